"""Floating-point work of a blended pass, as a share of a full prefill's. Rules are compared by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.shape import LayerShape, ModelShape


@dataclass(frozen=True)
class RowsDone:
    """All rows a pass worked on.

    Parameters
    ----------
    computed : tuple of Tensor, each [rows] long
        Positions computed on each layer.
    projected : tuple of (int, int)
        The checks: a layer, and how many rows' values were projected there, besides those it then computed.
    scored : tuple of Tensor, each [rows] long
        Positions a scoring pass computed, layer by layer as far as it went.
    ended : int or None
        How many rows of the last layer were computed to its end, counted from the last one. The others gave
        only keys and values. None means all.
    """

    computed: tuple[torch.Tensor, ...]
    projected: tuple[tuple[int, int], ...] = ()
    scored: tuple[torch.Tensor, ...] = ()
    ended: int | None = None


def work_share(shape: ModelShape, tokens: int, done: RowsDone, layers: int | None = None) -> float:
    """Work of a pass as a share of a full prefill's.

    Counted are the linear layers by rows, attention by row and visible key, the projections of
    checks, the scoring pass, and the output head once. The question's rows
    are rows like others.

    Parameters
    ----------
    shape : ModelShape
        The model.
    tokens : int
        Positions of the prompt.
    done : RowsDone
        The rows of the pass.
    layers : int, optional
        Scale to a model of so many layers of this kind: checks stay on their layers, the last
        layer stands for all that are added, and a scoring pass goes as far into the depth.

    Raises
    ------
    ConfigError
        If ``layers`` is less than the model has.
    """
    depth = len(shape.layers)
    layers = depth if layers is None else layers
    if layers < depth:
        raise ConfigError("layers", layers, f"use {depth} or more, the layers of the model")
    added = layers - depth
    # Counted by tensor: each is copied from a GPU once, since a copy waits for queued work.
    tensors = {id(rows): rows for rows in (*done.computed, *done.scored)}
    seen = {key: _RowCounts(rows.tolist()) for key, rows in tensors.items()}
    spent = [_work(layer, seen[id(rows)]) for layer, rows in zip(shape.layers, done.computed, strict=True)]
    checks = sum(rows * shape.layers[layer].values for layer, rows in done.projected)
    scoring = sum(_work(layer, seen[id(rows)]) for layer, rows in zip(shape.layers, done.scored, strict=False))
    total = (
        sum(spent)
        - _spared_work(shape.layers[-1], seen[id(done.computed[-1])], done.ended)
        + added * spent[-1]
        + checks
    )
    total += scoring * layers / depth + shape.head
    return total / prefill_work(shape, tokens, layers)


def prefill_work(shape: ModelShape, tokens: int, layers: int | None = None) -> float:
    """Multiply-adds of a full prefill, the output head once.

    Parameters
    ----------
    shape : ModelShape
    tokens : int
    layers : int, optional
        Scale to a model of so many layers, as in `work_share`.
    """
    every = _RowCounts(range(tokens))
    full = [_work(layer, every) for layer in shape.layers]
    added = 0 if layers is None else layers - len(full)
    return sum(full) + added * full[-1] + shape.head


def expected_share(
    shape: ModelShape,
    tokens: int,
    computed: Sequence[int],
    reused: Sequence[int],
    scored: Sequence[int],
    *,
    share: float = 0.0,
    kept: float = 0.0,
    begun: int = 0,
) -> float:
    """Work that a blended pass will do, as a share of the prefill in whose place it stands: the twin of `work_share`.

    Parameters
    ----------
    shape : ModelShape
        The model.
    tokens : int
        Positions of the prompt.
    computed : sequence of int
        Positions that are computed whatever the rule keeps.
    reused : sequence of int
        Positions on which it decides.
    scored : sequence of int
        Positions that a scoring pass computes.
    share : float
        Share of the layers that it goes through.
    kept : float
        Share of the reused rows that is recomputed, over all layers.
    begun : int
        First positions that the prefill need not compute.
    """
    always, some, looked = (_RowCounts(rows) for rows in (computed, reused, scored))
    last, prefilled = shape.layers[-1], _RowCounts(range(begun, tokens))
    spared = _spared_work(last, always, 1) + kept * _spared_work(last, some, 0)
    work = _through(shape, always) + share * _through(shape, looked) + kept * _through(shape, some) - spared
    return (work + shape.head) / (_through(shape, prefilled) + shape.head)


def _through(shape: ModelShape, rows: _RowCounts) -> float:
    """Multiply-adds of some rows on all layers."""
    return sum(_work(layer, rows) for layer in shape.layers)


class _RowCounts:
    """How many rows there are and how many keys they see, counted once for all layers that share them."""

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = positions
        self._keys: dict[int | None, float] = {}

    def keys(self, window: int | None) -> float:
        """Over all rows."""
        if window not in self._keys:
            seen = self.positions if window is None else [min(position, window - 1) for position in self.positions]
            self._keys[window] = float(len(seen) + sum(seen))
        return self._keys[window]


def _spared_work(last: LayerShape, rows: _RowCounts, ended: int | None) -> float:
    """Work that the rows of the last layer did not do."""
    stopped = _RowCounts(rows.positions[: 0 if ended is None else len(rows.positions) - ended])
    return _work(last, stopped) - len(stopped.positions) * (last.keys + last.values)


def _work(layer: LayerShape, rows: _RowCounts) -> float:
    """Multiply-adds of some rows on a layer."""
    return layer.linear * len(rows.positions) + layer.attention * rows.keys(layer.window)
