"""Stores on other machines, over real servers: the contract of every store, then what only they go through."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from cacheblend_rag.errors import RecordError
from cacheblend_rag.store import KVStore
from cacheblend_rag.store.s3 import S3Store
from cacheblend_rag.store.valkey import ValkeyStore
from docs.benchmarks.scripts.servers import make_bucket, s3_environment, s3_server, valkey_server
from tests.contract.store_contract import StoreContract, make, same

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
    """What is said otherwise of stores that are elsewhere."""

    def test_an_open_record_outlives_its_deletion(self, store: KVStore) -> None:
        """It is read whole, or lost; never another's."""
        store.put("a", make(1, tokens=5000))
        opened = store.open("a")
        assert opened is not None
        store.delete("a")
        with pytest.raises(RecordError):
            same(opened, make(1, tokens=5000))

    def test_an_open_record_outlives_its_replacement(self, store: KVStore) -> None:
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
