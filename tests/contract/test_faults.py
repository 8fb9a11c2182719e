"""Whatever happens to the folder, a request ends in the result of a run where the record was never stored."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.errors import StoreError
from cacheblend_rag.report import FusedKV
from cacheblend_rag.store import DiskStore
from tests.contract.faults import crowd, kill_while_writing, record_of, wrong_records
from tests.contract.test_store import alter, files
from tests.probes import CHUNKS, PROMPT, assert_same, engine_of

# The folder ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cold() -> FusedKV:
    """The result of a run in which nothing was ever stored."""
    with engine_of(recompute_ratio=0.2, write_back="off") as engine:
        return engine.fuse(PROMPT)


def test_removing_the_folder_in_use_costs_only_hits(
    tmp_path: Path, cold: FusedKV, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kv"
    with engine_of(store=folder, recompute_ratio=0.2, write_back="background") as engine:
        engine.warm(CHUNKS)
        shutil.rmtree(folder)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert_same(engine.fuse(PROMPT), cold)
                engine.flush()
        assert "could not store" in caplog.text
    assert not folder.exists(), "nothing is written into a folder that was taken away"


BIND, REMOUNT, READ_ONLY = 4096, 32, 1


def _libc() -> Any:
    return ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)


def _mount(path: Path, kind: str, flags: int = 0, options: str = "") -> bool:
    where = str(path).encode()
    return _libc().mount(where, where, kind.encode(), flags, options.encode()) == 0


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Mounts something at ``tmp_path``; the test is skipped where that is not allowed."""
    mounted = []

    def try_it(kind: str, flags: int = 0, options: str = "") -> None:
        if not _mount(tmp_path, kind, flags, options):
            pytest.skip("nothing can be mounted here")
        mounted.append(tmp_path)

    yield try_it
    for path in mounted:
        _libc().umount2(str(path).encode(), 2)


def test_full_disk_costs_only_storing(
    tmp_path: Path, mount: Callable[..., None], cold: FusedKV, caplog: pytest.LogCaptureFixture
) -> None:
    mount("tmpfs", options="size=1m")
    with engine_of(store=tmp_path / "kv", recompute_ratio=0.2) as engine, caplog.at_level(logging.WARNING):
        store = engine.store
        assert isinstance(store, DiskStore)
        disk = os.statvfs(tmp_path)
        (tmp_path / "ballast").write_bytes(b"\0" * ((disk.f_bavail - 9) * disk.f_frsize))
        assert_same(engine.fuse(PROMPT), cold)
        assert "could not store" in caplog.text
        assert "No space left" in caplog.text or "disk is full" in caplog.text
        assert engine.fuse(PROMPT).report.hits < 3
        assert len(files(store.folder)) <= len(list(store.entries())) + 1, "what could not be written whole is gone"
        (tmp_path / "ballast").unlink()
        engine.fuse(PROMPT)
        assert engine.fuse(PROMPT).report.hits == 3
        for entry in store.entries():
            record = store.read(entry)
            for layer in range(record.info.layers):
                record.read_layer(layer)
            record.close()


