"""Prompts as in the paper's evaluation, and the one of LangChain's ``RetrievalQA``."""

from __future__ import annotations

from typing import Any

from cacheblend_rag.calibration.evaluation.cases import EvalCase
from cacheblend_rag.config import check_choice
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.chat import STUFF, PromptFormat, written_by_template

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
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


class ChatFrame:
    """What a chat template puts before and after what the user says.

    Parameters
    ----------
    tokenizer : transformers tokenizer

    Raises
    ------
    ConfigError
        If it has no chat template, or one that does not give the text back.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("chat", True, "leave it out; this tokenizer has no chat template")
        said = [{"role": "user", "content": _MARK}]
        text = written_by_template(tokenizer, said, add_generation_prompt=True)
        if text.count(_MARK) != 1:
            raise ConfigError("chat", True, "leave it out; this tokenizer's chat template does not repeat the text")
        self.before, self.after = text.split(_MARK)


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
