"""Shared by scripts of benchmarks: arguments, errors, ways that are timed in turn, and how these are shown."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation import LogitsProcessor

from cacheblend_rag.app.cli.arguments import add_arguments
from cacheblend_rag.errors import CacheBlendError
from docs.benchmarks.scripts.measuring import shown_seconds, table
from docs.benchmarks.scripts.plots import EDGE, bar_rows

__all__ = [
    "TokenClock",
    "add_prompt_arguments",
    "draw_ways",
    "greedy",
    "in_eight_bits",
    "in_turn",
    "machine_parser",
    "options_from",
    "prompt_parser",
    "reported",
    "run_bench",
    "script_parser",
    "table_of_ways",
    "write_json",
]

_Options = TypeVar("_Options")


def script_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """A parser of the script of a name; ``about`` is its docstring."""
    return argparse.ArgumentParser(prog=f"python -m docs.benchmarks.scripts.{name}", description=about)


def machine_parser(name: str, about: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with `add_machine_arguments`, whose defaults are given."""
    parser = script_parser(name, about)
    add_machine_arguments(parser, **defaults)
    return parser


def prompt_parser(name: str, about: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with `add_prompt_arguments`, whose defaults are given."""
    parser = script_parser(name, about)
    add_prompt_arguments(parser, **defaults)
    return parser


def add_prompt_arguments(
    parser: argparse.ArgumentParser, *, shape: str, rounds: int, chunks: int = 4, chunk_tokens: int = 512
) -> None:
    """Arguments for `BenchOptions`, and a file for the plot."""
    add_machine_arguments(parser, shape=shape, rounds=rounds)
    parser.add_argument("--chunks", type=int, default=chunks)
    parser.add_argument("--chunk-tokens", type=int, default=chunk_tokens)


def add_machine_arguments(parser: argparse.ArgumentParser, *, shape: str, rounds: int) -> None:
    """The model, and how it is run and timed, whatever the prompt."""
    parser.add_argument("--shape", default=shape, help="model shape, random weights; or the path of a config.json")
    parser.add_argument("--dtype", default="float32", help='"float32", "bfloat16" or "float16"')
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--plot", metavar="FILE", help="draw the result into a file, such as result.svg")
    add_arguments(parser, "device")


def options_from(kind: type[_Options], parsed: argparse.Namespace) -> _Options:
    """Options of a benchmark, from arguments of the same names.

    Parameters
    ----------
    kind : type
        A dataclass. An option without an argument keeps its default; lists become tuples.
    parsed : Namespace
    """
    names = {option.name for option in fields(kind)}  # type: ignore[arg-type]
    given: dict[str, Any] = {name: value for name, value in vars(parsed).items() if name in names and value is not None}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def run_bench(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    kind: type[_Options],
    show: Callable[[_Options, str | None], None],
) -> int:
    """Measure what the arguments say, and show it; the process's exit status.

    Parameters
    ----------
    parser : ArgumentParser
        Its arguments have the names of the options.
    arguments : sequence of str, optional
        Those of the process by default.
    kind : type
        The options.
    show : callable
        Takes them and the file for the plot.
    """
    parsed = parser.parse_args(arguments)
    return reported(parser, lambda: show(options_from(kind, parsed), parsed.plot))


def reported(parser: argparse.ArgumentParser, work: Callable[[], object]) -> int:
    """Do a script's work; the process's exit status.

    It is 2, with the reason on standard error, if the work is refused, and 130 if it is interrupted.
    """
    try:
        work()
    except CacheBlendError as error:
        print(f"{parser.prog.rpartition('.')[2]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog.rpartition('.')[2]}: interrupted", file=sys.stderr)
        return 130
    return 0


def write_json(path: str | Path, result: Mapping[str, Any]) -> None:
    """Write the JSON that stands beside a table."""
    Path(path).write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


class TokenClock(LogitsProcessor):  # type: ignore[misc]
    """Notes when each token's logits are there.

    Attributes
    ----------
    times : list of float
        As `time.perf_counter` counts.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See `LogitsProcessor`."""
        self.times.append(time.perf_counter())
        return scores


def greedy(tokenizer: Any, new_tokens: int) -> GenerationConfig:
    """Greedy decoding of exactly so many tokens, whatever they are."""
    return GenerationConfig(
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )


def in_eight_bits(model: nn.Module) -> None:
    """Give linear layers but the output head torchao's weights of 8 bits, in place."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # type: ignore[import-untyped]

    def meant(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and name != "lm_head"

    quantize_(model, Int8WeightOnlyConfig(set_inductor_config=False), filter_fn=meant)


def in_turn(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run ways in turn, round after round; a first round warms up and does not count.

    Parameters
    ----------
    ways : mapping of str to callable
        Each says how many seconds it took, or what else is measured of it.
    rounds : int
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            took = way()
            if number:
                found[name].append(took)
    return found


def table_of_ways(head: Sequence[str], result: Mapping[str, Any], seconds: str, ratios: str) -> str:
    """A table of times.

    Parameters
    ----------
    head : sequence of str
        Titles of the columns: the way, its time, and its ratio to another's.
    result : mapping
    seconds, ratios : str
        Under what these stand in the result, by way.
    """
    rows = [(name, shown_seconds(value), f"{result[ratios][name]:.2f}×") for name, value in result[seconds].items()]
    return table(head, rows)


def draw_ways(pyplot: Any, result: Mapping[str, Any], ranges: Mapping[str, Sequence[float]], ratios: str) -> Any:
    """A figure of each way's milliseconds a token with their range, and its ratio to the first way's."""
    seconds = result["seconds_a_token"]
    first = next(iter(seconds))
    figure, axis = pyplot.subplots(figsize=(7.5, 1.6 + 0.32 * len(seconds)), layout="constrained")
    for plain, look in ((True, {"facecolor": "white", "hatch": "///"}), (False, {"facecolor": "0.65"})):
        at = [n for n, name in enumerate(seconds) if name.startswith(("plain", "transformers")) == plain]
        values = [1e3 * value for n, value in enumerate(seconds.values()) if n in at]
        label = "plain transformers" if plain else "this package"
        axis.barh(at, values, height=0.7, label=label, **EDGE, **look)
    for number, (name, value) in enumerate(seconds.items()):
        low, high = ranges[name]
        spread = {"xerr": [[1e3 * (value - low)], [1e3 * (high - value)]], "color": "black", "capsize": 3}
        axis.errorbar(1e3 * value, number, linestyle="", label="" if number else "range of the rounds", **spread)
        # In a column of their own, where no line crosses them.
        where = {"xycoords": axis.get_yaxis_transform(), "va": "center", "fontsize": "small"}
        axis.annotate(f"{1e3 * value:.2f} ms, {result[ratios][name]:.2f}×", (1.01, number), **where)
    axis.axvline(1e3 * seconds[first], color="black", linewidth=1, linestyle="--", label=first)
    bar_rows(axis, {name: float(number) for number, name in enumerate(seconds)})
    axis.set(xlabel="time a token (ms)", xlim=(0, None))
    figure.legend(loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    return figure
