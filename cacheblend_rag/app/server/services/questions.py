"""A question and its passages as a prompt, the report of its answer, and the comparison of methods."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated, Any

from pydantic import ConfigDict, StringConstraints

from cacheblend_rag.app.server.services.folders import SearchHit
from cacheblend_rag.calibration.quality import MethodResult
from cacheblend_rag.config import Reasoning
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import PromptError
from cacheblend_rag.prompt import Prompt, Span, TokenizedPrompt
from cacheblend_rag.prompt.chat import CHAT, STUFF, question_turns, render_turns
from cacheblend_rag.prompt.control import OWN, control_tokens
from cacheblend_rag.report import Generation

# A "stuff" chain joins documents with this.
_CHUNK_SEPARATOR = "\n\n"
_NO_TOKENS = TokenizedPrompt((), Span(0, 0), (), Span(0, 0))
_SEARCHED = 3  # earlier questions that a search takes into account
_SHORT = {"full recompute": "full", "prefix caching": "prefix", "full reuse": "reuse", "blended": "blend"}


@dataclass(frozen=True)
class EarlierTurn:
    """A question that was asked before in the same conversation, and its answer."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    question: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=100_000)]
    answer: Annotated[str, StringConstraints(max_length=100_000)]


class QuestionPrompt:
    """Writes the prompt for a question, with the model's chat template if it has one, as `FolderRAG` does.

    Parameters
    ----------
    tokenizer : transformers tokenizer
    template : str or None
        The chat template the model was made with, if any.
    """

    def __init__(self, tokenizer: Any, template: str | None) -> None:
        self._tokenizer, self._template = tokenizer, template

    def ask(
        self,
        question: str,
        passages: Sequence[str],
        earlier: Sequence[EarlierTurn] = (),
        instructions: str | None = None,
        reasoning: Reasoning = False,
    ) -> Prompt:
        """The prompt. No content of passages, questions or answers can move them to another place.

        Parameters
        ----------
        question : str
        passages : sequence of str
            Those that stand before the conversation.
        earlier : sequence of EarlierTurn
            Of the conversation, the first one first. They stand behind the passages, so that the passages keep their
            place in the prompt from turn to turn.
        instructions : str, optional
            Text before the passages; by default that of `CHAT` or `STUFF`.
        reasoning : bool or str
            Whether the model shall think.

        Raises
        ------
        PromptError
            If the chat template does not write every turn.
        """
        # Marks that no document can hold stand for the parts while the template is applied.
        said = [text for turn in earlier for text in (turn.question, turn.answer)] + [question]
        context, *marks = (f"<{secrets.token_hex(8)}>" for _ in range(len(said) + 1))
        written, tokens = self._written(context, marks, instructions, reasoning), control_tokens(self._tokenizer)
        if OWN not in written and any(map(tokens.any.search, (*said, *passages))):
            written = tokens.owned(written)
        prefix, _, rest = written.partition(context)
        suffix = ""
        for mark, text in zip(marks, said, strict=True):
            before, found, rest = rest.partition(mark)
            if not found:
                raise PromptError("the model's chat template leaves out earlier turns; ask without history")
            suffix += before + text
        between = [_CHUNK_SEPARATOR] * max(0, len(passages) - 1)
        # Instructions of a question are somebody's own words, which a prefix would leave in the store.
        stored, once = ("", prefix) if instructions else (prefix, "")
        return Prompt(stored, list(passages), suffix + rest, between, preamble=once)

    @property
    def instructions(self) -> str:
        """The default instructions before the passages."""
        return (CHAT if self._template else STUFF).prefix.strip()

    def _written(self, context: str, said: Sequence[str], instructions: str | None, reasoning: Reasoning) -> str:
        """Text of the whole prompt: earlier questions and answers alternate, and the current question comes last."""
        if not self._template:
            pieces = [STUFF.suffix.replace("{q}", text) if at % 2 == 0 else f" {text}" for at, text in enumerate(said)]
            return OWN + STUFF.opening(instructions) + context + "".join(pieces)
        roles = ("user", "assistant")
        turns = question_turns(context, said[0], instructions)
        turns += [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)][1:]
        return render_turns(self._tokenizer, turns, reasoning=reasoning)


