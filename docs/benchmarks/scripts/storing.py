"""What it costs to store the chunks of a prompt that missed, beside its cold prefill, and what the store then brings.

``python -m docs.benchmarks.scripts.storing --checkout before=../earlier after=. --out docs/benchmarks/storing.json``

Each checkout is measured in a process of its own, in turn, round after round, on the same prompts. A round is a prompt
of chunks of one size that come from the bundled articles. At first nothing is stored; then its chunks are stored in the
background, into a folder; then they hit. Seconds are of processor time. The divergence is that of the hits from full
prefill, over its greedy answer.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch

from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.calibration.comparison import shared_cache
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.decode import end_ids_of
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.fusor.teacher_forcing import answer_log_probs, greedy_answer, kl_divergence
from cacheblend_rag.prompt import Prompt
from docs.benchmarks.scripts.common import script_parser
from docs.benchmarks.scripts.measuring import machine, table

__all__ = ["main"]

# Tokens of a chunk, how many a prompt has, and rounds: small ones have more, since what they differ by is small.
_SIZES = ((25, 12, 8), (50, 12, 6), (100, 6, 3), (250, 6, 2), (500, 6, 1))
_ANSWER_TOKENS = 24


def prompt_of(tokenizer: Any, tokens: int, count: int, number: int) -> Prompt:
    """A prompt whose chunks are stretches of articles, about half of what those chosen say."""
    chooser = random.Random(f"{tokens}/{number}")
    paths = sorted(ARTICLES_PATH.glob("*.md"))
    chooser.shuffle(paths)
    ids = [
        one for path in paths for one in tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False)
    ]
    chunks = [tokenizer.decode(ids[at * tokens : (at + 1) * tokens]).strip() for at in range(2 * count)]
    about = paths[0].stem.replace("-", " ")
    return Prompt("", chooser.sample(chunks, count), f"\n\nQuestion: What is said of {about}?\nAnswer:")


def measure(engine: BlendEngine, prompt: Prompt) -> dict[str, float]:
    """Processor seconds of a cold prefill, of storing and of the prompt with hits, and the divergence of the latter."""
    times = [time.process_time()]
    engine.fuse(prompt)
    times.append(time.process_time())
    engine.flush()
    times.append(time.process_time())
    fused = engine.fuse(prompt)
    times.append(time.process_time())
    if fused.report.hits != len(prompt.chunks):
        raise RuntimeError(f"{fused.report.hits} hits of {len(prompt.chunks)}")
    full = engine.adapter.prefill(engine.tokenize(prompt).input_ids)
    end_ids = end_ids_of(engine.model.generation_config, engine.tokenizer)
    answer, rows = greedy_answer(engine.adapter, full.cache, full.logits, _ANSWER_TOKENS, end_ids)
    held = answer_log_probs(engine.adapter, shared_cache(fused.cache), fused.logits.flatten(), answer)
    cold, storing, hit = (end - begin for begin, end in pairwise(times))
    return {"cold": cold, "storing": storing, "hit": hit, "divergence": float(kl_divergence(rows, held).mean())}


def work() -> None:
    """Measure what comes on standard input, a line each."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with tempfile.TemporaryDirectory() as folder:
        config = BlendConfig(prompt_cache=0, min_tokens=0)
        with BlendEngine.from_pretrained("smollm2", config=config, store=folder) as engine:
            for line in sys.stdin:
                print(json.dumps(measure(engine, prompt_of(engine.tokenizer, *json.loads(line)))), flush=True)


@contextmanager
def worker(checkout: str, threads: int) -> Iterator[subprocess.Popen[str]]:
    """A process that measures the code of a checkout."""
    environment = os.environ | {"PYTHONPATH": str(Path(checkout).resolve()), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--worker"]
    with subprocess.Popen(
        command, cwd=checkout, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process  # leaving closes its standard input, which ends it


def asked(process: subprocess.Popen[str], *question: int) -> dict[str, float]:
    """What a worker measures."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the process has no pipes")
    process.stdin.write(json.dumps(question) + "\n")
    process.stdin.flush()
    found: dict[str, float] = json.loads(process.stdout.readline())
    return found


def compared(checkouts: Mapping[str, str], threads: int) -> dict[str, Any]:
    """Measure all; a dictionary fit for JSON."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        workers = {name: stack.enter_context(worker(path, threads)) for name, path in checkouts.items()}
        for process in workers.values():
            asked(process, *_SIZES[0][:2], -1)  # warms up
        for tokens, count, rounds in _SIZES:
            of_each: dict[str, list[dict[str, float]]] = {name: [] for name in workers}
            for number in range(rounds):
                for name, process in workers.items():
                    of_each[name].append(asked(process, tokens, count, number))
            found[str(tokens)] = {
                "chunks": count,
                "rounds": rounds,
                **{name: summary(rows, count) for name, rows in of_each.items()},
            }
    return {"options": {"model": "smollm2", "threads": threads}, "machine": machine(), "sizes": found}


def summary(rows: Sequence[Mapping[str, float]], count: int) -> dict[str, Any]:
    """Medians of seconds for each chunk, the mean divergence with its standard error, and all rows."""
    cold, storing, hit = (median(row[name] for row in rows) for name in ("cold", "storing", "hit"))
    far = [row["divergence"] for row in rows]
    return {
        "cold_s_a_chunk": cold / count,
        "storing_s_a_chunk": storing / count,
        "storing_to_cold": storing / cold,
        "paid_after_uses": storing / (cold - hit) if cold > hit else None,
        "divergence": fmean(far),
        "divergence_error": stdev(far) / len(far) ** 0.5 if len(far) > 1 else None,
        "rows": [{name: round(value, 5) for name, value in row.items()} for row in rows],
    }


def shown(result: Mapping[str, Any], names: Sequence[str]) -> str:
    """The table."""
    lines = []
    for tokens, found in result["sizes"].items():
        for name in names:
            one = found[name]
            paid = one["paid_after_uses"]
            lines.append(
                [
                    f"{found['chunks']} of {tokens} tokens",
                    name,
                    f"{1e3 * one['cold_s_a_chunk']:.0f} ms",
                    f"{1e3 * one['storing_s_a_chunk']:.0f} ms",
                    f"{one['storing_to_cold']:.1f}",
                    "never" if paid is None else f"{paid:.1f} uses",
                    f"{one['divergence']:.3f}",
                ]
            )
    head = ("chunks", "", "cold prefill a chunk", "storing a chunk", "storing to cold", "paid after", "divergence")
    return table(head, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table; the JSON goes into a file."""
    parser = script_parser("storing", __doc__)
    parser.add_argument("--checkout", nargs="+", default=["here=."], metavar="NAME=FOLDER")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", metavar="FILE", help="JSON")
    parser.add_argument("--worker", action="store_true", help="measure this checkout for another process")
    options = parser.parse_args(arguments)
    if options.worker:
        work()
        return 0
    checkouts = dict(one.split("=", 1) for one in options.checkout)
    result = compared(checkouts, options.threads)
    print(shown(result, [*checkouts]))
    if options.out:
        Path(options.out).write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
