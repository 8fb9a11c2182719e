"""Speeds of two checkouts of the package, paired: import, first token, decoding, storing, and the start of `serve`.

``python -m docs.benchmarks.scripts.house_speeds --before ../before --now . --out docs/benchmarks/house-speeds-2.json``

Every measurement is a process of its own, which uses only what users call. Both checkouts take turns, and every other
round begins with the other one. The table has the medians, and the median of the ratios of each round.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docs.benchmarks.scripts.common import reported, script_parser, write_json
from docs.benchmarks.scripts.house import commit_of
from docs.benchmarks.scripts.measuring import machine, table

# Run in a process of the checkout, with the threads as its argument; prints its seconds as JSON.
_MEASURED = """
import json, sys, tempfile, time
began = time.perf_counter()
from cacheblend_rag.langchain import ChatCacheBlend
found = {"import": time.perf_counter() - began}
import torch
torch.set_num_threads(int(sys.argv[1]))
from cacheblend_rag import BlendConfig
sentence = "The harbour of {0} was dredged in {1} and its mill number {2} burned down in {3}. "
chunks = ["".join(sentence.format("abcdefgh"[c], 1900 + i, c * 20 + i, 1950 + i) for i in range(12)) for c in range(6)]
with tempfile.TemporaryDirectory() as folder:
    config = BlendConfig(prompt_cache=0, min_tokens=0, write_back="inline")
    model = ChatCacheBlend.from_model_id("smollm2", config=config, store=folder, max_new_tokens=48, temperature=0)
    began = time.perf_counter()
    model.warm(chunks, progress=False)
    found["store 6 chunks"] = time.perf_counter() - began
    asked = "Question: When did mill number 45 burn down?\\nAnswer:"
    text = "\\n\\n".join(["Use the context.", *chunks, asked])
    model.invoke(text)
    firsts, tokens = [], []
    for _ in range(3):
        began = time.perf_counter()
        model.invoke(text)
        took, report = time.perf_counter() - began, model.last_report
        firsts.append(report.ttft)
        tokens.append((took - report.ttft) / max(1, report.generated_tokens - 1))
    found["first token, blended"], found["a further token"] = min(firsts), min(tokens)
    engine = model.engine.with_config(selection="all")
    engine.generate("Read this. " + " ".join(chunks), max_new_tokens=1)
    began = time.perf_counter()
    engine.generate("Read this. " + " ".join(chunks), max_new_tokens=1)
    found["first token, full prefill"] = time.perf_counter() - began
    model.engine.close()
print(json.dumps(found))
"""


def measured(root: Path, threads: int) -> dict[str, float]:
    """Seconds of each thing in a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(root.resolve()), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-c", _MEASURED, str(threads)]
    done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "start of serve": _start_of_serve(environment)}


def _start_of_serve(environment: dict[str, str]) -> float:
    """Seconds until a server says where it is."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "cacheblend_rag.app.cli", "serve", "--port", "0", "--data-dir", folder]
        began = time.perf_counter()
        with subprocess.Popen(
            command, env=environment, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as server:
            assert server.stdout is not None
            try:
                said = next((line for line in server.stdout if re.search(r"http://\S+:\d+", line)), None)
                took = time.perf_counter() - began
            finally:
                server.terminate()
    if said is None:
        raise RuntimeError("the server ended before it said where it is")
    return took


def run(parsed: argparse.Namespace) -> None:
    """Measure both in turn, and write what was found."""
    roots = {"before": parsed.before, "now": parsed.now}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in roots}
    for number in range(parsed.rounds):
        for name in list(roots)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(measured(roots[name], parsed.threads))
            print(name, found[name][-1], file=sys.stderr, flush=True)
    rows, summary = [], dict[str, Any]()
    for one in found["now"][0]:
        before, now = ([round_[one] for round_ in found[name]] for name in ("before", "now"))
        ratios = [new / old for old, new in zip(before, now, strict=True)]
        medians = statistics.median(before), statistics.median(now)
        summary[one] = {"before": medians[0], "now": medians[1], "ratio": statistics.median(ratios)}
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append((one, f"{medians[0]:.3f}", f"{medians[1]:.3f}", spread))
    print(table(("seconds", "before", "now", "now / before, of the rounds"), rows))
    commits = {name: commit_of(root) for name, root in roots.items()}
    options = {"rounds": parsed.rounds, "threads": parsed.threads, "model": "smollm2"}
    result = {"commits": commits, "options": options, "machine": machine(), "summary": summary, "rounds": found}
    if parsed.out:
        write_json(parsed.out, result)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = script_parser("house_speeds", __doc__)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the commit to compare with")
    parser.add_argument("--now", type=Path, default=Path())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out")
    parsed = parser.parse_args(arguments)
    return reported(parser, lambda: run(parsed))


if __name__ == "__main__":
    sys.exit(main())
