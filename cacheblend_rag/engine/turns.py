"""Turns: holding the model, and the steps that answers under way take together."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cacheblend_rag.config import DEFAULT_NEW_TOKENS, BlendConfig
from cacheblend_rag.engine.decode import Step
from cacheblend_rag.engine.pipeline import Pauses
from cacheblend_rag.engine.prompt_lookup import TRIED_AT_ONCE, PromptLookup
from cacheblend_rag.engine.route import Fused
from cacheblend_rag.engine.scheduler import ModelTime, Scheduler, prepare
from cacheblend_rag.engine.segments import Segments
from cacheblend_rag.engine.write_back import WriteBack
from cacheblend_rag.errors import ConfigError, GenerationError
from cacheblend_rag.models.batched_decode import BatchedDecode
from cacheblend_rag.models.cache import all_preallocated
from cacheblend_rag.prompt import Prompt


class Lifetime:
    """Ends with the last of an engine, the views of it and the answers of theirs that are under way."""


@dataclass(frozen=True)
class Turns:
    """The model of an engine, held by one request at a time, or by a step of several.

    Parameters
    ----------
    scheduler : Scheduler
        Engines over one model share it.
    segments : Segments
        Those of the engine's pipeline: its model and its options.
    batched_decode : BatchedDecode
        Takes the steps of several answers in one pass.
    write_back : WriteBack
        Closed with the engine; from then on nobody gets the model.
    lifetime : Lifetime
        All who may still use the model hold it.
    """

    scheduler: Scheduler
    segments: Segments
    batched_decode: BatchedDecode
    write_back: WriteBack
    lifetime: Lifetime

    @property
    def config(self) -> BlendConfig:
        """The options."""
        return self.segments.config

    def alone(self) -> AbstractContextManager[ModelTime]:
        """Hold the model and the store for one request, with no other under way."""
        return self._held(lambda: 0)

    def beside_others(self, prompt: Prompt, new_tokens: int | None) -> AbstractContextManager[ModelTime]:
        """Hold the model and the store for a prompt, beside others that have begun.

        Parameters
        ----------
        prompt : Prompt
        new_tokens : int or None
            Most tokens of its answer.
        """
        if not self.several:
            return self.alone()
        # No tokenizer makes more tokens than there are bytes.
        size = len(prompt.written(self.config.separator).text.encode(errors="surrogatepass"))
        return self._held(partial(self._room_beside, size + (new_tokens or DEFAULT_NEW_TOKENS)))

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Hold the model for a short piece of a request's work that uses all cores, between passes of others."""
        with self.scheduler.entered(lambda: sys.maxsize):
            self.check_open()
            prepare(self.scheduler)
            yield

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Hold the model for a short piece of work that no request waits for.

        It begins once no request wants the model. While requests never cease, such work gets a fifth of the time.
        """
        with self.scheduler.background():
            self.check_open()
            prepare(self.scheduler)
            self.segments.model.look()
            yield

    @contextmanager
    def _held(self, beside: Callable[[], int]) -> Iterator[ModelTime]:
        with self.scheduler.entered(beside) as spent:
            self.check_open()
            prepare(self.scheduler)
            self.segments.model.look()
            yield spent

    def check_open(self) -> None:
        """Refuse to work for an engine that was closed."""
        if self.write_back.closed:
            raise ConfigError("engine", "closed", "make a new engine; this one was closed")

    @property
    def several(self) -> bool:
        """Whether answers may be under way at once."""
        return self.config.max_concurrent > 1 and self.batched_decode.possible

    def _room_beside(self, tokens: int) -> int:
        """How many others may be under way when a prompt of so many tokens at most is begun."""
        return self.config.max_concurrent - 1 if self.batched_decode.fit(tokens) else 0

    # Within a turn -------------------------------------------------------------------------

    def pauses(self, cancelled: Callable[[], bool]) -> Pauses | None:
        """Pauses of a prefill, in which others use the model; None if there are no others."""
        if not self.several:
            return None

        def between(seconds: float) -> None:
            _go_on(cancelled)
            self.scheduler.give_way(seconds)

        def each_layer() -> None:
            _go_on(cancelled)
            if self._on_cpu:
                self.scheduler.let_step()

        return Pauses(between, each_layer)

    def pauses_in_background(self, cancelled: Callable[[], bool]) -> Pauses:
        """Pauses of a prefill in the background, in which all requests go first."""

        def between(seconds: float) -> None:
            _go_on(cancelled)
            self.scheduler.step_aside()
            _go_on(cancelled)

        def each_layer() -> None:
            if self._on_cpu:
                between(0.0)

        return Pauses(between, each_layer)

    @property
    def _on_cpu(self) -> bool:
        """Whether a layer takes so long that others should not wait for more than one; a millisecond on a GPU."""
        device: torch.device = self.segments.model.adapter.device
        return device.type == "cpu"

    @contextmanager
    def steps(self, fused: Fused) -> Iterator[Step]:
        """The function that takes each step of an answer."""
        if not (self.batched_decode.takes_several and all_preallocated(fused.cache)):
            yield self.step
            return
        lookup = PromptLookup(
            fused.input_ids,
            fused.cache,
            most=TRIED_AT_ONCE,
            window=self.segments.model.adapter.context_window or sys.maxsize,
            take=self.step,
            wanted=lambda: self.scheduler.alone,
        )
        with contextlib.closing(lookup):
            yield lookup

    def step(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """A step's pass, together with those of others under way; logits ``[1, tokens, vocab]``."""
        if not self.several:
            return self.batched_decode([inputs])[0]
        return self.scheduler.step(inputs, self.batched_decode)

    def step_in_background(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """A step's pass in the background, once no request wants the model; logits ``[1, tokens, vocab]``."""
        self.scheduler.step_aside()
        return self.batched_decode([inputs])[0]


def _go_on(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise GenerationError("the answer was given up while its prompt was prefilled")
