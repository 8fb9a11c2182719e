"""Measuring this machine for the loading controller."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import secrets
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from cacheblend_rag.calibration.comparison import blended, time_rounds
from cacheblend_rag.calibration.timing import medians, timed, timing_prompt
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.engine.ratio_policy import profile_path
from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.loading import Device, MachineProfile, PrefillProfile
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.models.plain import check_blends
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.store import KVRecord, KVStore, MemoryStore, StoredKV

_CHUNKS = 4
_RATIOS = (0.15, 0.5)
_LEAST_CHUNK = 16
_COPIED = 64 * 10**6
# Shape of the record by which a store on another machine is measured, in float32.
_LAYERS, _HEADS, _DIM = 16, 8, 64


@dataclass(frozen=True)
class BlendTime:
    """Time of a blended pass.

    Parameters
    ----------
    tokens : int
        Of the prompt.
    fixed_share : float
        Share of rows that are computed at any ratio, over all layers.
    row_share : float
        Share of rows that the ratio added.
    seconds : float
        With all stored KV in memory.
    """

    tokens: int
    fixed_share: float
    row_share: float
    seconds: float


def _measure_blend(engine: BlendEngine, prefill: PrefillProfile, lengths: Sequence[int]) -> PrefillProfile:
    """Complete what is known of full prefills by what blended passes of the same lengths take.

    Parameters
    ----------
    engine : BlendEngine
        Its store is not used.
    prefill : PrefillProfile
    lengths : sequence of int
        Tokens of prompts, about; longer ones than the model is made for are left out.
    """
    limit = engine.context_window or max(lengths)
    # As requests are computed.
    config = BlendConfig(min_tokens=0, write_back="off", prepack_weights=engine.config.prepack_weights)
    found: list[BlendTime] = []
    with BlendEngine(
        engine.model, engine.tokenizer, config=config, store=MemoryStore(), fingerprint=engine.fingerprint
    ) as other:
        for length in sorted(set(lengths)):
            prompt = timing_prompt(engine.tokenizer, _CHUNKS, max(_LEAST_CHUNK, length // _CHUNKS))
            tokens = len(other.tokenize(prompt).input_ids)
            if tokens <= limit and other.adapter.reusable(tokens):
                found += time_blends(other, prompt)
    return fit_blend(prefill, found) if found else prefill


def time_blends(engine: BlendEngine, prompt: Prompt, repeats: int = 3) -> Iterator[BlendTime]:
    """Time blended passes of a prompt at a low and a high ratio, in turn, after one that warms up.

    Parameters
    ----------
    engine : BlendEngine
        Over a store in memory, with the default rule.
    prompt : Prompt
    repeats : int
        Passes of each ratio, of which the median counts.
    """
    engine.warm(prompt.chunks, progress=False)
    methods = {str(ratio): blended(engine.with_config(recompute_ratio=ratio), prompt) for ratio in _RATIOS}
    timed = time_rounds(methods, repeats)
    tokens = len(engine.tokenize(prompt).input_ids)
    for ratio, (name, seconds) in zip(_RATIOS, medians(timed.seconds).items(), strict=True):
        share = statistics.mean(timed.last[name].computed) / tokens
        fixed = max(0.0, (share - ratio) / (1 - ratio))
        yield BlendTime(tokens, fixed, share - fixed, seconds)


def fit_blend(prefill: PrefillProfile, found: Sequence[BlendTime]) -> PrefillProfile:
    """Least squares of what rows cost, and of what a pass takes beside them, none below 0.

    Parameters
    ----------
    prefill : PrefillProfile
    found : sequence of BlendTime
        The measured times.
    """
    whole = [prefill.seconds(one.tokens) for one in found]
    beyond = [max(1e-9, one.seconds - one.fixed_share * full) for one, full in zip(found, whole, strict=True)]
    rows = [one.row_share * full for one, full in zip(found, whole, strict=True)]
    columns = {2: rows, 1: [float(one.tokens) for one in found], 0: [1.0] * len(found)}
    if len({one.tokens for one in found}) == 1:  # one length cannot tell what grows with it from what does not
        del columns[0]
    parts = least_squares(
        {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()},
        torch.tensor(beyond, dtype=torch.float64),
    )
    return dataclasses.replace(
        prefill, blend_constant=parts.get(0, 0.0), blend_linear=parts.get(1, 0.0), row_cost=parts[2] or 1.0
    )


_BLOCK = 2**20


def _measure_prefill(adapter: ModelAdapter, lengths: Sequence[int]) -> dict[int, float]:
    """Seconds of a full prefill by number of tokens, the less of two after one that warms up."""
    limit = adapter.context_window or max(lengths)
    chooser, found = random.Random(0), {}
    for length in sorted({min(length, limit) for length in lengths}):
        ids = [chooser.randrange(3, adapter.config.vocab_size) for _ in range(length)]
        times = [timed(lambda ids=ids: int(adapter.prefill(ids).logits.argmax())) for _ in range(3)]  # type: ignore[misc]
        found[length] = min(times[1:])
    return found


def fit_prefill(seconds: dict[int, float]) -> PrefillProfile:
    """Least squares of constant, linear and quadratic part, none below 0.

    Parameters
    ----------
    seconds : dict of int to float
        Measured times by number of tokens; with one alone, time is taken as proportional.

    Raises
    ------
    ConfigError
        If nothing was measured.
    """
    if not seconds:
        raise ConfigError("lengths", (), "use at least one number of tokens")
    lengths = torch.tensor(sorted(seconds), dtype=torch.float64)
    times = torch.tensor([seconds[int(length)] for length in lengths], dtype=torch.float64)
    powers = (1,) if len(lengths) == 1 else (1, 0, 2) if len(lengths) > 2 else (1, 0)
    found = least_squares({power: lengths**power for power in powers}, times)
    return PrefillProfile(found.get(0, 0.0), found[1], found.get(2, 0.0))


def least_squares(columns: Mapping[int, torch.Tensor], times: torch.Tensor) -> dict[int, float]:
    """Parts of which columns make up times, none below 0; the first column is kept whatever comes out.

    Parameters
    ----------
    columns : mapping of int to Tensor, each [times]
    times : Tensor, [times]
        Positive. Relative errors count, so that short times are not drowned by long ones.
    """
    kept = dict(columns)
    first = next(iter(kept))
    while True:
        matrix = torch.stack([*kept.values()], dim=1) / times[:, None]
        parts = dict(zip(kept, torch.linalg.lstsq(matrix, torch.ones_like(times)).solution.tolist(), strict=True))
        negative = [name for name, part in parts.items() if part < 0 and name != first]
        if not negative:
            return {name: max(0.0, part) for name, part in parts.items()}
        del kept[min(negative)]


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


def read_files(paths: Iterable[Path], repeats: int = 3) -> float:
    """Bytes a second at which files are read and nothing is done with them, the best of some repeats.

    Raises
    ------
    ConfigError
        If there is nothing in them.
    """
    found = list(paths)
    size = sum(path.stat().st_size for path in found)
    if not size:
        raise ConfigError("paths", found, "use files with something in them")
    buffer = bytearray(max(path.stat().st_size for path in found))

    def read() -> None:
        for path in found:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    return size / min(timed(read) for _ in range(repeats))


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
    engine: BlendEngine, *, lengths: Sequence[int] = (256, 512, 1024, 2048), size: int = 256 * 10**6
) -> tuple[MachineProfile, Path]:
    """Measure prefill and storage of an engine, and keep the result beside its store.

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
    check_blends(engine.adapter)
    path = _path_beside(engine.store)
    devices = {"disk": measure_folder(path.parent, size), "memory": measure_memory()}
    if engine.adapter.device.type == "cuda":
        devices["gpu"] = measure_gpu_copy(engine.adapter.device)
    remote = [tier for tier in engine.store.traits.tiers if tier.traits.remote]
    devices |= {tier.traits.tier: measure_remote(tier, size) for tier in remote}
    with engine.products():  # as requests are computed
        prefill = fit_prefill(_measure_prefill(engine.adapter, lengths))
    prefill = _measure_blend(engine, prefill, lengths)
    return keep_profile(engine.store, MachineProfile({engine.fingerprint: prefill}, devices))


def keep_profile(store: KVStore, found: MachineProfile) -> tuple[MachineProfile, Path]:
    """Add what was found to the profile beside a store.

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
        raise ConfigError("store", store, "use a store with a folder; a profile is kept beside it")
    return path
