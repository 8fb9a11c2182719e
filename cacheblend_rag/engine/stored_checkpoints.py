"""Checkpoints in the store: what is behind beginnings of prompts outlives the process, for models answered plainly.

A checkpoint is a record like any other, of one layer, whose bytes are the state of a cache in place of KV. Checksums,
encryption, limits and tenants are those of all records. Its key begins as that of a kept prompt: so it is erased with
each chunk that it holds.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from cacheblend_rag.engine.checkpoints import LEAST_TOKENS, Checkpoints, Owner
from cacheblend_rag.engine.session_cache import keys_begin
from cacheblend_rag.engine.write_back import Job
from cacheblend_rag.errors import RecordError, StoreError, StoreUnreachableError
from cacheblend_rag.models.cache import held_bytes
from cacheblend_rag.models.cache_state import pack_cache, unpack_cache
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.models.plain import PlainAdapter
from cacheblend_rag.store.base import KVRecord, KVStore, RecordInfo, discard, record_key

_log = logging.getLogger(__name__)
KIND = "checkpoint"


@dataclass(frozen=True)
class StoredCheckpoints:
    """The checkpoints of one model and one tenant in a store.

    Parameters
    ----------
    store : KVStore
    owner : Owner
    adapter : PlainAdapter
    held : Checkpoints
        Those in memory, and which of the store's are known.
    """

    store: KVStore
    owner: Owner
    adapter: PlainAdapter
    held: Checkpoints

    def find(self, ids: Sequence[int], tokens: int = 0, times_forgotten: int | None = None) -> tuple[Any, int] | None:
        """The cache behind the longest stored beginning of a prompt, if that has more than some tokens.

        The last token of the prompt is no part of it. A record that cannot be used is erased, and counts as a miss.
        A found one is kept in memory; for ``times_forgotten`` see `Checkpoints.keep`.
        """
        keys = self._keys(ids)
        lengths = sorted({_length(key) for key in keys if tokens < _length(key) < len(ids)}, reverse=True)
        for key in map(self.key, (tuple(ids[:length]) for length in lengths)):
            if key not in keys:
                continue
            cache = self._read(key, tuple(ids[: _length(key)]))
            if cache is not None:
                self.held.keep(self.owner, ids[: _length(key)], cache, times_forgotten=times_forgotten)
                return cache, _length(key)
            keys.discard(key)
        return None

    def jobs(self, ids: Sequence[int], prefix: int, whole: bool) -> Mapping[str, Job]:
        """Jobs that store the checkpoints in memory that are behind beginnings of some ids.

        Parameters
        ----------
        ids : sequence of int
            A prompt and its answer.
        prefix : int
            Tokens of its prefix.
        whole : bool
            Whether others are stored, too, such as that behind the answer.
        """
        keys, jobs = self._keys(ids), dict[str, Job]()
        for length, cache in self.held.behind(self.owner, ids):
            key = self.key(tuple(ids[:length]))
            if key not in keys and (whole or length == prefix):
                jobs[key] = self._job(key, tuple(ids[:length]), cache, keys)
        return jobs

    def key(self, ids: tuple[int, ...]) -> str:
        """Key of the checkpoint behind some ids; it names how many they are."""
        own = record_key(
            fingerprint=f"{self.owner.fingerprint} {transformers.__version__}",  # its caches change
            salt=self.owner.salt,
            kind=KIND,
            context_ids=(),
            token_ids=ids,
        )
        return f"{self._begin(ids)}{len(ids)}-{own}"

    def _begin(self, ids: Sequence[int]) -> str:
        """Beginning of the keys of those that have their first ids in common."""
        first = repr((self.owner.fingerprint, tuple(ids[:LEAST_TOKENS])))
        return f"{keys_begin(self.owner.salt)}state-{hashlib.sha256(first.encode()).hexdigest()[:16]}-"

    def _keys(self, ids: Sequence[int]) -> set[str]:
        """Keys of those with the same first ids; the store is looked through once for each."""
        if len(ids) < LEAST_TOKENS:
            return set()
        begin = self._begin(ids)
        try:
            return self.held.known(begin, lambda: {key for key, _ in self.store.infos(begin)})
        except StoreError as error:
            _log.warning("stored checkpoints cannot be looked for: %s", error)
            return set()

    def _job(self, key: str, ids: tuple[int, ...], cache: Any, keys: set[str]) -> Job:
        def store() -> None:
            packed = pack_cache(cache)
            if packed is None:
                _log.debug("a checkpoint of %d tokens is not stored: its cache holds no plain values", len(ids))
                return
            self.store.put(key, self._record(ids, packed))
            keys.add(key)

        return Job(store, held_bytes(cache), lambda: self._info(ids, 1))

    def _info(self, ids: tuple[int, ...], width: int) -> RecordInfo:
        return RecordInfo(self.owner.fingerprint, (), ids, 1, 1, width, "float32", True, KIND)

    def _record(self, ids: tuple[int, ...], packed: torch.Tensor) -> KVRecord:
        """The bytes in the place of the keys and values of one layer; they are never read as numbers."""
        width = math.ceil(len(packed) / (2 * 4 * len(ids)))
        data = torch.zeros(2 * 4 * width * len(ids), dtype=torch.uint8)
        data[: len(packed)] = packed
        keys, values = data.view(torch.float32).view(2, 1, len(ids), width)
        return KVRecord(self._info(ids, width), SegmentKV((keys,), (values,), rotated=True))

    def _read(self, key: str, ids: tuple[int, ...]) -> Any:
        """The cache in a record; None if there is none, or it cannot be used."""
        try:
            record = self.store.open(key)
        except StoreError as error:
            _log.warning("a stored checkpoint cannot be opened: %s", error)
            return None
        if record is None:
            return None
        try:
            if record.info != self._info(ids, record.info.head_dim):
                raise RecordError("it is of another prompt or model")
            cache = self.adapter.empty_cache()
            parts = [one.cpu().contiguous().reshape(-1).view(torch.uint8) for one in record.read_layer(0)]
            unpack_cache(torch.cat(parts), cache, self.adapter.device, len(ids))
            return cache
        except StoreUnreachableError as error:
            _log.warning("a stored checkpoint cannot be read: %s", error)
            return None
        except (StoreError, ValueError) as error:
            _log.warning("KV record %s counts as a miss: %s", key, error)
        finally:
            record.close()
        discard(self.store, key)
        return None


def _length(key: str) -> int:
    """Tokens that a checkpoint is behind, by its key."""
    return int(key.rsplit("-", 2)[-2])
