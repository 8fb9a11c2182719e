"""Every method on questions with known answers, each paired with full prefill of the same prompt.

``python -m docs.benchmarks.evaluation --data questions.jsonl --methods full,reuse,hkvd --ratios 0.15 --out runs/first``
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cacheblend_rag.app.cli.arguments import add_arguments, data_folder
from cacheblend_rag.calibration.prompts import WordRanker
from cacheblend_rag.calibration.statistics import Interval, interval, paired
from cacheblend_rag.config import DEFAULT_MODEL, BlendConfig, check_choice, parse_bytes
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.loading import BlendSettings, MachineProfile
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from docs.benchmarks.evaluation.datasets import Cases, EvalCase, load_cases
from docs.benchmarks.evaluation.passages import Ranker
from docs.benchmarks.evaluation.runner import EvalOptions, EvalRun, Evaluation, Part, VectorRanker
from docs.benchmarks.scripts.common import import_pyplot, machine, reported, save_figure, table

_NAMES = {"f1": "F1", "em": "exact match", "rouge_l": "Rouge-L", "forced_exact": "gold answer most likely"}


def draw_run(run: EvalRun, rows: Sequence[MethodRow], folder: Path, measure: str | None = None) -> list[Path]:
    """Draw everything a run has data for; the files.

    Parameters
    ----------
    run : EvalRun
    rows : sequence of MethodRow
        The summary by `summarise`.
    folder : path
    measure : str, optional
        The measure to draw, see `main_measure`.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    measure = main_measure(run, measure)
    points = list(dict.fromkeys((row.chunks, row.chunk_tokens) for row in rows))
    largest = [row for row in rows if (row.chunks, row.chunk_tokens) == points[-1]]
    files = [
        draw_against(largest, measure, "ttft", folder / "quality-ttft.svg"),
        draw_against(largest, measure, "work", folder / "quality-work.svg"),
        draw_against(largest, measure, "work_24", folder / "quality-work-24.svg"),
    ]
    if len({row.ratio for row in largest if row.ratio is not None}) > 1:
        files.append(draw_over_ratio(largest, measure, folder / "quality-ratio.svg"))
    if any(row.kinds for row in largest):
        files.append(_draw_by_kind(largest, measure, folder / "quality-kind.svg"))
    for name, place in (("chunks", 0), ("chunk_tokens", 1)):
        if len({point[place] for point in points}) > 1:
            files.append(draw_over_chunks(rows, measure, name, folder / f"quality-{name.replace('_', '-')}.svg"))
            if any(row.blended for row in rows):
                files.append(draw_least_work(rows, measure, name, folder / f"least-work-{name.replace('_', '-')}.svg"))
    return files


def draw_against(rows: Sequence[MethodRow], measure: str, cost: str, path: Path) -> Path:
    """Quality against time to first token or work, each method a point, those with ratios a line (Fig. 12, 13)."""

    def draw(axis: Any) -> None:
        for number, (method, of) in enumerate(_by_method(rows, measure).items()):
            of = sorted(of, key=lambda row: getattr(row, cost))
            _line(axis, [getattr(row, cost) for row in of], of, measure, method, number)
        titles = {
            "ttft": "time to first token (s)",
            "work": "work, share of full prefill's",
            "work_24": "work in 24 layers, share of full prefill's",
        }
        axis.set(xlabel=titles[cost], ylabel=_NAMES[measure], xlim=(0, None))

    return drawn(path, draw)


def draw_over_ratio(rows: Sequence[MethodRow], measure: str, path: Path) -> Path:
    """Quality over the recompute ratio, with full prefill and full reuse as levels (Fig. 16)."""

    def draw(axis: Any) -> None:
        for number, (method, of) in enumerate(_by_method(rows, measure).items()):
            if of[0].ratio is None:
                if method in ("full", "reuse"):
                    style = {"full": "--", "reuse": ":"}[method]
                    axis.axhline(of[0].measures[measure].mean, linestyle=style, color="grey", label=method)
                continue
            of = sorted(of, key=lambda row: row.ratio or 0)
            _line(axis, [row.ratio or 0 for row in of], of, measure, method, number)
        axis.set(xlabel="recompute ratio", ylabel=_NAMES[measure])

    return drawn(path, draw)


def _draw_by_kind(rows: Sequence[MethodRow], measure: str, path: Path) -> Path:
    """Quality of each method by question kind."""

    def draw(axis: Any) -> None:
        kinds = list(dict.fromkeys(kind for row in rows for kind in row.kinds))
        shown = [row for row in rows if row.kinds and all(measure in found for found in row.kinds.values())]
        width = 0.8 / max(1, len(shown))
        for number, row in enumerate(shown):
            places = [at + (number - (len(shown) - 1) / 2) * width for at in range(len(kinds))]
            heights = [row.kinds.get(kind, {}).get(measure, 0.0) for kind in kinds]
            axis.bar(places, heights, width, label=row.label)
        axis.set_xticks(range(len(kinds)), kinds)
        axis.set(ylabel=_NAMES[measure])

    return drawn(path, draw, width=7)


