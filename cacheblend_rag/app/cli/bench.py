"""``cacheblend-rag bench``: measure speed on this machine."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from typing import Any, TypeVar

from cacheblend_rag.app.cli.arguments import add_arguments

_Options = TypeVar("_Options")


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    bench = commands.add_parser("bench", help="measure speed on this machine")
    kinds = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    ttft = kinds.add_parser("ttft", help="time to first token of every method beside its bound, warm store")
    add_ttft_arguments(ttft)
    ttft.set_defaults(run=_bench_ttft)


def add_ttft_arguments(parser: argparse.ArgumentParser) -> None:
    """What `TTFTOptions` says, and a file for the plot."""
    add_prompt_arguments(parser, shape="qwen2.5-0.5b", rounds=5)
    parser.add_argument(
        "--ratios", type=float, nargs="+", metavar="R", help="of flat HKVD and chunk starts (default 0.15 0.05)"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="NAME",
        help="full, prefix, reuse, hkvd-v, hkvd-k, gradual-30, gradual-50, starts, default, cold (default: all)",
    )
    parser.add_argument(
        "--kv", nargs="+", metavar="PLACE", help="where stored KV lies: disk, memory, gpu (default: disk memory)"
    )


def add_prompt_arguments(
    parser: argparse.ArgumentParser, *, shape: str, rounds: int, chunks: int = 4, chunk_tokens: int = 512
) -> None:
    """What `BenchOptions` says, and a file for the plot."""
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
        A dataclass. What no argument gives keeps its default; lists become tuples.
    parsed : Namespace
    """
    names = {option.name for option in fields(kind)}  # type: ignore[arg-type]
    given: dict[str, Any] = {name: value for name, value in vars(parsed).items() if name in names and value is not None}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def _bench_ttft(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.calibration.bench.ttft import TTFTOptions, show

    show(options_from(TTFTOptions, parsed), parsed.plot)
    return 0
