"""What a run says: a row for each method, paired with full prefill, as a table and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.evaluation.benching import machine, table
from cacheblend_rag.evaluation.quality.methods import CHAINS
from cacheblend_rag.evaluation.quality.runner import EvalRun
from cacheblend_rag.evaluation.quality.statistics import Interval, interval, paired

__all__ = ["LOSS", "MEASURES", "MethodRow", "least_work", "main_measure", "markdown", "summarise", "write_summary"]

MEASURES = ("f1", "em", "rouge_l", "forced_exact", "agreement", "kl", "attention_deviation")
_QUALITY = ("f1", "em", "rouge_l", "forced_exact", "agreement")
LOSS = 0.015
"""What a method may lose to count as no worse, as in Fig. 15 of the paper."""
_TITLES = {
    "f1": "F1",
    "em": "exact match",
    "rouge_l": "Rouge-L",
    "forced_exact": "gold answer most likely",
    "agreement": "top-1 agreement",
    "kl": "KL divergence",
    "attention_deviation": "attention deviation",
}


# A question's line, a method's result on it, full prefill's, and that of the method compared with.
_Measured = tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any], Mapping[str, Any] | None]


@dataclass(frozen=True)
class MethodRow:
    """A method at one number and length of chunks.

    Parameters
    ----------
    label, method : str
    ratio : float or None
    chunks, chunk_tokens : int
    questions : int
    failed : int
        Questions for which a LangChain chain gave no answer.
    measures : dict of str to Interval
        Means, of those of `MEASURES` that were taken.
    differences : dict of str to Interval
        The same less full prefill's on the same questions, where more is better.
    against : dict of str to Interval
        The same less another method's, if one was named.
    ttft : float
        Median seconds to the first token; requests with a cold chunk are left out where they count.
    ttft_ratio : Interval
        Mean of full prefill's time over this method's, question by question.
    rows, work, work_24 : float
        Means; shares of full prefill's.
    kinds : dict of str to dict of str to float
        Means of the measures by question kind.
    """

    label: str
    method: str
    ratio: float | None
    chunks: int
    chunk_tokens: int
    questions: int
    failed: int
    measures: dict[str, Interval]
    differences: dict[str, Interval]
    ttft: float
    ttft_ratio: Interval
    rows: float
    work: float
    work_24: float
    kinds: dict[str, dict[str, float]]
    against: dict[str, Interval] = field(default_factory=dict)

    @property
    def blended(self) -> bool:
        """Whether it recomputes a part."""
        return self.method not in ("full", "prefix", "reuse", *CHAINS)


def main_measure(run: EvalRun) -> str:
    """The measure of the run's task: F1, Rouge-L for summaries, or what teacher forcing says."""
    if not run.settings["answers"]:
        return "forced_exact"
    return "f1" if all(line["task"] == "qa" for line in run.lines) else "rouge_l"


def summarise(run: EvalRun, against: str | None = None) -> list[MethodRow]:
    """Rows by number and length of chunks, in the order of the methods.

    Parameters
    ----------
    run : EvalRun
    against : str, optional
        Label of a method, such as ``"hkvd 0.15"``, that all are paired with besides full prefill.

    Raises
    ------
    ConfigError
        If nothing was measured, or there is no method of that label.
    """
    points: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for line in run.lines:
        if line["results"]:
            points.setdefault((line["chunks"], line["chunk_tokens"]), []).append(line)
    if not points:
        skipped = next((line["skipped"] for line in run.lines if "skipped" in line), "there was no question")
        raise ConfigError("data", "all questions", f"use other ones, or fewer or shorter chunks: {skipped}")
    rows = []
    for (chunks, length), lines in sorted(points.items()):
        by_label: dict[str, list[_Measured]] = {}
        for line in lines:
            named = {result["label"]: result for result in line["results"]}
            if against is not None and against not in named:
                raise ConfigError("against", against, "use one of " + ", ".join(map(repr, named)))
            for label, result in named.items():
                other = named.get(against) if against is not None else None
                by_label.setdefault(label, []).append((line, result, named["full"], other))
        for label in sorted(by_label, key=_place):
            rows.append(_row(chunks, length, by_label[label]))
    return rows


