"""``cacheblend-rag ask``: answer a question from a folder of documents."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cacheblend_rag.folder_rag import Answer, FolderRAG, FolderRAGOptions

__all__ = ["add_ask", "add_rag_arguments", "prepare", "rag_options"]


def add_ask(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    ask = commands.add_parser("ask", help="answer a question from a folder of documents")
    ask.add_argument("question")
    add_rag_arguments(ask)
    ask.add_argument("--top-k", type=int, default=6, metavar="N", help="chunks in the prompt (default 6)")
    ask.add_argument("--ratio", type=float, metavar="R", help="recompute ratio, 0 to 1 (default: auto)")
    ask.add_argument("--compare", action="store_true", help="answer by all four methods and show them side by side")
    ask.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="longest answer (default 64)")
    ask.set_defaults(run=_ask)


def add_rag_arguments(parser: argparse.ArgumentParser) -> None:
    """What is read, with which model, and where what is made of it is kept."""
    parser.add_argument("--docs", metavar="FOLDER", help=".txt, .md and .pdf files; the bundled archive by default")
    parser.add_argument("--model", metavar="PATH_OR_ID", help="a transformers model; the bundled one by default")
    parser.add_argument("--embedder", metavar="PATH_OR_ID", help="a sentence-transformers model; bundled by default")
    parser.add_argument("--size-limit", metavar="SIZE", help='of the KV store, such as "20GB" (default 10 GB)')
    parser.add_argument("--data-dir", metavar="FOLDER", help="where index and KV are kept (default: user's cache)")
    parser.add_argument("--device", default="auto", help='"auto", "cpu", "cuda", …')
    parser.add_argument("--dtype", default="auto", help='"auto", "float32", "bfloat16" or "float16"')


def _ask(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.folder_rag import FolderRAG

    options = rag_options(parsed)
    if options.foreign_documents:
        print(
            "Note: the bundled reference model knows only text like its own archive. For other documents name a\n"
            "model and an embedder, such as: --model Qwen/Qwen3-1.7B --embedder sentence-transformers/all-MiniLM-L6-v2",
            file=sys.stderr,
        )
    with FolderRAG(options) as rag:
        prepare(rag)
        answer = rag.ask(parsed.question)
        _show_answer(parsed.question, answer)
        if parsed.compare:
            _compare(rag, answer)
    return 0


def rag_options(parsed: argparse.Namespace) -> FolderRAGOptions:
    """What the arguments of `add_rag_arguments`, and some of ``ask``, say."""
    from cacheblend_rag.config import BlendConfig
    from cacheblend_rag.folder_rag import FolderRAGOptions

    given = {name: value for name, value in vars(parsed).items() if value is not None}
    names = ("docs", "model", "embedder", "data_dir", "top_k", "max_new_tokens", "device", "dtype")
    config = {"recompute_ratio": given.get("ratio"), "size_limit": given.get("size_limit")}
    return FolderRAGOptions(
        **{name: given[name] for name in names if name in given},
        config=BlendConfig(**{name: value for name, value in config.items() if value is not None}),
    )


def prepare(rag: FolderRAG) -> None:
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
