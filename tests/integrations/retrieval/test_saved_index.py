from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document

from cacheblend_rag.errors import ConfigError, DocumentError
from cacheblend_rag.retrieval import saved_index as module
from cacheblend_rag.retrieval.saved_index import IndexDamagedError, SavedIndex, has_index, read_index, write_index


def make(text: str) -> SavedIndex:
    return SavedIndex(f"vectors of {text}".encode(), {3: Document(page_content=text, id="a")}, {"note": text})


def test_the_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    write_index(tmp_path / "new", make("one"))
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_nothing_saved_here(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        assert not has_index(place)
        with pytest.raises(DocumentError, match="there is no saved index in") as caught:
            read_index(place)
        assert not isinstance(caught.value, IndexDamagedError)
    with pytest.raises(ConfigError, match=r"index_dir=.*name a folder, this is a file"):
        write_index(tmp_path / "file", make("one"))


@pytest.mark.parametrize("step", range(4))
def test_save_cut_short_at_any_step_leaves_the_old_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    write_index(tmp_path, make("old"))
    steps = iter(range(10))

    def perhaps_fail(path: Path) -> None:
        if next(steps) == step:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

    write, replace = module.write_file, Path.replace

    def write_perhaps(path: Path, data: bytes) -> None:
        perhaps_fail(path)
        write(path, data)

    def replace_perhaps(path: Path, target: Path) -> Path:
        perhaps_fail(path)
        return replace(path, target)

    monkeypatch.setattr(module, "write_file", write_perhaps)
    monkeypatch.setattr(Path, "replace", replace_perhaps)
    with pytest.raises(OSError, match="No space left"):
        write_index(tmp_path, make("new"))
    monkeypatch.undo()
    assert read_index(tmp_path) == make("old")
    write_index(tmp_path, make("newer"))
    assert read_index(tmp_path) == make("newer")


def test_leftovers_go_once_they_are_old_and_other_files_stay(tmp_path: Path) -> None:
    write_index(tmp_path, make("one"))
    name = "0" * 31
    old, young = tmp_path / f"index-{name}a.faiss", tmp_path / f"chunks-{name}b.jsonl"
    foreign = tmp_path / "notes.faiss"
    for path in (old, young, foreign):
        path.write_bytes(b"x")
    long_ago = time.time() - 86400
    os.utime(old, (long_ago, long_ago))
    os.utime(foreign, (long_ago, long_ago))
    write_index(tmp_path, make("two"))
    assert not old.exists()
    assert young.exists()
    assert foreign.exists()


def test_reader_overtaken_by_a_save_reads_the_new_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_index(tmp_path, make("old"))
    read = module.read_manifest
    overtaken: list[bool] = []

    def read_then_save(place: Path) -> dict[str, Any]:
        manifest = read(place)
        if not overtaken:
            overtaken.append(True)
            write_index(tmp_path, make("new"))
        return manifest

    monkeypatch.setattr(module, "read_manifest", read_then_save)
    assert read_index(tmp_path) == make("new")


def test_altered_truncated_and_missing_parts_are_noticed(tmp_path: Path) -> None:
    for pattern in ("*.faiss", "*.jsonl"):
        for harm in ("flip", "cut", "empty", "remove"):
            write_index(tmp_path, make("one"))
            (path,) = tmp_path.glob(pattern)
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            if harm == "remove":
                path.unlink()
            else:
                path.write_bytes({"flip": bytes(data), "cut": bytes(data)[:-1], "empty": b""}[harm])
            assert has_index(tmp_path)
            with pytest.raises(IndexDamagedError, match="lacks" if harm == "remove" else "checksum"):
                read_index(tmp_path)
