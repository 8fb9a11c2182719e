"""Times of a replica for each part of a request, measured with a starter model and fitted by straight lines.

``python -m docs.benchmarks.scripts.service_times --out docs/benchmarks/service-times.json``

`docs.benchmarks.scripts.simulator` computes with these times. Prompts of 2, 4 and 6 chunks are fused with none to all
of their chunks stored in memory, on disk and in a Valkey server on loopback. Then answers of several at once are
decoded, and what was missing is stored. At last prompts are fused while other processes work as hard, and without them:
this says how many processors the machine is worth to processes that work side by side.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.store import DiskStore, KVStore, MemoryStore
from cacheblend_rag.store.valkey import ValkeyStore
from docs.benchmarks.scripts.common import TokenClock, greedy, reported, script_parser, write_json
from docs.benchmarks.scripts.measuring import machine
from docs.benchmarks.scripts.servers import valkey_server

__all__ = ["DEFAULTS_PATH", "ServiceTimes", "fitted", "main", "measure"]

DEFAULTS_PATH = Path(__file__).parent.parent / "service-times.json"
_COUNTS, _BATCHES, _NEW_TOKENS = (2, 4, 6), (1, 2, 4, 8), 24
# Another replica's work: products of a few rows with more weights than any cache holds.
_WORK = """
import sys, torch
torch.set_num_threads(int(sys.argv[1]))
weights = [torch.randn(576, 1536) for _ in range(100)]
print(flush=True)
while True:
    for weight in weights:
        torch.randn(48, 576) @ weight
"""


@dataclass(frozen=True)
class ServiceTimes:
    """Seconds of each part of a request.

    Parameters
    ----------
    fixed : float
        Of any prompt.
    computed, attended : float
        Of each token that is computed, and of each with each token of the prompt.
    memory, disk, remote : float
        Of each token that is reused from there; the remote store's own time and the network's are not in it.
    step, beside : float
        Of a step of decoding, and of each answer that takes part in it.
    stored : float
        Of each token that is stored after it was missing.
    bytes : float
        Bytes of KV of a token.
    spread : tuple of float
        How many times as long as its line says each measured prompt took.
    """

    fixed: float
    computed: float
    attended: float
    memory: float
    disk: float
    remote: float
    step: float
    beside: float
    stored: float
    bytes: float
    spread: tuple[float, ...] = (1.0,)

    @classmethod
    def read(cls, path: Path = DEFAULTS_PATH) -> ServiceTimes:
        """Those of a file that this script has written; ConfigError if it is not one."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8"))["seconds"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError("times", str(path), f"use a file that service_times has written ({error!r})") from error

    def prefill(self, computed: float, memory: float = 0.0, disk: float = 0.0, remote: float = 0.0) -> float:
        """Time to first token by numbers of tokens; ``computed`` has those of the question, too."""
        total = computed + memory + disk + remote
        reused = self.memory * memory + self.disk * disk + self.remote * remote
        return self.fixed + self.computed * computed + self.attended * computed * total + reused


def measure(
    model: str, dtype: str, condition: str, chunk_tokens: int, rounds: int, threads: int | None = None
) -> dict[str, Any]:
    """Measure and fit; a dictionary fit for JSON."""
    if threads:
        torch.set_num_threads(threads)
    config = BlendConfig(prompt_cache=0, write_back="off", max_concurrent=8, min_tokens=0, condition=condition)
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        server = held.enter_context(valkey_server())
        remote = ValkeyStore(f"valkey://127.0.0.1:{server.port}/0", timeout=60.0)
        stores: dict[str, KVStore] = {"memory": MemoryStore(), "disk": DiskStore(folder), "remote": remote}
        first = held.enter_context(
            BlendEngine.from_pretrained(model, dtype=dtype, store=stores["memory"], config=config)
        )
        engines = {"memory": first}
        for name in ("disk", "remote"):
            other = BlendEngine(
                first.adapter.model,
                first.tokenizer,
                config=first.config,
                store=stores[name],
                fingerprint=first.fingerprint,
            )
            engines[name] = held.enter_context(other)
        texts = _texts(first.tokenizer, 4 * max(_COUNTS), chunk_tokens)
        known, unknown = texts[: max(_COUNTS)], texts[max(_COUNTS) :]
        first.warm(known, progress=False)
        for key, _ in stores["memory"].infos(""):
            record: Any = stores["memory"].open(key)
            for name in ("disk", "remote"):
                stores[name].put(key, record.record)
        rows = list(_prefills(engines, known, unknown, rounds))
        steps = [{"at_once": size, "seconds": _step(first, known[:4], size)} for size in _BATCHES]
        storing = first.with_config(write_back="background")
        stored = statistics.median(_storing(storing, unknown[n : n + 4]) for n in range(0, 4 * min(rounds, 3), 4))
        cores = _cores(first, _prompt([*known[:2], *unknown[-2:]], 0), 2 * rounds)
        token_bytes = first.chunks.estimate_bytes(known) / sum(map(len, first.tokenizer(list(known)).input_ids))
        found = {"prefills": rows, "steps": steps, "stored": stored, "bytes": token_bytes}
        return {
            "options": {
                "model": model,
                "dtype": dtype,
                "condition": condition,
                "chunk_tokens": chunk_tokens,
                "rounds": rounds,
                "threads": torch.get_num_threads(),
            },
            "machine": machine("cpu"),
            "cores": cores,
            "seconds": asdict(fitted(found)),
            **found,
        }


def _texts(tokenizer: Any, count: int, tokens: int) -> list[str]:
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in sorted(ARTICLES_PATH.glob("*.md")))
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [tokenizer.decode(ids[number * tokens : (number + 1) * tokens]).strip() for number in range(count)]