def draw_over_chunks(rows: Sequence[MethodRow], measure: str, name: str, path: Path) -> Path:
    """Quality over the number or the length of chunks, a line a method (Fig. 2)."""

    def draw(axis: Any) -> None:
        by_label: dict[str, list[MethodRow]] = {}
        for row in rows:
            if measure in row.measures:
                by_label.setdefault(row.label, []).append(row)
        for number, (label, of) in enumerate(by_label.items()):
            of = sorted(of, key=lambda row: getattr(row, name))
            _line(axis, [getattr(row, name) for row in of], of, measure, label, number)
        axis.set_xticks(sorted({getattr(row, name) for row in rows}))
        axis.set(xlabel=_chunk_title(name), ylabel=_NAMES[measure])

    return drawn(path, draw)


def draw_least_work(rows: Sequence[MethodRow], measure: str, name: str, path: Path) -> Path:
    """Time to first token of full prefill and of the least work that loses no more than 0.015 (Fig. 15a, b)."""

    def draw(axis: Any) -> None:
        best = least_work(rows, measure)
        full = {(row.chunks, row.chunk_tokens): row for row in rows if row.method == "full"}
        place = {"chunks": 0, "chunk_tokens": 1}[name]
        points = sorted(full, key=lambda point: point[place])
        axis.plot([p[place] for p in points], [full[p].ttft for p in points], marker="s", label="full prefill")
        having = [(p, row) for p in points if (row := best.get(p)) is not None]
        axis.plot([p[place] for p, _ in having], [r.ttft for _, r in having], marker="o", label=f"loss ≤ {LOSS}")
        for point, row in having:
            text = row.label.replace(":", "\n") + f"\n{row.work:.0%} work"  # options below the name
            where = {"textcoords": "offset points", "xytext": (0, 8), "ha": "center", "va": "bottom"}
            axis.annotate(text, (point[place], row.ttft), fontsize="x-small", **where)
        axis.set_xticks([point[place] for point in points])
        axis.margins(x=0.15)
        axis.set(xlabel=_chunk_title(name), ylabel="time to first token (s)", ylim=(0, None))

    return drawn(path, draw)


def _line(axis: Any, places: Sequence[float], rows: Sequence[MethodRow], measure: str, label: str, number: int) -> None:
    """A method's means with their intervals."""
    values = [row.measures[measure] for row in rows]
    errors = [[max(0.0, v.mean - v.low) for v in values], [max(0.0, v.high - v.mean) for v in values]]
    # Ten colours that are easily told apart, then the same with another mark.
    look = {"color": f"C{number % 10}", "marker": "osD^v"[number // 10 % 5]}
    axis.errorbar(places, [v.mean for v in values], yerr=errors, capsize=2, linewidth=1, label=label, **look)


def _by_method(rows: Sequence[MethodRow], measure: str) -> dict[str, list[MethodRow]]:
    found: dict[str, list[MethodRow]] = {}
    for row in rows:
        if measure in row.measures:
            found.setdefault(row.method, []).append(row)
    return found


def _chunk_title(name: str) -> str:
    return {"chunks": "chunks in the prompt", "chunk_tokens": "tokens of a chunk"}[name]


def drawn(path: Path, draw: Callable[[Any], None], width: float = 5) -> Path:
    """A file with what is drawn on an axis, and with a legend where there is more than one name."""
    pyplot = import_pyplot()
    figure, axis = pyplot.subplots(figsize=(width, 3.5), layout="constrained")
    axis.set_prop_cycle(color=pyplot.get_cmap("tab10" if width == 5 else "tab20").colors)
    draw(axis)
    _explain(figure, axis, width)
    save_figure(pyplot, figure, path)
    return path


def _explain(figure: Any, axis: Any, width: float) -> None:
    """A legend where there is more than one name: within the plot, or beside it if it is long."""
    handles, names = axis.get_legend_handles_labels()
    if 1 < len(names) <= 4:
        axis.legend(fontsize="small")
    elif names[1:]:
        figure.set_size_inches(width + 2.5, 3.5)
        figure.legend(handles, names, loc="outside right upper", fontsize="x-small")


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
        parser, "device", "dtype", "size-limit", data_dir="where calibrated settings are (default: user's cache)"
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
def open_evaluation(parsed: argparse.Namespace) -> Iterator[EvalSetup]:
    """Read the questions and load the model."""
    options = _options(parsed)
    read = load_cases(parsed.data, parsed.format, parsed.limit)
    size = parsed.size_limit or (_MEMORY if parsed.kv == "memory" else None)
    given: dict[str, Any] = {} if size is None else {"size_limit": parse_bytes(size)}
    fixed: dict[str, Any] = {"min_tokens": 0, "write_back": "inline", "prompt_cache": 0, "verify": "off"}
    config = BlendConfig(recompute_ratio=0.15, **fixed, **given)
    kept = data_folder(parsed) / "kv"
    with BlendEngine.from_pretrained(
        parsed.model or DEFAULT_MODEL,
        config=config,
        store=None if parsed.kv == "memory" else Path(parsed.kv or Path(parsed.out) / "kv"),
        device=parsed.device,
        dtype=parsed.dtype,
    ) as engine:
        ranker = _ranker(parsed.retrieve, read)
        yield EvalSetup(engine, lambda chunks: read, options, ranker, _calibrated(kept, engine))


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


def _ranker(how: str, cases: Sequence[EvalCase]) -> Ranker | None:

    if how == "file":
        return None
    if how == "words":
        return WordRanker(passage.chunk for case in cases for passage in case.passages)

    return VectorRanker(SentenceTransformerEmbeddings(how))


def _calibrated(kept: Path, engine: BlendEngine) -> BlendSettings | None:

    profile = MachineProfile.load(kept / "profile.json")
    return profile.blends.get(engine.fingerprint) if profile else None