def _place(label: str) -> tuple[bool, str, float, str]:
    """``full`` first, then methods by name and rising ratio: the order within a line turns."""
    name, _, ratio = label.rpartition(" ")
    try:
        return label != "full", name, float(ratio), label
    except ValueError:
        return label != "full", label, -1.0, label


def _row(chunks: int, length: int, found: Sequence[_Measured]) -> MethodRow:
    first = found[0][1]
    measures = {}
    for name in MEASURES:
        having = [(float(r[name]), _group(line)) for line, r, _, _ in found if r.get(name) is not None]
        if having:
            measures[name] = interval([value for value, _ in having], groups=[group for _, group in having])
    warm = [(r, f) for line, r, f, _ in found if not line["cold"]] or [(r, f) for _, r, f, _ in found]
    kinds: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(str(line["kind"]) for line, *_ in found if line["kind"]):
        of_kind = [result for line, result, *_ in found if line["kind"] == kind]
        kinds[kind] = {"questions": float(len(of_kind))} | {
            name: _mean(r[name] for r in of_kind if r.get(name) is not None)
            for name in measures
            if any(r.get(name) is not None for r in of_kind)
        }
    return MethodRow(
        label=first["label"],
        method=first["method"],
        ratio=first["ratio"],
        chunks=chunks,
        chunk_tokens=length,
        questions=len(found),
        failed=sum(bool(result.get("failed")) for _, result, *_ in found),
        measures=measures,
        differences=_differences([(line, result, full) for line, result, full, _ in found]),
        ttft=statistics.median(result["ttft"] for result, _ in warm),
        ttft_ratio=interval([full["ttft"] / result["ttft"] for result, full in warm]),
        rows=_mean(result["rows"] for _, result, *_ in found),
        work=_mean(result["work"] for _, result, *_ in found),
        work_24=_mean(result["work_24"] for _, result, *_ in found),
        kinds=kinds,
        against=_differences([(line, result, other) for line, result, _, other in found if other is not None]),
    )


def _group(line: Mapping[str, Any]) -> str:
    """Questions of one group are not independent."""
    return str(line["group"] or line["case"])


def _differences(
    found: Sequence[tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]]],
) -> dict[str, Interval]:
    """Paired differences of the second from the third, for the measures both have."""
    differences = {}
    for name in _QUALITY:
        both = [(r, o, line) for line, r, o in found if r.get(name) is not None and o.get(name) is not None]
        if both:
            ours, theirs = ([float(result[name]) for result in side] for side in list(zip(*both, strict=True))[:2])
            differences[name] = paired(ours, theirs, groups=[_group(line) for _, _, line in both])
    return differences


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(map(float, values))


def least_work(rows: Sequence[MethodRow], measure: str, loss: float = LOSS) -> dict[tuple[int, int], MethodRow | None]:
    """By number and length of chunks, the blended method of least work that loses no more than ``loss``.

    None where none does. Where methods do the same work, the first one counts.
    """
    found: dict[tuple[int, int], MethodRow | None] = {}
    for row in rows:
        point = (row.chunks, row.chunk_tokens)
        best = found.setdefault(point, None)
        good = row.blended and measure in row.differences and row.differences[measure].mean >= -loss
        if good and (best is None or row.work < best.work):
            found[point] = row
    return found


