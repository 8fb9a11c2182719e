"""The contract of every store. A new one inherits `StoreContract`; one that evicts, `BoundedStoreContract`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from cacheblend_rag.errors import ConfigError, RecordError, StoreError
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.store import KVRecord, KVStore, StoredKV, TieredStore
from cacheblend_rag.store.base import WrappedStore
from cacheblend_rag.store.record import RecordFormat, encode_pieces
from tests.contract.faults import record_of
from tests.probes import CHUNKS, PROMPT, engine_of
from tests.waiting import until

PATIENCE = 5  # seconds; diskcache gives up a lock after ten
HEADS, DIM, LAYERS = 2, 8, 2


def make(seed: int = 0, tokens: int = 5) -> KVRecord:
    """A record of a few tokens, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (
        tuple(torch.randn((HEADS, tokens, DIM), generator=generator) for _ in range(LAYERS)) for _ in range(2)
    )
    kv = SegmentKV(keys, values, rotated=False)
    return KVRecord.describe(kv, fingerprint="f", context_ids=(1,), token_ids=tuple(range(tokens)))


def encoded(record: KVRecord, form: RecordFormat | None = None, key: str = "") -> bytes:
    """The file of a record."""
    return b"".join(encode_pieces(record, form, key))


def same(stored: StoredKV | None, record: KVRecord) -> bool:
    """Whether a stored record is another, bit by bit; it is closed."""
    assert stored is not None
    try:
        layers = [stored.read_layer(layer) for layer in range(stored.info.layers)]
        return stored.info == record.info and all(
            torch.equal(keys, record.kv.keys[n]) and torch.equal(values, record.kv.values[n])
            for n, (keys, values) in enumerate(layers)
        )
    finally:
        stored.close()


def fill(store: KVStore, first: int = 0) -> list[str]:
    """Put records until some must have been evicted."""
    keys = [str(number) for number in range(first, first + 12)]
    for key in keys:
        store.put(key, record_of(int(key)))
    return keys


# Every method that a store may override, with arguments for it. The keys are those of records that it holds.
CALLS: dict[str, tuple[Any, ...]] = {
    "open_all": (["key", "other"],),
    "put": ("new", record_of(2)),
    "contains": ("key",),
    "infos": ("k",),
    "volume": (),
    "prefetch": ("key",),
    "delete": ("key",),
    "claim": ("key", 0.5),
    "stats": (),
    "flush": (),
    "close": (),
}


def assert_hands_on(wrapper: WrappedStore, inner: KVStore, **own: Any) -> None:
    """All that a wrapper is asked for comes from the wrapped store, which holds ``key`` and ``other``.

    Parameters
    ----------
    wrapper, inner : KVStore
    **own
        Traits of the wrapper's own.
    """
    members = {name for name, one in vars(KVStore).items() if callable(one) and not name.startswith("_")}
    assert members == CALLS.keys() | {"open", "record_bytes", "announce"}  # these three nobody overrides
    assert wrapper.traits == replace(inner.traits, **own)
    wrapper.on_evict = print
    assert inner.on_evict is print
    for name, arguments in CALLS.items():
        with mock.patch.object(inner, name, wraps=getattr(inner, name)) as called:
            given = getattr(wrapper, name)(*arguments)
            if name == "claim":
                with given as mine:
                    assert mine
            elif name == "infos":
                assert [key for key, _ in given] == ["key"]
            elif name == "open_all":
                assert sorted(given) == ["key", "other"]
                for record in given.values():
                    record.close()
        called.assert_called_once_with(*arguments)


