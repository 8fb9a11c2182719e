"""Stores: the disk store held against its plain twin in memory, and against people who alter its folder."""

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
import torch

from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.store import DiskStore, KVRecord, KVStore, MemoryStore, StoredKV, record_key

HEADS, DIM, LAYERS = 2, 8, 2


def make(seed: int = 0, tokens: int = 5) -> KVRecord:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (
        tuple(torch.randn((HEADS, tokens, DIM), generator=generator) for _ in range(LAYERS)) for _ in range(2)
    )
    kv = SegmentKV(keys, values, rotated=False)
    return KVRecord.of(kv, fingerprint="f", context_ids=(1,), token_ids=tuple(range(tokens)))


def same(stored: StoredKV | None, record: KVRecord) -> bool:
    assert stored is not None
    try:
        layers = [stored.read_layer(layer) for layer in range(stored.info.layers)]
        return stored.info == record.info and all(
            torch.equal(keys, record.kv.keys[n]) and torch.equal(values, record.kv.values[n])
            for n, (keys, values) in enumerate(layers)
        )
    finally:
        stored.close()


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and "cache.db" not in path.name)


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVStore]:
    opened: KVStore = DiskStore(tmp_path / "kv") if request.param == "disk" else MemoryStore()
    yield opened
    opened.close()


# Both stores --------------------------------------------------------------------------------


def test_put_open_replace_delete(store: KVStore) -> None:
    assert store.open("a") is None
    assert not store.contains("a")
    assert not store.delete("a")
    store.put("a", make(1))
    store.put("b", make(2))
    assert store.contains("a")
    assert same(store.open("a"), make(1))
    assert same(store.open("b"), make(2))
    store.put("a", make(3, tokens=9))
    assert same(store.open("a"), make(3, tokens=9))
    assert store.delete("a")
    assert not store.contains("a")
    assert store.open("a") is None
    assert same(store.open("b"), make(2))


def test_volume_rises_and_falls(store: KVStore) -> None:
    before = store.volume()
    store.put("a", make(1, tokens=500))
    size = LAYERS * 2 * HEADS * 500 * DIM * 4
    assert store.volume() - before >= size
    store.delete("a")
    assert store.volume() - before < size


def test_an_open_record_outlives_its_deletion(store: KVStore) -> None:
    store.put("a", make(1))
    opened = store.open("a")
    store.delete("a")
    assert same(opened, make(1))


def test_an_open_record_outlives_its_replacement(store: KVStore) -> None:
    store.put("a", make(1))
    opened = store.open("a")
    store.put("a", make(2))
    assert same(opened, make(1))
    assert same(store.open("a"), make(2))


@pytest.mark.parametrize("kind", [DiskStore, MemoryStore])
def test_the_least_recently_used_goes_first_and_only_as_much_as_must(kind: Any, tmp_path: Path) -> None:
    limit = 1_000_000
    store = kind(tmp_path, limit) if kind is DiskStore else kind(limit)
    record = make(1, tokens=800)  # about 205 KB: four fit beside the disk store's own pages
    for key in "abcd":
        store.put(key, record)
    assert all(map(store.contains, "abcd"))
    store.open("a").close()
    store.contains("b")  # a look is no use
    store.put("e", record)
    assert [key for key in "abcde" if store.contains(key)] == ["a", "c", "d", "e"]
    assert store.volume() <= limit
    store.put("f", make(2, tokens=2400))  # three times the size: three go
    assert [key for key in "abcdef" if store.contains(key)] == ["e", "f"]
    assert store.volume() <= limit
    assert same(store.open("f"), make(2, tokens=2400))
    store.close()


@pytest.mark.parametrize("kind", [DiskStore, MemoryStore])
def test_a_record_larger_than_the_store_is_refused_and_evicts_nothing(kind: Any, tmp_path: Path) -> None:
    store = kind(tmp_path, 200_000) if kind is DiskStore else kind(200_000)
    store.put("a", make(1))
    with pytest.raises(StoreError, match="size_limit"):
        store.put("b", make(2, tokens=5000))
    assert same(store.open("a"), make(1))
    store.close()


@pytest.mark.parametrize("size", [0, -1, "none", None])
def test_bad_size_limits(size: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        MemoryStore(size)
    with pytest.raises(ConfigError):
        DiskStore(tmp_path, size)


def test_threads_share_a_store(store: KVStore) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(5):
                key = f"{(number + turn) % 3}"
                store.put(key, make(int(key)))
                opened = store.open(key)
                if opened is not None:
                    assert same(opened, make(int(key)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


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


def test_a_journal_that_is_gone_before_it_is_looked_at_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_folder_is_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        (tmp_path / "open").mkdir(mode=0o777)
        for folder in (tmp_path / "new" / "inner", tmp_path / "open"):
            DiskStore(folder).close()
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        os.umask(old)


def test_a_folder_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store = DiskStore("~/kv")
    store.put("a", make(1))
    assert len(files(tmp_path / "kv")) == 1
    store.close()


def test_a_relative_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that first uses the store after the process has changed its folder opens the data base anew."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    store = DiskStore("kv", 10**7)
    monkeypatch.chdir(tmp_path / "second")
    writer = threading.Thread(target=store.put, args=("key", make()))
    writer.start()
    writer.join()
    assert same(store.open("key"), make())
    store.close()
    assert not list((tmp_path / "second").iterdir())
    assert files(tmp_path / "first")


def test_a_folder_that_cannot_be_used_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="name a folder"):
        DiskStore(tmp_path / "file")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "cache.db").write_bytes(b"no data base " * 1000)
    with pytest.raises(StoreError, match="broken"):
        DiskStore(tmp_path / "broken")


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
def test_a_pickled_value_is_a_miss_and_never_run(
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


def test_a_pickled_key_is_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_value_outside_the_folder_is_neither_read_nor_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kv"
    store = DiskStore(folder)
    store.put("a", make(1))
    outside = tmp_path / "outside"
    files(folder)[0].rename(outside)
    alter(folder, "UPDATE Cache SET filename = '../outside'")
    with caplog.at_level(logging.WARNING):
        assert store.open("a") is None
    assert "outside" in caplog.text
    store.delete("a")
    assert outside.exists()
    store.put("a", make(1))
    alter(folder, "UPDATE Cache SET filename = ?", str(outside))
    store.put("a", make(2))
    assert outside.exists()
    assert same(store.open("a"), make(2))
    store.close()


def _truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(5000)


DAMAGE = {
    "deleted": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "truncated": _truncate,
    "header flipped": lambda path: path.write_bytes(path.read_bytes()[:30] + b"\0" + path.read_bytes()[31:]),
    "a folder instead": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_a_logged_miss_and_can_be_stored_again(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore(tmp_path)
    store.put("a", make(1))
    DAMAGE[damage](files(tmp_path)[0])
    with caplog.at_level(logging.WARNING):
        assert store.open("a") is None
    assert "counts as a miss" in caplog.text
    assert not store.contains("a"), "a record that cannot be read must not keep a new one from being stored"
    caplog.clear()
    assert store.open("a") is None
    assert caplog.text == ""
    store.put("a", make(2))
    assert same(store.open("a"), make(2))
    store.close()


def test_a_data_base_destroyed_while_open_is_a_logged_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


@pytest.mark.parametrize(
    "changes",
    [
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
    ],
    ids=str,
)
def test_every_part_moves_the_key(changes: dict[str, Any]) -> None:
    assert record_key(**KEY | changes) != record_key(**KEY)
