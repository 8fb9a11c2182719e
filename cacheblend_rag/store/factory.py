"""The store that an engine's options describe."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TypeAlias, TypeGuard

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.memory import free_memory
from cacheblend_rag.store.base import KVStore, check_store
from cacheblend_rag.store.disk import DiskStore
from cacheblend_rag.store.memory import MemoryStore
from cacheblend_rag.store.record import RecordFormat
from cacheblend_rag.store.remote import RemoteStore, check_address
from cacheblend_rag.store.s3 import S3_SCHEMES, S3Store
from cacheblend_rag.store.tiered import TieredStore
from cacheblend_rag.store.valkey import VALKEY_SCHEMES, ValkeyStore

StoreLocations: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""Where KV is kept: a folder, the address of a store that machines share, or several, the nearest first."""

_ADDRESS = re.compile("://|" + "|".join(f"^{scheme}:" for scheme in (*S3_SCHEMES, *VALKEY_SCHEMES)))
_SHARE = 4  # of the memory that is free, the part that holds copies of records for a GPU, unless told otherwise
# Bytes of memory above a store on another machine, where there is neither a folder nor anything chosen.
_MEMORY = 256 * 2**20
_REMEDY = 'name a folder, an address such as "s3://bucket/kv" or "valkey://host:6379/0", or a list, the nearest first'


def open_store(store: KVStore | StoreLocations | None, config: BlendConfig, *, beside_gpu: bool = False) -> KVStore:
    """A store in memory, in the locations named (with memory above them, if there should be some), or the one given.

    Parameters
    ----------
    store : KVStore, path, address or list of these two, optional
    config : BlendConfig
    beside_gpu : bool
        Whether the model is on a GPU. Reading a folder then takes about as long as computing anew, so unless told
        otherwise records that were read stay in memory.

    Raises
    ------
    ConfigError
        If the store given is no `KVStore`, or a location is none.
    StoreError
        If a folder cannot be made or opened.
    MissingExtraError
        If an option or a store needs a package that is not installed.
    """
    if store is None:
        return MemoryStore(config.store_bytes)
    if not are_locations(store):
        return check_store(store)
    paths, form = _paths(store), RecordFormat(config.codec)
    for address in filter(_ADDRESS.search, paths):  # before a folder is made
        check_remote(address)
    tiers = list[KVStore]()
    for at in paths:
        tiers.append(open_remote(at, form) if _ADDRESS.search(at) else DiskStore(at, config.store_bytes, form=form))
    memory = config.memory_bytes
    if config.memory_limit == "auto":
        remote = all(tier.traits.remote for tier in tiers)
        memory = (free_memory() or 0) // _SHARE if beside_gpu else _MEMORY if remote else 0
    above = [MemoryStore(memory, pinned=beside_gpu)] if memory else []
    return TieredStore([*above, *tiers]) if len(above) + len(tiers) > 1 else tiers[0]


def are_locations(store: object) -> TypeGuard[StoreLocations]:
    """Whether a store is described by where it is."""
    return isinstance(store, (str, os.PathLike, list, tuple))


def absolute_locations(store: StoreLocations) -> list[str]:
    """The same locations, independent of the current folder."""
    return [path if _ADDRESS.search(path) else os.path.abspath(path) for path in _paths(store)]


def open_remote(address: str, form: RecordFormat | None = None) -> RemoteStore:
    """A store on another machine.

    Raises
    ------
    ConfigError
        If the address is not valid.
    MissingExtraError
        If the package of its client is not installed.
    """
    check_remote(address)
    made = ValkeyStore if address.startswith(VALKEY_SCHEMES) else S3Store
    return made(address, form=form)


def check_remote(address: str, field: str = "store") -> None:
    """Refuse what is no address of a store on another machine, or has a secret in it.

    Raises
    ------
    ConfigError
        Of the option named.
    """
    check_address(address, (*S3_SCHEMES, *VALKEY_SCHEMES), "the environment", field)


def _paths(store: StoreLocations) -> list[str]:
    locations = [store] if isinstance(store, (str, os.PathLike)) else store
    if not locations or not all(
        isinstance(location, (str, os.PathLike)) and os.fspath(location) for location in locations
    ):
        raise ConfigError("store", store, _REMEDY)
    return [os.fspath(location) for location in locations]