def markdown(run: EvalRun, rows: Sequence[MethodRow], against: str | None = None) -> str:
    """The tables, one for each number and length of chunks, and results by question kind."""
    measure = main_measure(run)
    parts = []
    for point, best in least_work(rows, measure).items():
        of_point = [row for row in rows if (row.chunks, row.chunk_tokens) == point]
        parts.append(_heading(of_point[0]) + "\n\n" + _table(of_point, against))
        if any(row.kinds for row in of_point):
            parts.append(_kinds(of_point, measure))
        full = next(row for row in of_point if row.method == "full")
        if full.measures[measure].mean == 0:
            parts.append("Full prefill answers none of these questions, so they cannot show what is lost.")
        elif any(row.blended for row in of_point):
            least = f"{best.label}, {best.work:.1%} of full prefill's work" if best else "none of those tried"
            parts.append(f"Least work that loses no more than {LOSS} {_TITLES[measure]}: {least}.")
    skipped = sum("skipped" in line for line in run.lines)
    if skipped:
        parts.append(f"{skipped} prompts were left out because they do not fit the model.")
    parts.append(
        "Square brackets: 95% bootstrap intervals over questions. Differences are paired with full prefill of the "
        "same prompts. Divergence and agreement are over the gold answer's tokens."
    )
    return "\n\n".join(parts) + "\n"


def _heading(row: MethodRow) -> str:
    length = f" of at most {row.chunk_tokens} tokens" if row.chunk_tokens else ""
    return f"**{row.chunks} chunks{length}, {row.questions} questions**"


def _table(rows: Sequence[MethodRow], against: str | None = None) -> str:
    taken = [name for name in MEASURES if any(name in row.measures for row in rows)]
    quality = [name for name in taken if name in _QUALITY and name != "agreement"]
    lead = quality[0] if quality else "agreement"
    columns: list[tuple[str, Callable[[MethodRow], str]]] = [("method", lambda row: row.label)]
    columns += [(_TITLES[name], _shower(name)) for name in taken]
    columns += [
        (f"{_TITLES[lead]} against full", lambda row: _signed(row.differences.get(lead))),
    ]
    if against is not None:
        columns.append((f"{_TITLES[lead]} against {against}", lambda row: _signed(row.against.get(lead))))
    columns += [
        ("TTFT", lambda row: f"{row.ttft * 1e3:.1f} ms"),
        ("times faster", lambda row: f"{row.ttft_ratio.mean:.2f}"),
        ("rows", lambda row: f"{row.rows:.1%}"),
        ("work", lambda row: f"{row.work:.1%}"),
        ("work, 24 layers", lambda row: f"{row.work_24:.1%}"),
    ]
    if any(row.failed for row in rows):
        columns.append(("unusable", lambda row: str(row.failed)))
    return table([title for title, _ in columns], [[show(row) for _, show in columns] for row in rows])


def _shower(name: str) -> Callable[[MethodRow], str]:
    digits = 4 if name in ("kl", "attention_deviation") else 3

    def show(row: MethodRow) -> str:
        found = row.measures.get(name)
        return "" if found is None else f"{found.mean:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"

    return show


def _signed(found: Interval | None) -> str:
    return "" if found is None else f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def _kinds(rows: Sequence[MethodRow], measure: str) -> str:
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.kinds))
    body = [
        [
            row.label,
            *(f"{row.kinds[kind][measure]:.3f}" if measure in row.kinds.get(kind, {}) else "" for kind in kinds),
        ]
        for row in rows
    ]
    return table([f"{_TITLES[measure]} by kind", *kinds], body)


def write_summary(run: EvalRun, folder: Path, against: str | None = None) -> list[MethodRow]:
    """Write ``table.md`` and ``summary.json`` into a folder; the rows."""
    rows, measure = summarise(run, against), main_measure(run)
    best = [
        {
            "chunks": chunks,
            "chunk_tokens": length,
            "label": row.label if row else None,
            "work": row.work if row else None,
        }
        for (chunks, length), row in least_work(rows, measure).items()
    ]
    content = {
        "settings": run.settings,
        "machine": machine(),
        "measure": measure,
        "rows": list(map(asdict, rows)),
        "least_work": best,
    }
    (folder / "table.md").write_text(markdown(run, rows, against), encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return rows
