"""Stores on other machines that are away, slow, full, altered or crowded: a miss and a warning, in time."""

from __future__ import annotations

import logging
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import valkey

from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.store import DiskStore, KVStore, MemoryStore, TieredStore
from cacheblend_rag.store.s3 import S3Store
from cacheblend_rag.store.valkey import ValkeyStore
from docs.benchmarks.scripts.servers import Proxy, free_port, make_bucket, s3_environment, s3_server, valkey_server
from tests.contract.remote_faults import Place, RemoteTrials, s3_place, valkey_place
from tests.contract.store_contract import make, same
from tests.waiting import Clock, until

# Of stores that answer: a machine that does other work stands still for seconds at times.
PATIENT = 10.0
# Of stores that fall silent, so that nobody waits for long.
TIMEOUT = 1.0
# The longest time of a request whose store is away: the calls under way run into their deadline once.
LONGEST = 60.0


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


@pytest.fixture(scope="module", params=["s3", "valkey"])
def filled(request: Any, valkey_port: int, s3_port: int, trials: RemoteTrials) -> Iterator[Place]:
    """A place with all chunks in it."""
    opened = valkey_place(valkey_port) if request.param == "valkey" else s3_place(s3_port, "faults")
    with opened as made:
        with closing(made.opened(PATIENT)) as store, trials.engine(store) as engine:
            trials.warm(engine)
        yield made


@pytest.fixture
def place(filled: Place) -> Place:
    """The place, and a connection without faults."""
    filled.timeout = PATIENT
    filled.proxy.silent, filled.proxy.rate = False, float("inf")
    return filled


@pytest.fixture
def hasty(place: Place) -> None:
    """Stores that wait for an answer for a second only."""
    place.timeout = TIMEOUT


@pytest.fixture
def warm(place: Place, trials: RemoteTrials) -> Iterator[Any]:
    """An engine over the store alone, with all chunks in it, whatever a test before took out."""
    with closing(place.opened(PATIENT)) as store, trials.engine(store) as engine:
        trials.warm(engine)
    with closing(place.opened()) as store, trials.engine(store) as engine:
        until(lambda: trials.ask(engine).hits == 3)  # on a busy machine a read may miss a short deadline
        assert trials.ask(engine).right
        yield engine


@pytest.mark.usefixtures("hasty")
def test_silent_store_costs_a_deadline_and_no_more(
    place: Place, trials: RemoteTrials, warm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    place.proxy.silent = True
    first = trials.ask(warm)
    second = trials.ask(warm)
    place.proxy.silent = False
    assert "is away" in caplog.text
    for asked in (first, second):
        assert (asked.hits, asked.right) == (0, True)
    assert first.seconds < LONGEST


@pytest.mark.usefixtures("hasty")
def test_cut_connection_costs_only_hits(place: Place, trials: RemoteTrials, warm: Any) -> None:
    place.proxy.rate = 10e6
    cutting = threading.Timer(0.01, place.proxy.cut)
    cutting.start()
    asked = trials.ask(warm)
    cutting.join()
    assert asked.right
    assert asked.seconds < LONGEST


CHANGES: dict[str, Callable[[bytes], bytes | None]] = {
    "one byte short": lambda data: data[:-1],
    "gone": lambda data: None,
    "a bit flipped": lambda data: data[:99] + bytes([data[99] ^ 16]) + data[100:],
}


def test_altered_record_is_a_miss_and_is_stored_again(place: Place, trials: RemoteTrials, warm: Any) -> None:
    for name, change in CHANGES.items():
        place.alter(change)
        asked = trials.ask(warm)
        assert (asked.hits, asked.right) == (0, True), name
        trials.warm(warm)
        asked = trials.ask(warm)
        assert (asked.hits, asked.right) == (3, True), name


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


def test_full_server_takes_no_more(trials: RemoteTrials) -> None:
    with valkey_server(**{"maxmemory": "2mb", "maxmemory-policy": "noeviction"}) as server:
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


def test_no_secret_in_an_address() -> None:
    for url in ("valkey://user:topsecret@host/0", "s3://key:topsecret@bucket/kv", "s3://b/kv?x=topsecret"):
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


# Tiers --------------------------------------------------------------------------------------


def test_chunk_computed_on_one_machine_is_read_on_another(place: Place, trials: RemoteTrials, tmp_path: Path) -> None:
    def machine(name: str) -> TieredStore:
        return TieredStore([MemoryStore("10MB"), DiskStore(tmp_path / name), place.opened()])

    with closing(place.opened()) as store, trials.engine(store) as engine:
        engine.forget(trials.chunks)
    with closing(machine("first")) as first, trials.engine(first, write_back="background") as engine:
        assert trials.ask(engine).hits == 0
        engine.flush()
    with closing(machine("second")) as second, trials.engine(second) as engine:
        asked = trials.ask(engine)
        assert (asked.hits, asked.right) == (3, True)
        second.flush()
        tiers = second.traits.tiers
        assert all(tiers[1].contains(key) for key, _ in tiers[2].infos("")), "they are kept here, too"
        place.proxy.silent = True
        asked = trials.ask(engine)
        assert (asked.hits, asked.right) == (3, True)
        place.proxy.silent = False


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