class StoreContract:
    """Records, claims, threads, and an engine over the store."""

    def opened(self, folder: Path) -> KVStore:
        """A new store with room enough, in a folder if it needs one."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[KVStore]:
        with closing(self.opened(tmp_path)) as made:
            yield made

    def test_put_open_replace_delete(self, store: KVStore) -> None:
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

    def test_records_are_found_by_how_their_keys_begin(self, store: KVStore) -> None:
        for number, key in enumerate(["one-a", "one-b", "two-a"]):
            store.put(key, make(number, tokens=3 + number))
        assert dict(store.infos("one-")) == {"one-a": make(0, tokens=3).info, "one-b": make(1, tokens=4).info}
        assert len(list(store.infos(""))) == 3

    def test_volume_rises_and_falls(self, store: KVStore) -> None:
        before, record = store.volume(), make(1, tokens=500)
        size = LAYERS * 2 * HEADS * 500 * DIM * 4
        assert store.record_bytes(record.info) >= size
        store.put("a", record)
        assert store.volume() - before >= size
        store.delete("a")
        until(lambda: store.volume() - before < size)  # a server may free memory a moment later

    def test_open_record_outlives_its_deletion(self, store: KVStore) -> None:
        store.put("a", make(1))
        opened = store.open("a")
        store.delete("a")
        assert same(opened, make(1))

    def test_open_record_outlives_its_replacement(self, store: KVStore) -> None:
        store.put("a", make(1))
        opened = store.open("a")
        store.put("a", make(2))
        assert same(opened, make(1))
        assert same(store.open("a"), make(2))

    def test_threads_share_it(self, store: KVStore) -> None:
        def work(number: int) -> None:
            for turn in range(5):
                key = f"{(number + turn) % 3}"
                store.put(key, make(int(key)))
                opened = store.open(key)
                if opened is not None:
                    assert same(opened, make(int(key)))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))

    def test_claim_is_held_by_one_at_a_time(self, store: KVStore) -> None:
        with store.claim("a") as first, store.claim("b") as other:
            assert first
            assert other
            with store.claim("a") as second:
                assert not second
        with store.claim("a") as again:
            assert again
        with pytest.raises(ZeroDivisionError), store.claim("a"):
            raise ZeroDivisionError
        with store.claim("a") as after:
            assert after

    def test_claim_can_be_waited_for(self, store: KVStore) -> None:
        events, asked = list[str](), threading.Event()

        def wait() -> None:
            with store.claim("a") as mine:
                assert not mine
            asked.set()
            with store.claim("a", wait=20) as mine:
                events.append("got" if mine else "given up")

        with store.claim("a"):
            waiting = threading.Thread(target=wait)
            waiting.start()
            assert asked.wait(20)
            events.append("left")
        waiting.join()
        assert events == ["left", "got"]

    def test_engines_that_miss_the_same_chunks_compute_them_once(
        self, store: KVStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Several engines over one store, warming the same chunks at the same time."""
        computed: list[tuple[int, ...]] = []
        claimed: set[int] = set()
        compute, claim = ModelAdapter.segments_kv, store.claim

        def noted(*given: Any, **more: Any) -> Any:
            claimed.add(threading.get_ident())
            return claim(*given, **more)

        def held(self: ModelAdapter, context: Any, segments: Any, *others: Any) -> Any:
            until(lambda: len(claimed) == 3, 120)  # all have seen that it is missing
            computed.extend(map(tuple, segments))
            return compute(self, context, segments, *others)

        engines = [engine_of(store=store) for _ in range(3)]  # each computes KV when it checks its model
        monkeypatch.setattr(store, "claim", noted)
        monkeypatch.setattr(ModelAdapter, "segments_kv", held)
        start = threading.Barrier(3)

        def warm(engine: Any) -> Any:
            start.wait()
            return engine.warm(CHUNKS)

        with ThreadPoolExecutor(3) as pool:
            reports = list(pool.map(warm, engines))
        assert len(computed) == 3
        assert sum(report.computed for report in reports) == 3
        assert sum(report.present for report in reports) == 6
        assert all(report.skipped == 0 for report in reports)
        for engine in engines:
            assert engine.fuse(PROMPT).report.hits == 3
            engine.close()

    def test_chunk_an_engine_forgets_is_a_miss(self, store: KVStore) -> None:
        with engine_of(store=store) as engine:
            engine.warm(CHUNKS)
            assert engine.forget(CHUNKS[:1]) == 1
            assert engine.with_config(write_back="off").fuse(PROMPT).report.chunk_tiers[0] == ""


