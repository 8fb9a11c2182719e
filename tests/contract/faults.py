"""Faults of a KV store that show whether it can be trusted: damage, kills, crowds."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.errors import RecordError, StoreError
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.report import FusedKV
from cacheblend_rag.store import DiskStore, KVRecord, StoredKV

_LAYERS, _HEADS, _DIM = 3, 2, 16


def same_result(one: FusedKV, other: FusedKV) -> bool:
    """Whether two prompts were fused to the same, bit by bit."""
    pairs = zip(one.cache.layers, other.cache.layers, strict=True)
    return torch.equal(one.logits, other.logits) and all(
        torch.equal(mine.keys, its.keys) and torch.equal(mine.values, its.values) for mine, its in pairs
    )


# Records that can be told from one another ----------------------------------------------------


def record_of(number: int) -> KVRecord:
    """A record whose content follows from its number."""
    generator = torch.Generator().manual_seed(number)
    tokens = 40 + 60 * (number % 7)
    shape = (_HEADS, tokens, _DIM)
    keys, values = (tuple(torch.randn(shape, generator=generator).bfloat16() for _ in range(_LAYERS)) for _ in range(2))
    kv = SegmentKV(keys, values, rotated=False)
    return KVRecord.describe(kv, fingerprint="faults", context_ids=(number,), token_ids=tuple(range(tokens)))


def is_right(stored: StoredKV, number: int) -> bool:
    """Whether a stored record is the one of `record_of`, bit by bit."""
    record = record_of(number)
    if stored.info != record.info:
        return False
    for layer in range(_LAYERS):
        keys, values = stored.read_layer(layer)
        if not (torch.equal(keys, record.kv.keys[layer]) and torch.equal(values, record.kv.values[layer])):
            return False
    return True


def wrong_records(store: DiskStore) -> Iterator[str]:
    """Keys of records, among those of `record_of`, that are damaged or are another's."""
    for entry in store.entries():
        try:
            record = store.read(entry)
        except RecordError:
            yield entry.key
            continue
        try:
            if not is_right(record, int(entry.key)):
                yield entry.key
        except RecordError:
            yield entry.key
        finally:
            record.close()


# Kills --------------------------------------------------------------------------------------


def kill_while_writing(folder: Path, rounds: int, seed: int = 0) -> list[int]:
    """Kill a writing process with SIGKILL at a random moment, round after round.

    Returns
    -------
    list of int
        By round, how many records it had written.
    """
    context, chooser, written = _context(), random.Random(seed), []
    for number in range(rounds):
        count: Any = context.RawValue("q", 0)  # without a lock, which a killed process would keep
        writer: Any = context.Process(target=_write, args=(str(folder), number, count))
        writer.start()
        while not count.value and writer.is_alive():
            time.sleep(0.001)
        time.sleep(chooser.uniform(0.0, 0.25))
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        written.append(int(count.value))
    return written


def hold_claim(folder: Path, key: str) -> BaseProcess:
    """A process that holds a claim until it is killed."""
    context = _context()
    held = context.Event()
    holder = context.Process(target=_hold, args=(str(folder), key, held), daemon=True)
    holder.start()
    assert held.wait(120)
    return holder


def _hold(folder: str, key: str, held: Any) -> None:
    with DiskStore(folder).claim(key) as mine:
        assert mine
        held.set()
        signal.pause()


def _write(folder: str, seed: int, count: Any) -> None:
    torch.set_num_threads(1)
    store = DiskStore(folder, 20_000_000)
    chooser = random.Random(seed)
    while True:
        number = chooser.randrange(200)
        store.put(str(number), record_of(number))
        count.value += 1


# Crowds -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crowd:
    """The results of processes over one folder.

    Parameters
    ----------
    reads, hits, writes, deletions : int
        What was done.
    wrong : int
        Records that were read and were not what had been written.
    refused : int
        Reads or writes that ended in an error of the store's own.
    crashed : int
        Processes that ended in anything else.
    """

    reads: int = 0
    hits: int = 0
    writes: int = 0
    deletions: int = 0
    wrong: int = 0
    refused: int = 0
    crashed: int = 0


def crowd(folder: Path, processes: int, seconds: float, size_limit: int = 3_000_000) -> Crowd:
    """Let processes read, write, delete and evict at random on one folder."""
    context = _context()
    results: Any = context.Queue()
    workers: Sequence[Any] = [
        context.Process(target=_jostle, args=(str(folder), seed, seconds, size_limit, results))
        for seed in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    crashed = sum(worker.exitcode != 0 for worker in workers)
    seen = [results.get(timeout=10) for _ in range(processes - crashed)]
    totals = {name: sum(counts[name] for counts in seen) for name in ("reads", "hits", "writes", "deletions")}
    return Crowd(
        **totals,
        wrong=sum(counts["wrong"] for counts in seen),
        refused=sum(counts["refused"] for counts in seen),
        crashed=crashed,
    )


def _jostle(folder: str, seed: int, seconds: float, size_limit: int, results: Any) -> None:
    torch.set_num_threads(1)
    store, chooser = DiskStore(folder, size_limit), random.Random(seed)
    counts = dict.fromkeys(("reads", "hits", "writes", "deletions", "wrong", "refused"), 0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        number, what = chooser.randrange(60), chooser.random()
        try:
            if what < 0.6:
                counts["reads"] += 1
                stored = store.open(str(number))
                if stored is not None:
                    counts["hits"] += 1
                    counts["wrong"] += not is_right(stored, number)
                    stored.close()
            elif what < 0.95:
                counts["writes"] += 1
                store.put(str(number), record_of(number))
            else:
                counts["deletions"] += 1
                store.delete(str(number))
        except StoreError:
            counts["refused"] += 1
    store.close()
    results.put(counts)


def _context() -> ForkServerContext:
    """Processes that are forked from one that has imported everything and runs no thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context
