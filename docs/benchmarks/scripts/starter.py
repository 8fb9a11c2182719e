"""First token, whole answer and memory of the starter model, beside plain transformers and llama.cpp.

From the repository's root, with llama-cpp-python in an environment of its own::

    python -m docs.benchmarks.scripts.starter --llama-python ../llama/bin/python --out docs/benchmarks/starter.json

Each way of answering is a process of its own that holds its model. All answer in turn, round after round. The prompt
is a chat about chunks of 512 tokens of the bundled articles, their KV stored on disk. Each answer has 256 tokens. It is
noted when the first, the 16th and the 64th were there. An answer that may not end repeats itself, so no tokens are
tried from what was written before (``prompt_lookup``): there would be more of them than in real answers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

CHUNK_TOKENS, NEW_TOKENS, THREADS = 512, 256, 2
NOTED = (1, 16, 64, 256)  # tokens of an answer
QUESTION = "When was Surtsey first seen?"
WAYS = {
    "transformers": "plain transformers",
    "engine, full recompute": "this package, full recompute",
    "engine, full reuse": "this package, full KV reuse",
    "engine, default": "this package, blended (default)",
    "llama.cpp, 4 bits": "llama.cpp, Q4_1, full prefill",
    "llama.cpp, 8 bits": "llama.cpp, Q8_0, full prefill",
}
"""Ways of answering, and how tables call them."""
_Answer = Callable[[], list[float]]
"""Answers, and says after how many seconds each token of `NOTED` was there."""


@dataclass(frozen=True)
class _Given:
    """What a process that answers is told: the element type, how many chunks, and the folder of what is stored."""

    dtype: str
    chunks: int
    store: str


# In a process of its own ----------------------------------------------------------------------


def _prompt(tokenizer: Any, count: int) -> Any:
    """The prompt: articles cut into so many chunks of so many tokens, the one with the answer in the middle."""
    from cacheblend_rag import Prompt
    from cacheblend_rag.app.collection import ARTICLES_PATH
    from cacheblend_rag.prompt.chat import question_turns, render_turns

    files = sorted(ARTICLES_PATH.glob("*.md"), key=lambda file: (file.stem != "surtsey", file.stem))
    texts = [file.read_text(encoding="utf-8") for file in files]
    ids = tokenizer.encode("\n\n".join(texts), add_special_tokens=False)
    chunks = [tokenizer.decode(ids[n * CHUNK_TOKENS : (n + 1) * CHUNK_TOKENS]).strip() for n in range(count)]
    chunks.insert(count // 2, chunks.pop(0))
    before, after = render_turns(tokenizer, question_turns(tokenizer, "<chunks>", QUESTION)).split("<chunks>")
    return Prompt(before, chunks, after, ["\n\n"] * (count - 1))


def _noted(began: float, times: Sequence[float]) -> list[float]:
    return [times[count - 1] - began for count in NOTED]


def _transformers(given: _Given) -> _Answer:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from cacheblend_rag.models.starters import starter_folder

    torch.set_num_threads(THREADS)
    folder = starter_folder("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=given.dtype).eval()
    text = _prompt(tokenizer, given.chunks).written("").text
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    times: list[float] = []

    class Clock:
        def put(self, value: Any) -> None:
            times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def answer() -> list[float]:
        times.clear()
        began = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            streamer=Clock(),
        )
        return _noted(began, times[1:])  # the first time is that of the prompt

    return answer


def _engine(given: _Given, **options: Any) -> _Answer:
    import torch

    from cacheblend_rag import BlendConfig, BlendEngine
    from docs.benchmarks.scripts.common import TokenClock, greedy

    torch.set_num_threads(THREADS)
    config = BlendConfig(prompt_lookup=0, **options)
    engine = BlendEngine.from_pretrained("smollm2", dtype=given.dtype, config=config, store=given.store)
    prompt = _prompt(engine.tokenizer, given.chunks)
    engine.warm(prompt.chunks, progress=False)

    def answer() -> list[float]:
        clock, began = TokenClock(), time.perf_counter()
        engine.generate(prompt, generation_config=greedy(engine.tokenizer, NEW_TOKENS), logits_processor=[clock])
        engine.flush()
        return _noted(began, clock.times)

    return answer


def _llama(given: _Given, bits: int) -> _Answer:
    import llama_cpp

    told = json.loads(Path(given.store, "llama.json").read_text(encoding="utf-8"))
    file = Path(told["gguf"])
    if bits == 8:
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, True
        source, file = file, Path(given.store, "q8_0.gguf")
        llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), params)
    model = llama_cpp.Llama(
        str(file), n_ctx=8192, n_threads=THREADS, n_threads_batch=THREADS, flash_attn=True, verbose=False
    )

    def answer() -> list[float]:
        model.reset()  # else it would go on from the same prompt's KV
        began, times = time.perf_counter(), []
        for _ in model.generate(told["ids"], temp=0.0, reset=True):
            times.append(time.perf_counter())
            if len(times) == NEW_TOKENS:
                break
        return _noted(began, times)

    return answer


def _work(way: str, given: _Given) -> None:
    """Answer whenever a line comes in, and say how long it took."""
    makers: dict[str, Callable[[], _Answer]] = {
        "transformers": lambda: _transformers(given),
        "engine, full recompute": lambda: _engine(given, selection="all"),
        "engine, full reuse": lambda: _engine(given, selection="none"),
        "engine, default": lambda: _engine(given),
        "llama.cpp, 4 bits": lambda: _llama(given, 4),
        "llama.cpp, 8 bits": lambda: _llama(given, 8),
    }
    answer = makers[way]()
    answer()  # warms up
    print("ready", flush=True)
    for _ in sys.stdin:
        seconds = answer()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": seconds, "peak": peak}), flush=True)


# The whole ------------------------------------------------------------------------------------


class _Worker:
    def __init__(self, python: str, way: str, given: _Given) -> None:
        command = [python, "-m", "docs.benchmarks.scripts.starter", "--way", way]
        command += ["--dtype", given.dtype, "--chunks", str(given.chunks), "--store", given.store]
        here = os.environ | {"PYTHONPATH": os.getcwd()}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=here)
        if self._read() != "ready":
            raise SystemExit(f"{way} did not start")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return dict(json.loads(self._read()))

    def end(self) -> None:
        self._process.communicate()


def _prepare(store: str, gguf: str, chunks: int) -> int:
    """Write what llama.cpp needs: the prompt's ids and the file."""
    from transformers import AutoTokenizer

    from cacheblend_rag.models.starters import starter_folder

    tokenizer = AutoTokenizer.from_pretrained(starter_folder("smollm2"))
    ids = tokenizer.encode(_prompt(tokenizer, chunks).written("").text, add_special_tokens=False)
    Path(store, "llama.json").write_text(json.dumps({"ids": ids, "gguf": gguf}), encoding="utf-8")
    return len(ids)


