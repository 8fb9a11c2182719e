"""Records in memory: the simplest store, and the tier above a disk store."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import torch

from cacheblend_rag.config import parse_bytes
from cacheblend_rag.errors import StoreError
from cacheblend_rag.models.kv import JoinedKV, SegmentKV
from cacheblend_rag.store.base import KVRecord, KVStore, RecordInfo, StoredKV, StoreStats, StoreTraits
from cacheblend_rag.store.codecs import EncodedKV

_log = logging.getLogger(__name__)
_NOT_PINNED = "a record could not be kept in pinned memory, and will come to the GPU slowly: %s"


class MemoryRecord(StoredKV):
    """A record in memory, read like any other.

    Parameters
    ----------
    record : KVRecord
    """

    tier = "memory"

    def __init__(self, record: KVRecord) -> None:
        self.record = record
        self.info: RecordInfo = record.info

    def read_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StoredKV.read_layer`."""
        kv = self.record.kv
        return kv.layer(layer) if isinstance(kv, EncodedKV) else (kv.keys[layer], kv.values[layer])

    @property
    def codec(self) -> str | None:
        """See `StoredKV.codec`; None where no GPU is in use."""
        return written.codec if (written := self.record.kv.written) else None

    def read_written(self, layers: slice, pinned: bool = False) -> torch.Tensor:
        """See `StoredKV.read_written`."""
        written = self.record.kv.written
        return super().read_written(layers, pinned) if written is None else written.layers[layers]


class MemoryStore(KVStore):
    """A KV store in memory. The least recently used records are evicted first.

    Parameters
    ----------
    size_limit : int or str
        Bytes the records may take.
    device : str or torch.device
        Where records are kept: ``"cpu"``, or a GPU.
    pinned : bool
        Keep all records on a CPU in pinned memory, from which a GPU reads fast. Records in 8 bits from a folder stay in
        8 bits. Records that a GPU computed are always in pinned memory.
    """

    def __init__(
        self,
        size_limit: int | str = 10 * 10**9,
        *,
        device: str | torch.device = "cpu",
        pinned: bool = False,
    ) -> None:
        self.traits = StoreTraits(
            "memory", persistent=False, size_limit=parse_bytes(size_limit), device=torch.device(device)
        )
        self._pinned = pinned
        self._records: OrderedDict[str, KVRecord] = OrderedDict()
        self._volume = 0
        self._lock = threading.Lock()
        self._hits = self._misses = self._evictions = 0

    def open_all(self, keys: Sequence[str]) -> Mapping[str, StoredKV]:
        """See `KVStore.open_all`."""
        with self._lock:
            found = {key: MemoryRecord(self._records[key]) for key in keys if key in self._records}
            for key in found:
                self._records.move_to_end(key)
            self._hits += len(found)
            self._misses += len(keys) - len(found)
            return found

    def put(self, key: str, record: KVRecord) -> None:
        """See `KVStore.put`."""
        record = self._move(record)
        size = record.kv.nbytes
        if size > self.traits.size_limit:
            raise StoreError(f"a record of {size} bytes exceeds size_limit={self.traits.size_limit}")
        with self._lock:
            self._drop(key)
            self._records[key] = record
            self._volume += size
        while True:
            with self._lock:
                if self._volume <= self.traits.size_limit:
                    return
                oldest, evicted = next(iter(self._records.items()))
            self.announce(oldest, MemoryRecord(evicted))
            with self._lock:
                if self._records.get(oldest) is evicted:  # nobody has erased or replaced it meanwhile
                    self._evictions += self._drop(oldest)

    def _move(self, record: KVRecord) -> KVRecord:
        kv = record.kv
        if isinstance(kv, EncodedKV):
            if self._pinned and self.traits.device.type == "cpu":
                try:
                    return KVRecord(record.info, kv.join(pinned=True))
                except RuntimeError as error:  # the system bounds how much may be pinned
                    _log.warning(_NOT_PINNED, error)
                    return KVRecord(record.info, kv.join(pinned=False))
            kv = kv.decode()
        if kv.keys and (self._pinned or kv.keys[0].is_cuda or self.traits.device.type == "cuda"):
            try:
                return KVRecord(record.info, JoinedKV.copy_from(kv, self.traits.device))
            except RuntimeError as error:
                if self.traits.device.type == "cuda":
                    raise
                _log.warning(_NOT_PINNED, error)
        keys = tuple(tensor.detach().to(self.traits.device) for tensor in kv.keys)
        values = tuple(tensor.detach().to(self.traits.device) for tensor in kv.values)
        return KVRecord(record.info, SegmentKV(keys, values, kv.rotated))

    def contains(self, key: str) -> bool:
        """See `KVStore.contains`."""
        with self._lock:
            return key in self._records

    def delete(self, key: str) -> bool:
        """See `KVStore.delete`."""
        with self._lock:
            return self._drop(key)

    def volume(self) -> int:
        """See `KVStore.volume`."""
        return self._volume

    def infos(self, beginning: str) -> Iterator[tuple[str, RecordInfo]]:
        """See `KVStore.infos`."""
        with self._lock:
            found = [(key, record.info) for key, record in self._records.items() if key.startswith(beginning)]
        yield from found

    def stats(self) -> StoreStats:
        """Sizes and counts since it was made."""
        with self._lock:
            return StoreStats(
                records=len(self._records),
                bytes=self._volume,
                volume=self._volume,
                size_limit=self.traits.size_limit,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
            )

    def _drop(self, key: str) -> bool:
        record = self._records.pop(key, None)
        if record is None:
            return False
        self._volume -= record.kv.nbytes
        return True
