"""Measuring this machine for the loading controller."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import xxhash

from cacheblend_rag.engine.backends import ModelInUse
from cacheblend_rag.engine.ratio_policy import profile_path
from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.loading import Device, MachineProfile, PrefillProfile
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.models.plain import PlainAdapter
from cacheblend_rag.store import KVRecord, KVStore, StoredKV

_COPIED = 64 * 10**6
# Shape of the record by which a store on another machine is measured, in float32.
_LAYERS, _HEADS, _DIM = 16, 8, 64
_BLOCK = 2**20


def timed(work: Callable[[], object]) -> float:
    """Seconds that some work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _measure_prefill(adapter: PlainAdapter, lengths: Sequence[int]) -> dict[int, float]:
    """Seconds of a full prefill by number of tokens: the shorter of two runs after a warm-up run."""
    limit = adapter.context_window or max(lengths)
    chooser, found = random.Random(0), {}
    for length in sorted({min(length, limit) for length in lengths}):
        ids = [chooser.randrange(3, adapter.config.vocab_size) for _ in range(length)]
        times = [timed(lambda ids=ids: int(adapter.prefill(ids).logits.argmax())) for _ in range(3)]  # type: ignore[misc]
        found[length] = min(times[1:])
    return found


def fit_prefill(seconds: dict[int, float]) -> PrefillProfile:
    """Non-negative least squares of a constant, a linear and a quadratic part.

    Relative errors count, so that short times are not drowned by long ones.

    Parameters
    ----------
    seconds : dict of int to float
        Measured times by number of tokens; a single time is extrapolated in proportion.

    Raises
    ------
    ConfigError
        If nothing was measured.
    """
    if not seconds:
        raise ConfigError("lengths", (), "use at least one number of tokens")
    lengths = torch.tensor(sorted(seconds), dtype=torch.float64)
    times = torch.tensor([seconds[int(length)] for length in lengths], dtype=torch.float64)
    powers = [1] if len(lengths) == 1 else [1, 0, 2] if len(lengths) > 2 else [1, 0]
    while True:
        matrix = torch.stack([lengths**power for power in powers], dim=1) / times[:, None]
        parts = dict(zip(powers, torch.linalg.lstsq(matrix, torch.ones_like(times)).solution.tolist(), strict=True))
        negative = [power for power, part in parts.items() if part < 0 and power != 1]
        if not negative:
            return PrefillProfile(parts.get(0, 0.0), max(0.0, parts[1]), parts.get(2, 0.0))
        powers.remove(min(negative))


