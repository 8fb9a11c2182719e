"""What a newcomer has of each starter model: bytes to fetch, seconds to the first answer, right answers.

``python -m docs.benchmarks.scripts.starters --model smollm2``

With an empty cache of its own, ``cacheblend-rag ask`` fetches a model, indexes the bundled articles and answers. Then
it is asked another question. After that a server with the same cache gets the page's suggested questions three times,
with its default settings: first with few passages stored, again with every passage stored, and by full prefill. An
answer is right if it has one of the answers in the file of questions. ``--all`` asks every bundled question. A model
that is no starter, such as a GGUF file, is measured in the same way; only fetching it is not.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cacheblend_rag.app.collection import QUESTIONS_PATH
from cacheblend_rag.config import DEFAULT_EMBEDDER, DEFAULT_MODEL
from cacheblend_rag.models.model_folders import folder_bytes
from cacheblend_rag.models.starters import STARTERS
from docs.benchmarks.scripts.common import script_parser
from docs.benchmarks.scripts.measuring import machine, table
from docs.benchmarks.scripts.served import ROOT
from docs.benchmarks.scripts.suggested import Asking, asked_server, judged

_FIRST, _SECOND = "When was Surtsey first seen?", "Which birds nest on Surtsey?"
WAYS = {"first": None, "again": None, "full": 1.0}
"""Each way, and the recompute ratio that is asked for; None is the default."""


def _timed_ask(model: str, question: str, cache: Path) -> dict[str, Any]:
    """Seconds of a command and what it printed."""
    command = [sys.executable, "-m", "cacheblend_rag.app.cli", "ask", question, "--model", model]
    started, before = time.perf_counter(), _processor_seconds()
    run = subprocess.run(
        command,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - started
    if run.returncode:
        raise SystemExit(run.stderr)
    lines = run.stdout.splitlines()
    answer = next(number for number, line in enumerate(lines) if line.startswith("Answer:"))
    end = lines.index("Sources:")
    return {
        "question": question,
        "seconds": round(seconds, 1),
        "processor_seconds": round(_processor_seconds() - before, 1),
        "answer": "\n".join(lines[answer:end]).removeprefix("Answer:").strip(),
        "first_token": next(line for line in lines if line.startswith("Time to first token")),
    }


def _processor_seconds() -> float:
    """Of all cores, by processes that have ended; unlike seconds, they hardly depend on what else runs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _ask_all(asking: Asking, questions: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every question in every way."""
    found: list[dict[str, Any]] = [{"question": one["question"]} for one in questions]
    for way, ratio in WAYS.items():
        for one, row in zip(questions, found, strict=True):
            started = time.perf_counter()
            got = asking.ask(one["question"], ratio)
            row[way] = judged(one, got) | {"seconds": round(time.perf_counter() - started, 2)}
            print(f"{way}: {one['question']} {row[way]['right']}", file=sys.stderr, flush=True)
    yield from found


def _measured(model: str, questions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        asks = [_timed_ask(model, question, cache) for question in (_FIRST, _SECOND)]
        disk = folder_bytes(cache / "cacheblend_rag" / "models" / model) if model in STARTERS else None
        same = ["--model", model, "--data-dir", str(cache / "cacheblend_rag")]
        with asked_server(same, XDG_CACHE_HOME=str(cache)) as asking:
            answers = list(_ask_all(asking, questions))
    name = Path(model).name
    fetched = STARTERS[model].wheel_bytes + STARTERS[DEFAULT_EMBEDDER].wheel_bytes if model in STARTERS else None
    return {"model": name, "fetched_bytes": fetched, "model_disk_bytes": disk, "ask": asks, "questions": answers}


def _row(one: Mapping[str, Any]) -> list[str]:
    fetched = "" if one["fetched_bytes"] is None else f"{one['fetched_bytes'] / 1e6:,.0f} MB"
    disk = "" if one["model_disk_bytes"] is None else f"{one['model_disk_bytes'] / 1e9:.1f} GB"
    right = [str(sum(asked[way]["right"] for asked in one["questions"])) for way in WAYS]
    seconds = [f"{statistics.median(asked[way]['seconds'] for asked in one['questions']):.1f} s" for way in WAYS]
    return [
        one["model"],
        fetched,
        disk,
        *(f"{ask['seconds']:.0f} s ({ask['processor_seconds']:.0f} s)" for ask in one["ask"]),
        *right,
        *seconds,
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = script_parser("starters", __doc__)
    parser.add_argument("--model", action="append", metavar="NAME", help="repeatable; the default model if left out")
    parser.add_argument("--all", action="store_true", help="every bundled question, not only those that are suggested")
    options = parser.parse_args(arguments)
    questions = [json.loads(line) for line in QUESTIONS_PATH.read_text(encoding="utf-8").splitlines()]
    questions = [one for one in questions if options.all or one["suggested"]]
    found = [_measured(model, questions) for model in options.model or [DEFAULT_MODEL]]
    heads = ["model", "fetched", "on disk", "first ask (of a processor)", "second ask"]
    heads += [f"right of {len(questions)}, {way}" for way in WAYS] + [f"median seconds, {way}" for way in WAYS]
    print(table(heads, [_row(one) for one in found]))
    print(json.dumps({"machine": machine("cpu"), "models": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
