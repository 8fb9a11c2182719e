"""Reading stored KV into place, one layer after another or one layer ahead (section 6 of the paper).

On a CPU KV is read straight into a prompt's buffers, and comes to a GPU through pinned host memory. Where a GPU can
decode all records of a prompt, it gets them as they were written, some layers at a time, on a stream of its own.
Threads read those that lie in files.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import cycle
from typing import NamedTuple

import torch

from cacheblend_rag.errors import RecordError, StoreError, StoreUnreachableError
from cacheblend_rag.loading.shared import SharedKV
from cacheblend_rag.models.gpu import has_kernels
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.store.base import KVStore, StoredKV
from cacheblend_rag.store.codecs import DTYPES

_log = logging.getLogger(__name__)
# Layers that are copied together: the pass should not wait long for the first ones, and each call takes the host time.
_GROUPS = (1, 1, 2, 4, 8)
# Groups that are under way before their layers are asked for.
_GROUPS_AHEAD = 3
# Groups that threads read from files at most before they are copied: a scoring pass wants most layers at once.
_READ_AHEAD = 6
# Threads that read files for a GPU: memory hardly gives more to further ones.
_READERS = min(6, os.cpu_count() or 1)
# Bytes a second from which reading is a CPU's own work, with hardly a wait in it to be hidden. On two cores, KV in the
# page cache read on a thread beside the pass made it slower than KV read between its layers
# (docs/benchmarks/ttft.md).
_FAST = 10**9
# Layers read before they are asked for. The first layers are computed in full, long enough to read several of the
# others; with two, the loader stood still meanwhile and the pass waited for it later. Buffers that are filled early
# take no memory that the prompt's cache would not take in the end.
_AHEAD = 8


def load_as_it_pays(reader: LayerReader) -> Generator[LayerKV]:
    """Read the first layer, for which the pass waits in any case, and the others ahead if that was slow.

    On a device that is no CPU, reading costs the pass nothing, and all layers are read ahead. KV in memory is never
    read ahead on a CPU: if its first layer was slow, that was the memory it is copied to.
    """
    if reader.device.type != "cpu":
        yield from _load_to_gpu(reader, _Streams(reader.device)) if _gpu_decodes(reader) else load_ahead(reader)
        return
    if all(place.record.tier == "memory" for place in reader.placements):
        yield from load_plainly(reader)
        return
    started = time.perf_counter()
    first = reader.fetch_kv(0)
    if reader.stored_layer_bytes >= _FAST * (time.perf_counter() - started):
        yield first
        yield from load_plainly(reader, 1)
        return
    yield from load_ahead(reader, first=first)


def load_plainly(reader: LayerReader, start: int = 0) -> Generator[LayerKV]:
    """Read each layer when it is asked for: the plain twin of `load_ahead`."""
    for layer in range(start, reader.layers):
        yield _take(reader.fetch_kv(layer))


def load_ahead(reader: LayerReader, ahead: int = _AHEAD, first: LayerKV | None = None) -> Generator[LayerKV]:
    """Read on a thread of its own while earlier layers are fused.

    Parameters
    ----------
    reader : LayerReader
        The KV to read.
    ahead : int
        Most layers held in memory before they are asked for.
    first : LayerKV, optional
        The first layer, if it has been read.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-loader") as pool:
        waiting: deque[Future[LayerKV]] = deque()
        if first is not None:
            waiting.append(Future())
            waiting[0].set_result(first)
        following = len(waiting)
        try:
            for _ in range(reader.layers):
                while following < reader.layers and len(waiting) < ahead:
                    waiting.append(pool.submit(reader.fetch_kv, following))
                    following += 1
                yield synchronize(waiting.popleft())
        finally:
            for future in waiting:
                future.cancel()


def synchronize(layer: Future[LayerKV]) -> LayerKV:
    """Wait until the KV of a layer is there.

    Raises
    ------
    RecordLost
        If a record could not be read.
    """
    return _take(layer.result())


def _take(kv: LayerKV) -> LayerKV:
    """KV that the stream of this thread works on from now on; its memory was given out to another."""
    for tensor in (kv.keys, kv.values) if kv.keys.is_cuda else ():
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return kv


