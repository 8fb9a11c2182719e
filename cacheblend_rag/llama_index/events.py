"""The event of an answer in tracing."""

from __future__ import annotations

from typing import Any

from llama_index.core.instrumentation.events import BaseEvent


class CacheBlendEvent(BaseEvent):
    """An answer is complete.

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

    @classmethod
    def of(cls, info: dict[str, Any], span_id: str | None) -> CacheBlendEvent:
        """An event of what is said of an answer, in the span in which the model was called."""
        own = {name: info[name] for name in cls.model_fields if name in info}
        return cls(**own, info=info, span_id=span_id)
