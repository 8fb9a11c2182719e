"""Stores on other machines, over real servers: the contract of every store, then what only they go through."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendConfig
from cacheblend_rag.calibration.profiler import measure_remote
from cacheblend_rag.errors import ConfigError, MissingExtraError, RecordError, StoreUnreachableError
from cacheblend_rag.loading import Device, MachineProfile, PrefillProfile
from cacheblend_rag.store import KVStore, open_store
from cacheblend_rag.store.factory import open_remote
from cacheblend_rag.store.remote import RemoteStore
from cacheblend_rag.store.s3 import S3Store
from cacheblend_rag.store.valkey import ValkeyStore
from docs.benchmarks.scripts.servers import make_bucket, s3_environment, s3_server, valkey_server
from tests.contract.store_contract import StoreContract, make, same
from tests.probes import CHUNKS, PROMPT, engine_of
from tests.waiting import Clock

_names = count()


@pytest.fixture(scope="session")
def s3() -> Iterator[int]:
    """The port of an S3 server."""
    with s3_server() as port, s3_environment(port):
        yield port


@pytest.fixture(scope="session")
def valkey() -> Iterator[int]:
    """The port of a Valkey server."""
    with valkey_server() as server:
        yield server.port


class RemoteStoreContract(StoreContract):
    """The contract where it differs for stores elsewhere."""

    def test_open_record_outlives_its_deletion(self, store: KVStore) -> None:
        """It is read whole, or lost; never another's."""
        store.put("a", make(1, tokens=5000))
        opened = store.open("a")
        assert opened is not None
        store.delete("a")
        with pytest.raises(RecordError):
            same(opened, make(1, tokens=5000))

    def test_open_record_outlives_its_replacement(self, store: KVStore) -> None:
        """A record is written once: of two with one identity the first stays."""
        store.put("a", make(1))
        opened = store.open("a")
        store.put("a", make(2))
        assert same(opened, make(1))
        assert same(store.open("a"), make(1))


class TestS3Store(RemoteStoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, s3: int) -> None:
        self.bucket = f"bucket-{next(_names)}"
        make_bucket(s3, self.bucket)

    def opened(self, folder: Path) -> KVStore:
        return S3Store(f"s3://{self.bucket}/kv")


class TestFolderOfObjects(RemoteStoreContract):
    """The client's own store without a network."""

    def opened(self, folder: Path) -> KVStore:
        return S3Store(f"file://{folder}/kv")


class TestValkeyStore(RemoteStoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, valkey: int) -> None:
        self.port = valkey

    def opened(self, folder: Path) -> KVStore:
        store = ValkeyStore(f"valkey://127.0.0.1:{self.port}/0")
        for key, _ in store.infos(""):
            store.delete(key)
        return store


# One line of configuration --------------------------------------------------------------------


def test_places_are_named_in_one_line(valkey: int, tmp_path: Path) -> None:
    config, gpu = BlendConfig(), {"beside_gpu": True}
    remote, shared = f"file://{tmp_path}/shared", f"valkey://127.0.0.1:{valkey}/2"
    for places, options, expected in (
        ([tmp_path / "kv", remote], {}, ["disk", "s3"]),
        ([str(tmp_path / "kv"), shared], gpu, ["memory", "disk", "valkey"]),
        (shared, {}, ["memory", "valkey"]),
        ((tmp_path / "kv", shared, remote), {}, ["disk", "valkey", "s3"]),
    ):
        with closing(open_store(places, config, **options)) as store:
            assert [tier.traits.tier for tier in store.traits.tiers] == expected


def test_bad_store_address_is_refused_without_its_secret() -> None:
    store: Any
    bad: list[Any] = [[], [""], ["kv", 3], "ftp://host/kv", "s3://", "valkey://host:port/0", "s3://name:secret@bucket"]
    for store in (*bad, "valkey:/x", ["kv", "s3:bucket"], "valkey:name:secret@host"):
        with pytest.raises(ConfigError, match="store=") as raised:
            open_store(store, BlendConfig())
        assert "secret" not in str(raised.value)
    assert not Path("kv").exists()


