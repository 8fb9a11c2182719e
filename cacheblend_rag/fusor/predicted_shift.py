"""What attention would bring a reused row from other chunks, predicted from its stored query: no row is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cacheblend_rag.fusor.mask import kept_mask
from cacheblend_rag.fusor.work import QueriedLayer
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.models.rope import Rotaries, Rotary, rotate, unrotate

__all__ = ["PredictedShift", "Queries", "ShiftPredictor"]

Queries = Callable[[int], torch.Tensor]
"""Stored queries of a layer, not rotated, ``[heads, tokens, head_dim]``; undefined outside of chunks."""


@dataclass(frozen=True)
class PredictedShift:
    """What stored queries say of a prompt.

    Parameters
    ----------
    deviation : Tensor, [tokens] float32
        How far each row's attention moves: the L2 norm of the difference over all heads, as a share of the mean norm
        of what reused rows attended to by themselves on that layer; its mean over the layers. NaN outside of
        reused chunks.
    moves : tuple of Tensor, each [chunk tokens, layers * heads * head_dim] float32
        The differences themselves, as shares of the same, of each reused chunk.
    queried : tuple of QueriedLayer
        What was looked at.
    """

    deviation: torch.Tensor
    moves: tuple[torch.Tensor, ...]
    queried: tuple[QueriedLayer, ...]


@dataclass(frozen=True)
class ShiftPredictor:
    """Stored queries and KV of a prompt, to be looked at within `ModelAdapter.blending`.

    Parameters
    ----------
    adapter : ModelAdapter
    ids : sequence of int
        Ids of the prompt.
    spans : sequence of range
        Positions of the reused chunks.
    contexts : sequence of sequence of int
        Ids that each was computed behind.
    missing : Tensor, [missing], long
        Positions before the end of the last of them whose KV is not stored, rising.
    queries : callable
        See `Queries`.
    layer_kv : callable
        Rotated KV of all positions of a layer.
    rotaries : Rotaries
        Of all positions, in float32.
    """

    adapter: ModelAdapter
    ids: Sequence[int]
    spans: Sequence[range]
    contexts: Sequence[Sequence[int]]
    missing: torch.Tensor
    queries: Queries
    layer_kv: Callable[[int], LayerKV]
    rotaries: Rotaries

    def look(self, layers: Sequence[int]) -> PredictedShift:
        """How far the output of a layer's attention moves once a row sees all that stands before it.

        The stored query of each row attends to the stored KV of its own chunk and of what that was computed behind,
        as it did when it was computed, and again to all KV before it. The difference is what the row's KV will
        deviate by on the next layer, as far as this layer alone is the cause. Each stored query and key is that of a
        chunk computed alone, so what a row passes on of what it learned from another chunk is not predicted.

        What a chunk was computed behind is not stored with it. Its first ids, as far as the prompt begins with them,
        are taken from there. The rest is a separator and the chunk's head: what stands before the chunk here.

        What is not stored is computed first, as far as the last of the layers.

        Parameters
        ----------
        layers : sequence of int
            Layers that are looked at, rising.
        """
        self._compute_missing(layers[-1])
        by_layer = [self._moves(layer) for layer in layers]
        deviation = torch.full((len(self.ids),), float("nan"), device=self.adapter.device)
        for at, span in enumerate(self.spans):
            lengths = torch.stack([moves[at].norm(dim=1) for moves in by_layer])
            deviation[span.start : span.stop] = lengths.mean(dim=0)
        seen = sum(
            len(span) * (span.start + len(context) + len(span) + 1)
            for span, context in zip(self.spans, self.contexts, strict=True)
        )
        moves = by_layer[0] if len(layers) == 1 else [torch.cat(of, dim=1) for of in zip(*by_layer, strict=True)]
        return PredictedShift(deviation, tuple(moves), tuple(QueriedLayer(layer, seen) for layer in layers))

    def _moves(self, layer: int) -> list[torch.Tensor]:
        """What each row's attention on a layer moves by, a chunk, as a share of the mean length of what it was."""
        asked, kv = self.queries(layer), self._kv(layer)
        first = min(span.start for span in self.spans)
        # One call for all chunks. Between them queries are undefined, and what becomes of them is not looked at.
        among = self._attended(layer, asked, kv, slice(first, self._tokens))
        length, tokens = torch.zeros((), device=self.adapter.device), sum(map(len, self.spans))
        moves = []
        for span, context in zip(self.spans, self.contexts, strict=True):
            rows = slice(span.start, span.stop)
            opening = next((at for at, id in enumerate(context) if self.ids[at] != id), len(context))
            alone = _alone(kv, span, opening, len(context) - opening, self.rotaries.of_keys(layer))
            apart = self._attended(layer, asked, alone, rows)
            moves.append(among[span.start - first : span.stop - first] - apart)
            length += apart.norm(dim=1).sum() / tokens
        return [move.div_(length.clamp_min(torch.finfo(length.dtype).tiny)) for move in moves]

    def _compute_missing(self, last: int) -> None:
        """KV of what is not stored, up to a layer."""
        adapter, rows = self.adapter, self.missing
        if not len(rows):
            return
        hidden = adapter.embed([self.ids[row] for row in rows.tolist()])
        own, tokens = self.rotaries.at(rows), self._tokens
        for layer in range(last):
            mask = kept_mask(adapter, rows, tokens, adapter.windows[layer])
            hidden = adapter.run_layer(layer, hidden, self._kv(layer), rows, own.to(adapter.dtype), mask)
        adapter.write_kv(last, hidden, self._kv(last), rows, own)

    @property
    def _tokens(self) -> int:
        """Positions up to the end of the last reused chunk: behind it, KV is undefined."""
        return max(span.stop for span in self.spans)

    def _kv(self, layer: int) -> LayerKV:
        kv = self.layer_kv(layer)
        return LayerKV(kv.keys[:, :, : self._tokens], kv.values[:, :, : self._tokens])

    def _attended(self, layer: int, asked: torch.Tensor, kv: LayerKV, rows: slice) -> torch.Tensor:
        """Attention of some rows over KV at whose end they stand, ``[rows, heads * head_dim]`` float32."""
        adapter, tokens, queries = self.adapter, kv.keys.shape[2], asked[:, rows]
        places = torch.arange(tokens - queries.shape[1], tokens, device=adapter.device)
        mask = kept_mask(adapter, places, tokens, adapter.windows[layer], trailing=True)
        return adapter.attend(layer, queries, kv, self.rotaries.at(rows), mask).flatten(1).float()


def _alone(kv: LayerKV, span: range, opening: int, before: int, rotary: Rotary | None) -> LayerKV:
    """KV of a chunk and of what it was computed behind.

    That is the prompt's ``opening`` first positions, and ``before`` positions directly before the chunk. The first are
    turned to where they would stand directly before the others.
    """
    begin = max(opening, span.start - before)
    first, rest, moved = slice(opening), slice(begin, span.stop), slice(begin - opening, begin)
    if not opening:
        return LayerKV(kv.keys[:, :, rest], kv.values[:, :, rest])
    keys = kv.keys[:, :, first]
    if rotary is not None:
        keys = rotate(unrotate(keys, rotary.at(first)), rotary.at(moved))
    return LayerKV(
        torch.cat((keys, kv.keys[:, :, rest]), dim=2),
        torch.cat((kv.values[:, :, first], kv.values[:, :, rest]), dim=2),
    )
