"""``cacheblend-rag ask``: answer a question from a folder of documents."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cacheblend_rag.app.cli.arguments import Screen, add_arguments, add_rag_arguments, rag_options
from cacheblend_rag.app.options import stronger_model
from cacheblend_rag.app.startup import SILENT, no_search_for_garbage, only_from
from cacheblend_rag.config import ENV_PREFIX, VERIFY
from cacheblend_rag.errors import ConfigError, require
from cacheblend_rag.models.loading_bars import bars_hidden

if TYPE_CHECKING:
    from cacheblend_rag.app.folder_rag import Answer, FolderRAG
    from cacheblend_rag.app.options import FolderRAGOptions
    from cacheblend_rag.report import Verification

_ANSWERING = "Answering…"
_LINE = 100  # characters of an answer in a table
_LOOKING = 0.2  # seconds between two looks at what is still to be stored


def add_ask(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    ask = commands.add_parser("ask", help="answer a question from a folder of documents")
    ask.add_argument("question", help="the question")
    add_rag_arguments(ask)
    add_arguments(ask, "top-k", "ratio", "max-new-tokens", "reasoning", "reasoning-tokens")
    ask.add_argument("--compare", action="store_true", help="answer by all four methods and show them side by side")
    ask.add_argument(
        "--verify",
        nargs="?",
        const="always",
        type=_way_to_verify,
        metavar="HOW",
        help="compare the answer with full prefill's, and correct it: always (the default), held or off",
    )
    ask.add_argument("--warm", action="store_true", help="afterwards, compute and store the KV of all chunks")
    ask.set_defaults(run=_ask)


def _way_to_verify(given: str) -> str:
    # Not 'idle': the command ends with its answer.
    if given not in (ways := [way for way in VERIFY if way != "idle"]):
        raise argparse.ArgumentTypeError(f"use {', '.join(ways)}, and write the question before it, not {given!r}")
    return given


def _ask(parsed: argparse.Namespace) -> int:
    options = rag_options(parsed)
    if not parsed.question.strip():
        raise ConfigError("question", parsed.question, "ask something")
    options.check_paths()
    with opened(options) as (screen, rag):
        _index(screen, rag)
        own = rag.engine.config.verify if ENV_PREFIX + "VERIFY" in os.environ else "always"
        # Nothing is checked once the command has ended.
        rag.llm.verify = verify = parsed.verify or ("always" if own == "idle" else own)
        with screen.step(_ANSWERING) as say:
            answer = rag.ask(parsed.question, lambda read: say(_progress(**read.counts)))
        _show_answer(screen, parsed.question, answer, read=verify != "held")
        _store(screen, rag, answer)
        if parsed.compare:
            _compare(screen, rag, answer)
        if parsed.warm:
            _warm_all(screen, rag)
        for hint in _hints(rag, answer):
            screen.note(hint, "cyan")
    return 0


@contextmanager
def opened(options: FolderRAGOptions) -> Iterator[tuple[Screen, FolderRAG]]:
    """Load the models, and say so: importing and loading takes seconds."""
    screen = Screen()
    screen.note(f"Loading {os.fspath(options.model)} and {os.fspath(options.embedder)}…")
    with only_from(logging.CRITICAL, *SILENT), bars_hidden():
        with no_search_for_garbage():
            require("app", "langchain_core", "sentence_transformers", "faiss")
            from cacheblend_rag.app.folder_rag import FolderRAG

            made = FolderRAG(options)
        with made as rag:
            yield screen, rag


def _index(screen: Screen, rag: FolderRAG) -> None:
    """Bring the index up to date, and say what is in it and what is not."""
    index = rag.update(progress=None)
    if index.rebuilt:
        screen.note(f"The index was rebuilt: {index.rebuilt}.", "yellow")
    screen.note(f"{index.chunks} chunks of {index.files} files indexed ({index.embedded} embedded now)")
    for line in index.left_out():
        screen.note(line, "yellow")


def _progress(total: int, processed: int, **other: int) -> str:
    """A line on how many tokens of the prompt are read."""
    return f"Reading the prompt: {processed:,} of {total:,} tokens…" if processed < total else _ANSWERING


def _store(screen: Screen, rag: FolderRAG, answer: Answer) -> None:
    """Store the KV of the answer's new passages, and wait until that is done; an interrupt drops the rest."""
    flush, files = rag.engine.turns.write_back.flush, [one.metadata.get("source") for one in answer.sources]
    new = [file for file, one in zip(files, answer.sources, strict=True) if answer.tiers.get(one.page_content) == ""]
    of = f"{len(new)} of {len(files)} passages, from {len(set(new))} of {len(set(files))} files,"
    text = f"Storing the KV of {of if new else 'this prompt'} for the next question: {{}} records left… Ctrl-C ends it."
    if left := flush(0.0):
        with screen.step(text.format(left)) as say:
            while left := flush(_LOOKING):
                say(text.format(left))
            rag.engine.flush()


def prepare(parsed: argparse.Namespace) -> int:
    """Bring index and KV store up to date, and say what that takes."""
    options = rag_options(parsed)
    options.check_paths()
    with opened(options) as (screen, rag):
        _index(screen, rag)
        _warm_all(screen, rag)
    return 0


