"""The only place that touches transformers' decoder layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.models.families import family_of
from cacheblend_rag.models.fingerprint import fingerprint
from cacheblend_rag.models.kv import LayerKV, SegmentKV
from cacheblend_rag.models.rope import Rotary, unrotate

__all__ = ["ModelAdapter", "Prefill"]

# RoPE types whose frequencies change once a prompt outgrows the length the model was trained at.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


@dataclass(frozen=True)
class Prefill:
    """Result of the model's own forward pass over a prompt.

    Parameters
    ----------
    cache : transformers Cache
        KV of all positions.
    logits : Tensor, [vocab]
        Logits of the last position.
    """

    cache: Any
    logits: torch.Tensor


class _ScatterCache:
    """Takes the new rows of one layer, and shows the layer all positions."""

    def __init__(self, kv: LayerKV, rows: torch.Tensor) -> None:
        self._kv = kv
        self._rows = rows

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._kv.keys.index_copy_(2, self._rows, keys)
        self._kv.values.index_copy_(2, self._rows, values)
        return self._kv.keys, self._kv.values


class ModelAdapter:
    """A decoder model, taken apart into the steps the blended pass needs.

    Parameters
    ----------
    model : transformers PreTrainedModel
        A causal language model of a known family. Nothing of it is changed, except within
        `blending`, which undoes it.

    Raises
    ------
    UnsupportedModelError
        If the family is not known or the model is spread over several devices.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config
        self._family = family_of(model)
        self._decoder = model.model
        self.layers = list(self._decoder.layers)
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) > 1:
            raise UnsupportedModelError(
                f"the model is spread over {sorted(map(str, devices))}; load it on one device"
            )
        self.device = next(iter(devices))
        self.dtype: torch.dtype = self._decoder.embed_tokens.weight.dtype
        self.windows = [self._family.window(self.config, layer) for layer in range(self.num_layers)]
        attention = getattr(self.layers[0], self._family.attention)
        self.head_dim = int(attention.head_dim)
        self.kv_heads = int(self.config.num_key_value_heads)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def attention_bytes_per_token(self) -> int:
        """Bytes of KV of one token on all layers, in the model's element type."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    def fingerprint(self) -> str:
        """Identity of the model: config, weights and element type."""
        return fingerprint(self.model)

    def reusable(self, tokens: int) -> bool:
        """Whether stored KV fits a prompt of this length.

        Dynamic NTK and LongRoPE change their frequencies beyond a length, and with them the
        values of deeper layers; such prompts take a plain prefill.
        """
        parameters = getattr(self.config, "rope_parameters", None) or {}
        if parameters.get("rope_type") not in _LENGTH_DEPENDENT:
            return True
        limit = parameters.get("original_max_position_embeddings") or self.config.max_position_embeddings
        return tokens <= int(limit)

    @contextmanager
    def blending(self) -> Iterator[None]:
        """Within this, decoder layers accept a mask row for each kept row.

        Kernels that take no mask of that kind are replaced by SDPA meanwhile.
        """
        before = self.config._attn_implementation
        training = self.model.training
        if before not in ("sdpa", "eager"):
            self.config._attn_implementation = "sdpa"
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(training)
            self.config._attn_implementation = before

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        """Input of layer 0, ``[tokens, hidden]``."""
        embedded: torch.Tensor = self._decoder.embed_tokens(torch.tensor(ids, device=self.device))
        return embedded

    def rotary(self, tokens: int, start: int = 0) -> Rotary:
        """Cosine and sine of positions ``start`` to ``start + tokens``, in float32."""
        positions = torch.arange(start, start + tokens, device=self.device)[None]
        like = torch.empty(0, dtype=torch.float32, device=self.device)
        cos, sin = self._decoder.rotary_emb(like, position_ids=positions)
        return Rotary(cos[0], sin[0])

    def project_values(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Values of the rows on a layer, ``[kv_heads, rows, head_dim]``.

        Parameters
        ----------
        hidden : Tensor, [rows, hidden]
            Input of the layer.
        """
        block, family = self.layers[layer], self._family
        attention = getattr(block, family.attention)
        values: torch.Tensor = getattr(attention, family.values)(getattr(block, family.norm)(hidden))
        return values.view(len(hidden), self.kv_heads, self.head_dim).transpose(0, 1)

    def run_layer(
        self, layer: int, hidden: torch.Tensor, kv: LayerKV, rows: torch.Tensor, rotary: Rotary, mask: torch.Tensor | None
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
        rotary : Rotary
            Of the kept rows, in the model's element type.
        mask : Tensor or None, [1, 1, rows, tokens], bool
            True where a row sees a position; None if the rows are all positions and no window
            applies.

        Returns
        -------
        Tensor, [rows, hidden]
        """
        if mask is not None and self.config._attn_implementation == "eager":
            hidden_below = torch.finfo(hidden.dtype).min
            mask = torch.where(mask, 0.0, hidden_below).to(hidden.dtype)
        elif mask is None and self.config._attn_implementation == "eager":
            mask = torch.full((len(rows), len(rows)), torch.finfo(hidden.dtype).min, dtype=hidden.dtype, device=hidden.device)
            mask = mask.triu(1)[None, None]
        out = self.layers[layer](
            hidden[None],
            attention_mask=mask,
            position_ids=rows[None],
            past_key_values=_ScatterCache(kv, rows),
            use_cache=True,
            position_embeddings=(rotary.cos[None], rotary.sin[None]),
        )
        out = out[0] if isinstance(out, tuple) else out
        return out[0]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[vocab]`` from the output ``[hidden]`` of the last layer at one position."""
        logits: torch.Tensor = self.model.lm_head(self._decoder.norm(hidden[None]))
        return logits[0]

    def new_cache(self, layers: Sequence[LayerKV]) -> Any:
        """A transformers cache that holds these layers, ready for generation."""
        cache = DynamicCache(config=self.config)
        for number, kv in enumerate(layers):
            layer = cache.layers[number]
            if layer.is_sliding:
                layer.update(kv.keys, kv.values)
                continue
            layer.lazy_initialization(kv.keys, kv.values)
            layer.keys, layer.values = kv.keys, kv.values
        return cache

    def prefill(self, ids: Sequence[int]) -> Prefill:
        """The model's own forward pass over all ids: plain prefill."""
        with self._plain():
            cache = DynamicCache(config=self.config)
            inputs = torch.tensor([list(ids)], device=self.device)
            out = self.model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            return Prefill(cache, out.logits[0, -1])

    def segment_kv(self, context_ids: Sequence[int], ids: Sequence[int]) -> SegmentKV:
        """KV of a segment computed behind a context, keys with their rotation undone.

        Rotation depends on the position, which the segment's next use decides. It is undone in
        float32; dividing by the squared norm also undoes the scaling YaRN puts into cosine and
        sine.
        """
        with self._plain():
            first, stop = len(context_ids), len(context_ids) + len(ids)
            cache = DynamicCache()
            self._decoder(torch.tensor([[*context_ids, *ids]], device=self.device), past_key_values=cache, use_cache=True)
            rotary = self.rotary(stop - first, start=first)
            keys, values = [], []
            for layer in cache.layers:
                keys.append(unrotate(layer.keys[0, :, first:stop], rotary).contiguous())
                values.append(layer.values[0, :, first:stop].contiguous())
            return SegmentKV(tuple(keys), tuple(values), rotated=False)

    @contextmanager
    def _plain(self) -> Iterator[None]:
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(training)
