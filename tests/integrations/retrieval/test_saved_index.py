from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
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


def test_files_of_an_earlier_version_go_with_the_first_save(tmp_path: Path) -> None:
    generation = "0123456789abcdef" * 2
    old = [tmp_path / name for name in ("manifest.json", f"index-{generation}.faiss", f"chunks-{generation}.jsonl")]
    own = tmp_path / "index-of-names.faiss"
    for path in (*old, own):
        path.write_text("a deleted text")
    write_index(tmp_path, make("one"))
    assert [path.name for path in sorted(tmp_path.iterdir())] == [own.name, "index.zip"]


def test_file_that_a_killed_process_left_goes_an_hour_later(tmp_path: Path) -> None:
    left, now = [tmp_path / f"index.zip.{number}-7.new" for number in range(2)], time.time()
    for path, age in zip(left, (3_700, 3_500), strict=True):
        path.write_text("half")
        os.utime(path, (now, now - age))
    write_index(tmp_path, make("one"))
    assert {*tmp_path.iterdir()} == {left[1], tmp_path / "index.zip"}, "another process may still write the later one"


def test_nothing_saved_here(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        assert not has_index(place)
        with pytest.raises(DocumentError, match="there is no saved index in") as caught:
            read_index(place)
        assert not isinstance(caught.value, IndexDamagedError)
    with pytest.raises(ConfigError, match=r"index_dir=.*name a folder, this is a file"):
        write_index(tmp_path / "file", make("one"))


@pytest.mark.parametrize("step", range(2))
def test_save_cut_short_at_any_step_leaves_the_old_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    write_index(tmp_path, make("old"))
    steps = iter(range(10))

    def perhaps(work: Callable[..., Any]) -> Callable[..., Any]:
        def done(path: Path, *given: Any) -> Any:
            if next(steps) == step:
                path.write_bytes(b"half")
                raise OSError(28, "No space left on device")
            return work(path, *given)

        return done

    monkeypatch.setattr(module, "write_file", perhaps(module.write_file))
    monkeypatch.setattr(Path, "replace", perhaps(Path.replace))
    with pytest.raises(OSError, match="No space left"):
        write_index(tmp_path, make("new"))
    monkeypatch.undo()
    assert read_index(tmp_path) == make("old")
    write_index(tmp_path, make("newer"))
    assert read_index(tmp_path) == make("newer")


def test_altered_and_truncated_files_are_noticed(tmp_path: Path) -> None:
    write_index(tmp_path, make("one"))
    (path,) = tmp_path.iterdir()
    whole, unnoticed = path.read_bytes(), 0
    for at in range(len(whole)):
        altered = bytearray(whole)
        altered[at] ^= 1
        for data in (bytes(altered), whole[:at]):
            path.write_bytes(data)
            assert has_index(tmp_path)
            try:
                assert read_index(tmp_path) == make("one"), "such as a date in the file"
                unnoticed += 1
            except IndexDamagedError:
                pass
    assert unnoticed < len(whole) / 2


def test_two_that_save_at_once_leave_a_whole_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = module.write_file

    def write_among_others(path: Path, data: bytes) -> None:
        write(path, data)
        monkeypatch.undo()
        write_index(tmp_path, make("other"))

    monkeypatch.setattr(module, "write_file", write_among_others)
    write_index(tmp_path, make("one"))
    assert read_index(tmp_path).state == {"note": "one"}
    assert [path.name for path in tmp_path.iterdir()] == ["index.zip"]
