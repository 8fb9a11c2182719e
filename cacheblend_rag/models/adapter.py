"""The only place that touches transformers' decoder layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.models.cache import (
    Enough,
    LastLayer,
    PreallocatedLayer,
    called_at_each_layer,
    first_rows,
    preallocate,
)
from cacheblend_rag.models.cpu.layers import computed_in_blocks, row_by_row
from cacheblend_rag.models.families import family_of
from cacheblend_rag.models.gpu import has_kernels
from cacheblend_rag.models.kv import LayerKV, Prefilled, SegmentKV
from cacheblend_rag.models.lora import unwrap
from cacheblend_rag.models.modules import ForwardOverrides, cache_argument, evaluating, is_compiled, misshapen, part_of
from cacheblend_rag.models.plain import PlainAdapter
from cacheblend_rag.models.projections import LatentKV, PlainKV
from cacheblend_rag.models.quantised import mixes_rows
from cacheblend_rag.models.rope import Positions, Rotaries, unrotate
from cacheblend_rag.models.row_layers import RowLayers
from cacheblend_rag.models.shape import ModelShape, layer_shape

if TYPE_CHECKING:
    from cacheblend_rag.models.gpu.plain import PlainLayers


# Tokens of one slice of a prefill that others may interrupt.
_SLICE = 1024
_NOTHING = -1  # in place of a context's number


class ModelAdapter(PlainAdapter):
    """A decoder model, taken apart into the steps the blended pass needs.

    Parameters
    ----------
    model : transformers PreTrainedModel or PeftModel
        A causal language model of a known family, perhaps with LoRA adapters, or a known container of one. It is left
        as it is: layers attend in other ways as twins of the model's, and what stands for a ``forward`` acts only on
        the thread that wants it.

    Raises
    ------
    UnsupportedModelError
        If the family is not known, the model is spread over several devices, or its modules do
        not have the family's names.
    """

    def __init__(self, model: Any) -> None:
        self.model = model = unwrap(model)
        self.family = family_of(model)
        self.config = model.config.get_text_config()
        self._decoder = part_of(model, "get_decoder")()
        self._within_container = self.config is not model.config
        self.layers = list(part_of(self._decoder, "layers"))
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1:
            raise UnsupportedModelError(f"the model is spread over {sorted(map(str, devices))}; load it on one device")
        self.device = next(iter(devices))
        self.dtype: torch.dtype = part_of(self._decoder, "embed_tokens").weight.dtype
        family, numbers = self.family, range(len(self.layers))
        try:
            self.windows: list[int | None] = [family.window(self.config, layer) for layer in numbers]
            rotates = [family.rotates(self.config, layer) for layer in numbers]
        except AttributeError as error:
            raise misshapen(self.config, error.name) from error
        rotary = part_of(self._decoder, "rotary_emb")
        self.positions = Positions(self.config, rotary, family.layout, rotates)
        attention = part_of(self.layers[0], family.attention)
        self.form = (LatentKV if family.latent else PlainKV)(family, self.config, attention)
        self.kv_heads, self.head_dim = self.form.heads, self.form.head_dim
        # Asked for once, so that what is missing shows at load.
        for owner, name in ((self.layers[0], family.norm), (self._decoder, "norm"), (model, "lm_head")):
            if name is not None:
                part_of(owner, name)
        self.mixes_rows = mixes_rows(model)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @cached_property
    def shape(self) -> ModelShape:
        """How much arithmetic the model does for a row."""
        fused = self.family.fused is not None
        layers = tuple(
            layer_shape(layer, self.config, self.kv_heads * self.head_dim, fused, window)
            for layer, window in zip(self.layers, self.windows, strict=True)
        )
        return ModelShape(layers, float(self.config.vocab_size * self.config.hidden_size))

    def regime(self, tokens: int) -> int | None:
        """Frequency regime of a prompt of this many tokens; KV of one fits no prompt of another.

        See `Positions.regime`: 0 for all models but those with dynamic NTK or LongRoPE; None if
        stored KV is of no use at this length.
        """
        return self.positions.regime(tokens)

    @property
    def regimes(self) -> tuple[int, ...]:
        """All frequency regimes in which KV may be stored, 0 first."""
        return self.positions.regimes

    @property
    def attends_by_kernel(self) -> bool:
        """Whether the model attends by SDPA or another kernel now; otherwise in the plain form."""
        return self.config._attn_implementation != "eager" and bool(self._decoder._supports_sdpa)

    @contextmanager
    def blending(self) -> Iterator[RowLayers]:
        """Context with decoder layers that attend from some rows to all positions.

        They use `row_attention` instead of the model's attention, or the plain form if the model uses it or SDPA lacks
        what the family needs (soft caps, attention sinks). The model itself is not changed: see `twins_of`.
        """
        # A GPU's kernel wants values as wide as keys.
        fused = self.attends_by_kernel and (self.form.as_attended or not has_kernels(self.device))
        plain = self.plain_layers if fused else None
        kernels = plain if plain is not None and plain.as_they_were() else None
        layers = RowLayers(self.layers, self.family, self.form, self.windows, self.dtype, fused, kernels)
        if kernels is None:
            _ = layers.twins  # what has no twin is refused before anything runs
        with evaluating(self.model), torch.no_grad(), self.row_by_row.in_use():
            yield layers

    @cached_property
    def plain_layers(self) -> PlainLayers | None:
        """The layers by kernels that know rows, where there are such kernels and all layers are plain."""
        if not has_kernels(self.device):
            return None
        from cacheblend_rag.models.gpu.plain import plain_layers

        return plain_layers(self.layers, self.windows, self.kv_heads, self.head_dim, self.rotary(1), self.device)

    @cached_property
    def row_by_row(self) -> ForwardOverrides[Any]:
        """Operations computed block by block: on other devices a call costs more than it saves."""
        attention = {part_of(layer, self.family.attention) for layer in self.layers}
        parts = row_by_row(part for layer in self.layers for part in layer.children() if part not in attention)
        left = self.device.type != "cpu" or is_compiled(self.model)
        return computed_in_blocks.get(self.model, [] if left else parts)

    def embed(self, ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Input of layer 0, ``[tokens, hidden]``."""
        inputs = torch.as_tensor(ids, dtype=torch.long, device=self.device)
        embedded: torch.Tensor = self._decoder.embed_tokens(inputs)
        multiplier = getattr(self.config, "embedding_multiplier", None)
        return embedded if multiplier is None else embedded * multiplier

    def rotary(self, tokens: int, start: int = 0, regime: int = 0) -> Rotaries:
        """Cosine and sine of positions ``start`` to ``start + tokens`` for every layer, in float32.

        With ``regime``, as part of a longer prompt of that frequency regime.
        """
        return self.positions.rotaries(tokens, start, regime, self.device)

    def rotation(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Cosine and sine by which a GPU rotates stored keys as it copies them; None where that is not done.

        Returns
        -------
        pair of Tensor, each [tokens, head_dim / 2] float32, or None
            The same for all layers; dimension i rotates with the one half the width further on.
        """
        return None if self.plain_layers is None else self.rotary(tokens).layer(0).frequencies()

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[…, vocab]`` from the output ``[…, hidden]`` of the last layer."""
        rows = hidden.reshape(1, -1, hidden.shape[-1])  # as the model would hand them over
        logits: torch.Tensor = self.model.lm_head(self._decoder.norm(rows)).view(*hidden.shape[:-1], -1)
        return logits if self._within_container else _scale_logits(logits, self.config)

    def new_cache(self, layers: Sequence[LayerKV]) -> Any:
        """A transformers cache that holds these layers, ready for generation; it takes the layers over."""
        cache = preallocate(DynamicCache(config=self.config))
        for number, kv in enumerate(layers):
            layer, held = cache.layers[number], self.form.to_cached(kv)
            if isinstance(layer, PreallocatedLayer):
                layer.hold(*held)
            else:
                layer.update(*held)
        return cache

    def layers_of(self, layers: Iterable[Any]) -> list[LayerKV]:
        """KV in layers of a transformers cache, keys rotated."""
        return [self.form.from_cached(layer.keys, layer.values) for layer in layers]

    def whole_layers(self, cache: Any) -> Sequence[LayerKV]:
        """KV of all tokens that a cache has read, keys rotated; empty if a layer has forgotten the first of them."""
        if any(layer.keys.shape[2] != layer.get_seq_length() for layer in cache.layers):
            return ()
        return self.layers_of(cache.layers)

    def cut(self, layers: Sequence[LayerKV], rows: slice, regime: int = 0) -> SegmentKV:
        """A copy of the KV of some positions of a prompt, the rotation of keys undone."""
        parts: list[Any] = [LayerKV(kv.keys[:, :, rows], kv.values[:, :, rows]) for kv in layers]
        count = rows.stop - rows.start
        return _cut_out(parts, [count], [0], 0, self.rotary(count, rows.start, regime))[0]

    def at_rest(self, cache: Any, tokens: int) -> Cache | None:
        """A cache of the first tokens of another, to be kept; None if a layer has forgotten them."""
        return first_rows(cache, tokens)

    def prefill(
        self,
        ids: Sequence[int],
        between: Callable[[float, int], object] | None = None,
        each_layer: Callable[[], object] | None = None,
        begun: Cache | None = None,
    ) -> Prefilled:
        """The model's own forward pass over all ids: plain prefill.

        Parameters
        ----------
        ids : sequence of int
        between : callable, optional
            Called between two slices of ids, with the seconds that the last slice took and the number of ids passed so
            far. Other requests may use the model meanwhile.
        each_layer : callable, optional
            Called within each layer.
        begun : transformers Cache, optional
            KV that such a pass gives to the first ids. It must leave out at least the last id, and grows by the rest.
        """
        cache = preallocate(DynamicCache(config=self.config)) if begun is None else begun
        # A slice would have the frequencies of its own last position.
        whole = between is None or self.mixes_rows or self.regime(len(ids)) != 0
        first = cache.get_seq_length()
        slices = [range(len(ids))] if whole else self.shape.slices(len(ids), _SLICE)
        for rows in [range(max(first, rows.start), rows.stop) for rows in slices if rows.stop > first]:
            began = time.perf_counter()
            self.positions.settle(self.device)
            with called_at_each_layer(cache, each_layer):
                logits = self.extend(cache, ids[rows.start : rows.stop], logits_to_keep=1)[-1]
            if between is not None and rows.stop < len(ids):
                between(time.perf_counter() - began, rows.stop)
        return Prefilled(cache, logits)

    def segments_kv(
        self,
        context_ids: Sequence[int],
        segments: Sequence[Sequence[int]],
        regime: int = 0,
        heads: Sequence[int] = (),
        behind: Sequence[LayerKV] = (),
    ) -> list[SegmentKV]:
        """KV of several segments in one pass, each computed behind the context as if it were alone.

        Shorter ones are padded at their ends, where no row of theirs looks. Rotation depends on the
        position, which a segment's next use decides. It is undone in float32; dividing by the squared
        norm also undoes the scaling YaRN and LongRoPE put into cosine and sine.

        Parameters
        ----------
        context_ids : sequence of int
            Ids they are computed behind.
        segments : sequence of sequence of int
            Ids of each.
        regime : int
            They are computed as parts of a prompt of this frequency regime.
        heads : sequence of int
            How many first tokens of each only serve as its context, and are left out of its KV; by default none.
        behind : sequence of LayerKV
            KV of what stands before the context's ids, as `decoder_kv` gives it; by default nothing does.

        Returns
        -------
        list of SegmentKV
            In the order of the segments; none shares memory with another.
        """
        rows, heads = [[*context_ids, *ids] for ids in segments], heads or [0] * len(segments)
        before = behind[0].keys.shape[2] if behind else 0
        alike = not self.mixes_rows and self.positions.alike((before + len(row) for row in rows), regime)
        if len(rows) > 1 and not alike:
            pairs = zip(segments, heads, strict=True)
            return [self.segments_kv(context_ids, [ids], regime, [head], behind)[0] for ids, head in pairs]
        first, longest = before + len(context_ids), before + max(map(len, rows))
        # A token of its own is padding that every model has seen: rows hidden by a mask must still be finite.
        layers = self.decoder_kv([row + row[-1:] * (longest - before - len(row)) for row in rows], regime, behind)
        rotaries = self.rotary(longest - first, first, regime)
        return _cut_out(layers, list(map(len, segments)), heads, first, rotaries)

    def decoder_kv(
        self, rows: Sequence[Sequence[int]], regime: int = 0, behind: Sequence[LayerKV] = ()
    ) -> list[LayerKV]:
        """KV of some texts of one length, keys rotated, ``[rows, kv_heads, tokens, head_dim]`` on each layer.

        Parameters
        ----------
        rows : sequence of sequence of int
            Ids of each.
        regime : int
            They are computed as parts of a prompt of this frequency regime.
        behind : sequence of LayerKV
            KV of what stands before each of them, which comes first in what is returned; by default nothing does.
        """
        inputs = torch.tensor(rows, device=self.device)
        layers = [*(DynamicLayer() for _ in self.layers[1:]), LastLayer()]
        for layer, kv in zip(layers, behind, strict=False):
            DynamicLayer.update(layer, *(part.expand(len(inputs), -1, -1, -1) for part in self.form.to_cached(kv)))
        self.positions.settle(self.device)
        cache, regimes = {cache_argument(self._decoder): Cache(layers=layers)}, self.positions.use_regime(regime)
        with evaluating(self.model), torch.no_grad(), self.row_by_row.in_use(), regimes, suppress(Enough):
            self._decoder(inputs, use_cache=True, **cache)
        return self.layers_of(layers)


def _scale_logits(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """Logits scaled as the config says: Granite divides, Cohere multiplies, Gemma caps."""
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (factor := getattr(config, "logit_scale", None)) is not None:
        logits = logits * factor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits


def _cut_out(
    layers: list[Any], lengths: Sequence[int], heads: Sequence[int], first: int, rotaries: Rotaries
) -> list[SegmentKV]:
    """KV of each segment of a batch, keys with their rotation undone; none shares memory with another.

    Parameters
    ----------
    layers : list of cache layers
        With ``keys`` and ``values`` of ``[segments, kv_heads, tokens, head_dim]``; they are taken off it, so that their
        memory goes as that of the segments comes.
    lengths : sequence of int
        Tokens of each segment; what is behind them is padding.
    heads : sequence of int
        How many of these to leave out at each segment's beginning.
    first : int
        Position at which segments begin.
    rotaries : Rotaries
        Of the positions from there on.
    """
    keys: list[list[torch.Tensor]] = [[] for _ in lengths]
    values: list[list[torch.Tensor]] = [[] for _ in lengths]
    for number in range(len(layers)):
        layer = layers.pop(0)
        rotated = unrotate(layer.keys[:, :, first:], rotaries.of_keys(number))  # [segments, kv_heads, tokens, dim]
        for row, (head, length) in enumerate(zip(heads, lengths, strict=True)):
            # Copies, in memory of their own: a view would keep the whole batch alive.
            keys[row].append(rotated[row, :, head:length].clone(memory_format=torch.contiguous_format))
            part = layer.values[row, :, first + head : first + length]
            values[row].append(part.clone(memory_format=torch.contiguous_format))
    return [SegmentKV(tuple(k), tuple(v), rotated=False) for k, v in zip(keys, values, strict=True)]


class ContextKV:
    """Computes chunks behind contexts, whose own KV is computed once and kept in memory.

    The text before a chunk is not known when it is stored. The mean over contexts is the estimate of its KV with
    the least squared error.

    Parameters
    ----------
    adapter : ModelAdapter
    contexts : sequence of sequence of int
        Ids of each; at least one.
    """

    def __init__(self, adapter: ModelAdapter, contexts: Sequence[Sequence[int]]) -> None:
        self._adapter, self._contexts = adapter, tuple(contexts)
        self._known: dict[tuple[int, int], list[LayerKV]] = {}

    def segments_kv(
        self,
        segments: Sequence[Sequence[int]],
        regime: int = 0,
        heads: Sequence[int] = (),
        numbers: Sequence[Sequence[int]] = (),
    ) -> list[SegmentKV]:
        """KV of several segments, each computed separately.

        Parameters
        ----------
        segments, regime, heads
            As for `ModelAdapter.segments_kv`.
        numbers : sequence of sequence of int
            The contexts of each segment; by default all. Contexts that would make the segment longer than its frequency
            regime are left out.

        Returns
        -------
        list of SegmentKV
            In the order of the segments; keys are not rotated.
        """
        heads = heads or [0] * len(segments)
        numbers = numbers or [range(len(self._contexts))] * len(segments)
        wanted, regime_of = list[Sequence[int]](), self._adapter.regime
        for ids, those in zip(segments, numbers, strict=True):
            fit = regime_of(len(ids)), regime
            fitting = [at for at in those if regime_of(len(self._contexts[at]) + len(ids)) in fit]
            wanted.append(fitting or [_NOTHING])  # where no context leaves it in its frequency regime
        sums = [_Sum() for _ in segments]
        for number in sorted({number for those in wanted for number in those}):
            places = [place for place, those in enumerate(wanted) if number in those]
            computed = self._adapter.segments_kv(
                (), [segments[at] for at in places], regime, [heads[at] for at in places], self._behind(number, regime)
            )
            for place, kv in zip(places, computed, strict=True):
                sums[place].add(kv)
        return [total.mean(self._adapter.dtype) for total in sums]

    def _behind(self, number: int, regime: int) -> Sequence[LayerKV]:
        """KV of a context in a frequency regime."""
        if number == _NOTHING:
            return ()
        if (number, regime) not in self._known:
            self._known[number, regime] = self._adapter.decoder_kv([self._contexts[number]], regime)
        return self._known[number, regime]


class _Sum:
    """KV of one segment added up in float32, so that rounding does not grow with the contexts."""

    def __init__(self) -> None:
        self._count = 0
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values of each

    def add(self, kv: SegmentKV) -> None:
        """The segment behind one more context."""
        self._count += 1
        if not self._layers:
            self._layers = [(keys.float(), values.float()) for keys, values in zip(kv.keys, kv.values, strict=True)]
            return
        for (keys, values), more_keys, more_values in zip(self._layers, kv.keys, kv.values, strict=True):
            keys += more_keys
            values += more_values

    def mean(self, dtype: torch.dtype) -> SegmentKV:
        """Divided by how many were added."""
        keys, values = zip(*self._layers, strict=True)
        return SegmentKV(
            tuple((layer / self._count).to(dtype) for layer in keys),
            tuple((layer / self._count).to(dtype) for layer in values),
            rotated=False,
        )
