"""The scoring pass of some rules: what the question attends to before anything is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cacheblend_rag.models.attention.rows import RowMask
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.models.rope import Rotaries
from cacheblend_rag.models.row_layers import RowLayers


def question_attention(
    row_layers: RowLayers,
    hidden: torch.Tensor,
    tokens: int,
    rows: torch.Tensor,
    watched: int,
    layer_kv: Callable[[int], LayerKV],
    rotaries: Rotaries,
    score_layers: Sequence[int],
    left_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean attention of the last rows over some layers, ``[tokens]`` float32; parameters as in `attention_rows`."""
    if left_out is None:
        last, own = range(len(rows) - watched, len(rows)), rotaries.at(rows).to(row_layers.dtype)
        mean = row_layers.sum_attention(hidden, tokens, rows, last, layer_kv, own, score_layers)
        if mean is not None:
            return mean
    # The plain twin.
    found = attention_rows(row_layers, hidden, rows, watched, layer_kv, rotaries, score_layers, left_out)
    return torch.stack([found[layer].float().mean(dim=(0, 1)) for layer in score_layers]).mean(dim=0)


def attention_rows(
    row_layers: RowLayers,
    hidden: torch.Tensor,
    rows: torch.Tensor,
    watched: int,
    layer_kv: Callable[[int], LayerKV],
    rotaries: Rotaries,
    layers: Sequence[int],
    left_out: torch.Tensor | None = None,
) -> dict[int, torch.Tensor]:
    """Attention of the last of some rows over given KV, on some layers.

    Parameters
    ----------
    row_layers : RowLayers
    hidden : Tensor, [rows, hidden]
        Input of layer 0 for the rows.
    rows : Tensor, [rows], long
        Positions that are computed, rising; their KV is overwritten.
    watched : int
        How many of them, from the end, are looked at.
    layer_kv : callable
        Rotated KV of all positions of a layer.
    rotaries : Rotaries
        Of all positions.
    layers : sequence of int
        Layers that are looked at, rising; nothing beyond the last is computed.
    left_out : Tensor or None, [tokens], bool
        Positions that no row sees, on a CPU; their KV must be finite.

    Returns
    -------
    dict of int to Tensor, each [heads, watched, tokens]
    """
    found: dict[int, torch.Tensor] = {}
    cut, positions = len(rows) - watched, rows.tolist()
    at_rows = rotaries.at(rows).to(row_layers.dtype)
    masks: dict[tuple[int | None, int | None], RowMask | None] = {}

    def run(running: RowLayers, layer: int, part: slice) -> torch.Tensor:
        """Some of the rows through a layer."""
        some, window, kv = rows[part], running.windows[layer], layer_kv(layer)
        if part.stop is not None:
            # Behind them, KV of rows that come later is undefined, and a mask does not hide what is not finite.
            tokens = positions[part][-1] + 1
            kv = LayerKV(kv.keys[:, :, :tokens], kv.values[:, :, :tokens])
        like = part.start, window  # parts that begin alike run in the same form of attention
        if like not in masks:
            masks[like] = running.mask(some, kv.keys.shape[2], window, left_out=left_out)
        return running.run_layer(layer, hidden[part], kv, some, at_rows.at(part), masks[like])

    for layer in range(layers[-1] + 1):
        if layer not in layers:
            hidden = run(row_layers, layer, slice(None))
            continue
        # Rows of one layer need only each other's KV, so those that are not looked at go first and
        # are spared the plain form of attention, which holds all weights in memory.
        before = run(row_layers, layer, slice(0, cut)) if cut else hidden[:0]
        seen: list[torch.Tensor] = []
        after = run(row_layers.watched(layer, seen), layer, slice(cut, None))
        hidden = torch.cat((before, after))
        found[layer] = seen[0]
    return found
