"""A step of several answers in one pass: every weight is read once for all of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch

from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.attention import PerSequenceKV
from cacheblend_rag.models.cache import joined_layers
from cacheblend_rag.models.cpu.layers import PlainRows, plain_rows
from cacheblend_rag.models.memory import free_memory_on
from cacheblend_rag.models.modules import cache_argument, is_compiled, keeping_nothing
from cacheblend_rag.models.plain import PlainAdapter


class BatchedDecode:
    """Takes the next step of answers, each with a cache of its own length.

    Parameters
    ----------
    adapter : PlainAdapter
        Answers of one that is no `ModelAdapter` are decoded one by one.

    Attributes
    ----------
    possible : bool
        Whether several answers of the model can be under way at once.
    token_bytes : int
        Bytes of a token's keys and values on all layers, in the model's element type; 0 if answers are decoded one by
        one for want of a `ModelAdapter`.
    """

    def __init__(self, adapter: PlainAdapter) -> None:
        self._adapter = cast(ModelAdapter, adapter)
        self._on_cpu = adapter.device.type == "cpu"
        if not isinstance(adapter, ModelAdapter):
            self.possible, self._one_by_one, self.token_bytes = not adapter.steps_alone, True, 0
            return
        # Frequencies that change with the length of a text would be those of whichever came last.
        self.possible = adapter.regime(sys.maxsize) == 0
        # A compiled model is one of fixed passes, layers that cache latents must make all keys anew, and where rows
        # depend on each other an answer would depend on who else is answered.
        fixed = is_compiled(adapter.model) or not adapter.form.as_attended or adapter.mixes_rows
        self._one_by_one = fixed or not self.possible
        self.token_bytes = 2 * adapter.num_layers * adapter.kv_heads * adapter.head_dim * adapter.dtype.itemsize

    @cached_property
    def plain(self) -> PlainRows | None:
        """The layers of a CPU's model in fewer calls, if all of them are plain."""
        adapter = self._adapter
        return plain_rows(adapter.layers, adapter.head_dim, adapter.rotary(1)) if self._on_cpu else None

    @property
    def takes_several(self) -> bool:
        """Whether a step can have more than one token. On a GPU it was not measured."""
        return self._on_cpu and self._in_one_pass

    @property
    def _in_one_pass(self) -> bool:
        # Families without SDPA attend by what fused kernels lack.
        return not self._one_by_one and self._adapter.attends_by_kernel

    def fit(self, tokens: int) -> bool:
        """Whether memory has room for the KV of so many tokens, and as much again for the pass that makes it."""
        free = free_memory_on(self._adapter.device)
        return free is None or 2 * tokens * self.token_bytes <= free

    def __call__(self, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
        """Logits of each step, ``[1, tokens, vocab]``; on a GPU one alone is the model's own pass, if its
        layers are not plain.

        Parameters
        ----------
        inputs : sequence of mapping
            Inputs by transformers' generation for each: ``input_ids`` ``[1, tokens]``, one token unless
            `takes_several`, the cache and more. The caches grow.
        """
        if self._in_one_pass and (found := self._by_kernels(inputs)) is not None:
            return found
        # On a CPU heads that share a key are faster as rows of one head. On a GPU it was not measured.
        alone = len(inputs) == 1 and not self._on_cpu
        if alone or not self._in_one_pass:
            model = keeping_nothing(self._adapter.model)
            return [model(**one, return_dict=True).logits for one in inputs]
        return [rows[None] for rows in self.one_pass(inputs)]

    def _by_kernels(self, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor] | None:
        """Logits of each, ``[1, 1, vocab]``, where a GPU runs all layers by one call; None where it cannot."""
        adapter, kernels = self._adapter, self._adapter.plain_layers
        if kernels is None or any(one["input_ids"].shape != (1, 1) for one in inputs):
            return None
        name = cache_argument(adapter.model)
        answers = [joined_layers(one[name]) for one in inputs]
        known = [answer for answer in answers if answer is not None]
        if len(known) < len(answers) or len(set(map(id, known))) < len(known):
            return None
        if not kernels.as_they_were():
            return None
        at = [answer.used for answer in known]
        positions = torch.tensor(at).to(adapter.device, non_blocking=True)
        rotaries = adapter.rotary(max(at) + 1).at(positions).to(adapter.dtype)
        entries = torch.stack([answer.entries for answer in known], dim=1)
        with torch.no_grad():  # nothing in these layers depends on whether a model is trained
            hidden = adapter.embed(torch.cat([one["input_ids"][0] for one in inputs]))
            logits = adapter.head(kernels.step(entries, hidden, positions, rotaries.layer(0)))
        for answer in known:
            answer.used += 1
        return list(logits[:, None, None])

    def one_pass(self, inputs: Sequence[Mapping[str, Any]]) -> Sequence[torch.Tensor]:
        """Logits of each, ``[tokens, vocab]``; every token is a row of its own."""
        adapter, name = self._adapter, cache_argument(self._adapter.model)
        caches, counts = [one[name] for one in inputs], [one["input_ids"].shape[1] for one in inputs]
        before = [cache.get_seq_length() for cache in caches]
        spans = [range(length, length + count) for length, count in zip(before, counts, strict=True)]
        positions = torch.tensor([position for span in spans for position in span], device=adapter.device)
        rotaries = adapter.rotary(int(positions.max()) + 1).at(positions).to(adapter.dtype)
        ids = torch.cat([one["input_ids"][0] for one in inputs])
        plain = self.plain if self.plain is not None and self.plain.as_they_were() else None
        with adapter.blending() if plain is None else torch.no_grad() as layers:
            hidden = adapter.embed(ids[:, None])  # [tokens of all, 1, hidden]
            masks = [_causal(span, hidden) for span in spans]
            kvs = [PerSequenceKV(held, masks) for held in zip(*(cache.layers for cache in caches), strict=True)]
            if plain is not None:
                hidden = plain(hidden, kvs, rotaries.layer(0))
            elif layers is not None:
                hidden = layers.step(hidden, kvs, positions, rotaries)
            return torch.split(adapter.head(hidden[:, 0]), counts)


def _causal(span: range, like: torch.Tensor) -> torch.Tensor:
    """Mask of an answer's newest tokens, added to scores: ``[tokens, positions]``, or ``[1, 0]`` if they see all."""
    if len(span) == 1:
        return like.new_zeros(1, 0)
    hidden = torch.full((len(span), span.stop), float("-inf"), dtype=like.dtype, device=like.device)
    return hidden.triu_(span.start + 1)