def measure(
    llama_python: str | None, gguf: str, dtypes: Sequence[str], counts: Sequence[int], rounds: int, ways: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Time ways in turn; the result so far after each element type and number of chunks."""
    rows: list[dict[str, Any]] = []
    machine = {"processor": _processor(), "threads": THREADS, "python": platform.python_version()}
    for dtype, count in itertools.product(dtypes, counts):
        with tempfile.TemporaryDirectory() as store:
            tokens = _prepare(store, gguf, count)
            pythons = {way: str(llama_python if way.startswith("llama") else sys.executable) for way in ways}
            workers = {way: _Worker(python, way, _Given(dtype, count, store)) for way, python in pythons.items()}
            found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
            for _ in range(rounds):
                for way, worker in workers.items():
                    found[way].append(worker.answer())
            for worker in workers.values():
                worker.end()
        rows += [
            {
                "way": way,
                "beside": dtype,
                "prompt_tokens": tokens,
                "seconds": [statistics.median(at) for at in zip(*(one["seconds"] for one in times), strict=True)],
                "peak_bytes": max(one["peak"] for one in times),
                "rounds": [one["seconds"] for one in times],
            }
            for way, times in found.items()
        ]
        yield {"date": date.today().isoformat(), "noted": NOTED, "machine": machine, "rows": rows}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def markdown(result: dict[str, Any]) -> str:
    """The result as tables, one for each element type and prompt."""
    parts = []
    for dtype, tokens in dict.fromkeys((row["beside"], row["prompt_tokens"]) for row in result["rows"]):
        rows = [row for row in result["rows"] if (row["beside"], row["prompt_tokens"]) == (dtype, tokens)]
        head = " | ".join(f"{count} tokens" for count in NOTED[1:])
        parts += [
            f"{dtype}, {tokens:,} prompt tokens\n",
            f"| | first token | sooner | {head} | a token | peak memory |",
        ]
        parts.append("|---" * (5 + len(NOTED[1:])) + "|")
        for row in rows:
            seconds = row["seconds"]
            later = " | ".join(f"{at:.2f} s" for at in seconds[1:])
            a_token = 1e3 * (seconds[-1] - seconds[0]) / (NOTED[-1] - 1)
            parts.append(
                f"| {WAYS[row['way']]} | {seconds[0]:.2f} s | {rows[0]['seconds'][0] / seconds[0]:.1f}× | {later} "
                f"| {a_token:.0f} ms | {row['peak_bytes'] / 1e9:.2f} GB |"
            )
        parts.append("")
    return "\n".join(parts)


def main() -> None:
    """Read the arguments and measure, or be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-python", help="a Python with llama-cpp-python; left out, llama.cpp is too")
    parser.add_argument("--gguf", default="", help="the starter's GGUF file, for llama.cpp")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--counts", nargs="+", type=int, default=[6, 12], help="chunks of the prompts")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="by default all that can be")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32", help=argparse.SUPPRESS)
    parser.add_argument("--chunks", type=int, default=6, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        _work(given.way, _Given(given.dtype, given.chunks, given.store))
        return
    ways = given.ways or [way for way in WAYS if given.llama_python or not way.startswith("llama")]
    for result in measure(given.llama_python, given.gguf, given.dtypes, given.counts, given.rounds, ways):
        print(markdown(result), flush=True)
        if given.out:
            given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
