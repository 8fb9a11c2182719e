"""Prompts as in the paper's evaluation and as in LangChain's ``RetrievalQA``, and which passages stand in them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from cacheblend_rag.calibration.prompts import ChatFrame
from cacheblend_rag.config import check_choice, check_whole
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.chat import STUFF, PromptFormat
from docs.benchmarks.evaluation.datasets import EvalCase

ORDERS = ("retrieved", "random")
STYLES = ("paper", "stuff")
PAPER = {
    "qa": PromptFormat(
        "You will be asked a question after reading several passages. Please directly answer the question based on "
        "the given passages. Do NOT repeat the question. The answer should be within 5 words.\nPassages:\n",
        "\n\nAnswer the question directly based on the given passages. Do NOT repeat the question. The answer should "
        "be within 5 words.\nQuestion: {q}\nAnswer:",
    ),
    "examples": PromptFormat(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n", "\n\n{q}"
    ),
    "summary": PromptFormat(
        "You are given several news passages. Write a one-page summary of all news.\n\nNews:\n",
        "\n\nNow, write a one-page summary of all the news.\nSummary:",
    ),
}
"""By task: a short answer is asked for where F1 is the measure."""


class Ranker(Protocol):
    """Puts passages in the order in which they would be retrieved."""

    def rank(self, question: str, texts: Sequence[str]) -> list[int]:
        """Numbers of the texts, nearest to the question first."""


def choose(
    case: EvalCase,
    count: int,
    *,
    order: str = "retrieved",
    ranker: Ranker | None = None,
    keep_support: bool = True,
    seed: int = 0,
) -> EvalCase:
    """A question with the passages of its prompt, in their order.

    Parameters
    ----------
    case : EvalCase
    count : int
        Passages; all of them if there are fewer.
    order : {"retrieved", "random"}
        Nearest to the question first, or drawn by chance.
    ranker : Ranker, optional
        By default the order of the file is the order of retrieval.
    keep_support : bool
        Put passages that the answer needs in whether they would be retrieved or not.
    seed : int
        Of the random order, together with the question's id.
    """
    check_choice("order", order, ORDERS)
    check_whole("chunks", count, 1)
    ranking = list(range(len(case.passages)))
    if ranker is not None and case.task == "qa":
        ranking = ranker.rank(case.question, [passage.chunk for passage in case.passages])
    if keep_support:
        first = [number for number in ranking if case.passages[number].support]
        kept = set((first + [number for number in ranking if number not in first])[:count])
        ranking = [number for number in ranking if number in kept]
    chosen = ranking[:count]
    if order == "random":
        random.Random(f"{seed}/{case.id}").shuffle(chosen)
    return replace(case, passages=tuple(case.passages[number] for number in chosen))


def build_prompt(case: EvalCase, style: str = "paper", chat: ChatFrame | None = None) -> Prompt:
    """The prompt of a question, its passages as chunks.

    Parameters
    ----------
    case : EvalCase
    style : {"paper", "stuff"}
        ``"stuff"`` is LangChain's prompt; for questions only.
    chat : ChatFrame, optional
        Of a model that wants to be talked to.
    """
    check_choice("prompt", style, STYLES)
    form = STUFF if style == "stuff" and case.task == "qa" else PAPER[case.task]
    before, after = (chat.before, chat.after) if chat else ("", "")
    chunks = [passage.chunk for passage in case.passages]
    # Not str.format: a question may have braces.
    return Prompt(before + form.prefix, chunks, form.suffix.replace("{q}", case.question) + after)