class BoundedStoreContract(StoreContract):
    """A store that evicts what was not used for longest, and says so to whoever wants to know."""

    def of_size(self, folder: Path, size_limit: int) -> KVStore:
        """A store of so many bytes."""
        raise NotImplementedError

    def opened(self, folder: Path) -> KVStore:
        return self.of_size(folder, 10**9)

    def test_the_least_recently_used_goes_first_and_only_as_much_as_must(self, tmp_path: Path) -> None:
        limit = 1_000_000
        store, record = self.of_size(tmp_path, limit), make(1, tokens=800)  # about 205 KB: four fit beside an index
        for key in "abcd":
            store.put(key, record)
        assert all(map(store.contains, "abcd"))
        opened = store.open("a")
        assert opened is not None
        opened.close()
        store.contains("b")  # a look is no use
        store.put("e", record)
        assert [key for key in "abcde" if store.contains(key)] == ["a", "c", "d", "e"]
        assert store.volume() <= limit
        store.put("f", make(2, tokens=2400))  # three times the size: three go
        assert [key for key in "abcdef" if store.contains(key)] == ["e", "f"]
        assert store.volume() <= limit
        assert same(store.open("f"), make(2, tokens=2400))
        store.close()

    def test_record_larger_than_the_store_is_refused_and_evicts_nothing(self, tmp_path: Path) -> None:
        store = self.of_size(tmp_path, 200_000)
        store.put("a", make(1))
        with pytest.raises(StoreError, match="size_limit"):
            store.put("b", make(2, tokens=5000))
        assert same(store.open("a"), make(1))
        store.close()

    def test_bad_size_limits(self, tmp_path: Path) -> None:
        size: Any
        for size in (0, -1, "none", None):
            with pytest.raises(ConfigError):
                self.of_size(tmp_path, size)

    def test_other_threads_use_it_while_it_tells_what_it_evicts(self, tmp_path: Path) -> None:
        store, told = self.of_size(tmp_path, 300_000), list[str]()
        with ThreadPoolExecutor(1) as pool:

            def evicted(key: str, record: StoredKV) -> None:
                told.append(key)
                if len(told) == 1:
                    assert store.contains(key), "it leaves afterwards"
                    pool.submit(store.put, "new", record_of(50)).result(PATIENCE)
                    assert pool.submit(store.delete, "new").result(PATIENCE)

            store.on_evict = evicted
            keys = fill(store)
        assert told
        assert [key for key in keys if not store.contains(key)] == sorted(set(told), key=int)
        store.close()

    def test_record_is_evicted_whatever_becomes_of_the_call(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = self.of_size(tmp_path, 300_000)

        def failing(key: str, record: StoredKV) -> None:
            raise error

        store.on_evict = failing
        error: Exception = RecordError("its last layer is damaged")
        keys = fill(store)
        assert not store.contains(keys[0])
        error = ZeroDivisionError("a fault of the user's")
        fill(store, 20)
        assert "a callback for it failed" in caplog.text
        assert store.volume() <= store.traits.size_limit
        store.close()

    def test_record_forgotten_during_eviction_does_not_come_back(self, tmp_path: Path) -> None:
        upper, lower = self.of_size(tmp_path, 300_000), self.of_size(tmp_path / "lower", 10**9)
        store, told = TieredStore([upper, lower]), list[str]()
        sink = upper.on_evict
        assert sink is not None

        def evicted(key: str, record: StoredKV) -> None:
            told.append(key)
            assert store.delete(key)
            sink(key, record)

        upper.on_evict = evicted
        fill(upper)
        assert told
        assert not any(store.contains(key) for key in told)
        store.close()
