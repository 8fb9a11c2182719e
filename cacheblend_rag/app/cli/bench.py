"""``cacheblend-rag bench`` and ``profile``: measure speed on this machine, by itself or for the loading controller."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from typing import Any, TypeVar

from cacheblend_rag.app.cli.arguments import add_arguments, data_folder


def add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    profile = commands.add_parser("profile", help="measure prefill and storage, so that the ratio can be chosen")
    add_arguments(profile, "model", "data-dir", "shared-store", "device", "dtype")
    profile.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048], metavar="TOKENS")
    profile.add_argument(
        "--file-size", default="256MB", metavar="SIZE", help="of what is read from each store (default 256 MB)"
    )
    profile.set_defaults(run=_profile)


def _profile(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.calibration.profiler import profile_machine
    from cacheblend_rag.config import DEFAULT_MODEL, parse_bytes
    from cacheblend_rag.engine.engine import BlendEngine
    from cacheblend_rag.errors import ConfigError

    if min(parsed.lengths) < 1:
        raise ConfigError("lengths", parsed.lengths, "use numbers of tokens, 1 or more")
    size = parse_bytes(parsed.file_size, "file_size")
    model = parsed.model or DEFAULT_MODEL
    store = [str(data_folder(parsed) / "kv"), *filter(None, [parsed.shared_store])]
    with BlendEngine.from_pretrained(model, store=store, device=parsed.device, dtype=parsed.dtype) as engine:
        found, path = profile_machine(engine, lengths=parsed.lengths, size=size)
        prefill = found.prefill[engine.fingerprint]
    for tokens in parsed.lengths:
        rows = "  ".join(f"{prefill.blended(tokens, 0.0, ratio):.3f} s at {ratio:.0%}" for ratio in (0.15, 0.5))
        print(f"prefill of {tokens:>6} tokens  {prefill.seconds(tokens):>9.3f} s  rows recomputed: {rows}")
    for name, device in found.devices.items():
        print(f"{name:<8} {device.throughput / 1e6:>10,.0f} MB/s {device.latency * 1e6:>10,.1f} µs a read")
    print(f"kept in {path}")
    return 0


_Options = TypeVar("_Options")


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    bench = commands.add_parser("bench", help="measure speed on this machine")
    kinds = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    ttft = kinds.add_parser("ttft", help="time to first token of every method beside its bound, warm store")
    add_ttft_arguments(ttft)
    ttft.set_defaults(run=_bench_ttft)


def add_ttft_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments for `TTFTOptions`, and a file for the plot."""
    add_prompt_arguments(parser, shape="qwen2.5-0.5b", rounds=5)
    parser.add_argument(
        "--ratios", type=float, nargs="+", metavar="R", help="of flat HKVD and chunk starts (default 0.15 0.05)"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="NAME",
        help="full, prefix, reuse, hkvd, gradual-30, gradual-50, starts, default, invoke, cold (default: all)",
    )
    parser.add_argument(
        "--kv", nargs="+", metavar="PLACE", help="where stored KV lies: disk, memory, gpu (default: disk memory)"
    )


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


def _bench_ttft(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.calibration.bench.ttft import TTFTOptions, show

    show(options_from(TTFTOptions, parsed), parsed.plot)
    return 0
