"""The model's answers as LlamaIndex's responses, and their event in tracing."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import LogProb
from llama_index.core.instrumentation.events import BaseEvent

from cacheblend_rag.engine.model_call import Said
from cacheblend_rag.report import Generation

CUT = "the answer was cut before its JSON ended: allow it more max_tokens"


class CacheBlendEvent(BaseEvent):
    """Event of a complete answer.

    Parameters
    ----------
    model_name : str
    ttft : float
        Time to first token, in seconds.
    hits, misses : int
        Chunks read from the store, and chunks that were not there.
    reused_tokens : int
        Tokens whose KV was read from the store.
    resumed_tokens : int
        Tokens that were continued from a kept prompt, such as the turn before.
    recomputed_tokens : list of int
        Reused chunk tokens that were recomputed, layer by layer.
    prompt_tokens, generated_tokens : int
    info : dict
        The same and more, as in the answer's ``raw``.
    """

    model_name: str
    ttft: float
    hits: int
    misses: int
    reused_tokens: int
    resumed_tokens: int
    recomputed_tokens: list[int]
    prompt_tokens: int
    generated_tokens: int
    info: dict[str, Any]

    @classmethod
    def class_name(cls) -> str:
        """Name of the event's class."""
        return "CacheBlendEvent"


def logprobs_of(answer: Generation | None) -> list[list[LogProb]] | None:
    """For each token of a whole answer, the token and the likeliest others in its place; None if not requested.

    LlamaIndex's models of OpenAI give the likeliest alone, among which a token that was drawn may be missing.
    """
    if answer is None or answer.logprobs is None:
        return None
    found = []
    for one in answer.logprobs:
        others = [(name, value) for name, value in one.top if name != one.token]
        named = [(one.token, one.logprob), *others]
        found.append([LogProb(token=name, logprob=value, bytes=list(name.encode())) for name, value in named])
    return found


def thought_of(said: Said) -> dict[str, Any]:
    """The fields of a thought so far: its newest piece, where LlamaIndex's agents look for it, and its whole text."""
    delta = {"thinking_delta": said.thought} if said.thought else {}
    whole = said.split.thought if said.answer is None else said.answer.thought
    return {**delta, "thinking": whole} if whole else {}


def delta_of(said: Said, content: str) -> str | None:
    """The newest piece of a response with this content; None if the answer was corrected since."""
    if said.answer is None:
        return said.text
    return said.split.rest(content) if said.streamed else None


def check_whole(answer: Generation | None) -> None:
    """Refuse an answer that was cut off and is to be read as JSON.

    Raises
    ------
    ValueError
        If the answer was cut off.
    """
    if answer is not None and answer.report.finish_reason == "length":
        raise ValueError(f"{CUT}; it said: {answer.text!r}")
