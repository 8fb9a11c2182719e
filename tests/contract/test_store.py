"""Every store by one contract; then the disk store against people who alter its folder."""

from __future__ import annotations

import logging
import os
import pickle
import sqlite3
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.errors import StoreError
from cacheblend_rag.store import DiskStore, KVStore, MemoryStore, TieredStore, record_key
from tests.contract.store_contract import BoundedStoreContract, StoreContract, make, same


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and "cache.db" not in path.name)


class TestMemoryStore(BoundedStoreContract):
    def of_size(self, folder: Path, size_limit: int) -> KVStore:
        return MemoryStore(size_limit)


class TestDiskStore(BoundedStoreContract):
    def of_size(self, folder: Path, size_limit: int) -> KVStore:
        return DiskStore(folder / "kv", size_limit)


class TestTieredStore(StoreContract):
    def opened(self, folder: Path) -> KVStore:
        return TieredStore([MemoryStore(), DiskStore(folder / "kv")])


# The disk store -----------------------------------------------------------------------------


def test_records_survive_and_two_stores_share_a_folder(tmp_path: Path) -> None:
    first, second = DiskStore(tmp_path), DiskStore(tmp_path)
    first.put("a", make(1))
    assert same(second.open("a"), make(1))
    second.delete("a")
    assert first.open("a") is None
    first.put("b", make(2))
    first.close()
    second.close()
    third = DiskStore(tmp_path)
    assert same(third.open("b"), make(2))
    third.close()


