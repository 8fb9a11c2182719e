"""First token, whole answer and memory of the starter model, beside plain transformers and llama.cpp.

From the repository's root, with llama-cpp-python in an environment of its own::

    python -m docs.benchmarks.scripts.starter --llama-python ../llama/bin/python --out docs/benchmarks/starter.json

Each way of answering is a process of its own that holds its model. All answer in turn, round after round. The prompt
is a chat about six chunks of 512 tokens of the bundled articles, their KV stored on disk. Each answer has 64 tokens.
"""

from __future__ import annotations

import argparse
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

CHUNKS, CHUNK_TOKENS, NEW_TOKENS, THREADS = 6, 512, 64, 2
QUESTION = "When was Surtsey first seen?"
WAYS = ("transformers", "engine, full recompute", "engine, full reuse", "engine, default", "llama.cpp, 4 bits")
_TITLES = {
    "transformers": "plain transformers",
    "engine, full recompute": "this package, full recompute",
    "engine, full reuse": "this package, full KV reuse",
    "engine, default": "this package, blended (default)",
    "llama.cpp, 4 bits": "llama.cpp, Q4_1, full prefill",
}


@dataclass(frozen=True)
class Timed:
    """Seconds of one answer."""

    first: float
    whole: float


# In a process of its own ----------------------------------------------------------------------


def _prompt(tokenizer: Any) -> Any:
    """The prompt: articles cut into chunks of so many tokens, the one with the answer in the middle."""
    from cacheblend_rag import Prompt
    from cacheblend_rag.app.collection import ARTICLES_PATH
    from cacheblend_rag.prompt.chat import question_turns, render_turns

    files = sorted(ARTICLES_PATH.glob("*.md"), key=lambda file: (file.stem != "surtsey", file.stem))
    texts = [file.read_text(encoding="utf-8") for file in files]
    ids = tokenizer.encode("\n\n".join(texts), add_special_tokens=False)
    chunks = [tokenizer.decode(ids[n * CHUNK_TOKENS : (n + 1) * CHUNK_TOKENS]).strip() for n in range(CHUNKS)]
    chunks.insert(CHUNKS // 2, chunks.pop(0))
    before, after = render_turns(tokenizer, question_turns(tokenizer, "<chunks>", QUESTION)).split("<chunks>")
    return Prompt(before, chunks, after, ["\n\n"] * (CHUNKS - 1))


def _transformers(dtype: str, store: str) -> Callable[[], Timed]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from cacheblend_rag.models.starters import starter_folder

    torch.set_num_threads(THREADS)
    folder = starter_folder("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = torch.tensor([tokenizer.encode(_prompt(tokenizer).written("").text, add_special_tokens=False)])
    times: list[float] = []

    class Clock:
        def put(self, value: Any) -> None:
            times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def answer() -> Timed:
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
        return Timed(times[1] - began, times[-1] - began)  # the first time is that of the prompt

    return answer


def _engine(dtype: str, store: str, **options: Any) -> Callable[[], Timed]:
    import torch
    from transformers import GenerationConfig

    from cacheblend_rag import BlendConfig, BlendEngine

    torch.set_num_threads(THREADS)
    engine = BlendEngine.from_pretrained("smollm2", dtype=dtype, config=BlendConfig(**options), store=store)
    prompt = _prompt(engine.tokenizer)
    engine.warm(prompt.chunks, progress=False)
    exact = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)

    def answer() -> Timed:
        began = time.perf_counter()
        made = engine.generate(prompt, generation_config=exact)
        whole = time.perf_counter() - began
        assert made.report.generated_tokens == NEW_TOKENS
        engine.flush()
        return Timed(made.report.ttft, whole)

    return answer


def _llama(dtype: str, store: str) -> Callable[[], Timed]:
    from llama_cpp import Llama

    given = json.loads(Path(store, "llama.json").read_text(encoding="utf-8"))
    model = Llama(given["gguf"], n_ctx=8192, n_threads=THREADS, n_threads_batch=THREADS, flash_attn=True, verbose=False)

    def answer() -> Timed:
        model.reset()  # else it would go on from the same prompt's KV
        began, times = time.perf_counter(), []
        for _ in model.generate(given["ids"], temp=0.0, reset=True):
            times.append(time.perf_counter())
            if len(times) == NEW_TOKENS:
                break
        return Timed(times[0] - began, times[-1] - began)

    return answer


def _work(way: str, dtype: str, store: str) -> None:
    """Answer whenever a line comes in, and say how long it took."""
    makers: dict[str, Callable[[], Callable[[], Timed]]] = {
        "transformers": lambda: _transformers(dtype, store),
        "engine, full recompute": lambda: _engine(dtype, store, selection="all"),
        "engine, full reuse": lambda: _engine(dtype, store, selection="none"),
        "engine, default": lambda: _engine(dtype, store),
        "llama.cpp, 4 bits": lambda: _llama(dtype, store),
    }
    answer = makers[way]()
    answer()  # warms up
    print("ready", flush=True)
    for _ in sys.stdin:
        took = answer()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"first": took.first, "whole": took.whole, "peak": peak}), flush=True)


