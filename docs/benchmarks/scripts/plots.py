"""Plots of benchmarks: bars that can be told apart without colour. matplotlib comes with the extra ``benchmarks``.

Each takes pyplot (`pyplot_for`), what the benchmark's last line says, and the file to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import ConfigError, MissingExtraError

# How bars look by where the KV they read lies; those of methods that read none come first.
_PLACES: dict[str, dict[str, str]] = {
    "": {"facecolor": "white", "label": "no KV loaded"},
    "disk": {"facecolor": "0.5", "label": "KV on disk"},
    "memory": {"facecolor": "0.85", "hatch": "////", "label": "KV in memory"},
    "gpu": {"facecolor": "0.95", "hatch": "....", "label": "KV on the GPU"},
}
EDGE = {"edgecolor": "black", "linewidth": 0.6}
"""How bars are drawn round."""


def import_pyplot() -> Any:
    """Pyplot of matplotlib, drawing into files.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("matplotlib", "benchmarks") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def pyplot_for(path: str | Path | None) -> Any:
    """Pyplot for a file drawn after long work, which is checked now; None if none is named.

    Raises
    ------
    ConfigError
        If matplotlib draws no such kind of file, or its folder does not exist.
    MissingExtraError
        If matplotlib is not installed.
    """
    if not path:
        return None
    pyplot = import_pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    wanted = Path(path)
    if wanted.suffix.lower().removeprefix(".") not in FigureCanvasBase.get_supported_filetypes():
        raise ConfigError("plot", str(path), "use a file name that ends in .svg, .png or .pdf")
    if not wanted.parent.is_dir():
        raise ConfigError("plot", str(path), "use a folder that exists")
    return pyplot


def save_figure(pyplot: Any, figure: Any, path: str | Path) -> None:
    """Write a figure into a file and let go of it; the same figure gives the same file."""
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(Path(path).suffix.lower())
    with pyplot.rc_context({"svg.hashsalt": "cacheblend-rag"}):  # ids that do not change
        figure.savefig(path, dpi=150, metadata=undated)
    pyplot.close(figure)


def draw_ttft(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """Time to first token of every method, a bar each, with its bound and how many times faster it is."""
    seconds, bounds, faster = result["ttft_seconds"], result["bound_seconds"], result["times_faster"]
    split = {name: _method_and_place(name) for name in seconds}
    methods = list(dict.fromkeys(method for method, _ in split.values()))
    # Bars of one method stand together, methods half a bar apart.
    places = {name: number + 0.5 * methods.index(split[name][0]) for number, name in enumerate(seconds)}
    figure, axis = pyplot.subplots(figsize=(7.5, 1.5 + 0.24 * max(places.values())), layout="constrained")
    for place, look in _PLACES.items():
        at = [name for name in seconds if split[name][1] == place]
        if at:
            axis.barh([places[name] for name in at], [seconds[name] for name in at], height=0.9, **EDGE, **look)
    for colour, width, label in (("white", 4, None), ("black", 2, "bound")):  # stands out on any bar
        low, high = ([places[name] + half for name in seconds] for half in (-0.45, 0.45))
        axis.vlines([bounds[name] for name in seconds], low, high, colors=colour, linewidth=width, label=label)
    for name, value in seconds.items():
        end = (max(value, bounds[name]), places[name])
        text = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": "small"}
        axis.annotate(f"{faster[name]:.1f}×", end, **text)
    middle = {method: [places[name] for name in seconds if split[name][0] == method] for method in methods}
    bar_rows(axis, {method: sum(at) / len(at) for method, at in middle.items()})
    axis.set(xlabel="time to first token (s)", xlim=(0, 1.1 * max(*seconds.values(), *bounds.values())))
    prompt = f"{result['prompt_tokens']:,} tokens"
    titled(figure, "Time to first token, and how many times faster than full recompute", result, prompt)
    figure.legend(loc="outside lower center", ncols=5, fontsize="small", frameon=False)
    save_figure(pyplot, figure, path)


def _method_and_place(name: str) -> tuple[str, str]:
    method, _, place = name.rpartition(", ")
    return (method, place) if place in _PLACES and method else (name, "")


def bar_rows(axis: Any, places: Mapping[str, float]) -> None:
    """Names of rows of bars, the first on top."""
    axis.set_yticks(list(places.values()), list(places))
    axis.invert_yaxis()
    axis.margins(y=0.02)
    unboxed(axis)


def unboxed(axis: Any) -> None:
    """Leave out the frame's upper and right sides, and marks beside names."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def titled(figure: Any, title: str, result: Mapping[str, Any], detail: str) -> None:
    """Write above a figure what it shows, and under what it was measured: model, element type, processor.

    Parameters
    ----------
    figure : matplotlib Figure
    title : str
    result : mapping
        Of a benchmark.
    detail : str
        Further conditions of the measurement.
    """
    options, machine = result["options"], result["machine"]
    device = machine["processor"] if machine["device"] == "cpu" else machine["device"]
    conditions = f"{Path(options['shape']).name}, {options['dtype']}, {detail}, {device}"
    figure.suptitle(f"{title}\n{conditions}", fontsize="medium")