@dataclass(frozen=True)
class LayerReader:
    """Reads one layer of all records into buffers that span the prompt.

    Parameters
    ----------
    placements : sequence of Placement
        Records and where they go.
    layers, kv_heads, tokens, head_dim : int
        Shape of the prompt's KV.
    dtype : torch.dtype
        Element type of the model.
    device : torch.device
        Where the buffers are made.
    clock : ReadClock
        Counts the time spent reading, on whichever thread.
    rotation : pair of Tensor or None
        Cosine and sine by which stored keys may be rotated to their positions on the way, see `ModelAdapter.rotation`.
    """

    placements: Sequence[Placement]
    layers: int
    kv_heads: int
    tokens: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    clock: ReadClock = field(default_factory=lambda: ReadClock())
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def stored_layer_bytes(self) -> int:
        """Bytes that one layer of all records takes in memory."""
        tokens = sum(place.record.info.tokens for place in self.placements)
        return 2 * tokens * self.kv_heads * self.head_dim * self.dtype.itemsize

    def fetch_kv(self, layer: int) -> LayerKV:
        """KV of one layer, read, checked and in place; positions without a record are undefined.

        The first of the three interfaces of section 6 of the paper; `synchronize` is the second,
        the fusor's ``prefill_layers`` the third.

        Raises
        ------
        RecordLost
            If a record cannot be read or fails its checksum.
        """
        started = time.perf_counter()
        shape = (1, self.kv_heads, self.tokens, self.head_dim)
        with self._copier.open():
            keys = torch.empty(shape, dtype=self.dtype, device=self.device)
            values = torch.empty(shape, dtype=self.dtype, device=self.device)
            # Records on other machines all come while the first is waited for.
            for place in self.placements:
                if not (place.shared and place.shared.holds(place.key, layer)):
                    try:
                        place.record.read_ahead(layer)
                    except StoreError as error:
                        raise _lost_error(place, error) from error
            for place in self.placements:
                stop = place.start + place.record.info.tokens
                span = slice(place.start, stop)
                try:
                    self._copier.put(place, layer, keys[0, :, span], values[0, :, span])
                except (StoreError, OSError) as error:
                    raise _lost_error(place, error) from error
        self.clock.add(time.perf_counter() - started)
        return LayerKV(keys, values)

    @cached_property
    def _copier(self) -> _Copier:
        if self.device.type != "cuda":
            return _Copier()
        return _PinnedCopier([place.record for place in self.placements], self.dtype, self.device)


@dataclass(frozen=True)
class Placement:
    """A stored record and the position in the prompt at which it begins.

    Parameters
    ----------
    key : str
        Key of the record.
    record : StoredKV
    start : int
    shared : SharedKV or None
        Keeps its layers for other prompts of a batch; None if no other needs them.
    """

    key: str
    record: StoredKV
    start: int
    shared: SharedKV | None = None

    def copy_layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write one layer into place; see `StoredKV.read_into`."""
        if self.shared is None:
            self.record.read_into(layer, keys, values)
        else:
            self.shared.copy_layer(self.key, self.record, layer, keys, values)


class ReadClock:
    """Seconds spent reading, and those for which the pass waited."""

    def __init__(self) -> None:
        self.seconds, self.waited, self._lock = 0.0, 0.0, threading.Lock()

    def add(self, seconds: float) -> None:
        """Count some more; several threads may do so."""
        with self._lock:
            self.seconds += seconds


class RecordLost(RecordError):  # noqa: N818 - an event the engine recovers from, not a fault of the caller
    """A record failed while its layers were read.

    Parameters
    ----------
    key : str
        Key of the record.
    reason : str
        The error.
    damaged : bool
        Whether the record is no good, and not only out of reach for now.
    """

    def __init__(self, key: str, reason: str, damaged: bool = True) -> None:
        self.key, self.damaged = key, damaged
        super().__init__(f"KV record {key} was lost while loading: {reason}")


def _lost_error(place: Placement, error: Exception) -> RecordLost:
    return RecordLost(place.key, str(error), damaged=not isinstance(error, StoreUnreachableError))


class _Copier:
    """A way into buffers, straight for a CPU; one thread at a time uses it."""

    def open(self) -> AbstractContextManager[None]:
        """Within it buffers are made and filled; after it they are whole, for every stream."""
        return nullcontext()

    def put(self, place: Placement, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Bring one layer of a record into place; see `StoredKV.read_into`."""
        place.copy_layer(layer, keys, values)


