"""A model in llama.cpp, taken apart into what the engine asks of one."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import Cache

from cacheblend_rag.errors import GenerationError
from cacheblend_rag.llama_cpp.cache import SequenceCache
from cacheblend_rag.llama_cpp.runtime import BATCH, Runtime
from cacheblend_rag.models.cache import PreallocatedLayer
from cacheblend_rag.models.identity import FileIdentity
from cacheblend_rag.models.kv import LayerKV, Prefilled, SegmentKV
from cacheblend_rag.models.memory import free_memory
from cacheblend_rag.models.modules import cache_argument
from cacheblend_rag.models.plain import Going
from cacheblend_rag.models.shape import LayerShape, ModelShape

if TYPE_CHECKING:
    from cacheblend_rag.llama_cpp.model import LlamaModel


class LlamaAdapter:
    """A model in llama.cpp as the engine runs it.

    KV of segments has its keys rotated as if the segment's first token stood at position 0. llama.cpp moves it from
    there, so no rotation is computed here.

    Parameters
    ----------
    model : LlamaModel
    """

    device = torch.device("cpu")
    dtype = torch.float16
    goes_on: Going = "slices"
    mixes_rows = False
    repeats_exactly = True

    def __init__(self, model: LlamaModel) -> None:
        self.model, self.config, self.runtime = model, model.config, model.runtime
        self.num_layers, self.kv_heads = self.runtime.layers, self.runtime.kv_heads
        self.plain_reason = "" if self.runtime.shifts else "llama.cpp cannot move its KV to other positions"
        self.head_dim = self.runtime.layout.head_dim if self.runtime.shifts else 0

    @property
    def context_window(self) -> int:
        """Most tokens of a prompt with its answer."""
        return self.runtime.window

    @cached_property
    def shape(self) -> ModelShape:
        """How much arithmetic the model does for a row."""
        config = self.config
        attended = 2.0 * config.num_attention_heads * self.head_dim
        keys = float(config.hidden_size * self.kv_heads * self.head_dim)
        linear = 2 * keys + config.hidden_size * attended + 3.0 * config.hidden_size * config.intermediate_size
        layer = LayerShape(linear, keys, keys, attended, None)
        return ModelShape((layer,) * self.num_layers, float(config.vocab_size * config.hidden_size))

    def identity(self, own: str | None = None) -> FileIdentity:
        """Identity of the model: its file, and the library whose KV it has."""
        said = f"ggml {self.runtime.version} F16 {own or self.model.identity}"
        return FileIdentity(hashlib.sha256(said.encode()).hexdigest())

    def regime(self, tokens: int) -> int | None:
        """0: stored KV fits prompts of every length."""
        return None if self.plain_reason else 0

    @property
    def regimes(self) -> tuple[int, ...]:
        """All frequency regimes in which KV of chunks may be stored."""
        return () if self.plain_reason else (0,)

    def reusable(self, tokens: int) -> bool:
        """Whether stored KV of chunks can be used in a prompt of this length."""
        return not self.plain_reason

    def rotation(self, tokens: int) -> None:
        """Nothing is rotated as it is read."""

    # Passes ------------------------------------------------------------------------------------

    def empty_cache(self, tokens: int = 0) -> SequenceCache:
        """A cache that holds nothing yet, in a context of its own with room for so many tokens."""
        alone = self.runtime.alone(tokens)
        return SequenceCache(alone, alone.take(), 0)

    def prefill(
        self,
        ids: Sequence[int],
        between: Callable[[float, int], object] | None = None,
        each_layer: Callable[[], object] | None = None,
        begun: Cache | None = None,
    ) -> Prefilled:
        """Full prefill: all ids in batches of one size.

        Parameters
        ----------
        ids : sequence of int
        between : callable, optional
            Called between two batches with the seconds that the last one took and the tokens read so far; others
            may use the model then.
        each_layer : callable, optional
            Not called: llama.cpp runs all layers at once.
        begun : Cache, optional
            KV that such a pass gives to the first ids, but for the last one at least.
        """
        cache = self.empty_cache() if begun is None else self.live(begun)
        return self.go_on(cache, ids[cache.length :], between)

    def go_on(
        self,
        cache: SequenceCache,
        ids: Sequence[int],
        between: Callable[[float, int], object] | None = None,
        each_layer: Callable[[], object] | None = None,
    ) -> Prefilled:
        """Prefill ids after those that a cache holds. The cache grows by them."""
        for start in range(0, len(ids), BATCH):
            began, part = time.perf_counter(), ids[start : start + BATCH]
            logits = cache.runtime.compute(part, cache.length, cache.sequence, int(start + BATCH >= len(ids)))
            cache.length += len(part)
            if between is not None and start + BATCH < len(ids):
                between(time.perf_counter() - began, cache.length)
        return Prefilled(cache, logits[-1])

    def extend(self, cache: SequenceCache, ids: Sequence[int], logits_to_keep: int = 0) -> torch.Tensor:
        """Compute ids behind a cache, which grows by them; logits of the last ``logits_to_keep``, 0 for all.

        Returns
        -------
        Tensor, [positions, vocab]
        """
        logits = cache.runtime.compute(ids, cache.length, cache.sequence, logits_to_keep or len(ids))
        cache.length += len(ids)
        return logits

    def segments_kv(
        self,
        context_ids: Sequence[int],
        segments: Sequence[Sequence[int]],
        regime: int = 0,
        heads: Sequence[int] = (),
        behind: Sequence[LayerKV] = (),
    ) -> list[SegmentKV]:
        """KV of several segments, each computed separately after the context; see `ModelAdapter`."""
        runtime, kept, before = self.runtime, list[SegmentKV](), 0
        heads = heads or [0] * len(segments)
        with runtime.sequence() as context:
            if behind:
                before = behind[0].keys.shape[2]
                runtime.place(self.state_of(behind, slice(0, before)), context)
            runtime.compute(context_ids, before, context)
            before += len(context_ids)
            for ids, head in zip(segments, heads, strict=True):
                with runtime.sequence() as own:
                    runtime.copy(context, own, 0, before)
                    runtime.compute(ids, before, own)
                    keys, values = runtime.kv(own, before + head, before + len(ids))
                kept.append(self._moved(keys, values, before + head))
        return kept

    def decoder_kv(self, rows: Sequence[Sequence[int]], regime: int = 0) -> Sequence[LayerKV]:
        """KV of what opens a text, layer by layer: what segments are computed behind."""
        (ids,) = rows
        with self.runtime.sequence() as sequence:
            self.runtime.compute(ids, 0, sequence)
            return self._layers(self.runtime, sequence, len(ids))

    # KV --------------------------------------------------------------------------------------

    def new_cache(self, layers: Sequence[LayerKV]) -> SequenceCache:
        """A cache that holds these layers, ready for generation."""
        tokens = layers[0].keys.shape[2]
        cache = self.empty_cache(tokens)
        cache.length = tokens
        cache.runtime.place(self.state_of(layers, slice(None)), cache.sequence)
        return cache

    def state_of(self, layers: Sequence[LayerKV], rows: slice) -> np.ndarray:
        """Some rows of layers as the state of a sequence, from position 0 on."""
        return self.runtime.layout.write(*_parts(layers, rows), 0)

    steps_as_prefill = False  # llama.cpp rounds rows of a batch otherwise than a row alone

    def aligned(self, tokens: int) -> int:
        """Number of a kept prompt's exact first tokens that a check may reuse: those of whole batches."""
        return tokens // BATCH * BATCH

    def live(self, cache: Cache) -> SequenceCache:
        """A cache within llama.cpp, of one that may be in memory."""
        return cache if isinstance(cache, SequenceCache) else self.new_cache(self.layers_of(cache.layers))

    def at_rest(self, cache: Cache, tokens: int) -> Cache:
        """A copy of a cache's first tokens in memory, which takes no cells of llama.cpp."""
        layers = []
        live = self.live(cache)
        for kv in self._layers(live.runtime, live.sequence, tokens):
            layer = PreallocatedLayer()
            layer.hold(kv.keys, kv.values)
            layers.append(layer)
        return Cache(layers=layers)

    def layers_of(self, layers: Sequence[Any]) -> list[LayerKV]:
        """KV in layers of a cache in memory."""
        return [LayerKV(layer.keys, layer.values, rotated=True) for layer in layers]

    def whole_layers(self, cache: Cache) -> Sequence[LayerKV]:
        """KV of all tokens that a cache holds, keys rotated; it is copied from llama.cpp once it is asked for."""
        return _LayersInLlama(self, self.live(cache))

    def cut(self, layers: Sequence[LayerKV], rows: slice, regime: int = 0) -> SegmentKV:
        """A copy of the KV of some positions of a prompt, as if they were the first."""
        return self._moved(*_parts(layers, rows), rows.start)

    def _layers(self, runtime: Runtime, sequence: int, tokens: int) -> list[LayerKV]:
        keys, values = runtime.kv(sequence, 0, tokens)
        return [LayerKV(k[None], v[None], rotated=True) for k, v in zip(keys, values, strict=True)]

    def _moved(self, keys: list[torch.Tensor], values: list[torch.Tensor], start: int) -> SegmentKV:
        """KV of tokens that stood from some position on, as if they stood from 0."""
        runtime = self.runtime
        if start:
            with runtime.sequence() as moved:
                runtime.place(runtime.layout.write(keys, values, start), moved)
                runtime.shift(moved, -start)
                runtime.settle()
                keys, _ = runtime.kv(moved, 0, keys[0].shape[1])
        return SegmentKV(tuple(keys), tuple(values), rotated=False)


