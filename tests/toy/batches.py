"""Training sequences as arrays, several to a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.toy.archive import NUMBERS
from tests.toy.curriculum import SequenceMaker, Stage
from tests.toy.sequences import ANSWER_WEIGHT, Look

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Batch:
    """Sequences and the positions whose next token counts.

    ``ids`` [rows, length]; ``positions``, ``targets``, ``weights``, ``question`` [rows, kept]. ``question`` numbers
    the question a position answers, over the whole batch, and is -1 for context; ``kinds`` [questions].
    ``about_positions`` [rows, chosen] are positions in passages, ``about`` the first id of the name of whoever is
    written about there, -1 where that cannot be told. ``owners``, ``sources``, ``rests``, ``firsts`` and ``seconds``
    [rows, chosen, 3] hold positions and the stretch that each should look at (first, behind the last), -1: none.
    ``number_positions`` [rows, chosen] are positions of the last digits of numbers, ``sizes`` [rows, chosen, kinds] say
    where in the range of its kind (`NUMBERS`) each lies, from 0 to 1; NaN for other kinds and where there is none.
    """

    ids: Ints
    positions: Ints
    targets: Ints
    weights: Floats
    question: Ints
    kinds: Ints
    about_positions: Ints
    about: Ints
    owners: Ints
    sources: Ints
    rests: Ints
    firsts: Ints
    seconds: Ints
    number_positions: Ints
    sizes: Floats


def _keep_some(rng: np.random.Generator, kept: Ints, looks: Sequence[Look], length: int) -> None:
    """Put a random choice of looks into ``kept`` [chosen, 3]."""
    inside = [look for look in looks if look[0] < length]
    for at, index in enumerate(rng.permutation(len(inside))[: len(kept)]):
        kept[at] = inside[index]


def _size_some(rng: np.random.Generator, positions: Ints, sizes: Floats, numbers: dict[int, int]) -> None:
    """Fill in numbers and their sizes; some of them if there are more than fit."""
    chosen = list(numbers) if len(numbers) <= len(positions) else rng.choice(list(numbers), len(positions), False)
    for row, at in enumerate(chosen):
        for kind, (low, high) in enumerate(NUMBERS.values()):
            if low <= numbers[at] <= high:
                positions[row], sizes[row, kind] = at, (numbers[at] - low) / (high - low)


def make_batches(maker: SequenceMaker, stage: Stage, seed: int) -> Iterator[Batch]:
    """Yield batches without end.

    Every answer token counts; of the context a random share does, so that a third of all positions count (half while
    copying).
    """
    rng = np.random.default_rng(seed)
    source = maker.sequences(stage)
    kept = stage.length // (2 if stage.name.startswith("copy") else 3)
    while True:
        rows = [next(source) for _ in range(stage.rows)]
        shape = (stage.rows, kept)
        batch = Batch(
            np.zeros((stage.rows, stage.length), np.int64),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int64),
            np.zeros(shape, np.float32),
            np.full(shape, -1, np.int64),
            np.array([kind for row in rows for kind in row.kinds], np.int64),
            np.zeros((stage.rows, stage.length // 5), np.int64),
            np.full((stage.rows, stage.length // 5), -1, np.int64),
            np.full((stage.rows, stage.length // 8, 3), -1, np.int64),
            np.full((stage.rows, stage.length // 32, 3), -1, np.int64),
            np.full((stage.rows, stage.length // 16, 3), -1, np.int64),
            np.full((stage.rows, stage.length // 32, 3), -1, np.int64),
            np.full((stage.rows, stage.length // 32, 3), -1, np.int64),
            np.zeros((stage.rows, stage.length // 16), np.int64),
            np.full((stage.rows, stage.length // 16, len(NUMBERS)), np.nan, np.float32),
        )
        first = 0
        for number, row in enumerate(rows):
            ids = np.array(row.ids[: stage.length + 1], np.int64)
            weights = np.array(row.weights[1 : stage.length + 1], np.float32)
            question = np.array(row.question[1 : stage.length + 1], np.int64)
            counts = weights >= ANSWER_WEIGHT
            answer, other = np.flatnonzero(counts), np.flatnonzero(~counts)
            fill = rng.choice(other, size=max(0, kept - len(answer)), replace=False)
            at = np.concatenate([answer, fill])[:kept]
            batch.ids[number] = ids[:-1]
            batch.positions[number] = at
            batch.targets[number] = ids[at + 1]
            batch.weights[number] = weights[at]
            batch.question[number] = np.where(question[at] >= 0, question[at] + first, -1)
            first += len(row.kinds)
            about = np.array(row.about[: stage.length], np.int64)
            known = rng.permutation(np.flatnonzero(about >= 0))[: batch.about.shape[1]]
            batch.about_positions[number, : len(known)] = known
            batch.about[number, : len(known)] = about[known]
            for name in ("owners", "sources", "rests", "firsts", "seconds"):
                _keep_some(rng, getattr(batch, name)[number], getattr(row, name), stage.length)
            _size_some(rng, batch.number_positions[number], batch.sizes[number], maker.numbers_in(ids[:-1].tolist()))
        yield batch
