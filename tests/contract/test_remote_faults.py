"""Stores on other machines that are away, slow, full, altered or crowded: a miss and a warning, in time."""

from __future__ import annotations

import logging
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import valkey

from cacheblend_rag.errors import ConfigError, RecordError, StoreError
from cacheblend_rag.store import DiskStore, KVStore, MemoryStore, TieredStore
from cacheblend_rag.store.s3 import S3Store
from cacheblend_rag.store.valkey import ValkeyStore
from docs.benchmarks.scripts.servers import Proxy, free_port, make_bucket, s3_environment, s3_server, valkey_server
from tests.contract.remote_faults import Place, RemoteTrials, clients_at_once, s3_place, valkey_place
from tests.contract.store_contract import make, same
from tests.waiting import Clock, until

# Of stores that answer: a machine that does other work stands still for seconds at times.
PATIENT = 10.0
# Of stores that fall silent, so that nobody waits for long.
TIMEOUT = 1.0
# The longest time of a request whose store is away: the calls under way run into their deadline once.
LONGEST = 8.0
_names = count()


@pytest.fixture(scope="module")
def trials() -> RemoteTrials:
    return RemoteTrials()


@pytest.fixture(scope="module")
def valkey_port() -> Iterator[int]:
    with valkey_server() as server:
        yield server.port


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture(params=["s3", "valkey"])
def place(request: Any, valkey_port: int, s3_port: int) -> Iterator[Place]:
    opened = valkey_place(valkey_port) if request.param == "valkey" else s3_place(s3_port, f"faults-{next(_names)}")
    with opened as made:
        made.timeout = PATIENT
        yield made


@pytest.fixture
def hasty(place: Place) -> None:
    """Stores that wait for an answer for a second only."""
    place.timeout = TIMEOUT


@pytest.fixture
def warm(place: Place, trials: RemoteTrials) -> Iterator[Any]:
    """An engine over the store alone, with all chunks in it."""
    with closing(place.opened(PATIENT)) as store, trials.engine(store) as engine:
        trials.warm(engine)
    with closing(place.opened()) as store, trials.engine(store) as engine:
        until(lambda: trials.ask(engine).hits == 3)  # on a busy machine a read may miss a short deadline
        assert trials.ask(engine).right
        yield engine


@pytest.mark.usefixtures("hasty")
def test_silent_store_costs_a_deadline_and_no_more(place: Place, trials: RemoteTrials, warm: Any) -> None:
    place.proxy.silent = True
    first = trials.ask(warm)
    pieces = place.proxy.pieces
    second = trials.ask(warm)
    assert place.proxy.pieces == pieces, "nobody asks a store again that was just away"
    place.proxy.silent = False
    for asked in (first, second):
        assert (asked.hits, asked.right) == (0, True)
    assert first.seconds < LONGEST


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("after", [0.0, 0.01, 0.03])
def test_cut_connection_costs_only_hits(after: float, place: Place, trials: RemoteTrials, warm: Any) -> None:
    place.proxy.rate = 10e6
    cutting = threading.Timer(after, place.proxy.cut)
    cutting.start()
    asked = trials.ask(warm)
    cutting.join()
    assert asked.right
    assert asked.seconds < LONGEST


@pytest.mark.usefixtures("hasty")
def test_seconds_of_latency(place: Place, trials: RemoteTrials, warm: Any, caplog: pytest.LogCaptureFixture) -> None:
    place.proxy.delay = 5.0
    with caplog.at_level(logging.WARNING):
        asked = trials.ask(warm)
    assert (asked.hits, asked.right) == (0, True)
    assert asked.seconds < LONGEST
    assert "is away" in caplog.text
    assert len(caplog.records) <= 4, "warnings do not pile up"


@pytest.mark.usefixtures("hasty")
def test_trickle_of_bytes_ends_at_the_deadline(place: Place, trials: RemoteTrials, warm: Any) -> None:
    """Bytes come, but too few of them."""
    place.proxy.rate = 20_000
    asked = trials.ask(warm)
    assert asked.right
    assert asked.hits < 3
    assert asked.seconds < LONGEST


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data[:100],
        lambda data: b"",
        lambda data: None,
        lambda data: bytes(len(data)),
    ],
    ids=["one byte short", "short", "empty", "gone", "zeros"],
)
def test_altered_record_is_a_miss_and_is_stored_again(
    change: Callable[[bytes], bytes | None], place: Place, trials: RemoteTrials, warm: Any
) -> None:
    place.alter(change)
    asked = trials.ask(warm)
    assert (asked.hits, asked.right) == (0, True)
    trials.warm(warm)
    asked = trials.ask(warm)
    assert (asked.hits, asked.right) == (3, True)


def test_flipped_bit_changes_no_answer(place: Place, trials: RemoteTrials, warm: Any) -> None:
    for share in (0.005, 0.7):

        def flip(data: bytes, share: float = share) -> bytes:
            at = int(len(data) * share)
            return data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]

        place.alter(flip)
        assert trials.ask(warm).right
        trials.warm(warm)


