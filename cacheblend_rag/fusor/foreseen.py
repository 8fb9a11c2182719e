"""What attention would bring a reused row from other chunks, foreseen from its stored query: no row is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.mask import row_mask
from cacheblend_rag.fusor.work import Looked
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.models.rope import Rotaries, Rotary, rotate, unrotate

__all__ = ["Queries", "foreseen_deviation"]

Queries = Callable[[int], torch.Tensor]
"""Stored queries of a layer, not rotated, ``[heads, tokens, head_dim]``; undefined outside of chunks."""


def foreseen_deviation(
    adapter: ModelAdapter,
    spans: Sequence[range],
    origins: Sequence[int],
    queries: Queries | None,
    layer_kv: Callable[[int], LayerKV],
    rotaries: Rotaries,
    layers: Sequence[int],
) -> tuple[torch.Tensor, tuple[Looked, ...]]:
    """How far the output of a layer's attention moves once a row sees all that stands before it.

    The stored query of each row attends to the stored KV of its own chunk and of what that was computed behind, as
    it did when it was computed, and again to all stored KV before it. The difference is what the row's KV will
    deviate by on the next layer, as far as this layer alone is the cause. Each stored query and key is that of a
    chunk computed alone, so what a row passes on of what it learned from another chunk is not foreseen.

    Parameters
    ----------
    adapter : ModelAdapter
        Within its `ModelAdapter.blending`.
    spans : sequence of range
        Positions of the reused chunks.
    origins : sequence of int
        Where each began when it was computed.
    queries : callable or None
        See `Queries`.
    layer_kv : callable
        Rotated KV of all positions of a layer.
    rotaries : Rotaries
        Of all positions, in float32.
    layers : sequence of int
        Layers that are looked at.

    Returns
    -------
    Tensor, [tokens] float32, and tuple of Looked
        The L2 norm of the difference over all heads; its mean over the layers. Only that of reused positions is
        defined.

    Raises
    ------
    ConfigError
        If no queries are stored.
    """
    if queries is None:
        raise ConfigError("query_layers", (), "name the layers whose queries are stored with the KV of chunks")
    total = torch.zeros(max(span.stop for span in spans), device=adapter.device)
    looked = []
    for layer in layers:
        asked, kv, seen = queries(layer), layer_kv(layer), 0
        for span, origin in zip(spans, origins, strict=True):
            rows = slice(span.start, span.stop)
            turned = rotaries.at(rows)
            before = LayerKV(kv.keys[:, :, : span.stop], kv.values[:, :, : span.stop])
            alone = _alone(kv, span, origin, rotaries.of_keys(layer))
            apart = _attended(adapter, layer, asked[:, rows], alone, turned)
            among = _attended(adapter, layer, asked[:, rows], before, turned)
            total[rows] += (among - apart).norm(dim=1)
            seen += len(span) * (span.start + origin + len(span) + 1)
        looked.append(Looked(layer, seen))
    return total / len(layers), tuple(looked)


def _alone(kv: LayerKV, span: range, origin: int, rotary: Rotary | None) -> LayerKV:
    """KV of a chunk and of what it was computed behind, which is turned to where it would stand directly before it."""
    context, chunk, moved = slice(origin), slice(span.start, span.stop), slice(span.start - origin, span.start)
    keys = kv.keys[:, :, context]
    if rotary is not None:
        keys = rotate(unrotate(keys, rotary.at(context)), rotary.at(moved))
    return LayerKV(
        torch.cat((keys, kv.keys[:, :, chunk]), dim=2),
        torch.cat((kv.values[:, :, context], kv.values[:, :, chunk]), dim=2),
    )


def _attended(
    adapter: ModelAdapter, layer: int, queries: torch.Tensor, kv: LayerKV, rotaries: Rotaries
) -> torch.Tensor:
    """Attention of the last positions of some KV over all of it, ``[rows, heads * head_dim]`` float32."""
    tokens, window = kv.keys.shape[2], adapter.windows[layer]
    rows = torch.arange(tokens - queries.shape[1], tokens, device=adapter.device)
    mask = adapter.kernel_mask(row_mask(rows, tokens, window), rows, tokens, window)
    return adapter.attend(layer, queries, kv, rotaries, mask).flatten(1).float()
