"""``cacheblend-rag ask``: answer a question from a folder of documents."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from cacheblend_rag.cli.arguments import add_arguments, add_rag_arguments, rag_options

if TYPE_CHECKING:
    from cacheblend_rag.folder_rag import Answer, FolderRAG

__all__ = ["add_ask", "prepare", "warm_all"]

_ROUNDS = 3


def add_ask(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    ask = commands.add_parser("ask", help="answer a question from a folder of documents")
    ask.add_argument("question")
    add_rag_arguments(ask)
    ask.add_argument("--top-k", type=int, default=6, metavar="N", help="chunks in the prompt (default 6)")
    add_arguments(ask, "ratio", "max-new-tokens")
    ask.add_argument("--compare", action="store_true", help="answer by all four methods and show them side by side")
    ask.add_argument("--warm", action="store_true", help="afterwards, compute and store the KV of all chunks")
    ask.set_defaults(run=_ask)


def _ask(parsed: argparse.Namespace) -> int:
    from cacheblend_rag.folder_rag import FolderRAG

    options = rag_options(parsed)
    with FolderRAG(options) as rag:
        _index(rag)
        answer = rag.ask(parsed.question)
        _show_answer(parsed.question, answer)
        if answer.info["misses"] and not answer.info["plain"]:
            print("Storing the KV of these passages for the next question…", file=sys.stderr)
            rag.engine.flush()
        if parsed.compare:
            _compare(rag, answer)
        if parsed.warm:
            warm_all(rag)
    return 0


def _index(rag: FolderRAG) -> None:
    """Bring the index up to date, and say what is in it."""
    index = rag.update()
    print(
        f"{index.chunks} chunks of {index.files} files indexed ({index.embedded} embedded now)",
        file=sys.stderr,
    )


def prepare(rag: FolderRAG) -> None:
    """Bring index and KV store up to date, and say what that takes."""
    _index(rag)
    warm_all(rag)


def warm_all(rag: FolderRAG) -> None:
    """Compute and store the KV of all chunks that are not stored, and say what that takes."""
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
    missing = sum(one["outcome"] == "not found" for one in info["documents"])
    if missing:
        print(f"\n{missing} of {len(info['documents'])} passages were not found in the prompt as they were retrieved.")
    how = "plain prefill" if info["plain"] else f"{info['hits']} hits, {info['misses']} misses"
    print(f"\nTime to first token {info['ttft'] * 1e3:.1f} ms ({how}; {info['prompt_tokens']} prompt tokens)")


def _compare(rag: FolderRAG, answer: Answer) -> None:
    from cacheblend_rag.decode import DecodeOptions
    from cacheblend_rag.evaluation.baselines import answer_all

    options = DecodeOptions(max_new_tokens=rag.options.max_new_tokens)
    rag.engine.warm(answer.prompt.chunks, progress=False)
    results = answer_all(rag.engine, answer.prompt, rounds=_ROUNDS, options=options)
    full = results[0].ttft
    print(f"\nThe same prompt by every method (medians of {_ROUNDS} interleaved rounds):\n")
    print(f"  {'method':<16}{'TTFT':>10}{'faster':>9}{'rows':>7}  {'against full recompute':<30}answer")
    for result in results:
        speed = f"{result.ttft * 1e3:>7.1f} ms{full / result.ttft:>8.2f}×"
        near = result.nearness
        how = "–" if result is results[0] else f"{near.words} (KL {near.kl:.3f})"
        print(f"  {result.name:<16}{speed}{f'{result.computed:.0%}':>7}  {how:<30}{_on_one_line(result.text)}")
    print(
        "\nKL: mean divergence from full recompute, in nats a token of its answer. Another order of the passages\n"
        "moves an answer by about 0.06."
    )


def _on_one_line(text: str, most: int = 100) -> str:
    """A text to stand in a table."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
