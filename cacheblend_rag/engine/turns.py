"""Turns: holding the model, and the steps that answers under way take together."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from cacheblend_rag.config import DEFAULT_NEW_TOKENS
from cacheblend_rag.engine.decode import Step
from cacheblend_rag.engine.pipeline import Pauses
from cacheblend_rag.engine.route import Fused
from cacheblend_rag.engine.scheduler import ModelTime, Scheduler
from cacheblend_rag.engine.segments import Segments
from cacheblend_rag.engine.write_back import WriteBack
from cacheblend_rag.errors import ConfigError, GenerationError
from cacheblend_rag.llama_cpp.adapter import LlamaDecode
from cacheblend_rag.models.batched_decode import BatchedDecode
from cacheblend_rag.models.cache import all_preallocated, take_back
from cacheblend_rag.prompt import Prompt

TRIED_AT_ONCE = 6
"""Most tokens of an answer that are tried at once."""

_LENGTHS = (3, 2)  # newest tokens that are looked for, the longest first


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
    batched_decode: BatchedDecode | LlamaDecode
    write_back: WriteBack
    lifetime: Lifetime

    @contextmanager
    def held(self, beside: Callable[[], int] = lambda: 0) -> Iterator[ModelTime]:
        """Hold the model and the store for one request, by default exclusively."""
        with self.scheduler.entered(beside) as spent:
            self.check_open()
            self.segments.model.look()
            yield spent

    def beside_others(self, prompt: Prompt, new_tokens: int | None) -> AbstractContextManager[ModelTime]:
        """Hold the model and the store for a prompt, together with prompts that have begun.

        Parameters
        ----------
        prompt : Prompt
        new_tokens : int or None
            Most tokens of its answer.
        """
        if not self.several:
            return self.held()
        # No tokenizer makes more tokens than there are bytes.
        size = len(prompt.written(self.segments.config.separator).text.encode(errors="surrogatepass"))
        tokens = size + (new_tokens or DEFAULT_NEW_TOKENS)
        return self.held(lambda: self.segments.config.max_concurrent - 1 if self.batched_decode.fit(tokens) else 0)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Hold the model for a short piece of a request's work that uses all cores, between passes of others."""
        with self.scheduler.entered(lambda: sys.maxsize):
            self.check_open()
            yield

    @contextmanager
    def in_background(self) -> Iterator[None]:
        """Hold the model for a short piece of work that no request waits for.

        It begins once no request wants the model. While requests never cease, such work gets a fifth of the time.
        """
        with self.scheduler.background():
            self.check_open()
            self.segments.model.look()
            yield

    def check_open(self) -> None:
        """Refuse to work for an engine that was closed."""
        if self.write_back.closed:
            raise ConfigError("engine", "closed", "make a new engine; this one was closed")

    @property
    def several(self) -> bool:
        """Whether answers may be under way at once."""
        return self.segments.config.max_concurrent > 1 and self.batched_decode.possible

    # Within a turn -------------------------------------------------------------------------

    def pauses(self, cancelled: Callable[[], bool], read: Callable[[int], object] | None = None) -> Pauses | None:
        """Pauses of a prefill, in which others use the model; None if there are no others.

        Parameters
        ----------
        cancelled : callable
        read : callable, optional
            Told how many tokens are read so far.
        """
        if not self.several:
            return None
        on_cpu = self.segments.model.adapter.device.type == "cpu"

        def between(seconds: float, tokens: int = 0) -> None:
            _go_on(cancelled)
            if read is not None:
                read(tokens)
            self.scheduler.give_way(seconds)

        def each_layer() -> None:
            _go_on(cancelled)
            if on_cpu:  # a layer takes a millisecond on a GPU
                self.scheduler.let_step()

        return Pauses(between, each_layer)

    def pauses_in_background(self, cancelled: Callable[[], bool]) -> Pauses:
        """Pauses of a prefill in the background, in which all requests go first."""
        on_cpu = self.segments.model.adapter.device.type == "cpu"

        def between(seconds: float, tokens: int = 0) -> None:
            _go_on(cancelled)
            self.scheduler.step_aside()
            _go_on(cancelled)

        def each_layer() -> None:
            if on_cpu:  # a layer takes a millisecond on a GPU
                between(0.0)

        return Pauses(between, each_layer)

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


class PromptLookup:
    """Takes the steps of one answer, several tokens in one pass where the prompt seems to have them already.

    Answers about documents repeat what the documents say. If the newest tokens of an answer stand in the prompt, those
    that follow there are tried: one pass gives the logits behind each of them. A token is taken from them only if the
    answer chose the very token that was tried, so what is answered does not change. This is prompt lookup decoding
    (A. Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding).

    Parameters
    ----------
    ids : sequence of int
        The prompt.
    cache : transformers Cache
        Its KV, which grows by the answer.
    most : int
        Tokens tried at once.
    window : int
        Most tokens of prompt and answer.
    take : callable
        Takes what transformers hands to the model, with one or more ids, and gives logits ``[1, ids, vocab]``.
    wanted : callable
        Whether a step may have more than one id; asked before each.
    """

    def __init__(
        self,
        ids: Sequence[int],
        cache: Any,
        *,
        most: int,
        window: int,
        take: Callable[[Mapping[str, Any]], torch.Tensor],
        wanted: Callable[[], bool],
    ) -> None:
        self._cache, self._take, self._wanted = cache, take, wanted
        self._most, self._window = most, window
        self._ids = list[int]()  # of the prompt and the answer so far
        self._behind = dict[tuple[int, ...], int]()  # where that stands which followed on a few tokens last
        self._tried: deque[tuple[int, torch.Tensor]] = deque()  # tokens and the logits behind each
        for token in ids:
            self._append(token)

    def __call__(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The logits behind the newest token, ``[1, 1, vocab]``."""
        newest = inputs["input_ids"]
        token = int(newest)
        self._append(token)
        if self._tried and self._tried[0][0] == token:
            return self._tried.popleft()[1][None, None]
        self.close()
        room = self._window - len(self._ids)
        tried = self._continuation(min(self._most, room)) if self._wanted() else []
        rows = self._take({**inputs, "input_ids": torch.cat((newest, newest.new_tensor([tried])), dim=1)})[0]
        self._tried.extend(zip(tried, rows[1:], strict=True))
        return rows[None, :1]

    def close(self) -> None:
        """Remove rejected tokens from the cache."""
        if self._tried:
            take_back(self._cache, len(self._tried))
            self._tried.clear()

    def _append(self, token: int) -> None:
        """Go on by a token. Those before it are known from now on."""
        place = len(self._ids)
        for length in _LENGTHS:
            if place >= length:
                self._behind[tuple(self._ids[place - length :])] = place
        self._ids.append(token)

    def _continuation(self, most: int) -> list[int]:
        """Tokens that followed when the newest tokens stood in the text before."""
        if most < 1:
            return []
        for length in _LENGTHS:
            place = self._behind.get(tuple(self._ids[-length:]))
            if place is not None:
                return self._ids[place : place + most]
        return []
