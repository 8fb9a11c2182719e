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


def _add_shared(parser: argparse.ArgumentParser, *, shape: str, rounds: int) -> None:
    parser.add_argument("--shape", default=shape, help="model shape, random weights")
    parser.add_argument("--dtype", default="float32", help='"float32", "bfloat16" or "float16"')
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--chunk-tokens", type=int, default=512)
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


def _bench_loading(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.evaluation.overlap import OverlapOptions, show

    chosen = _shared(parsed)
    if parsed.factor:
        chosen["factors"] = tuple(parsed.factor)
    show(OverlapOptions(**chosen))
    return 0
