"""Prompts whose stored KV lies in memory, to be fused by many rules, and chunks computed behind chosen contexts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor import Fusion, FusionPlan, fuse
from cacheblend_rag.fusor.selection import SelectionRule, SelectNone
from cacheblend_rag.fusor.work import work_share
from cacheblend_rag.models.adapter import ContextKV, ModelAdapter
from cacheblend_rag.models.kv import LayerKV, SegmentKV
from cacheblend_rag.prompt import Prompt, PromptTokenizer, TokenizedPrompt
from cacheblend_rag.prompt.contexts import CONTEXTS, contexts_beside

ComputeKV = Callable[[str, tuple[int, ...], tuple[int, ...], int], SegmentKV]
"""The KV of a chunk, of its text, the ids that stand directly before it, its own ids, and the frequency regime."""

_KEPT = 8  # groups whose contexts' KV stays in memory


class Corpus:
    """A corpus whose chunks are computed behind contexts.

    Parameters
    ----------
    adapter : ModelAdapter
    tokenizer : PromptTokenizer
    chunks : sequence of str
        Those of a document one after another.
    count : int
        How many contexts each chunk has.
    """

    def __init__(
        self, adapter: ModelAdapter, tokenizer: PromptTokenizer, chunks: Sequence[str], count: int = CONTEXTS
    ) -> None:
        self._adapter = adapter
        texts = list(dict.fromkeys(text.strip() for text in chunks))
        sizes = [len(tokenizer.chunk(text).ids) for text in texts]
        beside = contexts_beside(tokenizer, texts, sizes, count, adapter.context_window)
        self._contexts = dict(zip(texts, beside, strict=True))
        self._known: OrderedDict[str, ContextKV] = OrderedDict()
        # Rows that a prompt still holds, for other prompts with the same chunk.
        self._held: WeakValueDictionary[tuple[object, ...], SegmentKV] = WeakValueDictionary()

    def compute(self, text: str, before: tuple[int, ...], ids: tuple[int, ...], regime: int = 0) -> SegmentKV:
        """KV of a chunk of the corpus; see `ComputeKV`."""
        key = (text.strip(), before, ids, regime)
        if (held := self._held.get(key)) is None:
            held = self._held[key] = self._compute(*key)
        return held

    def _compute(self, text: str, before: tuple[int, ...], ids: tuple[int, ...], regime: int) -> SegmentKV:
        contexts = self._contexts[text]
        if contexts.digest not in self._known:
            self._known[contexts.digest] = ContextKV(self._adapter, contexts.ids)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(contexts.digest)
        kv = self._known[contexts.digest]
        return kv.segments_kv([(*before, *ids)], regime, [len(before)], [contexts.numbers_for(ids)])[0]


@dataclass(frozen=True)
class _Fused:
    """A prompt fused by one rule.

    Parameters
    ----------
    fusion : Fusion
        The result.
    work : float
        Its work as a share of a full prefill's.
    """

    fusion: Fusion
    work: float


class PreparedPrompt:
    """A prompt whose prefix and chunks are stored, each computed once.

    Parameters
    ----------
    adapter : ModelAdapter
    tokenizer : PromptTokenizer
    prompt : Prompt
        With at least one chunk and a suffix.
    compute : callable, optional
        Computes the KV of a chunk; by default it is computed behind what opens a text.

    Raises
    ------
    ConfigError
        If it has no chunk with tokens that can be reused, or no suffix.
    """

    def __init__(
        self, adapter: ModelAdapter, tokenizer: PromptTokenizer, prompt: Prompt, compute: ComputeKV | None = None
    ) -> None:
        if not prompt.chunks or not prompt.suffix:
            raise ConfigError("prompt", prompt, "give at least one chunk, and the question as suffix")
        self.adapter = adapter
        self.tokens: TokenizedPrompt = tokenizer.tokenize(prompt)
        self._known: dict[range, SegmentKV] = {}
        self._regime = adapter.regime(len(self.tokens.input_ids)) or 0
        in_place: list[range] = []
        reused: list[range] = []
        for chunk in self.tokens.located:
            if not len(chunk.span):
                continue
            span, before = range(chunk.span.start, chunk.span.stop), tokenizer.context_ids(chunk.text) + chunk.head
            if compute is None:
                self._known[span] = adapter.segments_kv(before, [self.ids(span)], self._regime)[0]
                exact = self.tokens.input_ids[: span.start] == before
            else:
                self._known[span] = compute(chunk.text, before, self.ids(span), self._regime)
                exact = False
            (in_place if exact else reused).append(span)
        chunks = list(self._known)
        if not chunks:
            raise ConfigError("prompt", prompt, "give at least one chunk of more than a word or two")
        if prefix := range(self.tokens.prefix.start, self.tokens.prefix.stop):
            self._known[prefix] = adapter.segments_kv((), [self.ids(prefix)], self._regime)[0]
            in_place.append(prefix)
        self.plan = FusionPlan(
            self.tokens.input_ids,
            exact=in_place,
            reused=reused,
            unrotated=range(0, chunks[-1].stop),
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

    def fuse(self, rule: SelectionRule) -> _Fused:
        """Fuse by a rule."""
        fusion = fuse(self.adapter, self.plan, _layers(self.adapter, len(self.tokens.input_ids), self._known), rule)
        shape, tokens = self.adapter.shape, len(self.tokens.input_ids)
        return _Fused(fusion, work_share(shape, tokens, fusion.done))

    @cached_property
    def full(self) -> Fusion:
        """Full prefill: every row is computed."""
        return prefill_layerwise(self.adapter, self.tokens.input_ids)


def _layers(adapter: ModelAdapter, tokens: int, known: Mapping[range, SegmentKV]) -> Iterator[LayerKV]:
    """Fresh buffers of every layer, with what is stored in place."""
    shape = (1, adapter.kv_heads, tokens, adapter.head_dim)
    for number in range(adapter.num_layers):
        keys = torch.zeros(shape, dtype=adapter.dtype, device=adapter.device)
        values = torch.zeros_like(keys)
        for span, kv in known.items():
            keys[0, :, span.start : span.stop] = kv.keys[number]
            values[0, :, span.start : span.stop] = kv.values[number]
        yield LayerKV(keys, values)


def prefill_layerwise(adapter: ModelAdapter, ids: Sequence[int]) -> Fusion:
    """Full prefill through the blended pass: every row is computed on every layer."""
    plan = FusionPlan(ids, exact=[], reused=[], unrotated=range(0))
    return fuse(adapter, plan, _layers(adapter, len(ids), {}), SelectNone())


def greedy_answer(
    adapter: ModelAdapter, cache: Any, logits: torch.Tensor, count: int, end_ids: Collection[int]
) -> tuple[list[int], torch.Tensor]:
    """The answer to a prompt by greedy decoding.

    Parameters
    ----------
    adapter : ModelAdapter
    cache : transformers Cache
        KV of the prompt; it grows by the answer.
    logits : Tensor, [vocab]
        Of the prompt's last position.
    count : int
        Most tokens.
    end_ids : collection of int
        Tokens that end the answer.

    Returns
    -------
    list of int, Tensor
        Ids, the end token included, and the log-probabilities they were taken from, ``[ids, vocab]``.
    """
    ids: list[int] = []
    rows: list[torch.Tensor] = []
    while True:
        rows.append(logits.float().log_softmax(dim=-1))
        ids.append(int(rows[-1].argmax()))
        if len(ids) == count or ids[-1] in end_ids:
            return ids, torch.stack(rows)
        logits = adapter.extend(cache, ids[-1:])[-1]
