"""The only place that touches transformers' decoder layers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.models.attention.rows import RowMask, as_added, use_row_attention, with_mask
from cacheblend_rag.models.cache import (
    Enough,
    JoinedLayers,
    LastLayer,
    PreallocatedLayer,
    ScatterCache,
    called_at_each_layer,
    first_rows,
    preallocate,
)
from cacheblend_rag.models.cpu.rowwise import computed_in_blocks, row_by_row
from cacheblend_rag.models.families import family_of
from cacheblend_rag.models.gpu import has_kernels
from cacheblend_rag.models.kv import LayerKV, Prefill, SegmentKV
from cacheblend_rag.models.lora import unwrap
from cacheblend_rag.models.modules import (
    ForwardOverrides,
    cache_argument,
    evaluating,
    is_compiled,
    misshapen,
    part_of,
    twins_of,
)
from cacheblend_rag.models.plain import PlainAdapter
from cacheblend_rag.models.projections import LatentKV, PlainKV
from cacheblend_rag.models.quantised import mixes_rows
from cacheblend_rag.models.rope import Positions, Rotaries
from cacheblend_rag.models.segments import cut_out
from cacheblend_rag.models.shape import ModelShape, layer_shape, slices_behind

if TYPE_CHECKING:
    from cacheblend_rag.models.gpu.plain import PlainLayers

TOGETHER = 4
"""Layers that are run by one call, where that is possible."""
# Tokens of one slice of a prefill that others may interrupt.
_SLICE = 1024


@dataclass(frozen=True)
class _Blending:
    """How layers are run within `ModelAdapter.blending`.

    Parameters
    ----------
    twins : callable
        Makes twins of the model's layers; not asked where kernels stand for them.
    fused : bool
        Whether they attend by `row_attention`; otherwise in the plain form.
    kernels : PlainLayers or None
        The kernels in their place, if there are any.
    """

    twins: Callable[[], Sequence[torch.nn.Module]]
    fused: bool
    kernels: PlainLayers | None = None

    @cached_property
    def layers(self) -> Sequence[torch.nn.Module]:
        """The layers to run."""
        return self.twins()


class _ThreadState(threading.local):
    """State of the thread that asks."""

    blending: _Blending | None = None


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
        self.layer_cache_argument = cache_argument(self.layers[0])
        self.dtype: torch.dtype = part_of(self._decoder, "embed_tokens").weight.dtype
        self.windows: list[int | None] = self._by_layer(self.family.window)
        rotates: list[bool] = self._by_layer(self.family.rotates)
        rotary = part_of(self._decoder, "rotary_emb")
        self.positions = Positions(self.config, rotary, self.family.layout, rotates)
        self.form = (LatentKV if self.family.latent else PlainKV)(self.family, self.config, self._attention(0))
        self.kv_heads, self.head_dim = self.form.heads, self.form.head_dim
        # Asked for once, so that what is missing shows at load.
        for owner, name in ((self.layers[0], self.family.norm), (self._decoder, "norm"), (model, "lm_head")):
            if name is not None:
                part_of(owner, name)
        self.mixes_rows = mixes_rows(model)
        self._here = _ThreadState()

    def _by_layer(self, read: Callable[[Any, int], Any]) -> list[Any]:
        """The config's value for each layer."""
        try:
            return [read(self.config, layer) for layer in range(self.num_layers)]
        except AttributeError as error:
            raise misshapen(self.config, error.name) from error

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
    def blending(self) -> Iterator[None]:
        """Within this, decoder layers attend from some rows to all positions, on this thread.

        Meanwhile `row_attention` stands for whatever the model uses, or the plain form where the
        model uses that, or where SDPA lacks what the family needs (soft caps, attention sinks).
        The model itself is not changed: see `twins_of`.
        """
        # A GPU's kernel wants values as wide as keys.
        fused = self.attends_by_kernel and (self.form.as_attended or not has_kernels(self.device))
        plain = self.plain_layers if fused else None
        kernels = plain if plain is not None and plain.as_they_were() else None
        implementation = use_row_attention() if fused else "eager"
        blending = _Blending(partial(self._twins, implementation), fused, kernels)
        if kernels is None:
            _ = blending.layers  # what has no twin is refused before anything runs
        with evaluating(self.model), torch.no_grad(), self.row_by_row.in_use(), self._as(blending):
            yield

    def _twins(self, implementation: str) -> list[torch.nn.Module]:
        return twins_of(self.layers, self.family.attention, implementation)

    @contextmanager
    def _as(self, blending: _Blending) -> Iterator[None]:
        before, self._here.blending = self._here.blending, blending
        try:
            yield
        finally:
            self._here.blending = before

    @property
    def running(self) -> Sequence[torch.nn.Module]:
        """The layers to run: within `blending` twins of the model's, else the model's own."""
        return self.layers if self._here.blending is None else self._here.blending.layers

    @cached_property
    def plain_layers(self) -> PlainLayers | None:
        """The layers by kernels that know rows, where there are such kernels and all layers are plain."""
        if not has_kernels(self.device):
            return None
        from cacheblend_rag.models.gpu.plain import plain_layers

        return plain_layers(self.layers, self.windows, self.kv_heads, self.head_dim, self.rotary(1), self.device)

    @property
    def takes_positions(self) -> bool:
        """Whether layers now run by kernels that know rows: within `blending`, on some devices, for plain layers."""
        return self._in_use is not None

    @property
    def _in_use(self) -> PlainLayers | None:
        """The layers by kernels, where they now stand for transformers' own."""
        return None if self._here.blending is None else self._here.blending.kernels

    @cached_property
    def row_by_row(self) -> ForwardOverrides[Any]:
        """Operations computed block by block: on other devices a call costs more than it saves."""
        attention = {self._attention(layer) for layer in range(self.num_layers)}
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

    def project_values(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Values of the rows on a layer, ``[kv_heads, rows, head_dim]``; ``hidden`` as for keys."""
        return self.form.values(self._attention(layer), self._norm_rows(layer, hidden))

    def project_keys(self, layer: int, hidden: torch.Tensor, rotaries: Rotaries) -> torch.Tensor:
        """Keys of the rows on a layer, rotated to their positions, ``[kv_heads, rows, head_dim]``.

        Parameters
        ----------
        hidden : Tensor, [rows, hidden]
            Input of the layer.
        rotaries : Rotaries
            Of the rows.
        """
        return self.form.keys(self._attention(layer), self._norm_rows(layer, hidden), rotaries.of_keys(layer))

    def write_kv(self, layer: int, hidden: torch.Tensor, kv: LayerKV, rows: torch.Tensor, rotaries: Rotaries) -> None:
        """Compute keys and values of rows on a layer, and no more of it; parameters as in `run_layer`.

        Parameters
        ----------
        rotaries : Rotaries
            Of the rows, in float32.
        """
        keys, values = self.form.both(self._attention(layer), self._norm_rows(layer, hidden), rotaries.of_keys(layer))
        kv.write(rows, keys[None], values[None])

    def _norm_rows(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """The rows that a layer projects: its input, behind a norm where the family has one there."""
        norm = self.family.norm
        if (kernels := self._in_use) is not None:
            return kernels[layer].norm_rows(hidden)
        return hidden if norm is None else getattr(self.layers[layer], norm)(hidden)

    def kernel_mask(
        self, mask: torch.Tensor | None, rows: torch.Tensor, tokens: int, window: int | None
    ) -> RowMask | None:
        """A mask in the form the attention in use takes; the same for all layers with its window.

        Parameters
        ----------
        mask : Tensor or None, [1, 1, rows, tokens], bool
            True where a row sees a position; None if the rows are the last positions and each
            sees all before it.
        rows : Tensor, [rows], long
            Positions of the rows, rising.
        tokens : int
            Positions in all.
        window : int or None
            Sliding window of the layers.

        Returns
        -------
        RowMask or None
            As added to the scores, ``[1, 1, rows, tokens]``, in the model's element type.
        """
        fused = self._here.blending is not None and self._here.blending.fused
        return as_added(mask, rows, tokens, window, self.form.sharing, self.dtype, fused)

    def run_layer(
        self,
        layer: int,
        hidden: torch.Tensor,
        kv: LayerKV,
        rows: torch.Tensor,
        rotaries: Rotaries,
        mask: RowMask | None,
    ) -> torch.Tensor:
        """Run transformers' own decoder layer on some rows; their new KV is written into ``kv``.

        Parameters
        ----------
        hidden : Tensor, [rows, hidden]
            Input of the layer for the kept rows.
        kv : LayerKV
            Keys (rotated) and values of all positions; rows in ``rows`` are overwritten.
        rows : Tensor, [rows]
            Positions of the kept rows, rising.
        rotaries : Rotaries
            Of the kept rows, in the model's element type.
        mask : RowMask or None
            The mask by `kernel_mask`.

        Returns
        -------
        Tensor, [rows, hidden]
        """
        rotary = rotaries.layer(layer)
        if (kernels := self._in_use) is not None:
            return kernels[layer](hidden, kv, rows, rotary, mask)
        with with_mask(mask):
            out = self.running[layer](
                hidden[None],
                attention_mask=None if mask is None else mask.added,
                position_ids=rows[None],
                use_cache=True,
                position_embeddings=rotary.for_layer(),
                **{self.layer_cache_argument: ScatterCache(kv, rows, self.form)},
            )
        after: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return after[0]

    def run_layers(
        self,
        first: int,
        hidden: torch.Tensor,
        kvs: Sequence[LayerKV],
        rows: torch.Tensor,
        rotaries: Rotaries,
        masks: Callable[[int | None], RowMask | None],
    ) -> torch.Tensor:
        """Several layers in a row, one for each of ``kvs``; parameters as in `run_layer`.

        Parameters
        ----------
        masks : callable
            The mask of layers with a window.
        """
        if (kernels := self._in_use) is not None and kernels.replays(len(rows)):
            return kernels.run(first, kvs, hidden, rows, rotaries.layer(first))
        for layer, kv in enumerate(kvs, first):
            hidden = self.run_layer(layer, hidden, kv, rows, rotaries, masks(self.windows[layer]))
        return hidden

    def replays(self, rows: int) -> bool:
        """Whether several layers in a row are one call for so many rows."""
        return (kernels := self._in_use) is not None and kernels.replays(rows)

    def sum_attention(
        self,
        ids: torch.Tensor,
        rows: torch.Tensor,
        watched: range,
        layer_kv: Callable[[int], LayerKV],
        rotaries: Rotaries,
        layers: Sequence[int],
    ) -> torch.Tensor | None:
        """Mean attention of some rows over given KV, by kernels that never hold single weights; None without them.

        Parameters
        ----------
        ids : Tensor, [tokens], long
            Ids of the prompt, on the model's device.
        rows : Tensor, [rows], long
            Positions that are computed, rising; their KV is overwritten.
        watched : range
            Which of them count, by their numbers.
        layer_kv : callable
            Rotated KV of all positions of a layer; asked for each layer once, in order.
        rotaries : Rotaries
            Of the rows, in the model's element type.
        layers : sequence of int
            Layers whose attention counts, rising; nothing beyond the last is computed.

        Returns
        -------
        Tensor, [tokens], float32, or None
        """
        if (kernels := self._in_use) is None:
            return None
        sums, hidden = kernels.begin_sums(len(ids), watched), self.embed(ids[rows])
        for first in range(0, layers[-1] + 1, TOGETHER):
            kvs = [layer_kv(layer) for layer in range(first, min(first + TOGETHER, layers[-1] + 1))]
            hidden = kernels.run(first, kvs, hidden, rows, rotaries.layer(first), sums, layers)
        weights = len(watched) * len(layers) * self.kv_heads * self.form.sharing
        return sums.totals[:, : len(ids)].sum(dim=0) / weights

    def step(self, ids: torch.Tensor, answers: Sequence[JoinedLayers]) -> torch.Tensor | None:
        """The next token of some answers through all layers by kernels; None where layers have no kernels now.

        Nothing in these layers depends on whether a model is trained.

        Parameters
        ----------
        ids : Tensor, [answers], long
            The newest token of each.
        answers : sequence of JoinedLayers
            The KV of each, with room for a row; it grows by one.

        Returns
        -------
        Tensor, [answers, hidden], or None
            To be used before the next call.
        """
        kernels = self.plain_layers
        if kernels is None or not kernels.as_they_were():
            return None
        at = [answer.used for answer in answers]
        positions = torch.tensor(at).to(self.device, non_blocking=True)
        rotaries = self.rotary(max(at) + 1).at(positions).to(self.dtype)
        entries = torch.stack([answer.entries for answer in answers], dim=1)
        with torch.no_grad():
            hidden = kernels.step(entries, self.embed(ids), positions, rotaries.layer(0))
        for answer in answers:
            answer.used += 1
        return hidden

    @contextmanager
    def watching(self, layer: int, seen: list[torch.Tensor]) -> Iterator[None]:
        """Within this, a layer's attention runs in its plain form and its weights are appended to ``seen``.

        Weights are ``[heads, rows, tokens]``. Masks must be those of `kernel_mask` made within.
        """
        layers = self._twins("eager")
        attention = part_of(layers[layer], self.family.attention)
        plain = attention.forward

        def noting(*args: Any, **kwargs: Any) -> Any:
            output = plain(*args, **kwargs)
            seen.append(output[1][0])
            return output

        attention.forward = noting  # of the twin
        with self._as(_Blending(lambda: layers, fused=False)):
            yield

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
        return cut_out(parts, [count], [0], 0, self.rotary(count, rows.start, regime))[0]

    def at_rest(self, cache: Any, tokens: int) -> Cache | None:
        """A cache of the first tokens of another, to be kept; None if a layer has forgotten them."""
        return first_rows(cache, tokens)

    def prefill(
        self,
        ids: Sequence[int],
        between: Callable[[float], object] | None = None,
        each_layer: Callable[[], object] | None = None,
        begun: Cache | None = None,
    ) -> Prefill:
        """The model's own forward pass over all ids: plain prefill.

        Parameters
        ----------
        ids : sequence of int
        between : callable, optional
            Ids are passed in slices. Between two of them this is called with the seconds that the last one took; others
            may use the model then.
        each_layer : callable, optional
            Called within each layer.
        begun : transformers Cache, optional
            KV that such a pass gives to the first ids, but for the last one at least; it grows by the others.
        """
        cache = preallocate(DynamicCache(config=self.config)) if begun is None else begun
        shape = None if between is None or self.mixes_rows else self.shape
        for rows in slices_behind(cache.get_seq_length(), len(ids), shape, _SLICE):
            began = time.perf_counter()
            with self._plain(), called_at_each_layer(cache, each_layer):
                logits = self.extend(cache, ids[rows.start : rows.stop], logits_to_keep=1)[-1]
            if between is not None and rows.stop < len(ids):
                between(time.perf_counter() - began)
        return Prefill(cache, logits)

    def segment_kv(self, context_ids: Sequence[int], ids: Sequence[int], regime: int = 0) -> SegmentKV:
        """KV of one segment; see `segments_kv`."""
        return self.segments_kv(context_ids, [ids], regime)[0]

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
            KV of what stands before the context's ids, as `context_kv` gives it; by default nothing does.

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
        inputs = torch.tensor([row + row[-1:] * (longest - before - len(row)) for row in rows], device=self.device)
        layers = self.layers_of(self._run_decoder(inputs, regime, behind))
        rotaries = self.rotary(longest - first, first, regime)
        return cut_out(layers, list(map(len, segments)), heads, first, rotaries)

    def context_kv(self, ids: Sequence[int], regime: int = 0) -> tuple[LayerKV, ...]:
        """KV of what opens a text, keys rotated, layer by layer: what segments are computed behind."""
        return tuple(self.layers_of(self._run_decoder(torch.tensor([list(ids)], device=self.device), regime)))

    def _run_decoder(self, inputs: torch.Tensor, regime: int, behind: Sequence[LayerKV] = ()) -> list[Any]:
        """Cache layers of some rows, ``[rows, kv_heads, tokens, head_dim]``; what they stand behind comes first."""
        layers = [*(DynamicLayer() for _ in self.layers[1:]), LastLayer()]
        for layer, kv in zip(layers, behind, strict=False):
            DynamicLayer.update(layer, *(part.expand(len(inputs), -1, -1, -1) for part in self.form.to_cached(kv)))
        with self._plain(), self.row_by_row.in_use(), self.positions.use_regime(regime), suppress(Enough):
            self._decoder(inputs, use_cache=True, **{cache_argument(self._decoder): Cache(layers=layers)})
        return layers

    def _attention(self, layer: int) -> Any:
        return part_of(self.layers[layer], self.family.attention)

    @contextmanager
    def _plain(self) -> Iterator[None]:
        self.positions.settle(self.device)
        with evaluating(self.model), torch.no_grad():
            yield


def _scale_logits(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """Logits scaled as the config says: Granite divides, Cohere multiplies, Gemma caps."""
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (factor := getattr(config, "logit_scale", None)) is not None:
        logits = logits * factor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits
