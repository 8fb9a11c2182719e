"""``adapt`` and ``calibrate`` on few prompts of one model: seconds, memory, and how near answers come.

``python -m docs.benchmarks.scripts.adapting --model MODEL --dtype bfloat16 --data squad.jsonl --out adapting.json``

Both learn from questions of the half that is chosen by, and are judged on the same few questions of the other half.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.calibration.adapt import AdaptOptions, adapt
from cacheblend_rag.calibration.calibrate import CalibrationOptions, calibrate
from cacheblend_rag.calibration.datasets import load_cases
from cacheblend_rag.calibration.passages import build_prompt
from cacheblend_rag.calibration.prompts import frame_prompts
from cacheblend_rag.calibration.trials import TriedRule
from docs.benchmarks.scripts.common import reported, script_parser, write_json
from docs.benchmarks.scripts.yardstick import in_prompt, of_half

_T = TypeVar("_T")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = script_parser("adapting", __doc__)
    for name, kind in (("model", str), ("data", str), ("out", str)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--chunks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--searched", type=int, default=6, help="prompts that calibrate searches on")
    parser.add_argument("--held-back", type=int, default=12)
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=("adapt", "calibrate"), default=["adapt", "calibrate"])
    parsed = parser.parse_args(arguments)
    return reported(parser, lambda: run(parsed))


def run(options: argparse.Namespace) -> None:
    """Adapt, then calibrate; the file is written after each of them."""
    torch.set_num_threads(options.threads)
    with BlendEngine.from_pretrained(
        options.model, dtype=options.dtype, config=BlendConfig(condition="context")
    ) as engine:
        taught = _prompts(engine, options, "dev", max(options.steps, options.searched))
        judged = _prompts(engine, options, "test", options.held_back)
        result: dict[str, Any] = {
            "model": Path(options.model).name,
            "settings": {
                name: getattr(options, name)
                for name in ("dtype", "chunks", "steps", "searched", "held_back", "answer_tokens", "threads")
            },
            "prompt_tokens": round(sum(len(engine.tokenize(one).input_ids) for one in judged) / len(judged)),
        }
        if "adapt" in options.only:
            result["adapt"] = _adapt(engine, options, taught, judged)
            write_json(options.out, result)
        if "calibrate" in options.only:
            result["calibrate"] = _calibrate(engine, options, taught, judged)
            write_json(options.out, result)


def _adapt(
    engine: BlendEngine, options: argparse.Namespace, taught: Sequence[Prompt], judged: Sequence[Prompt]
) -> dict[str, Any]:
    wanted = AdaptOptions(steps=options.steps, answer_tokens=options.answer_tokens, held_back=len(judged))
    adapted, took = _measured(lambda: adapt(engine, [*taught[: options.steps], *judged], wanted))
    tries = {"neighbours": adapted.neighbours, "learned": adapted.learned}
    return took | {
        "losses": [round(loss, 4) for loss in adapted.losses],
        **{f"{name}, nothing recomputed": _spread(one.reuse) for name, one in tries.items()},
        **{f"{name}, the default": _spread(one.blended) for name, one in tries.items()},
    }


def _calibrate(
    engine: BlendEngine, options: argparse.Namespace, taught: Sequence[Prompt], judged: Sequence[Prompt]
) -> dict[str, Any]:
    share = len(judged) / (options.searched + len(judged))
    wanted = CalibrationOptions(check_share=share, answer_tokens=options.answer_tokens)
    mixed = _mixed(taught[: options.searched], judged, share)
    (settings, finding), took = _measured(lambda: calibrate(engine, mixed, wanted))
    return took | {
        "rule": f"{settings.condition}/{settings.selection}@{settings.recompute_ratio:g}",
        "tolerance": settings.tolerance,
        "work": round(settings.work, 3),
        "held back": _spread(finding.checked) if finding.checked else None,
        "candidates": [
            {"kind": kind, "share": getattr(tried.rule, "recompute_ratio", 0.0), "work": round(tried.work, 3)}
            | _spread(tried)
            for kind, tried in finding.candidates
        ],
        "searched, nothing recomputed": {name: _spread(one) for name, one in finding.reuse.items()},
    }


def _prompts(engine: BlendEngine, options: argparse.Namespace, half: str, count: int) -> list[Prompt]:
    """Prompts of a half in an order drawn once."""
    cases = of_half(load_cases(options.data), half)
    random.Random(0).shuffle(cases)
    made = [build_prompt(in_prompt(case, options.chunks), "stuff") for case in cases[:count]]
    return frame_prompts(made, engine.tokenizer)


def _mixed(searched: Sequence[Prompt], judged: Sequence[Prompt], share: float) -> list[Prompt]:
    """Prompts in the order in which `calibrate` holds back those that judge."""
    left = iter(searched), iter(judged)
    count = len(searched) + len(judged)
    return [next(left[int((at + 1) * share) > int(at * share)]) for at in range(count)]


def _measured(work: Callable[[], _T]) -> tuple[_T, dict[str, float]]:
    """Result of some work, with its seconds and the most memory that the process had meanwhile."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    began, used = time.perf_counter(), time.process_time()
    result = work()
    took, used = time.perf_counter() - began, time.process_time() - used
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return result, {"seconds": round(took, 1), "cpu_seconds": round(used, 1), "peak_gb": round(peak / 1e6, 2)}


def _spread(tried: TriedRule) -> dict[str, float]:
    return {name: round(getattr(tried.divergence, name), 4) for name in ("mean", "low", "high")}


if __name__ == "__main__":
    sys.exit(main())