def test_full_disk_keeps_no_store_from_opening(
    tmp_path: Path, mount: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Records give way. Without any, the error says that there is no room."""
    mount("tmpfs", options="size=40m")
    store, keys = DiskStore(tmp_path / "kv"), [f"key {number}" for number in range(120)]
    for number, key in enumerate(keys):
        store.put(key, record_of(number))
    store.close()
    fill(tmp_path)
    with caplog.at_level(logging.WARNING):
        store = DiskStore(tmp_path / "kv")
    assert "gave way" in caplog.text
    there = store.open_all(keys)
    for record in there.values():
        record.close()
    assert 0 < len(there) < len(keys), "the oldest are gone, and no more than need be"
    assert keys[-1] in there
    store.put(keys[0], record_of(0))
    assert store.contains(keys[0])
    store.close()
    shutil.rmtree(tmp_path / "kv")
    fill(tmp_path)
    with pytest.raises(StoreError, match="make room on its disk"):
        DiskStore(tmp_path / "kv")


def fill(folder: Path) -> None:
    """Leave not a byte on the disk of a folder."""
    path = folder / f"ballast {len(list(folder.iterdir()))}"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * 4096):
            pass


def test_folder_turned_read_only_costs_only_storing(
    tmp_path: Path, mount: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(store=tmp_path / "kv", recompute_ratio=0.2) as engine:
        engine.warm(CHUNKS[:1])
        before = engine.with_config(write_back="off").fuse(PROMPT)
        mount("none", BIND)
        assert _mount(tmp_path, "none", BIND | REMOUNT | READ_ONLY)
        with caplog.at_level(logging.WARNING):
            fused = engine.fuse(PROMPT)
        assert_same(fused, before)
        assert "could not store" in caplog.text
        assert "Read-only" in caplog.text
        store = DiskStore(tmp_path / "kv")  # while another has it open, and its journal cannot be made anew
        assert store.traits.read_only
        with pytest.raises(StoreError, match="cannot be written"):
            store.put("key", record_of(1))
        assert [len(list(store.entries())), store.stats().records] == [1, 1]
        (entry,) = store.entries()
        record = store.open(entry.key)
        assert record is not None
        record.close()
        store.close()
        with pytest.raises(StoreError, match="name a folder that can be written"):
            DiskStore(tmp_path / "other")


# Foreign files -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "link", "socket folder"])
def test_record_that_is_no_plain_file_is_a_miss(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = DiskStore(tmp_path / "kv")
    store.put("a", record_of(1))
    (path,) = files(tmp_path / "kv")
    if kind == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with caplog.at_level(logging.WARNING):
        assert store.open("a") is None
    assert "counts as a miss" in caplog.text
    assert not store.prefetch("a")
    store.close()


def test_path_in_a_key_leads_nowhere(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    store = DiskStore(folder)
    for key in ("../../outside", "/etc/passwd", "a/b", "\0", "x" * 5000, "..", "'; DROP TABLE Cache"):
        store.put(key, record_of(3))
        with store.claim(key) as mine:
            assert mine, key
        opened = store.open(key)
        assert opened is not None, key
        assert opened.info == record_of(3).info
        opened.close()
        assert len(files(folder)) == 1
        assert store.delete(key)
        assert sorted(tmp_path.iterdir()) == [folder]
    store.close()


def test_path_in_the_index_leads_nowhere(tmp_path: Path) -> None:
    name: Any
    for name in ("../../outside", "/etc/passwd", "\0", "x" * 5000, 5, None, b"bytes", "cache.db/../../outside"):
        store = DiskStore(tmp_path / "kv")
        store.put("a", record_of(3))
        (file,) = [path for path in files(tmp_path / "kv") if path.stat().st_size > 5000]
        (tmp_path / "outside").write_bytes(file.read_bytes())
        alter(tmp_path / "kv", "UPDATE Cache SET filename = ?", name)
        assert store.open("a") is None, name
        store.put("b", record_of(4))
        assert [entry.key for entry in store.entries() if entry.key == "b"] == ["b"], name
        assert (tmp_path / "outside").exists()
        store.close()
        shutil.rmtree(tmp_path / "kv")


def test_settings_someone_left_in_the_data_base_are_an_error_of_ours_or_nothing(tmp_path: Path) -> None:
    DiskStore(tmp_path / "kv").close()
    for key, value in (("disk_evil", "1"), ("disk_pickle_protocol", "x"), ("size_limit", "x"), ("unknown", "x")):
        alter(tmp_path / "kv", "INSERT OR REPLACE INTO Settings VALUES (?, ?)", key, value)
        try:
            store = DiskStore(tmp_path / "kv", 5_000_000)
        except StoreError:
            alter(tmp_path / "kv", "DELETE FROM Settings WHERE key = ?", key)
            continue
        assert store.traits.size_limit == 5_000_000
        store.put("a", record_of(1))
        store.close()


# Other processes ----------------------------------------------------------------------------


def test_kill_9_while_writing_leaves_whole_records_only(tmp_path: Path) -> None:
    written = kill_while_writing(tmp_path / "kv", rounds=2)
    assert all(written)
    store = DiskStore(tmp_path / "kv", 20_000_000)
    assert list(store.entries())
    assert list(wrong_records(store)) == []
    known = {entry.filename for entry in store.entries()}
    left = {str(path.relative_to(store.folder)) for path in files(store.folder)} - known
    assert store.sweep() == 0, "young files may belong to a process that is just writing them"
    assert store.sweep(grace=0) == len([name for name in left if name.endswith(".val")])
    assert list(wrong_records(store)) == []
    store.close()


def test_processes_share_a_folder(tmp_path: Path) -> None:
    seen = crowd(tmp_path / "kv", processes=3, seconds=1.0, size_limit=600_000)
    assert (seen.wrong, seen.crashed, seen.refused) == (0, 0, 0)
    assert seen.hits
    assert seen.writes
    store = DiskStore(tmp_path / "kv", 600_000)
    assert list(wrong_records(store)) == []
    assert store.stats().evictions > 0
    store.close()
