"""A question and its passages as a prompt, and what a report shows of the answer."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.prompt import Prompt, TokenizedPrompt
from cacheblend_rag.prompt.chat import STUFF, question_turns, render_turns
from cacheblend_rag.report import Generation

__all__ = ["QuestionPrompt", "report_of", "rule_name"]

# What a "stuff" chain joins documents with.
CHUNK_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class QuestionPrompt:
    """How a model is asked about passages: as `FolderRAG` asks it, by its chat template if it has one.

    Parameters
    ----------
    prefix : str
        What stands before the passages.
    before, after : str
        What stands before and after the question, behind the passages.
    """

    prefix: str
    before: str
    after: str

    @classmethod
    def of(cls, tokenizer: Any, template: str | None) -> QuestionPrompt:
        """The form for a tokenizer.

        Parameters
        ----------
        tokenizer : transformers tokenizer
        template : str or None
            The chat template the model was made with, if any.
        """
        # Marks that no document can hold stand for the parts while the template is applied.
        passages, question = (f"<{secrets.token_hex(8)}>" for _ in range(2))
        if template:
            text = render_turns(tokenizer, question_turns(tokenizer, passages, question))
        else:
            text = STUFF.prefix + passages + STUFF.suffix.replace("{q}", question)
        prefix, _, rest = text.partition(passages)
        before, _, after = rest.partition(question)
        return cls(prefix, before, after)

    def ask(self, question: str, passages: Sequence[str]) -> Prompt:
        """The prompt; whatever passages and question hold, they stay in their places."""
        suffix = self.before + question + self.after
        return Prompt(self.prefix, passages, suffix, [CHUNK_SEPARATOR] * (len(passages) - 1))


def report_of(engine: BlendEngine, prompt: Prompt, answer: Generation) -> dict[str, Any]:
    """What the page shows of how an answer came about; times in seconds, sizes in bytes.

    Parameters
    ----------
    engine : BlendEngine
        The engine that answered.
    prompt : Prompt
        What it was asked.
    answer : Generation
    """
    report, seconds, split = answer.report, answer.report.seconds, engine.tokenize(prompt)
    chunks = [
        {
            "hit": bool(tier),
            "device": tier or None,
            "bytes": engine.estimate_bytes([text]),
            "tokens": len(span),
        }
        for tier, text, span in zip(report.chunk_tiers, prompt.chunks, split.chunks, strict=True)
    ]
    return {
        "ttft_s": report.ttft,
        "parts": {
            "split_s": seconds.split,
            "look_up_s": seconds.look_up,
            "load_s": seconds.load,
            "fuse_s": seconds.fuse,
            "first_token_s": seconds.first_token,
        },
        "tokens": {
            "prefix": report.prefix_tokens,
            "chunks": report.chunk_tokens,
            "between": len(split.input_ids) - report.prefix_tokens - report.chunk_tokens - report.suffix_tokens,
            "suffix": report.suffix_tokens,
        },
        "hits": report.hits,
        "misses": report.misses,
        "chunks": chunks,
        "reused": report.reused_tokens,
        "recomputed": list(report.recomputed_tokens),
        "ratio": report.recompute_ratio,
        "rule": rule_name(engine),
        "plain": report.plain,
        "finish_reason": report.finish_reason,
        "prompt": _tokens(engine, split, answer),
    }


def rule_name(engine: BlendEngine) -> str:
    """What an engine's selection rule is called."""
    rule = engine.config.selection
    return rule if isinstance(rule, str) else type(rule).__name__


def _tokens(engine: BlendEngine, split: TokenizedPrompt, answer: Generation) -> list[dict[str, Any]]:
    """The prompt token by token: what was recomputed up to the last layer, and how far stored KV was off."""
    computed = set(answer.recomputed[-1].tolist()) if answer.recomputed else set()
    deviations = answer.deviation.tolist() if answer.deviation is not None else []
    chunk_of = {at: number for number, span in enumerate(split.chunks) for at in range(span.start, span.stop)}
    rows = []
    for at, text in enumerate(_texts(engine.tokenizer, split.input_ids)):
        chunk = chunk_of.get(at)
        if chunk is not None:
            segment = "chunk"
        elif at >= split.suffix.start:
            segment = "suffix"
        else:
            segment = "prefix" if at < split.prefix.stop else "between"
        deviation = deviations[at] if at < len(deviations) and math.isfinite(deviations[at]) else None
        rows.append(
            {
                "text": text,
                "position": at,
                "segment": segment,
                "chunk": chunk,
                "recomputed": at in computed,
                "deviation": deviation,
            }
        )
    return rows


def _texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token; of a character in several tokens, all of it at the last of them."""
    texts, begun = [], 0
    for stop in range(1, len(ids) + 1):
        text = str(tokenizer.decode(list(ids[begun:stop]), clean_up_tokenization_spaces=False))
        whole = not text.endswith("\N{REPLACEMENT CHARACTER}") or stop - begun > 4
        texts.append(text if whole else "")
        begun = stop if whole else begun
    return texts