def test_missing_client_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, address, extra in (("obstore", "s3://bucket", "s3"), ("valkey", "valkey://host", "valkey")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtraError, match=rf"\[{extra}\]"):
            open_store(address, BlendConfig())


# The loading controller -----------------------------------------------------------------------


def test_remote_store_is_measured(store_of_each: KVStore) -> None:
    found = measure_remote(store_of_each, size=10**6)
    assert found.name == store_of_each.traits.tier
    assert found.throughput > 0
    assert 0 < found.latency < 1
    assert not list(store_of_each.infos(""))


@pytest.fixture(params=["s3", "valkey"])
def store_of_each(request: Any, s3: int, valkey: int) -> Iterator[KVStore]:
    bucket = f"bucket-{next(_names)}"
    make_bucket(s3, bucket)
    url = f"s3://{bucket}/kv" if request.param == "s3" else f"valkey://127.0.0.1:{valkey}/3"
    with closing(open_remote(url)) as store:
        yield store


def test_engine_leaves_records_that_do_not_pay(tmp_path: Path) -> None:
    shared, folder = f"file://{tmp_path}/shared", tmp_path / "kv"
    with engine_of(store=[tmp_path / "other", shared]) as other:
        other.warm(CHUNKS)
    folder.mkdir()
    for throughput, hits in ((1e3, 0), (1e12, 3)):
        with engine_of(store=[folder, shared], recompute_ratio="auto", write_back="off") as engine:
            prefill = {engine.fingerprint: PrefillProfile(0.0, 1e-3, 0.0)}
            devices = {"disk": Device("disk", 1e12), "s3": Device("s3", throughput)}
            MachineProfile(prefill, devices).save(folder / "profile.json")
        with engine_of(store=[folder, shared], recompute_ratio="auto", write_back="off") as engine:
            assert engine.fuse(PROMPT).report.hits == hits


# Stores that are away ---------------------------------------------------------------------------


class Far(RemoteStore):
    """A store that answers, or fails at once or late, as it is told."""

    def __init__(self, clock: Clock) -> None:
        super().__init__("far", "far", 2.0, None, clock)
        self.clock, self.fails, self.seconds, self.asked = clock, True, 0.0, 0

    def _has(self, key: str) -> bool:
        self.asked += 1
        self.clock.advance(self.seconds)
        if self.fails:
            raise StoreUnreachableError("it does not answer")
        return True


@pytest.mark.parametrize(("seconds", "calls"), [(0.0, 3), (0.5, 3), (0.6, 1)])
def test_failing_store_is_left_alone_and_tried_again(
    seconds: float, calls: int, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    with closing(Far(clock)) as store:
        store.seconds = seconds
        for _ in range(5):
            assert not store.contains("a")
        assert store.asked == calls, "three failures in a row open the circuit, or one that was waited for"
        clock.advance(9.9)
        assert not store.contains("a")
        assert store.asked == calls
        clock.advance(0.1)
        assert [store.contains("a") for _ in range(2)] == [False] * 2
        assert store.asked == calls + 1, "one call tries it, in vain"
        store.fails = False
        clock.advance(10)
        assert [store.contains("a") for _ in range(2)] == [True] * 2
        assert store.asked == calls + 3
    assert "far answers again" in caplog.text


def test_others_go_on_without_a_store_while_one_call_tries_it() -> None:
    clock, trying, go = Clock(), threading.Event(), threading.Event()

    class Slow(Far):
        def _has(self, key: str) -> bool:
            if key == "slow":
                trying.set()
                assert go.wait(20)
            return super()._has(key)

    with closing(Slow(clock)) as store, ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            assert not store.contains("a")
        clock.advance(10)
        store.fails = False
        first = pool.submit(store.contains, "slow")
        assert trying.wait(20)
        assert not store.contains("a")
        assert store.asked == 3
        go.set()
        assert first.result(20)
        assert store.contains("a")
