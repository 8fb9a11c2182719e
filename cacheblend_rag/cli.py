"""The command line: ``cacheblend-rag ask`` and ``cacheblend-rag bench``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cacheblend_rag import __version__
from cacheblend_rag.errors import CacheBlendError

if TYPE_CHECKING:
    from cacheblend_rag.folder_rag import Answer, FolderRAG, FolderRAGOptions

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the process's exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
        return status
    except CacheBlendError as error:
        print(f"cacheblend-rag: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cacheblend-rag", description="Fast local RAG from stored KV.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_ask(commands)
    _add_bench(commands)
    return parser


def _add_ask(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    ask = commands.add_parser("ask", help="answer a question from a folder of documents")
    ask.add_argument("question")
    ask.add_argument("--docs", metavar="FOLDER", help=".txt, .md and .pdf files; the bundled archive by default")
    ask.add_argument("--model", metavar="PATH_OR_ID", help="a transformers model; the bundled one by default")
    ask.add_argument("--embedder", metavar="PATH_OR_ID", help="a sentence-transformers model; bundled by default")
    ask.add_argument("--top-k", type=int, default=6, metavar="N", help="chunks in the prompt (default 6)")
    ask.add_argument("--ratio", type=float, metavar="R", help="recompute ratio, 0 to 1 (default 0.15)")
    ask.add_argument("--compare", action="store_true", help="answer by all four methods and show them side by side")
    ask.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="longest answer (default 64)")
    ask.add_argument("--size-limit", metavar="SIZE", help='of the KV store, such as "20GB" (default 10 GB)')
    ask.add_argument("--data-dir", metavar="FOLDER", help="where index and KV are kept (default: user's cache)")
    ask.add_argument("--device", default="auto", help='"auto", "cpu", "cuda", …')
    ask.add_argument("--dtype", default="auto", help='"auto", "float32", "bfloat16" or "float16"')
    ask.set_defaults(run=_ask)


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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


def _bench_ttft(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.evaluation.ttft import TTFTOptions, show

    names = ("shape", "dtype", "chunks", "chunk_tokens", "rounds", "threads")
    chosen = {name: getattr(parsed, name) for name in names}
    if parsed.ratio:
        chosen["ratios"] = tuple(parsed.ratio)
    show(TTFTOptions(**chosen))
    return 0


def _ask(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.folder_rag import FolderRAG

    options = _options(parsed)
    if options.foreign_documents:
        print(
            "Note: the bundled reference model knows only text like its own archive. For other documents name a\n"
            "model and an embedder, such as: --model Qwen/Qwen3-1.7B --embedder sentence-transformers/all-MiniLM-L6-v2",
            file=sys.stderr,
        )
    with FolderRAG(options) as rag:
        _prepare(rag)
        answer = rag.ask(parsed.question)
        _show_answer(parsed.question, answer)
        if parsed.compare:
            _compare(rag, answer)
    return 0


def _options(parsed: argparse.Namespace) -> FolderRAGOptions:
    from cacheblend_rag.config import BlendConfig
    from cacheblend_rag.folder_rag import FolderRAGOptions

    config = {"recompute_ratio": parsed.ratio, "size_limit": parsed.size_limit}
    chosen = {name: getattr(parsed, name) for name in ("docs", "model", "embedder", "data_dir")}
    return FolderRAGOptions(
        **{name: value for name, value in chosen.items() if value is not None},
        top_k=parsed.top_k,
        max_new_tokens=parsed.max_new_tokens,
        device=parsed.device,
        dtype=parsed.dtype,
        config=BlendConfig(**{name: value for name, value in config.items() if value is not None}),
    )


def _prepare(rag: FolderRAG) -> None:
    """Bring index and KV store up to date, and say what that takes."""
    index = rag.update()
    print(
        f"{index.chunks} chunks of {index.files} files indexed ({index.embedded} embedded now)",
        file=sys.stderr,
    )
    size = rag.warming_bytes()
    print(f"their KV takes {size / 1e6:,.1f} MB of {rag.engine.store.size_limit / 1e6:,.0f} MB", file=sys.stderr)
    warmed = rag.warm()
    print(
        f"{warmed.computed} computed in {warmed.seconds:.1f} s, {warmed.present} there already",
        file=sys.stderr,
    )
    if warmed.skipped:
        print(
            f"{warmed.skipped} chunks were left out because the KV store is full; raise --size-limit",
            file=sys.stderr,
        )


def _show_answer(question: str, answer: Answer) -> None:
    info = answer.info
    print(f"\nQuestion: {question}\nAnswer:   {answer.text}\n\nSources:")
    for number, source in enumerate(answer.sources, 1):
        title = source.page_content.strip().splitlines()[0]
        print(f"  {number}. {source.metadata.get('source', '?')}: {title[:70]}")
    how = "plain prefill" if info["plain"] else f"{info['hits']} hits, {info['misses']} misses"
    print(f"\nTime to first token {info['ttft'] * 1e3:.1f} ms ({how}; {info['prompt_tokens']} prompt tokens)")


def _compare(rag: FolderRAG, answer: Answer) -> None:
    from cacheblend_rag.decode import DecodeOptions
    from cacheblend_rag.evaluation.baselines import answer_all

    options = DecodeOptions(max_new_tokens=rag.options.max_new_tokens)
    results = answer_all(rag.engine, answer.prompt, rounds=9, options=options)
    full = results[0].ttft
    print("\nThe same prompt by every method (medians of 9 interleaved rounds):\n")
    print(f"  {'method':<16}{'TTFT':>9}{'faster':>9}{'rows':>7}  answer")
    for result in results:
        speed = f"{result.ttft * 1e3:>6.1f} ms{full / result.ttft:>8.2f}×"
        print(f"  {result.name:<16}{speed}{f'{result.computed:.0%}':>7}  {result.text.strip()}")


if __name__ == "__main__":
    sys.exit(main())
