"""Summary of a run: a row for each method, paired with full prefill, as a table and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cacheblend_rag.calibration.statistics import Interval, interval, paired
from cacheblend_rag.config import check_choice
from cacheblend_rag.errors import ConfigError
from docs.benchmarks.evaluation.runner import EvalRun
from docs.benchmarks.scripts.measuring import machine, table

_MEASURES = ("f1", "em", "rouge_l", "forced_exact", "agreement", "kl")
_QUALITY = ("f1", "em", "rouge_l", "forced_exact")
"""Measures that say how good an answer is: what a run is led by is one of these."""
_COMPARED = (*_QUALITY, "agreement")
LOSS = 0.015
"""The loss up to which a method counts as no worse, as in Fig. 15 of the paper."""
_MARGIN = 0.01
"""The loss that the whole interval may reach for a method to be called not inferior: one point."""
# With fewer questions, divided by the margin, not even a method that loses none is shown to be within it: where the
# true loss is at the margin, none in so many is seen once in 40 times.
_NONE_LOST = 3.7
_TITLES = {
    "f1": "F1",
    "em": "exact match",
    "rouge_l": "Rouge-L",
    "forced_exact": "gold answer most likely",
    "agreement": "top-1 agreement",
    "kl": "KL divergence",
}


@dataclass(frozen=True)
class _Measured:
    """A method on one question.

    Parameters
    ----------
    line : mapping
        The question's, as the run kept it.
    result, full : mapping
        Of the method, and of full prefill.
    others : mapping of str to mapping
        Of the methods that all are compared with besides, by their labels.
    """

    line: Mapping[str, Any]
    result: Mapping[str, Any]
    full: Mapping[str, Any]
    others: Mapping[str, Mapping[str, Any]]

    @property
    def group(self) -> str:
        """Questions of one group are not independent."""
        return str(self.line["group"] or self.line["case"])


@dataclass(frozen=True)
class MethodRow:
    """A method at one number and length of chunks.

    Parameters
    ----------
    label, method : str
    ratio : float or None
    chunks, chunk_tokens : int
    questions : int
    measures : dict of str to Interval
        Means of what was measured, by name.
    differences : dict of str to Interval
        The same less full prefill's on the same questions, where more is better.
    against : dict of str to dict of str to Interval
        The same less other methods', by their labels.
    kind_differences : dict of str to dict of str to Interval
        ``differences`` by question kind.
    ttft : float
        Median seconds to the first token.
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
    measures: dict[str, Interval]
    differences: dict[str, Interval]
    ttft: float
    ttft_ratio: Interval
    rows: float
    work: float
    work_24: float
    kinds: dict[str, dict[str, float]]
    against: dict[str, dict[str, Interval]] = field(default_factory=dict)
    kind_differences: dict[str, dict[str, Interval]] = field(default_factory=dict)

    @property
    def blended(self) -> bool:
        """Whether it recomputes a part."""
        return self.ratio is not None or self.method == "calibrated"


def main_measure(run: EvalRun, wanted: str | None = None) -> str:
    """The first measure of the table: the one asked for, or F1, Rouge-L for summaries, or teacher forcing's.

    Raises
    ------
    ConfigError
        If it was not measured.
    """
    if wanted is not None:
        check_choice("measure", wanted, _QUALITY if run.settings["answers"] else ("forced_exact",))
        return wanted
    if not run.settings["answers"]:
        return "forced_exact"
    return "f1" if all(line["task"] == "qa" for line in run.lines) else "rouge_l"