def _warm_all(screen: Screen, rag: FolderRAG) -> None:
    """Compute and store the KV of all chunks that are not stored, and say what that takes."""
    from cacheblend_rag.store.base import UNLIMITED

    size = rag.engine.chunks.estimate_bytes(chunk.page_content for chunk in rag.index.chunks())
    limit = rag.engine.store.traits.size_limit
    screen.note(f"their KV takes {size / 1e6:,.1f} MB" + (f" of {limit / 1e6:,.0f} MB" if limit < UNLIMITED else ""))
    warmed = rag.warm()
    if warmed.plain_reason:
        screen.note(f"no KV of them is stored, because the model is not blended: {warmed.plain_reason}")
        return
    screen.note(f"{warmed.computed} computed in {warmed.seconds:.1f} s, {warmed.present} there already")
    if warmed.skipped:
        text = f"{warmed.skipped} chunks were left out because the KV store is full; raise --size-limit"
        screen.note(text, "yellow")


def _show_answer(screen: Screen, question: str, answer: Answer, read: bool = True) -> None:
    report = answer.report
    screen.show("")
    screen.show("Question: ", question)
    if answer.thought:
        screen.show("Thought:  ", (answer.thought, "dim"))
    screen.show("Answer:   ", (answer.text or "(the model gave no words)", "bold green"))
    screen.show("")
    screen.show((fidelity_line(report.verification), "dim"))
    screen.show("")
    screen.show("Sources:")
    unread = not read or (report.plain and not report.misses)  # what is missing of others is stored now
    tiers = {} if unread else answer.tiers
    for number, source in enumerate(answer.sources, 1):
        page = f", page {source.metadata['page']}" if "page" in source.metadata else ""
        title = source.page_content.strip().splitlines()[0].lstrip("# ")
        tier = tiers.get(source.page_content)  # None: too short to be stored
        found = "" if tier is None else f"  [{tier or 'new'}]"
        name = str(source.metadata.get("source", "?"))
        screen.show(f"  {number}. ", (name + page, "bold"), f": {title[:70]}", (found, "dim"))
    if missing := sum(one.outcome == "not found" for one in report.documents):
        text = f"{missing} of {len(report.documents)} passages were not found in the prompt as they were retrieved."
        screen.note(text, "yellow")
    resumed = f" behind {report.resumed_tokens} kept tokens" if report.resumed_tokens else ""
    how = f"plain prefill{resumed}" if unread else f"{report.hits} hits, {report.misses} misses"
    screen.show("")
    shown = f"{report.ttft:.1f} s" if report.ttft >= 10 else f"{report.ttft * 1e3:,.0f} ms"
    screen.show(f"Time to first token {shown} ({how}; {report.prompt_tokens} prompt tokens)")


def fidelity_line(found: Verification) -> str:
    """A line on how near the answer is to full prefill's."""
    why = f": {found.reason}" if found.reason else ""
    if found.fidelity == "approximate":
        return f"Approximate: not compared with the answer without reuse{why}."
    said = {
        "exact": f"Exact: this is the full model's answer{why}.",
        "checked": "Checked: the same answer as without reuse.",
        "corrected": f"Corrected: the answer without reuse; the first one went on with {found.before[:_LINE]!r}.",
    }
    compared = "" if found.fidelity == "exact" else " This compares computations, not facts."
    return said[found.fidelity] + compared


def _hints(rag: FolderRAG, answer: Answer) -> Iterator[str]:
    """Hints about an answer."""
    report = answer.report
    least, new = rag.engine.config.min_tokens, f"{report.misses} of {len(answer.sources)} passages were new"
    if report.plain and report.chunk_tokens < least:
        yield f"The passages have fewer than {least} tokens: a plain prefill is as fast, and nothing is stored."
    elif report.misses and report.tokens_to_store:
        yield f"{new}; their KV is stored now. When they are retrieved again, it is read from the store."
    elif report.plain_reason:
        yield f"The prompt was prefilled in full: {report.plain_reason}."
    elif report.misses:
        yield f"{new}, and their KV is not kept: the store is read-only, or write_back is off."
    if report.finish_reason == "length":
        tokens = report.generated_tokens - report.thought_tokens
        yield f"The answer was cut at {tokens} tokens; --max-new-tokens allows more."
    if report.stopped_by == "repetition":
        yield "The answer was ended: it only repeated itself."
    if (stronger := stronger_model([rag.options.model])) is not None:
        yield stronger


def _compare(screen: Screen, rag: FolderRAG, answer: Answer) -> None:
    from cacheblend_rag.calibration.quality import COMPARED_TOKENS, ROUNDS, Methods

    with screen.step(f"Answering by every method, {ROUNDS} rounds…"):
        *_, results = Methods(rag.engine, answer.prompt).compare(rag.options.max_new_tokens or COMPARED_TOKENS)
    full = results[0].ttft
    screen.show(f"\nThe same prompt by every method (medians of {ROUNDS} interleaved rounds):\n")
    heads = f"  {'method':<16}{'TTFT':>10}{'faster':>9}{'rows':>7}  {'against full recompute':<52}answer"
    screen.show((heads, "bold"))
    for result in results:
        speed = f"{result.ttft * 1e3:>7.1f} ms{full / result.ttft:>8.2f}×"
        near = result.nearness
        how = "–" if result is results[0] else f"{near.words} (KL {near.kl:.3f})"
        said = " ".join(result.text.split())
        said = said[: _LINE - 1] + "…" if len(said) > _LINE else said  # some languages have no spaces to cut at
        line = f"  {result.name:<16}{speed}{f'{result.computed:.0%}':>7}  {how:<52}{said}"
        screen.show((line, "green" if result is results[-1] else ""))
    screen.show(
        "\nKL: mean divergence from full recompute, in nats a token of its answer; 0 if each token is as likely."
    )
    if (order_kl := results[-1].nearness.order_kl) is not None:
        screen.show(f"Another order of the same passages moves full recompute's own answer by KL {order_kl:.3f}.")
