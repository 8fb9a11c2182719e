"""Faults of a KV store that show whether it can be trusted: damage, kills, crowds."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import RecordError, StoreError
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.report import FusedKV
from cacheblend_rag.store import DiskStore, KVRecord, StoredKV
from tests.toy import MODEL_PATH

__all__ = [
    "Crowd",
    "DamageTrials",
    "Outcome",
    "crowd",
    "is_right",
    "kill_while_writing",
    "only_from",
    "record_of",
    "same_result",
    "truncations",
    "wrong_records",
]

_LAYERS, _HEADS, _DIM = 3, 2, 16
_CHUNKS = (
    "The harbour was dredged in 1912 and the sand went to the mill.",
    "The mill burned down in 1931. Nobody was in it.",
    "The bridge beside the mill is made of oak and was mended twice.",
)
_PROMPT = Prompt("Read this.\n", list(_CHUNKS), "\nQuestion: When did the mill burn down?\nAnswer:")


@contextmanager
def only_from(level: int, name: str = "cacheblend_rag") -> Iterator[None]:
    """Within it, nothing below this level is logged there: every trial would log a miss."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


# Damage -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result of a request over a damaged record.

    Parameters
    ----------
    hits : int
        Chunks read from the store, of three.
    as_never_stored : bool
        Whether the result is bit by bit that of a run in which the chunk was never stored.
    as_undamaged : bool
        Whether it is that of a run over the whole record.
    """

    hits: int
    as_never_stored: bool
    as_undamaged: bool

    @property
    def right(self) -> bool:
        """Whether the damage was seen, or did not touch the content."""
        return self.as_never_stored if self.hits == 2 else self.as_undamaged and self.hits == 3


class DamageTrials:
    """One request over a tiny model, asked again and again with the record of one chunk damaged.

    Parameters
    ----------
    folder : path
        Of the KV store; should be empty.
    """

    def __init__(self, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": _LAYERS, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, initializer_range=0.3, **shape)
        options = BlendConfig(min_tokens=0, recompute_ratio=0.2, write_back="off")
        model = LlamaForCausalLM(config).eval()
        self.engine = BlendEngine(model, tokenizer, config=options, store=folder)
        self.engine.warm([_CHUNKS[0], _CHUNKS[2]], progress=False)
        self._never = self.engine.fuse(_PROMPT)
        others = set(self._files())
        self._restore()
        (self.path,) = set(self._files()) - others
        self._others = others
        self.data = self.path.read_bytes()
        self._warm = self.engine.fuse(_PROMPT)

    def _files(self) -> list[Path]:
        store: Any = self.engine.store
        return sorted(store.folder.glob("??/??/*.val"))

    def _restore(self) -> None:
        self.engine.warm([_CHUNKS[1]], progress=False)

    def run(self, damaged: bytes | None) -> Outcome:
        """Put these bytes in place of the record's file, or nothing, and ask."""
        self._restore()
        (path,) = set(self._files()) - self._others
        if damaged is None:
            path.unlink()
        else:
            path.write_bytes(damaged)
        fused = self.engine.fuse(_PROMPT)
        return Outcome(fused.report.hits, same_result(fused, self._never), same_result(fused, self._warm))

    def close(self) -> None:
        """Release the engine."""
        self.engine.close()


def truncations(data: bytes) -> dict[str, int]:
    """A length of every class to which a record can be cut."""
    header = int.from_bytes(data[8:12], "little")
    return {
        "nothing left": 0,
        "within the magic": 5,
        "within the header's size": 10,
        "before the header": 16,
        "within the header": 16 + header // 2,
        "before the padding": 16 + header,
        "before layer 0": 4096 * -(-(16 + header) // 4096),
        "within a layer": len(data) // 2 + 100,
        "before the last layer": len(data) - 4096,
        "within the last layer": len(data) - 4000,
        "last byte missing": len(data) - 1,
    }


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
