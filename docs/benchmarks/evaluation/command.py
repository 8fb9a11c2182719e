"""Every method on questions with known answers, each paired with full prefill of the same prompt.

``python -m docs.benchmarks.evaluation --data questions.jsonl --methods full,reuse,hkvd --ratios 0.15 --out runs/first``
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.app.cli.arguments import add_arguments, data_folder
from cacheblend_rag.calibration.datasets import Cases, load_cases
from cacheblend_rag.calibration.passages import Ranker, WordRanker
from cacheblend_rag.config import DEFAULT_MODEL, BlendConfig, parse_bytes
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.loading import BlendSettings, MachineProfile
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.store.learned import kept_context
from docs.benchmarks.evaluation.passages import VectorRanker
from docs.benchmarks.evaluation.plots import draw_run
from docs.benchmarks.evaluation.runner import EvalOptions, Evaluation, Part
from docs.benchmarks.evaluation.summary import write_summary
from docs.benchmarks.scripts.common import reported
from docs.benchmarks.scripts.plots import import_pyplot

_MEMORY = "1GB"  # of KV in memory: a question's chunks are wanted while it is asked, by all methods


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the arguments say; the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m docs.benchmarks.evaluation", description=__doc__)
    add_eval_arguments(parser)
    _add_run_arguments(parser)
    parsed = parser.parse_args(arguments)
    return reported(parser, lambda: _run_eval(parsed))


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments for the output of a run."""
    parser.add_argument(
        "--against", type=_names, default=(), metavar="LABEL,…", help='pair all with more methods, such as "hkvd 0.15"'
    )
    parser.add_argument("--no-plots", action="store_true", help="leave the drawing out")
    parser.add_argument(
        "--part",
        metavar="K/N",
        help="measure every N-th question, from the K-th on; sum up without it when all have run",
    )


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Questions, methods and how answers are made."""
    parser.add_argument("--data", required=True, metavar="FILE", help="questions with passages")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="keeps results; a killed run goes on there")
    add_arguments(parser, "model")
    parser.add_argument("--methods", type=_names, default=("full", "prefix", "reuse", "hkvd"), metavar="A,B,…")
    parser.add_argument("--ratios", type=numbers, metavar="R,R,…", help="recompute ratios (default 0.05,0.1,0.15,0.3)")
    parser.add_argument("--chunks", type=_whole, default=(6,), metavar="N,N,…", help="chunks in a prompt (default 6)")
    parser.add_argument("--chunk-tokens", type=_whole, default=(0,), metavar="N,N,…", help="0: passages as they are")
    parser.add_argument("--order", choices=("retrieved", "random"), default="retrieved")
    _add_questions(parser)
    _add_answers(parser)


def _add_questions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", default="auto", help="of the file; recognised by default")
    parser.add_argument("--limit", type=int, metavar="N", help="only so many questions")
    parser.add_argument("--retrieve", default="words", metavar="HOW", help='"words", "file", or an embedder')
    parser.add_argument("--support", choices=("always", "retrieved"), default="always", help="passages an answer needs")
    parser.add_argument("--seed", type=int, default=0)


def _add_answers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", choices=("paper", "stuff"), default="paper", help="the paper's, or LangChain's")
    parser.add_argument("--chat", action="store_true", help="put prompts into the model's chat template")
    parser.add_argument("--max-new-tokens", type=int, default=0, metavar="N", help="of an answer; 0: by task")
    parser.add_argument("--no-answers", action="store_true", help="generate nothing; measure by the gold answers alone")
    add_arguments(
        parser,
        "device",
        "dtype",
        "size-limit",
        data_dir="where calibrated settings and a learned context are (default: user's cache)",
    )
    parser.add_argument("--kv", metavar="FOLDER", help='KV store, or "memory" (default: in the folder of results)')
    parser.add_argument(
        "--measure",
        choices=("f1", "em", "rouge_l", "forced_exact"),
        help="what tables and plots are led by (default: by task)",
    )


def _part(text: str | None) -> Part | None:
    if text is None:
        return None
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal()):
        raise ConfigError("part", text, "use K/N, such as 1/4 for the first of four parts")
    return Part(int(number), int(of))


def _split(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        return tuple(kind(part.strip()) for part in text.split(",") if part.strip())

    return parse


_names, numbers, _whole = _split(str), _split(float), _split(int)


def _run_eval(parsed: argparse.Namespace) -> None:
    """Measure what the arguments of `add_eval_arguments` and `_add_run_arguments` say, sum it up and draw it."""
    part = _part(parsed.part)
    if not parsed.no_plots:
        import_pyplot()  # better missed now than after hours
    out, measure = Path(parsed.out), parsed.measure
    with open_evaluation(parsed) as made:
        evaluation = Evaluation(
            made.engine, made.cases, made.options, made.ranker, made.calibrated, retrieval=parsed.retrieve
        )
        if part:
            evaluation.run(out, part=part)
            print(f"part {part.number} of {part.of} is done; without --part all of them are summed up", file=sys.stderr)
            return
        run = evaluation.run(out)
        rows = write_summary(run, out, parsed.against, measure)
        if not parsed.no_plots:
            draw_run(run, rows, out, measure)
    print((out / "table.md").read_text(encoding="utf-8"))
    print(f"results, table and plots are in {out}", file=sys.stderr)


@dataclass(frozen=True)
class EvalSetup:
    """The model, store and prompts that the arguments of `add_eval_arguments` name.

    Parameters
    ----------
    engine : BlendEngine
    cases : Cases
    options : EvalOptions
    ranker : Ranker or None
    calibrated : BlendSettings or None
        The model's settings from ``cacheblend-rag calibrate``.
    """

    engine: BlendEngine
    cases: Cases
    options: EvalOptions
    ranker: Ranker | None
    calibrated: BlendSettings | None


@contextmanager
def open_evaluation(parsed: argparse.Namespace, cases: Cases | None = None) -> Iterator[EvalSetup]:
    """Read the questions, unless they are given, and load the model."""
    options = _options(parsed)
    read = [] if cases else load_cases(parsed.data, parsed.format, parsed.limit)
    cases = cases or (lambda chunks: read)
    size = parsed.size_limit or (_MEMORY if parsed.kv == "memory" else None)
    given: dict[str, Any] = {} if size is None else {"size_limit": parse_bytes(size)}
    fixed: dict[str, Any] = {
        "min_tokens": 0,
        "write_back": "inline",
        "prompt_cache": 0,
        "session_cache": False,
        "verify": "off",
    }
    config = BlendConfig(recompute_ratio=0.15, **fixed, **given)
    kept = data_folder(parsed) / "kv"
    with BlendEngine.from_pretrained(
        parsed.model or DEFAULT_MODEL,
        config=config,
        store=None if parsed.kv == "memory" else Path(parsed.kv or Path(parsed.out) / "kv"),
        device=parsed.device,
        dtype=parsed.dtype,
    ) as engine:
        engine = engine.with_learned(kept_context(kept, engine.fingerprint, engine.adapter))
        ranker = _ranker(parsed.retrieve, cases, max(options.chunks))
        yield EvalSetup(engine, cases, options, ranker, _calibrated(kept, engine))


def _options(parsed: argparse.Namespace) -> EvalOptions:

    same = ("methods", "chunks", "chunk_tokens", "order", "seed", "chat")
    return EvalOptions(
        **{name: getattr(parsed, name) for name in same},
        ratios=parsed.ratios or EvalOptions.ratios,
        keep_support=parsed.support == "always",
        style=parsed.prompt,
        max_new_tokens=parsed.max_new_tokens,
        answers=not parsed.no_answers,
    )


def _ranker(how: str, cases: Cases, chunks: int) -> Ranker | None:

    if how == "file":
        return None
    if how == "words":
        return WordRanker(passage.chunk for case in cases(chunks) for passage in case.passages)

    return VectorRanker(SentenceTransformerEmbeddings(how))


def _calibrated(kept: Path, engine: BlendEngine) -> BlendSettings | None:

    profile = MachineProfile.load(kept / "profile.json")
    return profile.blends.get(engine.fingerprint) if profile else None
