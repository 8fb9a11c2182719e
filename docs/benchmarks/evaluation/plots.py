"""A run drawn in the paper's manner; needs matplotlib, which the extra ``benchmarks`` installs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from docs.benchmarks.evaluation.runner import EvalRun
from docs.benchmarks.evaluation.summary import LOSS, MethodRow, least_work, main_measure
from docs.benchmarks.scripts.plots import import_pyplot, save_figure

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