def search(
    find: Callable[[str, int], list[SearchHit]], question: str, earlier: Sequence[EarlierTurn], k: int
) -> list[SearchHit]:
    """The ``k`` passages that a question is answered from.

    A question such as "And when was it built?" names nothing, so that it is also searched for together with the latest
    questions before it. If it finds a nearer passage alone, that search counts. Otherwise both give passages in turn
    (``docs/decisions`` has the trial).

    Parameters
    ----------
    find : callable
        Gives the passages that fit a text best, as many as asked for.
    question : str
    earlier : sequence of EarlierTurn
        The first one first.
    k : int
    """
    alone = find(question, k)
    if not earlier:
        return alone
    before = [turn.question for turn in reversed(earlier[-_SEARCHED:])]
    together = find(" ".join([question, *before]), k)
    nearest, other = (min((hit.score for hit in found), default=math.inf) for found in (alone, together))
    if not together or nearest < other:
        return alone
    found: dict[tuple[str, int], SearchHit] = {}
    for one in (one for both in zip_longest(together, alone) for one in both if one is not None):
        found.setdefault((one.document_id, one.chunk), one)
    return list(found.values())[:k]


def report_of(
    engine: BlendEngine, prompt: Prompt, answer: Generation, turns: int = 0, show_prompt: bool = True
) -> dict[str, Any]:
    """The figures of an answer that the page shows; times in seconds, sizes in bytes.

    Parameters
    ----------
    engine : BlendEngine
        The engine that answered.
    prompt : Prompt
        The prompt.
    answer : Generation
    turns : int
        Earlier turns of the conversation that the prompt holds.
    show_prompt : bool
        Whether to tell of each token of the prompt. Each of them has to be decoded for that.
    """
    report, seconds = answer.report, answer.report.seconds
    # An empty prompt has no tokens, or a beginning of text alone.
    split = engine.tokenize(prompt) if prompt.chunks or prompt.suffix else _NO_TOKENS
    chunks = [
        {"hit": bool(tier), "device": tier or None, "bytes": engine.chunks.estimate_bytes([text]), "tokens": len(span)}
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
        "rule": rule_name(engine.config.selection),
        "plain": report.plain,
        "plain_reason": report.plain_reason,
        "fidelity": report.fidelity,
        "finish_reason": report.finish_reason,
        "stopped_by": report.stopped_by,
        "thought_tokens": report.thought_tokens,
        "turns": turns,
        "resumed": report.resumed_tokens,
        "verification": report.verification.asdict(),
        "prompt": _tokens(engine.tokenizer, split, answer) if show_prompt else [],
    }


def rule_name(rule: Any) -> str:
    """The name of a selection rule."""
    return rule if isinstance(rule, str) else type(rule).__name__


def _tokens(tokenizer: Any, split: TokenizedPrompt, answer: Generation) -> list[dict[str, Any]]:
    """The prompt token by token: what was recomputed up to the last layer, and how far stored KV was off."""
    computed = set(answer.recomputed[-1].tolist()) if answer.recomputed else set()
    deviations = answer.deviation.tolist() if answer.deviation is not None else []
    chunk_of = {at: number for number, span in enumerate(split.chunks) for at in range(span.start, span.stop)}
    rows = []
    for at, text in enumerate(_texts(tokenizer, split.input_ids)):
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
                "resumed": at < answer.report.resumed_tokens,
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


def compared_row(result: MethodResult) -> dict[str, Any]:
    """A method's result as the page shows it."""
    return {
        "method": _SHORT[result.name],
        "answer": result.text,
        "ttft_s": result.ttft,
        "same_as_full": result.nearness.same_answer,
        "kl": result.nearness.kl,
        "order_kl": result.nearness.order_kl,
        "nearness": result.nearness.words,
        "rounds": result.rounds,
    }
