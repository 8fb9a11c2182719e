"""How divergence falls as more is recomputed: ``python -m docs.benchmarks.scripts.ratio_sweep``.

Every rule fuses the same held-out questions by reference at rising recompute ratios, its checks standing
where they are told to. Divergence is from full prefill of the same prompt, by teacher forcing on the gold
answer.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.calibration.bench.benching import machine, table
from cacheblend_rag.calibration.evaluation.statistics import interval
from cacheblend_rag.fusor.selection import (
    SelectBoundary,
    SelectGradual,
    SelectHKVD,
    SelectionRule,
    SelectMixed,
    SelectNone,
    SelectPredicted,
    SelectQuery,
    SelectRandom,
    SelectThreshold,
)
from cacheblend_rag.models.adapter import ModelAdapter
from docs.benchmarks.scripts.rule_grid import LATE
from docs.benchmarks.scripts.selection_table import prepared_case, score
from tests.toy import MODEL_PATH
from tests.toy.measure import Case, held_out_cases

__all__ = ["RATIOS", "rules", "sweep"]

RATIOS = (0.01, 0.05, 0.15, 0.5, 1.0)
_DRAWS = 4
_Make = Callable[[float], SelectionRule]


def rules(check: int, scored: int) -> dict[str, list[_Make]]:
    """All rules by ratio; of one that draws by chance, several draws whose mean counts.

    Parameters
    ----------
    check : int
        Layer of the (first) check; stored queries are those of the layer before.
    scored : int
        Layer whose attention from the question is asked for.
    """
    named: dict[str, _Make] = {
        "hkvd v": lambda ratio: SelectHKVD((check,), ratio, metric="v"),
        "hkvd k": lambda ratio: SelectHKVD((check,), ratio, metric="k"),
        "hkvd kv": lambda ratio: SelectHKVD((check,), ratio, metric="kv"),
        "gradual k": lambda ratio: SelectGradual((check,), ratio, metric="k"),
        # With a bound above 0 it may keep fewer rows than the ratio allows, even of ratio 1.
        "threshold k": lambda ratio: SelectThreshold((check,), ratio, metric="k", bound=0.0),
        "boundary": SelectBoundary,
        "query": lambda ratio: SelectQuery(ratio, (scored,)),
        "predicted": lambda ratio: SelectPredicted(ratio, (check - 1,)),
        "mixed k": lambda ratio: SelectMixed((check,), ratio, metric="k", score_layers=(scored,)),
    }
    draws: list[_Make] = [lambda ratio, seed=seed: SelectRandom(ratio, seed=seed) for seed in range(_DRAWS)]  # type: ignore[misc]
    return {**{name: [make] for name, make in named.items()}, f"random, {_DRAWS} draws": draws}


def sweep(
    model: Any, tokenizer: Any, cases: Sequence[Case], chosen: Mapping[str, Sequence[_Make]]
) -> dict[str, dict[str, list[list[float]]]]:
    """Divergence and exact answers of every rule at every ratio.

    Parameters
    ----------
    model, tokenizer
        As transformers loads them.
    cases : sequence of Case
    chosen : mapping of str to sequence of callable
        See `rules`.

    Returns
    -------
    dict
        By rule: ``divergence`` and ``exact``, each a list over prompts for ratio 0 and each of `RATIOS`.
    """
    adapter = ModelAdapter(model)
    measures = ("divergence", "exact")
    found: dict[str, dict[str, list[list[float]]]] = {
        measure: {name: [[] for _ in (0.0, *RATIOS)] for name in chosen} for measure in measures
    }
    with torch.no_grad():
        for case in cases:
            prepared, answer = prepared_case(adapter, tokenizer, case)
            floor = score(prepared, prepared.fuse(SelectNone()).fusion, answer)
            for name, makes in chosen.items():
                for number, ratio in enumerate((0.0, *RATIOS)):
                    scored = [score(prepared, prepared.fuse(make(ratio)).fusion, answer) for make in makes if ratio]
                    scored = scored or [floor]
                    for measure in measures:
                        found[measure][name][number].append(statistics.mean(getattr(one, measure) for one in scored))
    return found


def _summary(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Means, and of each step to a higher ratio the change of divergence with its interval."""
    rows = []
    for name, divergence in found["divergence"].items():
        steps = [interval([b - a for a, b in zip(*pair, strict=True)]) for pair in pairwise(divergence)]
        rows.append(
            {
                "rule": name,
                "divergence": [statistics.mean(one) for one in divergence],
                "exact": [statistics.mean(one) for one in found["exact"][name]],
                "steps": [[step.mean, step.low, step.high] for step in steps],
            }
        )
    return rows


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("rule", *(f"{ratio:.0%}" for ratio in (0.0, *RATIOS)), "highest step")
    cells = []
    for row in rows:
        means = [f"{d:.3f} ({100 * e:.0f}%)" for d, e in zip(row["divergence"], row["exact"], strict=True)]
        mean, low, high = max(row["steps"])
        cells.append((row["rule"], *means, f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"))
    return table(head, cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry: prints a table; the last line is JSON."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(prog="python -m docs.benchmarks.scripts.ratio_sweep", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_PATH)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--passages", type=int, default=6)
    parser.add_argument("--check", type=int, default=LATE, metavar="LAYER")
    parser.add_argument("--scored", type=int, default=6, metavar="LAYER")
    args = parser.parse_args(argv)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    asked = held_out_cases(args.questions, passages=args.passages)
    cases = [case for case in asked if case.kind == "reference"]
    rows = _summary(sweep(model, tokenizer, cases, rules(args.check, args.scored)))
    print(_table(rows))
    settings = {"questions": len(cases), "passages": args.passages, "check": args.check, "scored": args.scored}
    print(json.dumps({**settings, "machine": machine("cpu"), "ratios": (0.0, *RATIOS), "rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