class _PinnedCopier(_Copier):
    """Reads into pinned host memory and copies from there on a stream of its own, beside the pass.

    Of two pinned buffers one is read into while the other is copied.

    Parameters
    ----------
    records : sequence of StoredKV
        Records to be read; the buffers hold a layer of the largest.
    dtype : torch.dtype
        Element type of the model.
    device : torch.device
        The GPU.
    """

    def __init__(self, records: Sequence[StoredKV], dtype: torch.dtype, device: torch.device) -> None:
        self._device, self._stream = device, _side_stream(device)
        infos = [record.info for record in records if record.tier != "memory"]
        shape = [max((getattr(info, name) for info in infos), default=0) for name in ("kv_heads", "tokens", "head_dim")]
        buffers = [torch.empty((2, *shape), dtype=dtype, pin_memory=True) for _ in range(2)]
        self._buffers = cycle([(buffer, torch.cuda.Event()) for buffer in buffers])  # type: ignore[no-untyped-call]

    @contextmanager
    def open(self) -> Iterator[None]:
        """See `_Copier.open`."""
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def put(self, place: Placement, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See `_Copier.put`."""
        if place.record.tier == "memory":
            # Where it lies already, and if that is the GPU's, perhaps only now being written by what was queued before.
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
            place.copy_layer(layer, keys, values)
            return
        buffer, sent = next(self._buffers)
        sent.synchronize()  # what it held before has left it
        held = buffer[:, :, : place.record.info.tokens]
        place.copy_layer(layer, held[0], held[1])
        keys.copy_(held[0], non_blocking=True)
        values.copy_(held[1], non_blocking=True)
        sent.record(self._stream)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all passes on a device: memory that one stream gave back serves the next pass."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _load_to_gpu(reader: LayerReader, streams: _Streams) -> Iterator[LayerKV]:
    """Layers in groups: read or taken from memory, copied, put into their places, given to the pass.

    Parameters
    ----------
    reader : LayerReader
        The KV to read, see `_gpu_decodes`.
    streams : _Streams
    """
    groups, reading = _groups(reader.layers), deque[_Group]()
    copied, ready = deque[tuple[torch.Tensor, torch.cuda.Event]](), deque[LayerKV]()
    begun = False  # the pass begins once its first layer is under way
    with ThreadPoolExecutor(_READERS, thread_name_prefix="kv-loader") as pool:
        try:
            while True:
                while len(reading) < _READ_AHEAD and (layers := next(groups, None)):
                    reading.append(_read(reader, layers, pool))
                while reading and len(copied) < _GROUPS_AHEAD and (reading[0].is_read() if begun else not copied):
                    copied.append(_copy(reader, reading.popleft(), streams))
                if not ready:
                    if not copied and not reading:
                        return
                    target, done = copied.popleft() if copied else _copy(reader, reading.popleft(), streams)
                    streams.hand_over(target, done)
                    rotated = reader.rotation is not None
                    ready.extend(LayerKV(keys, values, rotated) for keys, values in target[:, :, None].unbind())
                yield ready.popleft()
                begun = True
        except BaseException:
            pool.shutdown(cancel_futures=True)
            if copied:  # the pass was given up: records may go, and must not while they are copied
                streams.settle()
            raise


def _gpu_decodes(reader: LayerReader) -> bool:
    """Whether a GPU takes all records of a prompt as they were written."""
    if not has_kernels(reader.device) or any(place.record.codec is None for place in reader.placements):
        return False
    infos = [place.record.info for place in reader.placements]
    aligned = all(info.head_dim % 8 == 0 for info in infos)  # then all parts of a layer begin where a GPU can read them
    return aligned and all(DTYPES.get(info.dtype) == reader.dtype and info.layers >= reader.layers for info in infos)


def _groups(layers: int) -> Iterator[slice]:
    """Layers in groups: small ones first, then of one size."""
    start, sizes = 0, iter(_GROUPS)
    while start < layers:
        stop = min(layers, start + next(sizes, _GROUPS[-1]))
        yield slice(start, stop)
        start = stop


def _read(reader: LayerReader, layers: slice, pool: ThreadPoolExecutor) -> _Group:
    """Let threads read some layers of all records that lie in files."""

    def read(record: StoredKV) -> torch.Tensor:
        started = time.perf_counter()
        data = record.read_written(layers, pinned=reader.device.type == "cuda")
        reader.clock.add((time.perf_counter() - started) / _READERS)  # for others read meanwhile
        return data

    records = ((number, place.record) for number, place in enumerate(reader.placements))
    return _Group(layers, {number: pool.submit(read, record) for number, record in records if record.tier != "memory"})


class _Group(NamedTuple):
    """Layers that go to a GPU together, and by the number of a record what reads it, if it lies in a file."""

    layers: slice
    reads: dict[int, Future[torch.Tensor]]

    def is_read(self) -> bool:
        """Whether nothing has to be waited for."""
        return all(read.done() for read in self.reads.values())


def _copy(reader: LayerReader, group: _Group, streams: _Streams) -> tuple[torch.Tensor, torch.cuda.Event]:
    """Buffers of some layers, ``[layers, 2, kv_heads, tokens, head_dim]``, and what says that they are filled."""
    from cacheblend_rag.models.gpu.scatter import Source, place

    layers, data = group.layers, list[torch.Tensor]()
    for number, placed in enumerate(reader.placements):
        try:
            data.append(group.reads[number].result() if number in group.reads else placed.record.read_written(layers))
        except (StoreError, OSError) as error:
            raise _lost_error(placed, error) from error
    started = time.perf_counter()
    shape = (layers.stop - layers.start, 2, reader.kv_heads, reader.tokens, reader.head_dim)
    with streams.copying():
        target = torch.empty(shape, dtype=reader.dtype, device=reader.device)
        # Kept until the kernel is queued: then their memory waits for it. Pinned memory is given out again only when
        # the copies from it are done: PyTorch sees to both.
        parts = [one.to(reader.device, non_blocking=True) for one in data]
        sources = []
        for part, placed in zip(parts, reader.placements, strict=True):
            info, int8 = placed.record.info, placed.record.codec == "int8"
            where = part.data_ptr(), part.stride(0), info.tokens, placed.start
            sources.append(Source(*where, rotates=not info.rotated, int8=int8))
        place(sources, target, reader.rotation)
        done = streams.mark_queued()
    reader.clock.add(time.perf_counter() - started)
    return target, done


class _Streams:
    """The stream of copies to a GPU, and that of the pass they are for."""

    def __init__(self, device: torch.device) -> None:
        self._copies, self._pass = _side_stream(device), torch.cuda.current_stream(device)
        self._copies.wait_stream(self._pass)  # records may only now be written by what was queued before

    def copying(self) -> AbstractContextManager[object]:
        """Within it the host queues copies."""
        return torch.cuda.stream(self._copies)

    def mark_queued(self) -> torch.cuda.Event:
        """Event of the moment when all copies queued so far are done."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._copies)
        return event

    def hand_over(self, target: torch.Tensor, done: torch.cuda.Event) -> None:
        """Let the pass use what the stream of copies allocated and filled; its stream waits, its host does not."""
        self._pass.wait_event(done)
        target.record_stream(self._pass)

    def settle(self) -> None:
        """Wait for all copies."""
        self._copies.synchronize()


class Prefetcher:
    """Asks a store, on a thread of its own, to bring records closer.

    Parameters
    ----------
    store : KVStore
    limit : int
        Most records waiting; further ones are left where they are.
    """

    def __init__(self, store: KVStore, limit: int = 256) -> None:
        self._store, self._limit = store, limit
        self._waiting: set[str] = set()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def submit(self, keys: Iterable[str]) -> None:
        """Bring stored records of these keys closer; never waits."""
        for key in keys:
            with self._lock:
                if self._closed or key in self._waiting or len(self._waiting) >= self._limit:
                    continue
                self._waiting.add(key)
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-prefetch")
                self._pool.submit(self._fetch, key)

    def _fetch(self, key: str) -> None:
        try:
            self._store.prefetch(key)
        except Exception:
            _log.exception("KV record %s cannot be brought closer", key)
        finally:
            with self._lock:
                self._waiting.discard(key)

    def close(self) -> None:
        """Drop waiting records and stop."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