def summarise(run: EvalRun, against: Sequence[str] = ()) -> list[MethodRow]:
    """Rows by number and length of chunks, in the order of the methods.

    Parameters
    ----------
    run : EvalRun
    against : sequence of str
        Labels of methods, such as ``"hkvd 0.15"``, that all are paired with besides full prefill.

    Raises
    ------
    ConfigError
        If nothing was measured, or there is no method of such a label.
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
            for label in against:
                if label not in named:
                    raise ConfigError("against", label, "use one of " + ", ".join(map(repr, named)))
            others = {label: named[label] for label in against}
            for label, result in named.items():
                by_label.setdefault(label, []).append(_Measured(line, result, named["full"], others))
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
    first = found[0].result
    taken = [name for name in _MEASURES if any(one.result.get(name) is not None for one in found)]
    return MethodRow(
        label=first["label"],
        method=first["method"],
        ratio=first["ratio"],
        chunks=chunks,
        chunk_tokens=length,
        questions=len(found),
        measures={name: _interval(name, found) for name in taken},
        differences=_differences(found, lambda one: one.full),
        ttft=statistics.median(one.result["ttft"] for one in found),
        ttft_ratio=interval([one.full["ttft"] / one.result["ttft"] for one in found]),
        rows=_mean(one.result["rows"] for one in found),
        work=_mean(one.result["work"] for one in found),
        work_24=_mean(one.result["work_24"] for one in found),
        kinds=_by_kind(taken, found),
        against={label: _differences(found, lambda one, of=label: one.others[of]) for label in found[0].others},  # type: ignore[misc]
        kind_differences={
            kind: _differences([one for one in found if one.line["kind"] == kind], lambda one: one.full)
            for kind in _kinds_of(found)
        },
    )


def _kinds_of(found: Sequence[_Measured]) -> list[str]:
    return list(dict.fromkeys(str(one.line["kind"]) for one in found if one.line["kind"]))


def _interval(name: str, found: Sequence[_Measured]) -> Interval:
    having = [one for one in found if one.result.get(name) is not None]
    return interval([float(one.result[name]) for one in having], groups=[one.group for one in having])


def _by_kind(taken: Sequence[str], found: Sequence[_Measured]) -> dict[str, dict[str, float]]:
    """Means of measures by question kind, and how many questions there are of each."""
    kinds: dict[str, dict[str, float]] = {}
    for kind in _kinds_of(found):
        of_kind = [one.result for one in found if one.line["kind"] == kind]
        kinds[kind] = {"questions": float(len(of_kind))}
        for name in taken:
            values = [result[name] for result in of_kind if result.get(name) is not None]
            if values:
                kinds[kind][name] = _mean(values)
    return kinds


def _differences(
    found: Sequence[_Measured], theirs_of: Callable[[_Measured], Mapping[str, Any]]
) -> dict[str, Interval]:
    """Paired differences from other results on the same questions, for the measures both have."""
    differences = {}
    for name in _COMPARED:
        both = [one for one in found if None not in (one.result.get(name), theirs_of(one).get(name))]
        if both:
            ours = [float(one.result[name]) for one in both]
            theirs = [float(theirs_of(one)[name]) for one in both]
            differences[name] = paired(ours, theirs, groups=[one.group for one in both])
    return differences


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(map(float, values))


def least_work(rows: Sequence[MethodRow], measure: str) -> dict[tuple[int, int], MethodRow | None]:
    """By number and length of chunks, the blended method of least work that loses no more than `LOSS`.

    None where none does. Where methods do the same work, the first one counts.
    """
    found: dict[tuple[int, int], MethodRow | None] = {}
    for row in rows:
        point = (row.chunks, row.chunk_tokens)
        best = found.setdefault(point, None)
        good = row.blended and measure in row.differences and row.differences[measure].mean >= -LOSS
        if good and (best is None or row.work < best.work):
            found[point] = row
    return found


def no_worse(rows: Sequence[MethodRow], measure: str) -> list[MethodRow]:
    """Methods whose loss is within the margin with all of its 95% interval; of few questions none is."""
    return [
        row
        for row in rows
        if row.method != "full"
        and measure in row.differences
        and row.differences[measure].low >= -_MARGIN
        and row.questions * _MARGIN >= _NONE_LOST
    ]


def markdown(run: EvalRun, rows: Sequence[MethodRow], measure: str | None = None) -> str:
    """The tables, one for each number and length of chunks, and results by question kind."""
    measure = main_measure(run, measure)
    parts = []
    for point, best in least_work(rows, measure).items():
        of_point = [row for row in rows if (row.chunks, row.chunk_tokens) == point]
        parts.append(_heading(of_point[0]) + "\n\n" + _table(of_point, measure))
        if any(row.kinds for row in of_point):
            parts.append(_kinds(of_point, measure))
        full = next(row for row in of_point if row.method == "full")
        if full.measures[measure].mean == 0:
            parts.append("Full prefill answers none of these questions, so they cannot show what is lost.")
        elif any(row.blended for row in of_point):
            least = f"{best.label}, {best.work:.1%} of full prefill's work" if best else "none of those tried"
            parts.append(f"Least work that loses no more than {LOSS} {_TITLES[measure]}: {least}.")
            parts.append(_not_inferior(of_point, measure))
    skipped = sum("skipped" in line for line in run.lines)
    if skipped:
        parts.append(f"{skipped} prompts were left out because they do not fit the model.")
    parts.append(
        "Square brackets: 95% bootstrap intervals over questions. Differences are paired with full prefill of the "
        "same prompts. Divergence and agreement are over the gold answer's tokens."
    )
    return "\n\n".join(parts) + "\n"


def _not_inferior(rows: Sequence[MethodRow], measure: str) -> str:
    if rows[0].questions * _MARGIN < _NONE_LOST:
        few = f"{rows[0].questions} questions are too few to show that a method loses no more than {_MARGIN}"
        return f"{few}; it takes {_NONE_LOST / _MARGIN:.0f} or more."
    found = [f"{row.label} ({row.work_24:.1%} of the work in 24 layers)" for row in no_worse(rows, measure)]
    return f"Lose no more than {_MARGIN} {_TITLES[measure]} with all of the interval: {', '.join(found) or 'none'}."


def _heading(row: MethodRow) -> str:
    length = f" of at most {row.chunk_tokens} tokens" if row.chunk_tokens else ""
    return f"**{row.chunks} chunks{length}, {row.questions} questions**"


def _table(rows: Sequence[MethodRow], measure: str) -> str:
    taken = [name for name in _MEASURES if any(name in row.measures for row in rows)]
    columns: list[tuple[str, Callable[[MethodRow], str]]] = [("method", lambda row: row.label)]
    columns += [(_TITLES[name], _shower(name)) for name in taken]
    columns.append((f"{_TITLES[measure]} against full", lambda row: _signed(row.differences.get(measure))))
    for label in rows[0].against:
        shown = f"{_TITLES[measure]} against {label}"
        columns.append((shown, lambda row, of=label: _signed(row.against[of].get(measure))))  # type: ignore[misc]
    columns += [
        ("TTFT", lambda row: f"{row.ttft * 1e3:.1f} ms"),
        ("times faster", lambda row: f"{row.ttft_ratio.mean:.2f}"),
        ("rows", lambda row: f"{row.rows:.1%}"),
        ("work", lambda row: f"{row.work:.1%}"),
        ("work, 24 layers", lambda row: f"{row.work_24:.1%}"),
    ]
    return table([title for title, _ in columns], [[show(row) for _, show in columns] for row in rows])


def _shower(name: str) -> Callable[[MethodRow], str]:
    digits = 4 if name == "kl" else 3

    def show(row: MethodRow) -> str:
        found = row.measures.get(name)
        return "" if found is None else f"{found.mean:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"

    return show


def _signed(found: Interval | None) -> str:
    return "" if found is None else f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def _kinds(rows: Sequence[MethodRow], measure: str) -> str:
    """Means by question kind, and differences from full prefill."""
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.kinds))

    def shown(row: MethodRow, kind: str) -> str:
        mean = row.kinds.get(kind, {}).get(measure)
        if mean is None:
            return ""
        return f"{mean:.3f}" if row.method == "full" else f"{mean:.3f}, {_signed(row.kind_differences[kind][measure])}"

    counts = {kind: max(row.kinds.get(kind, {}).get("questions", 0) for row in rows) for kind in kinds}
    head = [f"{_TITLES[measure]} by kind, and against full", *(f"{kind} ({counts[kind]:.0f})" for kind in kinds)]
    return table(head, [[row.label, *(shown(row, kind) for kind in kinds)] for row in rows])


def write_summary(
    run: EvalRun, folder: Path, against: Sequence[str] = (), measure: str | None = None
) -> list[MethodRow]:
    """Write ``table.md`` and ``summary.json`` into a folder; the rows.

    Parameters
    ----------
    run : EvalRun
    folder : path
    against : sequence of str
        See `summarise`.
    measure : str, optional
        The first measure of the table, see `main_measure`.
    """
    rows, measure = summarise(run, against), main_measure(run, measure)
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
        "no_worse": [
            {"chunks": row.chunks, "chunk_tokens": row.chunk_tokens, "label": row.label, "work_24": row.work_24}
            for row in no_worse(rows, measure)
        ],
    }
    (folder / "table.md").write_text(markdown(run, rows, measure), encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return rows
