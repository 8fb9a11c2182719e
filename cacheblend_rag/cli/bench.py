"""``cacheblend-rag bench``: measure speed on this machine."""

from __future__ import annotations

import argparse
import os
from typing import Any

__all__ = ["add_bench"]


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    bench = commands.add_parser("bench", help="measure speed on this machine")
    kinds = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    ttft = kinds.add_parser("ttft", help="time to first token of every method, warm store")
    _add_shared(ttft, shape="qwen2.5-0.5b", rounds=5)
    ttft.add_argument("--ratio", type=float, action="append", help="may be given several times")
    ttft.set_defaults(run=_bench_ttft)
    loading = kinds.add_parser("loading", help="time to first token over storage of many speeds")
    _add_shared(loading, shape="smollm2-135m", rounds=3)
    loading.add_argument("--factor", type=float, action="append", help="of the break-even; may be given several times")
    loading.set_defaults(run=_bench_loading)
    decode = kinds.add_parser("decode", help="seconds a token after a blend, beside plain transformers")
    _add_shared(decode, shape="qwen2.5-0.5b", rounds=5)
    decode.add_argument("--new-tokens", type=int, default=32)
    decode.set_defaults(run=_bench_decode)
    throughput = kinds.add_parser("throughput", help="time to first token against the rate of requests")
    _add_shared(throughput, shape="smollm2-135m", rounds=20, chunks=3, chunk_tokens=256)
    throughput.add_argument("--requests", type=int, default=20)
    throughput.add_argument("--documents", type=int, default=16, help="chunks in the whole set")
    throughput.add_argument("--capacity", type=int, default=0, help="chunks that can be stored; 0 for all")
    throughput.add_argument("--new-tokens", type=int, default=4)
    throughput.add_argument("--exponent", type=float, default=1.0, help="of the Zipf law")
    throughput.add_argument("--load", type=float, action="append", help="rate, as a multiple of full recompute's most")
    throughput.add_argument("--plot", metavar="FILE")
    throughput.set_defaults(run=_bench_throughput)


def _add_shared(
    parser: argparse.ArgumentParser, *, shape: str, rounds: int, chunks: int = 4, chunk_tokens: int = 512
) -> None:
    parser.add_argument("--shape", default=shape, help="model shape, random weights")
    parser.add_argument("--dtype", default="float32", help='"float32", "bfloat16" or "float16"')
    parser.add_argument("--chunks", type=int, default=chunks)
    parser.add_argument("--chunk-tokens", type=int, default=chunk_tokens)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)


def _shared(parsed: argparse.Namespace) -> dict[str, Any]:
    names = ("shape", "dtype", "chunks", "chunk_tokens", "rounds", "threads")
    return {name: getattr(parsed, name) for name in names}


def _bench_ttft(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.evaluation.ttft import TTFTOptions, show

    chosen = _shared(parsed)
    if parsed.ratio:
        chosen["ratios"] = tuple(parsed.ratio)
    show(TTFTOptions(**chosen))
    return 0


def _bench_decode(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.evaluation.decoding import DecodingOptions, show

    show(DecodingOptions(**_shared(parsed), new_tokens=parsed.new_tokens))
    return 0


def _bench_throughput(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.evaluation.throughput import ThroughputOptions, show

    chosen = _shared(parsed)
    for name in ("requests", "documents", "capacity", "new_tokens", "exponent"):
        chosen[name] = getattr(parsed, name)
    if parsed.load:
        chosen["loads"] = tuple(parsed.load)
    show(ThroughputOptions(**chosen), parsed.plot)
    return 0


def _bench_loading(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.evaluation.overlap import OverlapOptions, show

    chosen = _shared(parsed)
    if parsed.factor:
        chosen["factors"] = tuple(parsed.factor)
    show(OverlapOptions(**chosen))
    return 0