@pytest.mark.usefixtures("hasty")
def test_forgetting_fails_while_the_store_is_away(place: Place, trials: RemoteTrials, warm: Any) -> None:
    """Forgetting says that it failed, and can be tried again."""
    place.proxy.silent = True
    with pytest.raises(StoreError):
        warm.forget(trials.chunks)
    place.proxy.silent = False
    with closing(place.opened(PATIENT)) as store, trials.engine(store) as other:
        assert other.forget(trials.chunks) == 3
        assert not list(store.infos(""))


@pytest.mark.usefixtures("hasty")
def test_returning_store_is_used_again(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock(beside=time.monotonic)
    with closing(place.opened(clock=clock)) as store:
        store.put("a", make(1))
        place.proxy.silent = True
        assert store.open("a") is None
        place.proxy.silent = False
        assert not store.contains("a"), "it is left alone"

        def is_back() -> bool:
            clock.advance(10)
            return store.contains("a")

        with caplog.at_level(logging.WARNING):
            until(is_back)
            assert same(store.open("a"), make(1))
        assert "answers again" in caplog.text


def test_restarted_server_is_used_again(trials: RemoteTrials) -> None:
    port = free_port()
    with valkey_server(port) as server, Proxy(port) as proxy:
        clock = Clock(beside=time.monotonic)
        store = ValkeyStore(f"valkey://127.0.0.1:{proxy.port}/0", timeout=TIMEOUT, clock=clock)
        with trials.engine(store) as engine:
            trials.warm(engine)
            proxy.rate = 10e6
            killing = threading.Timer(0.05, server.stop)
            killing.start()
            asked = trials.ask(engine)
            killing.join()
            assert asked.right
            assert asked.seconds < LONGEST
            assert trials.ask(engine).hits == 0
            proxy.rate = float("inf")
            server.start()

            def is_empty() -> bool:
                clock.advance(10)
                with suppress(StoreError):
                    return not list(store.infos(""))
                return False

            def is_full() -> bool:
                clock.advance(10)
                with suppress(StoreError):
                    trials.warm(engine)
                asked = trials.ask(engine)
                assert asked.right
                return asked.hits == 3

            until(is_empty)
            assert trials.ask(engine).hits == 0, "its memory is gone"
            until(is_full)
        store.close()


def test_evicting_server_changes_no_answer(trials: RemoteTrials) -> None:
    limits = {"maxmemory": "5mb", "maxmemory-policy": "allkeys-lru"}
    with valkey_server(**limits) as server, closing(ValkeyStore(f"valkey://127.0.0.1:{server.port}/0")) as store:
        assert store.traits.size_limit == 5 * 2**20
        with trials.engine(store) as engine:
            for number in range(4):
                trials.warm(engine)
                store.put(str(number), make(number, tokens=5000))
                assert trials.ask(engine).right


def test_full_server_takes_no_more(trials: RemoteTrials) -> None:
    with valkey_server(**{"maxmemory": "3mb", "maxmemory-policy": "noeviction"}) as server:
        with closing(ValkeyStore(f"valkey://127.0.0.1:{server.port}/0")) as store:
            with pytest.raises(StoreError, match="refuses"):
                store.put("a", make(1, tokens=20_000))
            assert store.open("a") is None
        with trials.engine(f"valkey://127.0.0.1:{server.port}/0", write_back="background") as engine:
            for _ in range(2):
                assert trials.ask(engine).right
                engine.flush()


def test_denying_bucket_is_named(s3_port: int, trials: RemoteTrials, caplog: pytest.LogCaptureFixture) -> None:
    def deny(after: str) -> None:
        address = f"http://127.0.0.1:{s3_port}/moto-api/reset-auth"
        told = urllib.request.Request(address, data=after.encode(), headers={"Content-Type": "text/plain"})
        urllib.request.urlopen(told).close()

    make_bucket(s3_port, "denies")
    with s3_environment(s3_port):
        deny("0")
        try:
            with caplog.at_level(logging.WARNING), closing(S3Store("s3://denies/kv")) as store:
                with pytest.raises(StoreError, match="refuses"):
                    store.put("a", make(1))
                with pytest.raises(StoreError, match="refuses"):
                    store.delete("a")
                assert store.open("a") is None
                with trials.engine("s3://denies/kv", write_back="background") as engine:
                    for _ in range(2):
                        assert trials.ask(engine).right
                        engine.flush()
        finally:
            deny("inf")
    assert "refuses" in caplog.text
    assert "a-key-that-nobody-may-see" not in caplog.text + repr(store)


@pytest.mark.parametrize(
    "url", ["valkey://user:topsecret@host/0", "s3://key:topsecret@bucket/kv", "s3://b/kv?x=topsecret"]
)
def test_no_secret_in_an_address(url: str) -> None:
    made: Callable[[str], KVStore] = ValkeyStore if url.startswith("valkey") else S3Store
    with pytest.raises(ConfigError) as raised:
        made(url)
    assert "topsecret" not in str(raised.value)


def test_password_comes_from_the_environment_and_is_never_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with valkey_server() as server:
        url = f"valkey://127.0.0.1:{server.port}/0"
        with closing(valkey.Valkey(port=server.port)) as client:
            client.config_set("requirepass", "topsecret")
        with closing(ValkeyStore(url)) as store, pytest.raises(StoreError, match="CACHEBLEND_RAG_VALKEY_PASSWORD"):
            store.put("a", make(1))
        monkeypatch.setenv("CACHEBLEND_RAG_VALKEY_PASSWORD", "topsecret")
        with closing(ValkeyStore(url)) as store, caplog.at_level(logging.DEBUG):
            store.put("a", make(1))
            assert same(store.open("a"), make(1))
            assert "topsecret" not in repr(store) + caplog.text


def test_records_are_sealed_there_too(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_RAG_ENCRYPTION_KEY", "A" * 43 + "=")
    with closing(place.opened()) as store:
        store.put("a", make(1, tokens=500))
        assert same(store.open("a"), make(1, tokens=500))
    monkeypatch.delenv("CACHEBLEND_RAG_ENCRYPTION_KEY")
    with closing(place.opened()) as store:
        assert store.open("a") is None


def test_twenty_clients_at_once_while_connections_are_cut(place: Place) -> None:
    def fault(left: float) -> None:
        time.sleep(min(0.3, left))  # so that some calls are answered between two cuts
        place.proxy.cut()

    for _ in range(5):  # on a busy machine few calls come to their end
        seen = clients_at_once(lambda: place.opened(5.0), clients=20, seconds=2.0, fault=fault)
        assert seen["wrong"] == 0
        assert seen["longest"] < 15_000
        if seen["hits"] and seen["writes"]:
            return
    pytest.fail(f"nothing was written or read: {seen}")


# Tiers --------------------------------------------------------------------------------------


def test_chunk_computed_on_one_machine_is_read_on_another(place: Place, trials: RemoteTrials, tmp_path: Path) -> None:
    def machine(name: str) -> TieredStore:
        return TieredStore([MemoryStore("10MB"), DiskStore(tmp_path / name), place.opened()])

    with closing(machine("first")) as first, trials.engine(first, write_back="background") as engine:
        trials.ask(engine)
        engine.flush()
    with closing(machine("second")) as second, trials.engine(second) as engine:
        asked = trials.ask(engine)
        assert (asked.hits, asked.right) == (3, True)
        second.flush()
        assert all(second.traits.tiers[1].contains(key) for key, _ in second.traits.tiers[2].infos("")), (
            "they are kept here, too"
        )
        place.proxy.silent = True
        asked = trials.ask(engine)
        assert (asked.hits, asked.right) == (3, True)
        place.proxy.silent = False


def test_no_request_waits_for_a_write(place: Place, trials: RemoteTrials) -> None:
    store = TieredStore([MemoryStore("10MB"), place.opened()])
    with closing(store), trials.engine(store, write_back="background") as engine:
        place.proxy.delay = 1.5
        asked = trials.ask(engine)
        assert asked.right
        assert asked.seconds < 7.5, "four writes take longer, with two answers each"
        place.proxy.delay = 0.0


def test_record_forgotten_in_the_write_queue_is_not_written(place: Place) -> None:
    remote = place.opened()
    with closing(TieredStore([MemoryStore("10MB"), remote])) as store:
        place.proxy.delay = 0.3
        for name in "abc":
            store.put(name, make(1))
        assert store.delete("c")
        place.proxy.delay = 0.0
        store.flush()
        assert sorted(key for key, _ in remote.infos("")) == ["a", "b"]


def test_record_forgotten_during_reading_does_not_rise(place: Place) -> None:
    remote = place.opened()
    with closing(TieredStore([MemoryStore("10MB"), remote])) as store:
        remote.put("a", make(1))
        opened = store.open("a")
        assert opened is not None
        assert store.delete("a")
        with closing(opened), suppress(RecordError):
            same(opened, make(1))
        assert not store.contains("a")


def test_another_machine_waits_until_what_it_misses_has_arrived(valkey_port: int) -> None:
    """The claim of a record that is computed lasts until it is written."""
    url = f"valkey://127.0.0.1:{valkey_port}/1"
    with Proxy(valkey_port) as proxy, closing(ValkeyStore(url)) as there:
        slow = ValkeyStore(f"valkey://127.0.0.1:{proxy.port}/1")
        with closing(TieredStore([MemoryStore("10MB"), slow])) as here:
            with here.claim("claimed") as mine:
                assert mine
                proxy.delay = 0.2
                here.put("claimed", make(1))
            with there.claim("claimed") as theirs:
                assert not theirs
            with there.claim("claimed", wait=20) as theirs:
                assert theirs
                assert there.contains("claimed")


def test_stores_of_this_machine_come_first(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tiers"):
        TieredStore([S3Store("memory:///"), DiskStore(tmp_path)])