# The whole ------------------------------------------------------------------------------------


class _Worker:
    def __init__(self, python: str, way: str, dtype: str, store: str) -> None:
        command = [python, "-m", "docs.benchmarks.scripts.starter", "--way", way, "--dtype", dtype, "--store", store]
        here = os.environ | {"PYTHONPATH": os.getcwd()}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=here)
        if self._read() != "ready":
            raise SystemExit(f"{way} did not start")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def answer(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return dict(json.loads(self._read()))

    def end(self) -> None:
        self._process.communicate()


def _prepare(store: str, gguf: str) -> int:
    """Write what llama.cpp needs: the prompt's ids and the file."""
    from transformers import AutoTokenizer

    from cacheblend_rag.models.starters import starter_folder

    tokenizer = AutoTokenizer.from_pretrained(starter_folder("smollm2"))
    ids = tokenizer.encode(_prompt(tokenizer).written("").text, add_special_tokens=False)
    Path(store, "llama.json").write_text(json.dumps({"ids": ids, "gguf": gguf}), encoding="utf-8")
    return len(ids)


def measure(llama_python: str | None, gguf: str, dtypes: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Time all ways in turn; the result so far after each element type."""
    machine = {"processor": _processor(), "threads": THREADS, "python": platform.python_version()}
    rows = []
    with tempfile.TemporaryDirectory() as store:
        tokens = _prepare(store, gguf)
        for dtype in dtypes:
            ways = [way for way in WAYS if llama_python or not way.startswith("llama")]
            pythons = {way: llama_python if way.startswith("llama") else sys.executable for way in ways}
            workers = {way: _Worker(str(pythons[way]), way, dtype, store) for way in ways}
            found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
            for _ in range(rounds):
                for way, worker in workers.items():
                    found[way].append(worker.answer())
            for worker in workers.values():
                worker.end()
            for way, times in found.items():
                first, whole = (statistics.median(one[name] for one in times) for name in ("first", "whole"))
                rows.append(
                    {
                        "way": way,
                        "dtype": "Q4_1" if way.startswith("llama") else dtype,
                        "beside": dtype,
                        "first_token_s": first,
                        "whole_answer_s": whole,
                        "tokens_a_second": (NEW_TOKENS - 1) / (whole - first),
                        "peak_bytes": max(one["peak"] for one in times),
                        "rounds": [[one["first"], one["whole"]] for one in times],
                    }
                )
            yield {"date": date.today().isoformat(), "prompt_tokens": tokens, "machine": machine, "rows": rows}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def markdown(result: dict[str, Any]) -> str:
    """The result as a table, one for each element type."""
    parts = []
    for dtype in dict.fromkeys(row["beside"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["beside"] == dtype]
        base = rows[0]["first_token_s"]
        parts.append(f"{dtype}, {result['prompt_tokens']} prompt tokens, {NEW_TOKENS} new tokens\n")
        parts.append(
            "| | first token | sooner | whole answer | tokens a second | peak memory |\n|---|---|---|---|---|---|"
        )
        parts += [
            f"| {_TITLES[row['way']]} | {row['first_token_s']:.2f} s | {base / row['first_token_s']:.1f}× "
            f"| {row['whole_answer_s']:.2f} s | {row['tokens_a_second']:.0f} | {row['peak_bytes'] / 1e9:.2f} GB |"
            for row in rows
        ]
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
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32", help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        _work(given.way, given.dtype, given.store)
        return
    for result in measure(given.llama_python, given.gguf, given.dtypes, given.rounds):
        print(markdown(result), flush=True)
        if given.out:
            given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
