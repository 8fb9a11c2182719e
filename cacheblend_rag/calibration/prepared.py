"""One prompt, its stored KV kept in memory, to be fused by many rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor import Fusion, FusionPlan, fuse
from cacheblend_rag.fusor.selection import SelectionRule
from cacheblend_rag.fusor.teacher_forcing import prefill_layerwise
from cacheblend_rag.fusor.work import work_share
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.kv import LayerKV, SegmentKV, from_kv_layers
from cacheblend_rag.prompt import Prompt, PromptTokenizer, TokenizedPrompt

__all__ = ["DEPTH", "Fused", "PreparedPrompt"]

DEPTH = 24
"""Layers of the model to which work is scaled, so that shallow models compare with usual ones."""
_KEPT_QUERIES = 2  # layers: those of a whole model would take as much memory as its KV, and more


@dataclass(frozen=True)
class Fused:
    """A prompt fused by one rule.

    Parameters
    ----------
    fusion : Fusion
        The result.
    work : float
        Its work as a share of a full prefill's.
    scaled_work : float
        The same in a model of `DEPTH` layers, or of its own if they are more; see `work_share`.
    """

    fusion: Fusion
    work: float
    scaled_work: float


class PreparedPrompt:
    """A prompt whose prefix and chunks are stored, each computed once.

    Parameters
    ----------
    adapter : ModelAdapter
    tokenizer : PromptTokenizer
    prompt : Prompt
        With at least one chunk and a suffix.

    Raises
    ------
    ConfigError
        If it has no chunk with tokens that can be reused, or no suffix.
    """

    def __init__(self, adapter: ModelAdapter, tokenizer: PromptTokenizer, prompt: Prompt) -> None:
        if not prompt.chunks or not prompt.suffix:
            raise ConfigError("prompt", prompt, "give at least one chunk, and the question as suffix")
        self.adapter = adapter
        self.tokens: TokenizedPrompt = tokenizer.tokenize(prompt)
        self._known: dict[range, SegmentKV] = {}
        self._queries: dict[int, torch.Tensor] = {}
        self._regime = adapter.regime(len(self.tokens.input_ids)) or 0
        # Ids that each chunk is computed behind.
        self._contexts = {
            range(chunk.span.start, chunk.span.stop): tokenizer.context_ids(chunk.text) + chunk.head
            for chunk in self.tokens.located
            if len(chunk.span)
        }
        if not self._contexts:
            raise ConfigError("prompt", prompt, "give at least one chunk of more than a word or two")
        chunks = list(self._contexts)
        for span, context in self._contexts.items():
            self._known[span] = adapter.segment_kv(context, self.ids(span), self._regime)
        in_place = [span for span, context in self._contexts.items() if self.tokens.input_ids[: span.start] == context]
        reused = [span for span in chunks if span not in in_place]
        if prefix := range(self.tokens.prefix.start, self.tokens.prefix.stop):
            self._known[prefix] = adapter.segment_kv((), self.ids(prefix), self._regime)
            in_place.append(prefix)
        self.plan = FusionPlan(
            self.tokens.input_ids,
            exact=in_place,
            reused=reused,
            unrotated=range(0, chunks[-1].stop),
            contexts=[self._contexts[span] for span in reused],
            question=self.question,
        )

    @property
    def question(self) -> range:
        """Positions behind the last chunk."""
        return range(self.tokens.suffix.start, self.tokens.suffix.stop)

    @property
    def context(self) -> range:
        """Positions from the first chunk to the last."""
        return range(self.tokens.chunks[0].start, self.tokens.chunks[-1].stop)

    def ids(self, span: range) -> tuple[int, ...]:
        """Ids of some positions."""
        return self.tokens.input_ids[span.start : span.stop]

    def fuse(self, rule: SelectionRule) -> Fused:
        """Fuse by a rule."""
        fusion = fuse(self.adapter, self.plan, self._buffers(self._known), rule, self._asked)
        shape, tokens = self.adapter.shape, len(self.tokens.input_ids)
        layers = max(DEPTH, self.adapter.num_layers)
        return Fused(fusion, work_share(shape, tokens, fusion.done), work_share(shape, tokens, fusion.done, layers))

    @cached_property
    def full(self) -> Fusion:
        """Full prefill: every row is computed."""
        return prefill_layerwise(self.adapter, self.tokens.input_ids)

    def forget_full(self) -> None:
        """Let go of the full prefill; it is made again when it is wanted."""
        self.__dict__.pop("full", None)

    def _asked(self, layer: int) -> torch.Tensor:
        """Queries of a layer as they would be stored, ``[heads, tokens, head_dim]``."""
        if layer not in self._queries:
            adapter, first = self.adapter, self.adapter.num_layers
            shape = (adapter.heads, len(self.tokens.input_ids), adapter.head_dim)
            queries = torch.zeros(shape, dtype=adapter.dtype, device=adapter.device)
            for span in self.plan.reused:
                kv = adapter.segment_kv(self._contexts[span], self.ids(span), self._regime, (layer,))
                parts = list(zip(kv.keys[first:], kv.values[first:], strict=True))
                queries[:, span.start : span.stop] = from_kv_layers(parts, adapter.heads)
            while len(self._queries) >= _KEPT_QUERIES:
                del self._queries[next(iter(self._queries))]
            self._queries[layer] = queries
        return self._queries[layer]

    def _buffers(self, known: Mapping[range, SegmentKV]) -> list[LayerKV]:
        """Fresh buffers of every layer, with what is stored in place."""
        adapter = self.adapter
        shape = (1, adapter.kv_heads, len(self.tokens.input_ids), adapter.head_dim)
        layers = []
        for number in range(adapter.num_layers):
            keys = torch.zeros(shape, dtype=adapter.dtype, device=adapter.device)
            values = torch.zeros_like(keys)
            for span, kv in known.items():
                keys[0, :, span.start : span.stop] = kv.keys[number]
                values[0, :, span.start : span.stop] = kv.values[number]
            layers.append(LayerKV(keys, values))
        return layers