def _prompt(chunks: Sequence[str], number: int) -> Prompt:
    return Prompt("Answer from these texts.", list(chunks), f"Question {number}: what do these texts tell us?")


def _prefills(
    engines: dict[str, BlendEngine], known: Sequence[str], unknown: Sequence[str], rounds: int
) -> Iterator[dict[str, Any]]:
    engines["memory"].fuse(_prompt([*known[:2], unknown[0]], 0))  # warms up
    for count in _COUNTS:
        for hits in range(count + 1):
            prompt = _prompt([*known[:hits], *unknown[: count - hits]], hits)
            for tier, engine in engines.items():
                if tier != "memory" and (hits == 0 or hits % 2):
                    continue
                reports = [engine.fuse(prompt).report for _ in range(rounds)]
                reused, seconds = reports[0].reused_tokens, [report.ttft for report in reports]
                yield {
                    "tier": tier,
                    "computed": reports[0].prompt_tokens - reused,
                    "reused": reused,
                    "seconds": statistics.median(seconds),
                    "each": seconds,
                }


def _step(engine: BlendEngine, chunks: Sequence[str], size: int) -> float:
    """Seconds from token to token while so many answers are under way."""
    clocks = [TokenClock() for _ in range(size)]
    config = greedy(engine.tokenizer, _NEW_TOKENS)
    with ThreadPoolExecutor(size) as pool:
        for number, clock in enumerate(clocks):
            pool.submit(engine.generate, _prompt(chunks, number), generation_config=config, logits_processor=[clock])
    begun = max(clock.times[0] for clock in clocks)
    gaps = [b - a for clock in clocks for a, b in zip(clock.times, clock.times[1:], strict=False) if a > begun]
    return statistics.median(gaps)


def _storing(engine: BlendEngine, chunks: Sequence[str]) -> float:
    """Seconds a token of storing what a prompt lacked."""
    before = engine.turns.write_back.seconds
    report = engine.fuse(_prompt(chunks, 0)).report
    engine.flush()
    return (engine.turns.write_back.seconds - before) / report.chunk_tokens


def _cores(engine: BlendEngine, prompt: Prompt, rounds: int) -> float:
    """How many processors the machine is worth to processes with this one's threads, as many as it has room for."""
    processes = max(1, (os.cpu_count() or 1) // torch.get_num_threads())
    with _others(processes - 1) as others:
        slower = []
        for _ in range(rounds):
            alone = engine.fuse(prompt).report.ttft
            for one in others:
                one.send_signal(signal.SIGCONT)
            slower.append(engine.fuse(prompt).report.ttft / alone)
            for one in others:
                one.send_signal(signal.SIGSTOP)
    return processes / max(1.0, statistics.median(slower))


@contextmanager
def _others(count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that work when they are told to go on."""
    command = [sys.executable, "-c", _WORK, str(torch.get_num_threads())]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        for one in others:
            if one.stdout is not None:
                one.stdout.readline()
            one.send_signal(signal.SIGSTOP)
        yield others
    finally:
        for one in others:
            one.kill()
            one.communicate()


def fitted(found: dict[str, Any]) -> ServiceTimes:
    """Least squares of relative errors, each coefficient at least 0."""
    rows = found["prefills"]
    columns = [
        [
            1.0,
            row["computed"],
            row["computed"] * (row["computed"] + row["reused"]),
            *(row["reused"] if row["tier"] == tier else 0.0 for tier in ("memory", "disk", "remote")),
        ]
        for row in rows
    ]
    prefill = _least_squares(columns, [row["seconds"] for row in rows])
    lines = (sum(a * b for a, b in zip(prefill, row, strict=True)) for row in columns)
    spread = tuple(one / line for row, line in zip(rows, lines, strict=True) for one in row["each"])
    step = _least_squares([[1.0, row["at_once"]] for row in found["steps"]], [row["seconds"] for row in found["steps"]])
    return ServiceTimes(*prefill, *step, found["stored"], found["bytes"], spread)


def _least_squares(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    left = np.array(columns) / np.array(seconds)[:, None]
    kept = list(range(left.shape[1]))
    while True:  # leave out the most negative one until none is
        solved = np.linalg.lstsq(left[:, kept], np.ones(len(left)), rcond=None)[0]
        if solved.min() >= 0:
            return [float(solved[kept.index(n)]) if n in kept else 0.0 for n in range(left.shape[1])]
        kept.pop(int(solved.argmin()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print what is computed with, and write all of it."""
    parser = script_parser("service_times", __doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--condition", default="auto", help="what chunks are computed behind")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, metavar="N", help="of each replica (default: all)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the file to write")
    parsed = parser.parse_args(arguments)

    def work() -> None:
        began = time.perf_counter()
        result = measure(
            parsed.model, parsed.dtype, parsed.condition, parsed.chunk_tokens, parsed.rounds, parsed.threads
        )
        print(f"measured in {time.perf_counter() - began:.0f} s")
        spread = result["seconds"]["spread"]
        for name, value in (result["seconds"] | {"spread": statistics.stdev(spread)}).items():
            print(f"{name:<9} {value:.3g}")
        print(f"cores     {result['cores']:.2f}")
        if parsed.out:
            write_json(parsed.out, result)

    return reported(parser, work)


if __name__ == "__main__":
    sys.exit(main())
