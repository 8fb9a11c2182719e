"""A bounded table of hashes, and what is known of each, in arrays of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

# Share of the slots that are taken at most; with more, searches become long.
_FULL = 0.82
_SMALLEST = 1021
# Keys that no hash has.
_FREE, _FORGOTTEN = np.uint64(0), np.uint64(1)
_HALF = np.uint64(32)


class Generation:
    """An open-addressed table.

    Parameters
    ----------
    slots : int
        A prime number, so that every step leads through all slots.
    fields : mapping of str to dtype

    Attributes
    ----------
    keys : ndarray of uint64, [slots]
    values : dict of str to ndarray, each [slots]
        The fields of each key; 0 at first.
    used : int
        Slots that are taken.
    """

    def __init__(self, slots: int, fields: Mapping[str, Any]) -> None:
        self.keys = np.zeros(slots, dtype=np.uint64)
        self.values = {name: np.zeros(slots, dtype=kind) for name, kind in fields.items()}
        self.used = 0

    def find(self, keys: Keys) -> Rows:
        """Slot of each key; -1 where it is not here."""
        return self._slots(keys, insert=False)

    def insert(self, keys: Keys) -> Rows:
        """Slots of new keys, each given once."""
        self.used += len(keys)
        return self._slots(keys, insert=True)

    def move_to(self, other: Generation, rows: Rows) -> None:
        """Copy rows to another table."""
        slots = other.insert(self.keys[rows])
        for name, values in self.values.items():
            other.values[name][slots] = values[rows]

    def forget(self, rows: Rows) -> None:
        """Empty rows; what stands behind them is still found."""
        self.keys[rows] = _FORGOTTEN
        for values in self.values.values():
            values[rows] = 0

    def rows(self) -> Rows:
        """Slots that hold a key."""
        return np.flatnonzero(self.keys > _FORGOTTEN)

    def _slots(self, keys: Keys, insert: bool) -> Rows:
        # Another step for each key: with steps of one, slots that are taken would lie in long rows.
        size, found = len(self.keys), np.full(len(keys), -1, dtype=np.int64)
        left = np.arange(len(keys))
        slots = ((keys >> _HALF) * np.uint64(size) >> _HALF).astype(np.int64)
        steps = 1 + (keys % np.uint64(max(1, size - 1))).astype(np.int64)
        while len(left):
            there, wanted = self.keys[slots], keys[left]
            free = there == _FREE
            if insert:
                self.keys[slots[free]] = wanted[free]  # of several for one slot, one gets it
                there = self.keys[slots]
            hit = there == wanted
            found[left[hit]] = slots[hit]
            on = ~hit if insert else ~(hit | free)
            left = left[on]
            slots = (slots[on] + steps[left]) % size
        return found


class HashTable:
    """Hashes in two generations: what was not met in a whole generation is forgotten.

    Parameters
    ----------
    limit : int
        Hashes that are kept at least; never more than twice as many.
    **fields : dtype
        Fields of each, all 0 at first.
    """

    def __init__(self, limit: int, **fields: Any) -> None:
        self._limit, self._fields = limit, fields
        self.young, self._old = Generation(_SMALLEST, fields), Generation(2, fields)

    def __len__(self) -> int:
        return len(self.young.rows()) + len(self._old.rows())

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(array.nbytes for one in (self.young, self._old) for array in (one.keys, *one.values.values()))

    def enter(self, keys: Keys, new: npt.NDArray[np.bool_]) -> tuple[Rows, npt.NDArray[np.bool_]]:
        """Slots of keys among the young, where all that is known is afterwards, and which of them were known.

        Parameters
        ----------
        keys : ndarray of uint64
            None of them below 2.
        new : ndarray of bool
            The keys that become known; of others that are not, the slot is -1.
        """
        self._make_room(len(keys))
        slots = self.young.find(keys)
        older = self._old.find(np.unique(keys[slots < 0])) if self._old.used else slots[:0]
        rows = older[older >= 0]
        if len(rows):
            self._old.move_to(self.young, rows)
            self._old.forget(rows)
            slots = self.young.find(keys)
        known = slots >= 0
        if (new & ~known).any():
            self.young.insert(np.unique(keys[new & ~known]))
            slots = self.young.find(keys)
        return slots, known

    def _make_room(self, more: int) -> None:
        """Let the young have room for more; once there are as many as are kept, they are the old."""
        if self.young.used + more <= _FULL * len(self.young.keys):
            return
        rows = self.young.rows()
        if len(rows) + more > self._limit:
            self._old, self.young = self.young, Generation(_SMALLEST, self._fields)
            rows = rows[:0]
        wanted = min(max(self._limit, more), 2 * (len(rows) + more))
        grown = Generation(_prime(int(wanted / _FULL) + 1), self._fields)
        self.young.move_to(grown, rows)
        self.young = grown


def _prime(least: int) -> int:
    """The smallest prime number that is no smaller."""
    number = max(2, least)
    while any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return number
