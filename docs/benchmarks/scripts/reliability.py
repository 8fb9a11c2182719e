"""The long form of the store's fault tests.

``python -m docs.benchmarks.scripts.reliability``

Prints a table of counts; the last line is JSON. The status is 1 if anything went wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cacheblend_rag.store import DiskStore
from docs.benchmarks.scripts.faults import (
    DamageTrials,
    crowd,
    kill_while_writing,
    only_from,
    truncations,
    wrong_records,
)

__all__ = ["Line", "main"]


@dataclass(frozen=True)
class Line:
    """One fault, and how often it was tried.

    Parameters
    ----------
    fault : str
    tried : int
    wrong : int
        How often it gave a wrong result, a damaged record or a crash.
    detail : str
        What else there is to say.
    """

    fault: str
    tried: int
    wrong: int
    detail: str


def flips(folder: Path, times: int) -> Line:
    """Flip bits of one record, spread evenly over its file."""
    trials, chooser = DamageTrials(folder), random.Random(0)
    wrong = unseen = 0
    for number in range(times):
        at = number * len(trials.data) // times
        damaged = bytearray(trials.data)
        damaged[at] ^= 1 << chooser.randrange(8)
        outcome = trials.run(bytes(damaged))
        wrong, unseen = wrong + (not outcome.right), unseen + (outcome.hits == 3)
    trials.close()
    return Line("bit flipped", times, wrong, f"{unseen} of them in padding, the record still used")


def cuts(folder: Path, times: int) -> Line:
    """Cut one record to lengths of every class, and to random ones; remove it."""
    trials, chooser = DamageTrials(folder), random.Random(0)
    lengths = [*truncations(trials.data).values(), *(chooser.randrange(len(trials.data)) for _ in range(times))]
    outcomes = [trials.run(trials.data[:length]) for length in lengths] + [trials.run(None)]
    trials.close()
    wrong = sum(not outcome.right or outcome.hits != 2 for outcome in outcomes)
    return Line("record cut short or removed", len(outcomes), wrong, "every class of length, and random ones")


def kills(folder: Path, rounds: int) -> Line:
    """Kill a writing process, then read everything."""
    written = kill_while_writing(folder, rounds)
    store = DiskStore(folder, 20_000_000)
    records, wrong = len(list(store.entries())), len(list(wrong_records(store)))
    swept = store.sweep(grace=0)
    store.close()
    detail = f"{sum(written)} records written, {records} kept and read, {swept} unfinished files removed"
    return Line("kill -9 while writing", rounds, wrong, detail)


def crowds(folder: Path, processes: int, seconds: float) -> Line:
    """Several processes over one folder, then read everything."""
    seen = crowd(folder, processes, seconds)
    store = DiskStore(folder)
    wrong = len(list(wrong_records(store))) + seen.wrong + seen.crashed
    evictions = store.stats().evictions
    store.close()
    detail = ", ".join(f"{value} {name}" for name, value in dataclasses.asdict(seen).items())
    tried = seen.reads + seen.writes + seen.deletions
    return Line(f"{processes} processes for {seconds:g} s", tried, wrong, f"{detail}, {evictions} evictions")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; 0 if nothing went wrong."""
    parser = argparse.ArgumentParser(description="Damage, kill and crowd a KV store; count what goes wrong.")
    parser.add_argument("--flips", type=int, default=4000)
    parser.add_argument("--cuts", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120.0)
    parsed = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, only_from(logging.ERROR):
        base = Path(folder)
        lines = [
            flips(base / "flips", parsed.flips),
            cuts(base / "cuts", parsed.cuts),
            kills(base / "kills", parsed.kills),
            crowds(base / "crowd", parsed.processes, parsed.seconds),
        ]
    for line in lines:
        print(f"{line.fault:<30}{line.tried:>8} tried{line.wrong:>6} wrong   {line.detail}")
    print(json.dumps([dataclasses.asdict(line) for line in lines]))
    return int(any(line.wrong for line in lines))


if __name__ == "__main__":
    sys.exit(main())
