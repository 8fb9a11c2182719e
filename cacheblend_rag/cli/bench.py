"""``cacheblend-rag bench``: measure speed on this machine."""

from __future__ import annotations

import argparse
import os
from typing import Any

from cacheblend_rag.cli.arguments import add_arguments

__all__ = ["add_bench"]


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    bench = commands.add_parser("bench", help="measure speed on this machine")
    kinds = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    _add_ttft(kinds)
    _add_store(kinds)
    _add_scaling(kinds)
    warm = kinds.add_parser("warm", help="seconds a token of warming, beside plain batched prefill")
    _add_shared(warm, shape="qwen2.5-0.5b", rounds=3, chunks=8)
    warm.set_defaults(run=_bench_warm)
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
    throughput.add_argument("--batch", type=int, action="append", help="requests at once (default 1, 2, 4 and 8)")
    throughput.set_defaults(run=_bench_throughput)
    concurrent = kinds.add_parser("concurrent", help="requests that come at once, several of them under way")
    _add_shared(concurrent, shape="qwen2.5-0.5b", rounds=3, chunks=3, chunk_tokens=256)
    concurrent.add_argument("--new-tokens", type=int, default=32)
    concurrent.add_argument("--limit", type=int, action="append", help="answers under way (default 1 and 4)")
    concurrent.add_argument("--at-once", type=int, action="append", help="requests (default 1, 2, 4 and 8)")
    concurrent.set_defaults(run=_bench_concurrent)


def _add_ttft(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    ttft = kinds.add_parser("ttft", help="time to first token of every method beside its bound, warm store")
    _add_shared(ttft, shape="qwen2.5-0.5b", rounds=5)
    ttft.add_argument(
        "--ratios", type=float, nargs="+", metavar="R", help="of flat HKVD and foreseen (default 0.15 0.05)"
    )
    ttft.add_argument(
        "--methods",
        nargs="+",
        metavar="NAME",
        help="full, prefix, reuse, hkvd-v, hkvd-k, gradual-30, gradual-50, foreseen, default, cold, llama.cpp, "
        "llama.cpp-prefix (default: all but those of llama.cpp)",
    )
    ttft.add_argument(
        "--kv", nargs="+", metavar="PLACE", help="where stored KV lies: disk, memory, gpu (default: disk memory)"
    )
    ttft.set_defaults(run=_bench_ttft)


def _add_store(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    store = kinds.add_parser("store", help="writing, finding and reading records, by store and codec")
    _add_shared(store, shape="qwen2.5-0.5b", rounds=5, chunks=8)
    store.add_argument("--codecs", nargs="+", metavar="CODEC", help="raw, fp8, int8, int4 (default: all)")
    store.set_defaults(run=_bench_store)


def _add_scaling(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    scaling = kinds.add_parser("scaling", help="time to first token and peak memory over length and chunk count")
    _add_machine(scaling, shape="qwen2.5-0.5b", rounds=1)
    scaling.add_argument("--lengths", type=int, nargs="+", metavar="N", help="tokens (default 2048 to 16384)")
    scaling.add_argument("--chunks", type=int, nargs="+", metavar="N", help="chunk counts (default 4 to 32)")
    scaling.add_argument("--ratio", type=float, default=0.15)
    scaling.set_defaults(run=_bench_scaling)


def _add_shared(
    parser: argparse.ArgumentParser, *, shape: str, rounds: int, chunks: int = 4, chunk_tokens: int = 512
) -> None:
    _add_machine(parser, shape=shape, rounds=rounds)
    parser.add_argument("--chunks", type=int, default=chunks)
    parser.add_argument("--chunk-tokens", type=int, default=chunk_tokens)


def _add_machine(parser: argparse.ArgumentParser, *, shape: str, rounds: int) -> None:
    parser.add_argument("--shape", default=shape, help="model shape, random weights; or the path of a config.json")
    parser.add_argument("--dtype", default="float32", help='"float32", "bfloat16" or "float16"')
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--plot", metavar="FILE", help="draw the result into a file, such as result.svg")
    add_arguments(parser, "device")


def _shared(parsed: argparse.Namespace) -> dict[str, Any]:
    return _given(parsed, "shape", "dtype", "chunks", "chunk_tokens", "rounds", "threads", "device")


def _given(parsed: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Arguments that have a value, lists as tuples."""
    values = {name: getattr(parsed, name) for name in names}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if v is not None}


def _bench_ttft(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.evaluation.ttft import TTFTOptions, show

    show(TTFTOptions(**_shared(parsed), **_given(parsed, "ratios", "methods", "kv")), parsed.plot)
    return 0


def _bench_store(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.evaluation.storing import StoreOptions, show

    show(StoreOptions(**_shared(parsed), **_given(parsed, "codecs")), parsed.plot)
    return 0


def _bench_scaling(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.evaluation.scaling import ScalingOptions, show

    names = ("shape", "dtype", "rounds", "threads", "device", "ratio", "lengths", "chunks")
    show(ScalingOptions(**_given(parsed, *names)), parsed.plot)
    return 0


def _bench_warm(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.evaluation.warming import WarmOptions, show

    show(WarmOptions(**_shared(parsed)), parsed.plot)
    return 0


def _bench_decode(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.evaluation.decoding import DecodingOptions, show

    show(DecodingOptions(**_shared(parsed), new_tokens=parsed.new_tokens), parsed.plot)
    return 0


def _bench_throughput(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.evaluation.throughput import ThroughputOptions, show

    chosen = _shared(parsed)
    for name in ("requests", "documents", "capacity", "new_tokens", "exponent"):
        chosen[name] = getattr(parsed, name)
    if parsed.load:
        chosen["loads"] = tuple(parsed.load)
    if parsed.batch:
        chosen["batches"] = tuple(parsed.batch)
    show(ThroughputOptions(**chosen), parsed.plot)
    return 0


def _bench_concurrent(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.evaluation.concurrent import ConcurrentOptions, show

    chosen = {**_shared(parsed), **_given(parsed, "new_tokens", "at_once")}
    if parsed.limit:
        chosen["limits"] = tuple(parsed.limit)
    show(ConcurrentOptions(**chosen), parsed.plot)
    return 0


def _bench_loading(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.evaluation.overlap import OverlapOptions, show

    chosen = _shared(parsed)
    if parsed.factor:
        chosen["factors"] = tuple(parsed.factor)
    show(OverlapOptions(**chosen), parsed.plot)
    return 0