def test_journal_that_vanishes_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes that use the folder make and remove journals at any time."""
    found = Path.glob

    def stale(folder: Path, pattern: str) -> Iterator[Path]:
        yield from found(folder, pattern)
        if pattern.startswith("cache.db"):
            yield folder / "cache.db-journal"

    monkeypatch.setattr(Path, "glob", stale)
    store = DiskStore(tmp_path)
    store.put("a", make())
    assert same(store.open("a"), make())
    store.close()


def test_files_of_no_record_are_swept_once_a_day(tmp_path: Path) -> None:
    DiskStore(tmp_path).close()
    stale = tmp_path / "00" / "11" / f"{'2' * 28}.val"
    stale.parent.mkdir(parents=True)
    stale.touch()
    os.utime(stale, (0, 0))
    DiskStore(tmp_path).close()
    assert stale.exists(), "swept a moment ago"
    os.utime(tmp_path / "cache.db.swept", (0, 0))
    DiskStore(tmp_path).close()
    assert not stale.exists()


def test_the_folder_is_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        (tmp_path / "open").mkdir(mode=0o777)
        for folder in (tmp_path / "new" / "inner", tmp_path / "open"):
            DiskStore(folder).close()
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        os.umask(old)


def test_relative_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that first uses the store after the process has changed its folder opens the data base anew."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    monkeypatch.setenv("HOME", str(tmp_path))
    DiskStore("~/tilde").close()
    assert (tmp_path / "tilde").is_dir()
    store = DiskStore("kv", 10**7)
    monkeypatch.chdir(tmp_path / "second")
    writer = threading.Thread(target=store.put, args=("key", make()))
    writer.start()
    writer.join()
    assert same(store.open("key"), make())
    store.close()
    assert not list((tmp_path / "second").iterdir())
    assert files(tmp_path / "first")


def test_unusable_folder_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="name a folder"):
        DiskStore(tmp_path / "file")


def test_damaged_index_is_put_aside_and_the_store_begins_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for damage in ("no data base", "a page"):
        folder = tmp_path / damage
        store = DiskStore(folder)
        store.put("a", make(1))
        store.close()
        whole = (folder / "cache.db").read_bytes()
        page = whole[:4096] + b"\xff" * (len(whole) - 4096)
        (folder / "cache.db").write_bytes(b"no data base " * 1000 if damage == "no data base" else page)
        (folder / "cache.db-wal").write_bytes(b"x")
        damaged = (folder / "cache.db").read_bytes()
        caplog.clear()
        store = DiskStore(folder)
        assert "cache.db.damaged" in caplog.text
        assert (folder / "cache.db.damaged").read_bytes() == damaged
        assert (store.open("a"), files(folder)) == (None, [])
        store.put("a", make(1))
        store.close()
        assert same(DiskStore(folder).open("a"), make(1))


def test_every_value_is_a_file_and_nothing_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import diskcache

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was pickled")

    monkeypatch.setattr(diskcache.core.pickle, "dumps", refuse)
    monkeypatch.setattr(diskcache.core.pickle, "load", refuse)
    monkeypatch.setattr(diskcache.core.pickle, "loads", refuse)
    store = DiskStore(tmp_path)
    for number in range(3):
        store.put(f"key{number}", make(number, tokens=1))
        assert same(store.open(f"key{number}"), make(number, tokens=1))
    store.close()
    with sqlite3.connect(tmp_path / "cache.db") as database:
        rows = database.execute("SELECT key, raw, mode, filename, value FROM Cache").fetchall()
    database.close()
    assert len(rows) == 3
    for key, raw, mode, filename, value in rows:
        assert isinstance(key, str)
        assert raw == 1
        assert mode == diskcache.core.MODE_BINARY
        assert value is None
        assert (tmp_path / filename).read_bytes().startswith(b"CBRAGKV\x02")


class _Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["BOMB"],)


def alter(folder: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(folder / "cache.db") as database:
        assert database.execute(statement, values).rowcount == 1
    database.close()


@pytest.mark.parametrize("inline", [True, False])
def test_pickled_value_is_a_miss_and_never_run(
    inline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    bomb = pickle.dumps(_Bomb())
    folder = tmp_path / "kv"
    store = DiskStore(folder)
    store.put("a", make(1))
    if inline:
        alter(folder, "UPDATE Cache SET mode = 4, filename = NULL, value = ?", bomb)
    else:
        files(folder)[0].write_bytes(bomb)
        alter(folder, "UPDATE Cache SET mode = 4")
    with caplog.at_level(logging.WARNING):
        assert store.open("a") is None
    assert "counts as a miss" in caplog.text
    assert not (tmp_path / "exploded").exists()
    assert not store.contains("a")
    store.put("a", make(2))
    assert same(store.open("a"), make(2))
    store.close()
    pickle.loads(bomb)
    assert (tmp_path / "exploded").exists(), "the bomb itself must work, or this test shows nothing"


def test_pickled_key_is_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    store = DiskStore(tmp_path / "kv", 300_000)
    store.put("a", make(1))
    alter(tmp_path / "kv", "UPDATE Cache SET key = ?, raw = 0", pickle.dumps(_Bomb()))
    assert store.open("a") is None
    for number in range(8):  # past the limit, so that the row is evicted too
        store.put(f"b{number}", make(1, tokens=200))
    assert not (tmp_path / "exploded").exists()
    assert store.volume() <= 300_000
    store.close()


def test_database_destroyed_while_open_is_a_logged_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = DiskStore(tmp_path)
    store.put("a", make(1))
    store.close()
    store = DiskStore(tmp_path)
    with sqlite3.connect(tmp_path / "cache.db") as database:
        database.execute("DROP TABLE Cache")
    database.close()
    with caplog.at_level(logging.WARNING):
        assert store.open("a") is None
        assert not store.contains("a")
    assert "cannot be read and counts as a miss" in caplog.text
    with pytest.raises(StoreError, match="cannot be erased"):
        store.delete("a")
    with pytest.raises(StoreError, match="cannot write"):
        store.put("a", make(1))
    store.close()


# Keys ---------------------------------------------------------------------------------------

KEY: dict[str, Any] = {
    "fingerprint": "model", "salt": "", "kind": "chunk", "context_ids": (1,), "token_ids": (5, 6)
}  # fmt: skip


def test_keys_are_stable_and_take_any_sequence() -> None:
    assert record_key(**KEY) == record_key(**KEY | {"context_ids": [1], "token_ids": [5, 6]})


def test_every_part_moves_the_key() -> None:
    for changes in (
        {"fingerprint": "other"},
        {"salt": "tenant"},
        {"kind": "prefix"},
        {"context_ids": ()},
        {"context_ids": (1, 5), "token_ids": (6,)},
        {"token_ids": (56,)},
        {"token_ids": (6, 5)},
        {"fingerprint": "mode", "salt": "l"},
        {"salt": "chunk", "kind": ""},
        {"salt": "5chunk1", "kind": ""},
    ):
        assert record_key(**KEY | changes) != record_key(**KEY), changes