def measure_folder(folder: Path, size: int = 256 * 10**6) -> Device:
    """Throughput and latency of the device a folder lies on, with its page cache dropped.

    Each block is checked as a record's is, since that is part of loading.

    Parameters
    ----------
    folder : path
    size : int
        Bytes of the file that is written and read.

    Raises
    ------
    StoreError
        If the folder cannot be written.
    """
    path = folder / "profile.probe"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "r+b", buffering=0) as file:
            block = os.urandom(_BLOCK)
            for _ in range(max(1, size // _BLOCK)):
                file.write(block)
            os.fsync(file.fileno())
            return _read_through(file.fileno())
    except OSError as error:
        raise StoreError(f"cannot measure {str(folder)!r}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _read_through(descriptor: int) -> Device:
    size, buffer = os.fstat(descriptor).st_size, bytearray(_BLOCK)
    small, chooser = bytearray(4096), random.Random(0)
    drop_cache(descriptor)
    places = [chooser.randrange(size // 4096) * 4096 for _ in range(64)]
    latency = statistics.median(timed(lambda at=at: os.preadv(descriptor, [small], at)) for at in places)  # type: ignore[misc]
    drop_cache(descriptor)
    started = time.perf_counter()
    for offset in range(0, size, _BLOCK):
        os.preadv(descriptor, [buffer], offset)
        xxhash.xxh3_64_intdigest(buffer)
    seconds = time.perf_counter() - started
    return Device("disk", throughput=size / seconds, latency=latency)


def drop_cache(descriptor: int) -> None:
    """Let the system forget what it keeps in memory of a file that has been written out, where it can be asked to."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def measure_memory(device: torch.device | None = None) -> Device:
    """Throughput of copying within memory: the host's, or that of a GPU."""
    source = torch.ones(_COPIED // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize(source.device)

    return Device("memory", throughput=_COPIED / min(timed(copy) for _ in range(3)))


def measure_gpu_copy(device: torch.device) -> Device:
    """Throughput of copying from host memory to a GPU."""
    source = torch.ones(_COPIED // 4).pin_memory()

    def copy() -> None:
        source.to(device)
        torch.cuda.synchronize(device)

    return Device("gpu", throughput=_COPIED / min(timed(copy) for _ in range(4)))


def measure_remote(store: KVStore, size: int = 64 * 10**6) -> Device:
    """Throughput and latency of a store on another machine, by a record that is written, read and erased.

    Parameters
    ----------
    store : KVStore
    size : int
        Bytes of the record.

    Raises
    ------
    StoreError
        If the store cannot be written, or does not answer.
    """
    tokens = max(1, size // (_LAYERS * 2 * _HEADS * _DIM * 4))
    layers = tuple(torch.rand((_HEADS, tokens, _DIM)) for _ in range(_LAYERS))
    record = KVRecord.describe(
        SegmentKV(layers, layers, rotated=False), fingerprint="profile", context_ids=(), token_ids=(0,) * tokens
    )
    key, target = f"profile-{secrets.token_hex(8)}", torch.empty((2, _HEADS, tokens, _DIM))

    def opened() -> StoredKV:
        found = store.open(key)
        if found is None:
            raise StoreError(f"cannot measure {store.traits.tier}: what was written there cannot be read")
        return found

    def read() -> None:
        with contextlib.closing(opened()) as found:
            for layer in range(_LAYERS):
                found.read_into(layer, target[0], target[1])

    try:
        store.put(key, record)
        latency = statistics.median(timed(lambda: opened().close()) for _ in range(8))
        seconds = min(timed(read) for _ in range(3)) - latency
    finally:
        with contextlib.suppress(StoreError):
            store.delete(key)
    return Device(store.traits.tier, throughput=_LAYERS * target.nbytes / max(seconds, 1e-9), latency=latency)


def profile_machine(
    store: KVStore,
    model: ModelInUse,
    *,
    lengths: Sequence[int] = (256, 512, 1024, 2048),
    size: int = 256 * 10**6,
) -> tuple[MachineProfile, Path]:
    """Measure the prefill of a model and the speed of a store, and save the result with the store.

    Returns
    -------
    MachineProfile, path
        The whole profile, and its file. Engines that are made from now on use it.

    Raises
    ------
    UnsupportedModelError
        If the model is answered plainly.
    ConfigError
        If the store has no folder.
    """
    adapter, path = model.blended, _path_beside(store)
    devices = {"disk": measure_folder(path.parent, size), "memory": measure_memory()}
    if adapter.device.type == "cuda":
        devices["gpu"] = measure_gpu_copy(adapter.device)
    remote = [tier for tier in store.traits.tiers if tier.traits.remote]
    devices |= {tier.traits.tier: measure_remote(tier, size) for tier in remote}
    with model.products():  # as requests are computed
        prefill = fit_prefill(_measure_prefill(adapter, lengths))
    return keep_profile(store, MachineProfile({model.look(): prefill}, devices))


def keep_profile(store: KVStore, found: MachineProfile) -> tuple[MachineProfile, Path]:
    """Add the result to the profile that is kept with a store.

    Returns
    -------
    MachineProfile, path
        The whole profile, and its file. Engines that are made from now on use it.

    Raises
    ------
    ConfigError
        If the store has no folder.
    StoreError
        If the profile cannot be read or written.
    """
    path = _path_beside(store)
    before = MachineProfile.load(path)
    known = found if before is None else before.merge(found)
    known.save(path)
    return known, path


def _path_beside(store: KVStore) -> Path:
    path = profile_path(store)
    if path is None:
        raise ConfigError("store", store, "use a store with a folder; the profile is saved there")
    return path
