"""Every rule, metric, check layer and schedule at the ratio that makes its work equal to the others'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

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
from cacheblend_rag.fusor.selection.query import third_quarter

__all__ = ["FLOOR", "LATE", "PAPER", "WORKS", "Candidate", "candidates"]

WORKS = (0.05, 0.10, 0.15, 0.25)
FLOOR = "full KV reuse"
PAPER = "hkvd v, layer 1"
"""What the paper's flat rule is called, up to its ratio."""
_DEPTH = 24
# What the last layer does of a layer, about: keys and values of its rows are all that is wanted of it.
_LAST = 0.1
LATE = 3
"""Layer of the later checks: from some layer on deviation points at the right rows. The toy's."""
# Shares of the layers from 1 on, one after another; the ratio holds from the next layer on.
_FUNNELS = ((0.3,), (0.5, 0.4, 0.3), (0.4, 0.3, 0.2, 0.1), (0.7, 0.6, 0.5, 0.4))
# The schedule that `gradual` makes of one number: so many rows for each that the last layers keep.
_TIMES = (10, 8, 6, 4, 2)
# A lower ratio keeps hardly a row of a short prompt.
_LEAST = 0.004

_Make = Callable[[float], SelectionRule]


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
    family : str
        What it has in common with others: a long table shows the best of each.
    """

    name: str
    aim: float | None
    rule: SelectionRule
    family: str = ""


@dataclass(frozen=True)
class _Kind:
    """A rule before its ratio is known.

    Parameters
    ----------
    family : str
    name : str
        With braces where the ratio goes.
    full : float
        Full layers before its ratio holds; layers with some rows count in part.
    from_layer : int
        The first layer on which its ratio holds.
    make : callable
        The rule with a ratio.
    most : float
        Highest ratio it can have.
    scored : float
        How far into the depth its scoring pass goes, as a share of all layers.
    times : float
        Layers that its ratio stands for before ``from_layer``, where it holds several times over.
    """

    family: str
    name: str
    full: float
    from_layer: int
    make: _Make
    most: float = 1.0
    scored: float = 0.0
    times: float = 0.0


def candidates(
    layers: int, works: Sequence[float] = WORKS, question: float = 0.05, reused: float = 0.9, late: int = LATE
) -> list[Candidate]:
    """All rules at each amount of work, so far as they can be had for it.

    Parameters
    ----------
    layers : int
        Layers of the model.
    works : sequence of float
        Work on reused tokens aimed at, as a share of full prefill's, in a model of 24 layers (or
        its own, if it has more): checks stay on their layers, a scoring pass goes as far into the
        depth, as `work_share` counts it.
    question : float
        Work of the rows that are always computed, as a share of full prefill's; a scoring pass
        costs as much of it as it goes into the depth.
    reused : float
        Reused chunk tokens as a share of all.
    late : int
        Layer of the later checks.
    """
    depth, late = max(_DEPTH, layers), min(late, layers - 2)
    done = depth - 1 + _LAST
    found = [
        Candidate(FLOOR, None, SelectNone()),
        Candidate(f"{PAPER}, 15.0%", None, SelectHKVD((1,), 0.15)),
        Candidate(f"hkvd k, layer {late}, 15.0%", None, SelectHKVD((late,), 0.15, metric="k")),
        Candidate(f"query on layer {layers - 2}, 15.0%", None, SelectQuery(0.15, (layers - 2,))),
    ]
    for work in works:
        for kind in _kinds(layers, late):
            # The question's rows save most of the last layer, a scoring pass that goes less deep does not.
            scoring = kind.scored * question * depth / done
            left = depth * (work - scoring) / reused - kind.full
            ratio = left / (done - kind.from_layer + kind.times)
            if _LEAST <= ratio <= kind.most:
                name = kind.name.format(f"{ratio:.1%}")
                found.append(Candidate(name, work, kind.make(ratio), kind.family))
    return found


def _kinds(layers: int, late: int) -> list[_Kind]:
    return [
        *_single_checks(layers),
        *_several_checks(late),
        *_funnels(layers),
        _Kind("threshold", "threshold k, layer 1, at most {}", 1, 1, _threshold(1)),
        _Kind("threshold", f"threshold k, layer {late}, at most {{}}", late, late, _threshold(late)),
        *_asked(layers, late),
        _Kind("boundary", "boundary, {}", 0, 0, SelectBoundary),
        _Kind("random", "random, {}", 0, 0, SelectRandom),
    ]


def _single_checks(layers: int) -> list[_Kind]:
    return [
        _Kind("one check", f"hkvd {metric}, layer {check}, {{}}", check, check, _hkvd((check,), (), metric))
        for check in range(1, layers - 1)
        for metric in ("v", "k", "kv")
    ]


def _several_checks(late: int) -> list[_Kind]:
    """Many rows from layer 1 up to a later check, and few after it."""
    middle = (1 + late) // 2
    schedules: list[tuple[tuple[int, ...], tuple[float, ...]]] = [
        ((1, middle), (0.5,)),
        ((1, late), (0.3,)),
        ((1, late), (0.5,)),
        ((1, late), (0.7,)),
        ((1, middle, late), (0.5, 0.3)),
    ]
    kinds = []
    for checks, shares in schedules:
        steps = [after - before for before, after in pairwise(checks)]
        if min(steps) < 1:
            continue
        name = f"hkvd k, layers {_listed(checks)}, {_percents(shares)}, then {{}}"
        full = checks[0] + sum(share * step for share, step in zip(shares, steps, strict=True))
        make = _hkvd(checks, shares, "k")
        kinds.append(_Kind("several checks", name, full, checks[-1], make, most=shares[-1]))
    return kinds


def _funnels(layers: int) -> list[_Kind]:
    kinds = []
    for head in _FUNNELS:
        if len(head) + 2 <= layers:
            name, behind = f"gradual k, {_percents(head)}, then {{}}", 1 + len(head)
            kinds.append(_Kind("gradual", name, 1 + sum(head), behind, _gradual(head), most=head[-1]))
    if len(_TIMES) + 2 <= layers:
        name, behind = "gradual k, its own schedule, down to {}", 1 + len(_TIMES)
        kinds.append(_Kind("gradual", name, 1, behind, _own_schedule, most=1 / _TIMES[0], times=sum(_TIMES)))
    return kinds


def _asked(layers: int, late: int) -> list[_Kind]:
    """Rules that look at the question's attention, on their own layers or on one later layer."""
    last = layers - 2
    usual = third_quarter(layers)
    singles = [(layer,) for layer in range(layers // 2, layers - 1, max(1, layers // 8))]
    kinds = [
        _Kind("query", f"query on {_layers(on)}, {{}}", 0, 0, _query(on), scored=_reached(on, layers))
        for on in (usual, *(on for on in singles if on != usual))
    ]
    late_on = (last,)
    name = f"boundary and query on {_layers(late_on)}, {{}}"
    make = _mixed((1,), (0.5, 0.0, 0.5), late_on)
    kinds.append(_Kind("boundary and query", name, 0, 0, make, scored=_reached(late_on, layers)))
    mixtures: list[tuple[int, tuple[float, ...], tuple[int, ...]]] = [
        (1, (0.2, 0.6, 0.2), usual),
        (1, (0.2, 0.6, 0.2), late_on),
        (late, (0.0, 0.5, 0.5), late_on),
    ]
    for check, shares, on in mixtures:
        name = f"mixed k, layer {check}, {_percents(shares)}, query on {_layers(on)}, {{}}"
        make = _mixed((check,), shares, on)
        kinds.append(_Kind("mixed", name, check, check, make, scored=_reached(on, layers)))
    return kinds


def _reached(scored: Sequence[int], layers: int) -> float:
    """How far into the depth a scoring pass goes that looks at some layers."""
    return (scored[-1] + 1) / layers


def _layers(numbers: Sequence[int]) -> str:
    return f"layer{'s' if len(numbers) > 1 else ''} {_listed(numbers)}"


def _listed(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _percents(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.0%}" for share in shares)


def _hkvd(checks: Sequence[int], shares: Sequence[float], metric: str) -> _Make:
    if not shares:
        return lambda ratio: SelectHKVD(checks, ratio, metric=metric)
    return lambda ratio: SelectHKVD(checks, recompute_ratios=(*shares, ratio), metric=metric)


def _gradual(head: Sequence[float]) -> _Make:
    return lambda ratio: SelectGradual((1,), recompute_ratios=(*head, ratio), metric="k")


def _own_schedule(ratio: float) -> SelectionRule:
    return _gradual([times * ratio for times in _TIMES])(ratio)


def _threshold(check: int) -> _Make:
    return lambda ratio: SelectThreshold((check,), ratio, lowest_ratio=ratio / 4, bound=0.3, metric="k")


def _query(on: Sequence[int]) -> _Make:
    return lambda ratio: SelectQuery(ratio, on)


def _mixed(checks: Sequence[int], shares: Sequence[float], on: Sequence[int]) -> _Make:
    return lambda ratio: SelectMixed(checks, ratio, shares, on, "k")
