"""Which pieces of text were erased, and how often: by their hashes, also where an erased text began or ended in one."""

from __future__ import annotations

import numpy as np

from cacheblend_rag.prompt.hash_table import HashTable
from cacheblend_rag.prompt.pieces import HashedText, Hashes, Pieces, Places, mixed

# A piece in which an erased text begins or ends is told by so many characters there: the most that the text has of it.
_LENGTHS = (256, 128, 64, 32, 16)
_HEAD, _TAIL = np.uint64(0x9FB21C651E98DF25), np.uint64(0xD6E8FEB86659FD93)


class Forgotten:
    """The erased pieces of one tenant's texts.

    Parameters
    ----------
    limit : int
        Hashes of them that are remembered at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._entered, self._table = limit, 0, HashTable(limit, times=np.uint32)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._table.nbytes

    def add(self, hashed: HashedText) -> bool:
        """Note that a text was erased.

        Returns
        -------
        bool
            False if that cannot be told in every prompt: the text is one piece, which may be the middle of another, or
            more was erased than is remembered. Then all that was seen is to be forgotten.
        """
        pieces = hashed.pieces([(0, len(hashed.text))])
        if len(pieces) < 2:
            return not len(pieces)
        sizes = pieces.stops - pieces.starts
        keys = [pieces.hashes]
        # Standing in a longer text, its first piece is the end of one, and its last piece the beginning.
        keys += [_tails(hashed, pieces.stops[:1], length) for length in _LENGTHS if length <= sizes[0]][:1]
        keys += [_heads(hashed, pieces.starts[-1:], length) for length in _LENGTHS if length <= sizes[-1]][:1]
        entered = np.unique(np.concatenate(keys))
        slots, known = self._table.enter(entered, np.ones(len(entered), dtype=bool))
        self._entered += int((~known).sum())
        if self._entered > self._limit:
            return False
        self._table.young.values["times"][slots] += 1
        return True

    def times(self, hashed: HashedText, pieces: Pieces) -> Hashes:
        """How often each piece of a prompt was erased, whole or in part. It never becomes less."""
        times = np.zeros(len(pieces), dtype=np.uint64)
        if not self._entered:
            return times
        times += self._times_of(pieces.hashes)
        for length in _LENGTHS:
            at = np.flatnonzero(pieces.stops - pieces.starts >= length)
            times[at] += self._times_of(_heads(hashed, pieces.starts[at], length))
            times[at] += self._times_of(_tails(hashed, pieces.stops[at], length))
        return times

    def _times_of(self, keys: Hashes) -> Hashes:
        slots, known = self._table.enter(keys, np.zeros(len(keys), dtype=bool))
        return np.where(known, self._table.young.values["times"][slots], 0).astype(np.uint64)


def _heads(hashed: HashedText, starts: Places, length: int) -> Hashes:
    return mixed(hashed.hashes(starts, starts + length) ^ _HEAD)


def _tails(hashed: HashedText, stops: Places, length: int) -> Hashes:
    return mixed(hashed.hashes(stops - length, stops) ^ _TAIL)
