"""Rows that are not recomputed are given what recomputed rows of their chunk show that all of it deviates by.

Where a model writes what a chunk is about into each of its rows, all of them deviate alike once another chunk says
it. A few of them then tell what the others deviate by: ridge regression (Hoerl and Kennard 1970) on how far each
row's attention is predicted to move, and what that is worth, row by row left out (PRESS, Allen 1974).
docs/decisions/0006 has the evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.models.rope import Rotaries, rotate_in_place, unrotate

__all__ = ["DriftCorrection", "sampled_rows"]

_MOVED = 0.3
"""A chunk moves as a whole if its rows move by more in the mean, in mean lengths of what attention gave them alone."""
_RIDGE = 1.0
_FEWEST = 3  # rows: of fewer, what one shows and what all show cannot be told apart
_blocks: Callable[..., torch.Tensor] = torch.block_diag  # which has no types


def sampled_rows(spans: Sequence[range], moves: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    """Rows to recompute for what the rest of their chunk is to be given: evenly spaced, where all of it moves.

    Parameters
    ----------
    spans : sequence of range
        Positions of the chunks.
    moves : sequence of Tensor, each [chunk tokens, width] float32
        What each row's attention is predicted to move by, as a share of the mean length of what it was.
    count : int
        How many rows a chunk.

    Returns
    -------
    list of Tensor, each [rows] long
        Positions in each chunk, rising; none in chunks that do not move as a whole.
    """
    found = []
    for span, move in zip(spans, moves, strict=True):
        even = torch.linspace(0, len(span) - 1, min(count, len(span)), device=move.device).round().long()
        found.append(span.start + (even if move.mean(dim=0).norm() > _MOVED else even[:0]))
    return found


@dataclass(frozen=True)
class DriftCorrection:
    """What the rest of some chunks is given, by recomputed rows of theirs.

    Parameters
    ----------
    rows : Tensor, [rows] long
        Positions of recomputed rows.
    places : Tensor, [places] long
        Positions of the other rows of their chunks.
    weights : tuple of (slice, Tensor [places of a chunk, rows of it] float32)
        Chunk by chunk, which of the rows are of it, and what each of its places is given of each row's deviation.
    left_out : Tensor, [rows, rows] float32
        Maps deviations of the rows to what each is told wrong by the others of its chunk.
    counted : Tensor, [chunks, rows] float32
        1 for the sampled rows of each chunk, by which is judged what the regression is worth.
    chunk : Tensor, [rows] long
        Which chunk each row is of.
    """

    rows: torch.Tensor
    places: torch.Tensor
    weights: tuple[tuple[slice, torch.Tensor], ...]
    left_out: torch.Tensor
    counted: torch.Tensor
    chunk: torch.Tensor

    @classmethod
    def of(
        cls,
        spans: Sequence[range],
        moves: Sequence[torch.Tensor],
        samples: Sequence[torch.Tensor],
        chosen: torch.Tensor,
    ) -> DriftCorrection | None:
        """That of a prompt; None where no chunk has both enough sampled rows and rows that are not recomputed.

        Parameters
        ----------
        spans, moves, samples
            As `sampled_rows` takes and gives them; nothing where nothing is sampled.
        chosen : Tensor, [chosen] long
            Positions that are recomputed, rising.
        """
        if not samples:
            return None
        fitted = []
        for span, move, sample in zip(spans, moves, samples, strict=True):
            known = torch.zeros(len(span), dtype=torch.bool, device=move.device)
            known[chosen[(chosen >= span.start) & (chosen < span.stop)] - span.start] = True
            sampled = torch.isin(known.nonzero()[:, 0] + span.start, sample)
            if int(sampled.sum()) >= _FEWEST and not known.all():
                fitted.append((span.start, known, sampled.float(), *_regression(move, known)))
        if not fitted:
            return None
        starts, taken, counted, weights, left_out = zip(*fitted, strict=True)
        return cls(
            torch.cat([start + of.nonzero()[:, 0] for start, of in zip(starts, taken, strict=True)]),
            torch.cat([start + (~of).nonzero()[:, 0] for start, of in zip(starts, taken, strict=True)]),
            tuple(zip(_consecutive([of.shape[1] for of in weights]), weights, strict=True)),
            _blocks(*left_out),
            _blocks(*counted),
            torch.cat([torch.full_like(of[of], at, dtype=torch.long) for at, of in enumerate(taken)]),
        )

    @property
    def pairs(self) -> int:
        """Of a row and a place of its chunk, over which a layer's deviation is spread."""
        return sum(weights.numel() for _, weights in self.weights)

    def told(self, deviation: torch.Tensor) -> torch.Tensor:
        """What the places deviate by, as far as the rows tell it.

        What is told is given in the proportion in which it explains rows that are left out, for each chunk and head:
        nothing, where it explains none of their deviation.

        Parameters
        ----------
        deviation : Tensor, [heads, rows, width] float32
            Of the rows.

        Returns
        -------
        Tensor, [heads, places, width] float32
        """
        wrong = self.left_out @ deviation
        unexplained, all_of_it = (of.square().sum(dim=2) @ self.counted.T for of in (wrong, deviation))
        worth = 1 - unexplained / all_of_it.clamp_min(torch.finfo(torch.float32).tiny)  # [heads, chunks]
        given = deviation * worth.clamp_min(0)[:, self.chunk, None]
        return torch.cat([weights @ given[:, rows] for rows, weights in self.weights], dim=1)

    def write(self, adapter: ModelAdapter, layer: int, hidden: torch.Tensor, kv: LayerKV, rotaries: Rotaries) -> None:
        """Add it to the KV of a layer; deviation of keys is that before their rotation.

        Parameters
        ----------
        adapter : ModelAdapter
        layer : int
        hidden : Tensor, [rows, hidden]
            Input of the layer, of the recomputed rows.
        kv : LayerKV
            Of all positions, keys rotated; as it was stored, where it is not computed.
        rotaries : Rotaries
            Of all positions, in float32.
        """
        at, rotary = rotaries.at(self.rows), rotaries.of_keys(layer)
        keys = adapter.project_keys(layer, hidden, at).float() - kv.keys[0][:, self.rows].float()
        values = adapter.project_values(layer, hidden).float() - kv.values[0][:, self.rows].float()
        told = self.told(torch.cat((unrotate(keys, at.of_keys(layer)), values)))
        told_keys, told_values = told[: len(keys)], told[len(keys) :]
        if rotary is not None:
            rotate_in_place(told_keys, rotary.at(self.places))
        for stored, more in ((kv.keys[0], told_keys), (kv.values[0], told_values)):
            stored[:, self.places] = (stored[:, self.places] + more).to(stored.dtype)  # in float32


def _consecutive(counts: Sequence[int]) -> list[slice]:
    """Slices of so many each, one behind the other."""
    return [slice(stop - count, stop) for stop, count in zip(accumulate(counts), counts, strict=True)]


def _regression(move: torch.Tensor, known: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the known rows for the others, ``[others, known]``, and what maps deviations to errors left out."""
    scaled = move / move.norm(dim=1).mean()
    features = torch.cat((scaled, torch.ones_like(scaled[:, :1])), dim=1)
    alike = features @ features[known].T  # the kernel form: rows are fewer than features
    penalty = _RIDGE * torch.eye(alike.shape[1], device=move.device)
    weights = torch.linalg.solve(alike[known] + penalty, alike.T).T
    own = weights[known]
    left_out = (torch.eye(len(own), device=move.device) - own) / (1 - own.diagonal()).clamp_min(1e-3)[:, None]
    return weights[~known], left_out
