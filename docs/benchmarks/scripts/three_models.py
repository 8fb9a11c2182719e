"""Several models on the same prompts: one table of what `yardstick run` found of each, its JSON, and a picture.

``python -m docs.benchmarks.scripts.three_models --model 135M a.jsonl --model 0.5B b.jsonl --out three-models.json``

A divergence is the mean over the tokens of full prefill's answer to one prompt. Of these the table has the mean with
its 95% interval, whole groups of questions drawn, the median, the 95th percentile and the worst.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any

from cacheblend_rag.calibration.statistics import interval
from docs.benchmarks.scripts.common import script_parser, write_json
from docs.benchmarks.scripts.plots import pyplot_for, save_figure, unboxed

__all__ = ["draw", "main", "summary"]

_DEFAULT = "context/query@0.15"
_LEAST = 1e-4  # what is nearer is drawn here
_SAID = {
    "context/query@0.15": "the default",
    "context/none": "contexts, nothing recomputed",
    "sink/none": "alone, nothing recomputed",
    "sink/hkvd@0.15": "alone, the paper's rule 15%",
    "context/boundary@0.15": "contexts, chunk starts 15%",
    "context/hkvd@0.15": "contexts, the paper's rule 15%",
    "order": "full prefill, another order",
    "8-bit weights": "full prefill, 8-bit weights",
}


def summary(rows: Sequence[Mapping[str, Any]], names: Sequence[str], against: str = _DEFAULT) -> dict[str, Any]:
    """What was found of one model.

    Parameters
    ----------
    rows : sequence of mapping
        As `yardstick run` writes them.
    names : sequence of str
        The methods, and what moves full prefill.
    against : str
        The method that all others are paired with.
    """
    groups, right = [row["group"] for row in rows], [bool(row["right"]) for row in rows]

    def spread(values: Sequence[float], at: Sequence[str] = groups) -> dict[str, float]:
        found = interval(values, groups=at)
        return {name: float(f"{getattr(found, name):.4g}") for name in ("mean", "low", "high")}

    def each(name: str) -> list[float]:
        return [fmean(_of(row, name)["kl"]) for row in rows]

    def one(name: str) -> dict[str, Any]:
        found, kl = [_of(row, name) for row in rows], each(name)
        values: dict[str, Any] = {
            "divergence": spread(kl),
            "median": _short(median(kl)),
            "p95": _short(sorted(kl)[ceil(0.95 * len(kl)) - 1]),
            "worst": _short(max(kl)),
            "first_token": _short(fmean(row["kl"][0] for row in found)),
            "further": spread([mine - other for mine, other in zip(kl, each(against), strict=True)]),
            "each": [_short(value) for value in kl],
        }
        if "work" in found[0]:
            values["work"] = _short(fmean(row["work"] for row in found))
        if all("same" in row for row in found):
            now = [bool(row["right"]) for row in found]
            values["same"] = spread([float(row["same"]) for row in found])
            values["lost"] = sum(was and not still for was, still in zip(right, now, strict=True))
            values["gained"] = sum(still and not was for was, still in zip(right, now, strict=True))
        return values

    return {
        "prompts": len(rows),
        "groups": len(set(groups)),
        "mean_tokens": round(fmean(row["tokens"] for row in rows)),
        "right": sum(right),
        "methods": {name: one(name) for name in names},
    }


def _of(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A method or noise of a prompt, both in the same form; empty if it was not measured."""
    if name in row["methods"]:
        return dict(row["methods"][name])
    if name not in row["noise"]:
        return {}
    found = {"kl": row["noise"][name]}
    for field in ("right", "same"):
        if name in row.get(f"noise_{field}", ()):
            found[field] = row[f"noise_{field}"][name]
    return found


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def table(found: Mapping[str, Any]) -> str:
    """One model's summary in Markdown."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "work": lambda one: f"{one['work']:.1%}" if "work" in one else "",
        "divergence": lambda one: _bracketed(one["divergence"]),
        "median": lambda one: f"{one['median']:.3f}",
        "95th percentile": lambda one: f"{one['p95']:.3f}",
        "worst": lambda one: f"{one['worst']:.3f}",
        "first token": lambda one: f"{one['first_token']:.3f}",
        "further than the default, paired": lambda one: (
            _bracketed(one["further"]) if any(one["further"].values()) else "–"
        ),
        "word for word": lambda one: _percent(one["same"]) if "same" in one else "",
        "right answers lost, gained": lambda one: f"{one['lost']}, {one['gained']}" if "lost" in one else "",
    }
    lines = ["| method | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for name, one in found["methods"].items():
        lines.append(f"| {_SAID.get(name, name)} | " + " | ".join(write(one) for write in columns.values()) + " |")
    return "\n".join(lines)


def _bracketed(one: Mapping[str, float]) -> str:
    return f"{one['mean']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"


def _percent(one: Mapping[str, float]) -> str:
    return f"{one['mean']:.0%} [{100 * one['low']:.0f}, {100 * one['high']:.0f}]"


def draw(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """A panel for each model: every prompt's divergence a dot, the mean with its interval above, the median a line."""
    models = result["models"]
    names = list(next(iter(models.values()))["methods"])
    form: dict[str, Any] = {"figsize": (2.2 + 3.2 * len(models), 1.6 + 0.42 * len(names)), "layout": "constrained"}
    figure, panels = pyplot.subplots(1, len(models), sharex=True, sharey=True, squeeze=False, **form)
    for axis, (model, found) in zip(panels[0], models.items(), strict=True):
        for place, name in enumerate(names):
            one = found["methods"][name]
            colour = "tab:blue" if name == result["options"]["against"] else "0.35" if "work" in one else "tab:green"
            values = [max(_LEAST, value) for value in one["each"]]
            axis.scatter(values, [place + 0.12] * len(values), s=9, color=colour, alpha=0.35, linewidths=0)
            axis.vlines(max(_LEAST, one["median"]), place - 0.02, place + 0.26, color=colour, linewidth=1.5)
            mean = one["divergence"]
            bars = [[mean["mean"] - mean["low"]], [mean["high"] - mean["mean"]]]
            axis.errorbar([mean["mean"]], [place - 0.2], xerr=bars, fmt="D", markersize=4, capsize=3, color=colour)
        axis.set_xscale("log")
        axis.set_title(f"{model}: {found['prompts']} prompts", fontsize="small")
        axis.set_xlabel("KL divergence, nats a token")
        axis.grid(axis="x", alpha=0.3)
        unboxed(axis)
    panels[0][0].set_yticks(range(len(names)), [_SAID.get(name, name) for name in names])
    panels[0][0].invert_yaxis()
    title = "How far answers move from full prefill's: dots are prompts, a line the median, diamonds the mean"
    figure.suptitle(title, fontsize="medium")
    save_figure(pyplot, figure, path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = script_parser("three_models", __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", nargs="+", action="append", required=True, metavar=("NAME", "FILE"))
    parser.add_argument("--against", default=_DEFAULT, metavar="METHOD", help="pair all others with this one")
    parser.add_argument("--about", default="")
    parser.add_argument("--date", default="")
    parser.add_argument("--machine", default="")
    parser.add_argument("--out", metavar="FILE", help="JSON")
    parser.add_argument("--plot", metavar="FILE", help="SVG")
    options = parser.parse_args(arguments)
    said = {name: getattr(options, name) for name in ("about", "against", "date", "machine")}
    result: dict[str, Any] = {"options": said, "models": {}}
    rows = {
        name: [json.loads(line) for file in files for line in Path(file).read_text(encoding="utf-8").splitlines()]
        for name, *files in options.model
    }
    every = [row for found in rows.values() for row in found]
    names = [name for name in (*every[0]["methods"], *every[0]["noise"]) if all(_of(row, name) for row in every)]
    for name in rows:
        found = result["models"][name] = summary(rows[name], names, options.against)
        print(f"\n{name}: {found['prompts']} prompts, {found['mean_tokens']} tokens, {found['right']} right\n")
        print(table(found))
    if options.out:
        write_json(options.out, result)
    if options.plot:
        draw(pyplot_for(options.plot), result, Path(options.plot))
    return 0


if __name__ == "__main__":
    sys.exit(main())
