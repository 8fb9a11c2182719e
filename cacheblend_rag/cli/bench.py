"""``cacheblend-rag bench``: measure speed on this machine."""

from __future__ import annotations

import argparse
import os

__all__ = ["add_bench"]


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    bench = commands.add_parser("bench", help="measure speed on this machine")
    kinds = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    ttft = kinds.add_parser("ttft", help="time to first token of every method, warm store")
    ttft.add_argument("--shape", default="qwen2.5-0.5b", help="model shape, random weights")
    ttft.add_argument("--dtype", default="float32", help='"float32", "bfloat16" or "float16"')
    ttft.add_argument("--chunks", type=int, default=4)
    ttft.add_argument("--chunk-tokens", type=int, default=512)
    ttft.add_argument("--ratio", type=float, action="append", help="may be given several times")
    ttft.add_argument("--rounds", type=int, default=5)
    ttft.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    ttft.set_defaults(run=_bench_ttft)
    loading = kinds.add_parser("loading", help="time to first token over storage of many speeds")
    loading.add_argument("--shape", default="smollm2-135m", help="model shape, random weights")
    loading.add_argument("--dtype", default="float32", help='"float32", "bfloat16" or "float16"')
    loading.add_argument("--chunks", type=int, default=4)
    loading.add_argument("--chunk-tokens", type=int, default=512)
    loading.add_argument("--factor", type=float, action="append", help="of the break-even; may be given several times")
    loading.add_argument("--rounds", type=int, default=3)
    loading.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    loading.set_defaults(run=_bench_loading)


def _bench_ttft(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.evaluation.ttft import TTFTOptions, show

    names = ("shape", "dtype", "chunks", "chunk_tokens", "rounds", "threads")
    chosen = {name: getattr(parsed, name) for name in names}
    if parsed.ratio:
        chosen["ratios"] = tuple(parsed.ratio)
    show(TTFTOptions(**chosen))
    return 0


def _bench_loading(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.evaluation.overlap import OverlapOptions, show

    names = ("shape", "dtype", "chunks", "chunk_tokens", "rounds", "threads")
    chosen = {name: getattr(parsed, name) for name in names}
    if parsed.factor:
        chosen["factors"] = tuple(parsed.factor)
    show(OverlapOptions(**chosen))
    return 0
