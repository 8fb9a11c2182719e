"""What the benchmarks of ways and stores found, drawn as bars that can be told apart without colour.

Each takes pyplot (see `cacheblend_rag.evaluation.plotting.pyplot_for`), what the benchmark's last line says,
and the file to write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cacheblend_rag.evaluation.plotting import save_figure

__all__ = ["draw_decode", "draw_store", "draw_ttft", "draw_warm", "titled"]

# How bars look by where the KV they read lies; those of methods that read none come first.
_PLACES: dict[str, dict[str, str]] = {
    "": {"facecolor": "white", "label": "no KV loaded"},
    "disk": {"facecolor": "0.5", "label": "KV on disk"},
    "memory": {"facecolor": "0.85", "hatch": "////", "label": "KV in memory"},
    "gpu": {"facecolor": "0.95", "hatch": "....", "label": "KV on the GPU"},
}
_EDGE = {"edgecolor": "black", "linewidth": 0.6}
_PARTS = ("write", "first read", "read")


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
            axis.barh([places[name] for name in at], [seconds[name] for name in at], height=0.9, **_EDGE, **look)
    for colour, width, label in (("white", 4, None), ("black", 2, "bound")):  # stands out on any bar
        low, high = ([places[name] + half for name in seconds] for half in (-0.45, 0.45))
        axis.vlines([bounds[name] for name in seconds], low, high, colors=colour, linewidth=width, label=label)
    for name, value in seconds.items():
        end = (max(value, bounds[name]), places[name])
        text = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": "small"}
        axis.annotate(f"{faster[name]:.1f}×", end, **text)
    middle = {method: [places[name] for name in seconds if split[name][0] == method] for method in methods}
    _rows(axis, {method: sum(at) / len(at) for method, at in middle.items()})
    axis.set(xlabel="time to first token (s)", xlim=(0, 1.1 * max(*seconds.values(), *bounds.values())))
    prompt = f"{result['prompt_tokens']:,} tokens"
    titled(figure, "Time to first token, and how many times faster than full recompute", result, prompt)
    figure.legend(loc="outside lower center", ncols=5, fontsize="small", frameon=False)
    save_figure(pyplot, figure, path)


def _method_and_place(name: str) -> tuple[str, str]:
    method, _, place = name.rpartition(", ")
    return (method, place) if place in _PLACES and method else (name, "")


def draw_store(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """Throughput of writing and reading, by store and codec; each part has a scale of its own."""
    rates = result["bytes_a_second"]
    places = {name: float(number) for number, name in enumerate(rates)}
    size = (9.5, 1.5 + 0.3 * len(places))
    figure, axes = pyplot.subplots(1, len(_PARTS), sharey=True, figsize=size, layout="constrained")
    _rows(axes[0], places)
    for axis, part in zip(axes, _PARTS, strict=True):
        shown = {name: parts[part] / 1e9 for name, parts in rates.items() if part in parts}
        said = {name: f"{shown[name]:.2f}" if name in shown else "–" for name in rates}
        if part == "write" and shown.pop("memory", None):  # would dwarf the others and says nothing of the store
            said["memory"] = "nothing is copied"
        at = [places[name] for name in shown]
        axis.barh(at, list(shown.values()), height=0.7, facecolor="0.6", **_EDGE)
        for name, text in said.items():
            end = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": "small"}
            axis.annotate(text, (shown.get(name, 0.0), places[name]), **end)
        axis.set(title=part, xlabel="GB of KV a second", xlim=(0, 1.25 * max(shown.values(), default=1.0)))
        _unboxed(axis)
    records = f"{result['records']} records of {result['options']['chunk_tokens']} tokens"
    titled(figure, "Throughput of stores, higher is better (each part has its own scale)", result, records)
    save_figure(pyplot, figure, path)


def draw_warm(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """Seconds a token of warming, beside plain batched prefill."""
    tokens = result["tokens"]
    ranges = {name: (low / tokens, high / tokens) for name, (low, high) in result["spread"].items()}
    figure = _ways(pyplot, result, ranges, "to_batch")
    detail = f"{result['options']['chunks']} chunks, {tokens:,} tokens"
    titled(figure, "Computing chunks ahead of time, beside one plain batch", result, detail)
    save_figure(pyplot, figure, path)


def draw_decode(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """Seconds a token after the first, beside transformers."""
    figure = _ways(pyplot, result, result["spread"], "to_transformers")
    detail = f"{result['options']['new_tokens']} new tokens behind {result['prompt_tokens']:,}"
    titled(figure, "Decoding, beside transformers", result, detail)
    save_figure(pyplot, figure, path)


def _ways(pyplot: Any, result: Mapping[str, Any], ranges: Mapping[str, Sequence[float]], ratios: str) -> Any:
    """A figure of each way's milliseconds a token with their range, and its ratio to the first way's."""
    seconds = result["seconds_a_token"]
    first = next(iter(seconds))
    figure, axis = pyplot.subplots(figsize=(7.5, 1.6 + 0.32 * len(seconds)), layout="constrained")
    for plain, look in ((True, {"facecolor": "white", "hatch": "///"}), (False, {"facecolor": "0.65"})):
        at = [n for n, name in enumerate(seconds) if name.startswith(("plain", "transformers")) == plain]
        values = [1e3 * value for n, value in enumerate(seconds.values()) if n in at]
        label = "plain transformers" if plain else "this package"
        axis.barh(at, values, height=0.7, label=label, **_EDGE, **look)
    for number, (name, value) in enumerate(seconds.items()):
        low, high = ranges[name]
        spread = {"xerr": [[1e3 * (value - low)], [1e3 * (high - value)]], "color": "black", "capsize": 3}
        axis.errorbar(1e3 * value, number, linestyle="", label="" if number else "range of the rounds", **spread)
        # In a column of their own, where no line crosses them.
        where = {"xycoords": axis.get_yaxis_transform(), "va": "center", "fontsize": "small"}
        axis.annotate(f"{1e3 * value:.2f} ms, {result[ratios][name]:.2f}×", (1.01, number), **where)
    axis.axvline(1e3 * seconds[first], color="black", linewidth=1, linestyle="--", label=first)
    _rows(axis, {name: float(number) for number, name in enumerate(seconds)})
    axis.set(xlabel="time a token (ms)", xlim=(0, None))
    figure.legend(loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    return figure


def _rows(axis: Any, places: Mapping[str, float]) -> None:
    """Names of rows of bars, the first on top."""
    axis.set_yticks(list(places.values()), list(places))
    axis.invert_yaxis()
    axis.margins(y=0.02)
    _unboxed(axis)


def _unboxed(axis: Any) -> None:
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
        What else it depended on.
    """
    options, machine = result["options"], result["machine"]
    device = machine["processor"] if machine["device"] == "cpu" else machine["device"]
    conditions = f"{Path(options['shape']).name}, {options['dtype']}, {detail}, {device}"
    figure.suptitle(f"{title}\n{conditions}", fontsize="medium")
