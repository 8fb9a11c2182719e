"""Calls of stores while they work: never under a lock, never quietly failing, and wrappers that hand all of them on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.app.fleet.summaries import SummarizedStore
from cacheblend_rag.errors import ConfigError, RecordError, StoreError
from cacheblend_rag.store import DiskStore, KVStore, MemoryStore, RecordFormat, StoredKV, TieredStore, open_store
from cacheblend_rag.store.base import WrappedStore
from docs.benchmarks.scripts.storage import ThrottledStore
from tests import tiny
from tests.contract.faults import record_of
from tests.contract.store_contract import PATIENCE, assert_hands_on, fill
from tests.probes import CHUNKS, PROMPT, CountingStore, Hooked, engine_of

SMALL = 2 * 100_000


class Refusing(MemoryStore):
    """Erases nothing."""

    def delete(self, key: str) -> bool:
        raise StoreError(f"{key!r} is held by somebody")


# Call-outs ----------------------------------------------------------------------------------


def test_forgetting_and_evicting_do_not_wait_for_one_another(tmp_path: Path) -> None:
    """One holds what tiers move under and wants the disk; the other holds the disk and wants to move a record."""
    erasing, evicting = threading.Event(), threading.Event()

    class Gated(MemoryStore):
        def delete(self, key: str) -> bool:
            erasing.set()
            assert evicting.wait(PATIENCE)
            return super().delete(key)

    fast, slow = DiskStore(tmp_path / "fast", 300_000), MemoryStore()
    store = TieredStore([Gated(), fast, slow])
    sink = fast.on_evict
    assert sink is not None

    def evicted(key: str, record: StoredKV) -> None:
        evicting.set()
        sink(key, record)

    fast.on_evict = evicted
    slow.put("forgotten", record_of(40))
    with ThreadPoolExecutor(2) as pool:
        forgotten = pool.submit(store.delete, "forgotten")
        assert erasing.wait(PATIENCE)
        filled = pool.submit(fill, fast)
        assert forgotten.result(PATIENCE)
        keys = filled.result(PATIENCE)
    assert not store.contains("forgotten")
    assert all(store.contains(key) for key in keys)
    assert slow.stats().records
    store.close()


def test_record_forgotten_while_it_sinks_does_not_come_back() -> None:
    sinking, put = threading.Event(), threading.Event()

    class Slow(MemoryStore):
        def put(self, key: str, record: Any) -> None:
            sinking.set()
            assert put.wait(PATIENCE)
            super().put(key, record)

    upper = MemoryStore(SMALL)
    store = TieredStore([upper, Slow()])
    with ThreadPoolExecutor(2) as pool:
        filled = pool.submit(fill, upper)
        assert sinking.wait(PATIENCE)
        forgotten = pool.submit(store.delete, "0")
        other = pool.submit(store.delete, "unknown")
        with pytest.raises(TimeoutError):
            forgotten.result(0.2)
        put.set()
        assert forgotten.result(PATIENCE)
        assert not other.result(PATIENCE)
        filled.result(PATIENCE)
    assert not store.contains("0")


# Forgetting ---------------------------------------------------------------------------------


def test_error_in_one_tier_is_raised_after_the_others_were_tried(tmp_path: Path) -> None:
    first, middle, last = Refusing(), MemoryStore(), Refusing()
    for tier in (first, middle, last):
        tier.put("1", record_of(1))
    with pytest.raises(StoreError, match="'1' is held by somebody; '1' is held"):
        TieredStore([first, middle, last]).delete("1")
    assert not middle.contains("1")


def test_unreadable_tier_is_reported_after_the_others_are_listed() -> None:
    class Unreadable(MemoryStore):
        def infos(self, beginning: str) -> Any:
            raise StoreError("cannot be read")

    last = MemoryStore()
    last.put("1", record_of(1))
    found = TieredStore([Unreadable(), last]).infos("")
    assert next(found)[0] == "1"
    with pytest.raises(StoreError, match="cannot be read"):
        next(found)


def test_engine_forgets_all_it_can_and_says_what_it_could_not() -> None:
    class Partly(MemoryStore):
        held, unreadable = "", False

        def delete(self, key: str) -> bool:
            if key == self.held:
                raise StoreError("held by somebody")
            return super().delete(key)

        def infos(self, beginning: str) -> Any:
            if self.unreadable:
                raise StoreError("cannot be read")
            return super().infos(beginning)

    store = Partly()
    with engine_of(store=store) as engine:
        engine.warm(CHUNKS, progress=False)
        keys = [key for key, _ in store.infos("")]
        store.unreadable = True
        with pytest.raises(StoreError, match="3 records were: cannot be read"):
            engine.forget(CHUNKS)
        store.unreadable = False
        engine.warm(CHUNKS, progress=False)
        store.held = keys[1]
        with pytest.raises(StoreError, match="not all could be forgotten, 2 records were"):
            engine.forget(CHUNKS)
        assert [key for key, _ in store.infos("")] == [keys[1]]


def test_unusable_record_that_cannot_be_erased_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Hooked):
        def delete(self, key: str) -> bool:
            raise StoreError("cannot be erased")

    def damaged(key: str, layer: int) -> None:
        if layer == 2:
            raise RecordError("damaged")

    store = Stuck()
    with engine_of(store=store, write_back="off") as engine:
        expected = engine.generate(PROMPT, max_new_tokens=4).token_ids
        engine.warm(CHUNKS, progress=False)
        store.reading = damaged
        answer = engine.generate(PROMPT, max_new_tokens=4)
    assert answer.token_ids == expected
    assert answer.report.lost == len(CHUNKS)
    assert "cannot be erased" in caplog.text


# The protocol -------------------------------------------------------------------------------


def test_tiers_take_their_traits_from_the_nearest_that_keeps_records(tmp_path: Path) -> None:
    memory, disk = MemoryStore(), DiskStore(tmp_path / "kv", 10**6, form=RecordFormat("int8"))
    store = TieredStore([memory, disk])
    assert store.traits == replace(disk.traits, tiers=(memory, disk))
    assert store.stats() == disk.stats()
    store.close()


def tiers_of(folder: Path) -> TieredStore:
    """Memory over a folder, with two records."""
    store = TieredStore([MemoryStore(), DiskStore(folder)])
    for number, key in enumerate(("key", "other")):
        store.put(key, record_of(number))
    return store


@pytest.mark.parametrize(
    "wrap",
    [WrappedStore, SummarizedStore, Hooked, CountingStore,
     lambda inner: ThrottledStore(inner, 1e12)],
    ids=["plain", "summaries", "hooked", "counting", "throttled"],
)  # fmt: skip
def test_wrapper_hands_on_every_member(tmp_path: Path, wrap: Callable[[KVStore], WrappedStore]) -> None:
    inner = tiers_of(tmp_path)
    wrapper = wrap(inner)
    # One says that it is a device.
    own = {"tier": "throttled", "tiers": ()} if isinstance(wrapper, ThrottledStore) else {}
    assert_hands_on(wrapper, inner, **own)
    inner.close()


def test_wrapper_gives_out_the_very_records() -> None:
    inner = MemoryStore()
    inner.put("key", record_of(0))
    records = {"key": inner.open("key")}
    for wrapper in (WrappedStore(inner), SummarizedStore(inner)):
        with mock.patch.object(inner, "open_all", return_value=records):
            assert wrapper.open_all(["key"])["key"] is records["key"]
            assert wrapper.open("key") is records["key"]


def test_object_that_is_no_store_is_refused() -> None:
    class Own:
        """Opens records, and nothing else."""

        def open_all(self, keys: Sequence[str]) -> dict[str, StoredKV]:
            return {}

    class Derived(Own, KVStore):
        pass

    lacking: Any = Own()
    with pytest.raises(
        ConfigError, match=r"store='a Own' is not usable: .* inherits from cacheblend_rag.store.KVStore"
    ):
        open_store(lacking, BlendConfig())
    with pytest.raises(ConfigError, match="store='a Own'"):
        BlendEngine(tiny.model(), tiny.tokenizer(), store=lacking)
    with pytest.raises(ConfigError, match="tiers='a Own'"):
        TieredStore([MemoryStore(), lacking])
    with pytest.raises(TypeError, match=r"contains.*delete.*infos.*put"):
        Derived()  # type: ignore[abstract]
