"""Chunks computed behind those next to them, as warming does it, without a store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakValueDictionary

from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.contexts import ContextKV, LearnedContext
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.prompt import PromptTokenizer
from cacheblend_rag.prompt.contexts import contexts_beside

_KEPT = 8  # groups whose contexts' KV stays in memory


class Corpus:
    """What computes the chunks of a corpus behind contexts.

    Parameters
    ----------
    adapter : ModelAdapter
    tokenizer : PromptTokenizer
    chunks : sequence of str
        Those of a document one after another.
    count : int
        How many contexts each chunk has.
    learned : LearnedContext, optional
        One more, the same for all.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        tokenizer: PromptTokenizer,
        chunks: Sequence[str],
        count: int,
        learned: LearnedContext | None = None,
    ) -> None:
        self._adapter, self._learned = adapter, () if learned is None else (learned,)
        texts = list(dict.fromkeys(text.strip() for text in chunks))
        sizes = [len(tokenizer.chunk(text).ids) for text in texts]
        beside = contexts_beside(tokenizer, texts, sizes, count, adapter.context_window)
        self._contexts = dict(zip(texts, beside, strict=True))
        self._known: OrderedDict[str, ContextKV] = OrderedDict()
        # What a prompt still holds, for other prompts with the same chunk.
        self._held: WeakValueDictionary[tuple[object, ...], SegmentKV] = WeakValueDictionary()

    def compute(self, text: str, before: tuple[int, ...], ids: tuple[int, ...], regime: int = 0) -> SegmentKV:
        """KV of a chunk of the corpus; see `ComputeKV`."""
        key = (text.strip(), before, ids, regime)
        if (held := self._held.get(key)) is None:
            held = self._held[key] = self._computed(*key)
        return held

    def _computed(self, text: str, before: tuple[int, ...], ids: tuple[int, ...], regime: int) -> SegmentKV:
        contexts = self._contexts[text]
        if contexts.digest not in self._known:
            self._known[contexts.digest] = ContextKV(self._adapter, (*contexts.ids, *self._learned))
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(contexts.digest)
        kv = self._known[contexts.digest]
        numbers = (*contexts.of(ids), *range(len(contexts.ids), len(contexts.ids) + len(self._learned)))
        return kv.segments_kv([(*before, *ids)], regime, [len(before)], [numbers])[0]