def _parts(layers: Sequence[LayerKV], rows: slice) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys and values of some rows, layer by layer, each ``[kv_heads, rows, head_dim]``."""
    return [kv.keys[0, :, rows] for kv in layers], [kv.values[0, :, rows] for kv in layers]


class _LayersInLlama(Sequence[LayerKV]):
    """KV of a cache as it is now, layer by layer.

    Parameters
    ----------
    adapter : LlamaAdapter
    cache : SequenceCache
    """

    def __init__(self, adapter: LlamaAdapter, cache: SequenceCache) -> None:
        self._adapter, self._cache, self._tokens = adapter, cache, cache.length

    @cached_property
    def _read(self) -> list[LayerKV]:
        return self._adapter._layers(self._cache.runtime, self._cache.sequence, self._tokens)

    def __len__(self) -> int:
        return self._adapter.num_layers

    def __getitem__(self, layer: Any) -> Any:
        return self._read[layer]


class LlamaDecode:
    """Takes the next step of answers, all in one pass; see `BatchedDecode`."""

    possible = True
    takes_several = False
    """Several tokens of an answer at once round in other ways than one by one."""

    def __init__(self, adapter: LlamaAdapter) -> None:
        self._adapter, self._runtime = adapter, adapter.runtime

    def fit(self, tokens: int) -> bool:
        """Whether memory has room for the KV of so many tokens, and as much again for what is enlarged."""
        free = free_memory()
        return free is None or 2 * tokens * self._runtime.token_bytes <= free

    def __call__(self, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
        """Logits of each step, ``[1, 1, vocab]``; caches grow.

        Where a context cannot grow, the error stands in the place of its longest answer, and the others are answered
        in the cells of that. Of one alone it is raised.
        """
        name = cache_argument(self._adapter.model)
        caches: list[SequenceCache] = [one[name] for one in inputs]
        found: dict[int, Any] = {}
        for runtime in dict.fromkeys(cache.runtime for cache in caches):
            here = [at for at, cache in enumerate(caches) if cache.runtime is runtime]
            while here:
                rows = [(int(inputs[at]["input_ids"]), caches[at].length, caches[at].sequence) for at in here]
                try:
                    found |= zip(here, runtime.step(rows, len(rows))[:, None, None], strict=True)
                    break
                except GenerationError as error:
                    if len(inputs) == 1:
                        raise
                    longest = max(here, key=lambda at: caches[at].length)
                    found[longest] = error
                    here.remove(longest)
                    if here:
                        caches[longest].take_back(caches[longest].length)
            for at in here:
                caches[at].length += 1
        return [found[at] for at in range(len(inputs))]
