"""Every rule, metric, check layer and schedule at the ratio that makes its work equal to the others'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cacheblend_rag.fusor.selection import (
    SelectBoundary,
    SelectGradual,
    SelectHKVD,
    SelectionRule,
    SelectMixed,
    SelectNone,
    SelectQuery,
    SelectRandom,
    SelectThreshold,
)

__all__ = ["FLOOR", "WORKS", "Candidate", "candidates"]

WORKS = (0.05, 0.10, 0.15, 0.25)
FLOOR = "full KV reuse"
_DEPTH = 24
_FUNNELS = ((0.3,), (0.5, 0.3), (0.5, 0.4, 0.3), (0.4, 0.3, 0.2, 0.1))
# A lower ratio keeps hardly a row of a short prompt.
_LEAST = 0.004


@dataclass(frozen=True)
class Candidate:
    """A rule in the table.

    Parameters
    ----------
    name : str
        What it is called there.
    aim : float or None
        Work on reused tokens it aims at; None for the floor and the like.
    rule : SelectionRule
    """

    name: str
    aim: float | None
    rule: SelectionRule


@dataclass(frozen=True)
class _Kind:
    """A rule before its ratio is known.

    Parameters
    ----------
    name : str
    full : float
        Full layers before its ratio holds; layers with some rows count in part.
    layers : int
        Layers on which its ratio holds, of `_DEPTH`.
    make : callable
        The rule with a ratio.
    most : float
        Highest ratio it can have.
    scores : bool
        Whether it needs a scoring pass.
    """

    name: str
    full: float
    layers: int
    make: Callable[[float], SelectionRule]
    most: float = 1.0
    scores: bool = False


def candidates(
    layers: int, works: Sequence[float] = WORKS, question: float = 0.05, reused: float = 0.9
) -> list[Candidate]:
    """All rules at each amount of work, so far as they can be had for it.

    Parameters
    ----------
    layers : int
        Layers of the model.
    works : sequence of float
        Work on reused tokens aimed at, as a share of full prefill's, in a model of 24 layers.
    question : float
        Work of the rows that are always computed, as a share of full prefill's; a scoring pass costs
        three quarters of it.
    reused : float
        Reused chunk tokens as a share of all.
    """
    found = [
        Candidate(FLOOR, None, SelectNone()),
        Candidate(f"{FLOOR}, keys not moved", None, SelectNone(correct_positions=False)),
        Candidate("hkvd v, layer 1, ratio 15%", None, SelectHKVD((1,), 0.15)),
    ]
    for work in works:
        for kind in _kinds(layers):
            left = work - (0.75 * question if kind.scores else 0)
            ratio = (_DEPTH * left / reused - kind.full) / kind.layers
            if _LEAST <= ratio <= kind.most:
                found.append(Candidate(f"{kind.name}, ratio {ratio:.1%}", work, kind.make(ratio)))
    return found


def _kinds(layers: int) -> list[_Kind]:
    checks = [("v", 1), ("k", 1), ("kv", 1), *[(m, check) for check in range(2, min(6, layers)) for m in "vk"]]
    kinds = [
        _Kind(f"hkvd {metric}, layer {check}", check, _DEPTH - check, _hkvd(check, metric)) for metric, check in checks
    ]
    for head in _FUNNELS:
        if len(head) + 2 <= layers:
            name = f"gradual k, {', '.join(f'{share:.0%}' for share in head)}, then"
            kinds.append(_Kind(name, 1 + sum(head), _DEPTH - 1 - len(head), _gradual(head), most=head[-1]))
    return [
        *kinds,
        _Kind("boundary", 0, _DEPTH, SelectBoundary),
        _Kind("query", 0, _DEPTH, SelectQuery, scores=True),
        _Kind("boundary and query", 0, _DEPTH, _boundary_and_query, scores=True),
        _Kind("mixed k", 1, _DEPTH - 1, _mixed, scores=True),
        _Kind("threshold k, bound 0.3, at most", 1, _DEPTH - 1, _threshold),
        _Kind("random", 0, _DEPTH, SelectRandom),
    ]


def _hkvd(check: int, metric: str) -> Callable[[float], SelectionRule]:
    return lambda ratio: SelectHKVD((check,), ratio, metric=metric)


def _gradual(head: Sequence[float]) -> Callable[[float], SelectionRule]:
    return lambda ratio: SelectGradual((1,), recompute_ratios=(*head, ratio), metric="k")


def _boundary_and_query(ratio: float) -> SelectionRule:
    return SelectMixed((1,), ratio, (0.5, 0.0, 0.5))


def _mixed(ratio: float) -> SelectionRule:
    return SelectMixed((1,), ratio, metric="k")


def _threshold(ratio: float) -> SelectionRule:
    return SelectThreshold((1,), ratio, lowest_ratio=ratio / 4, bound=0.3, metric="k")
