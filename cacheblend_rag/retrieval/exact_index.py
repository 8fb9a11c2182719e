"""Items with vectors in memory, searched exactly by L2 distance: the core of the vector stores of both frameworks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import faiss
import numpy as np
import numpy.typing as npt

from cacheblend_rag.errors import EmbedderError
from cacheblend_rag.retrieval.vectors import Vectors

T = TypeVar("T")
# faiss rounds distances differently by place in the index; what is this close may be a tie.
_TIE = 1e-5


class Hit(NamedTuple):
    """The key of an item that was found, and of its nearest vector, [dimension], the L2 distance and the numbers."""

    key: int
    distance: float
    vector: Vectors


class ExactIndex(Generic[T]):
    """Items by key in the order in which they were added, and a faiss index of their vectors; for one thread at a time.

    An item may have several vectors, one for each of its parts. Its key is the number of the first of them in the
    faiss index; the others follow. The faiss index is made with the first vector, which tells the dimension. It is None
    while there are no items.
    """

    def __init__(self) -> None:
        self.items: dict[int, T] = {}
        self.keys: dict[str, int] = {}  # by the items' ids
        self.faiss: Any = None
        self._next = 0
        self._starts: npt.NDArray[np.int64] | None = None  # all keys in order, once they are asked for

    def replace(self, remove: Iterable[str], add: Mapping[str, T], vectors: Iterable[Vectors]) -> None:
        """Remove items by their ids, known or not, and add others by theirs.

        Parameters
        ----------
        remove : iterable of str
        add : mapping of str to item
        vectors : iterable of ndarray of float32
            For each item that is added its vector, [dimension], or vectors, [parts, dimension].

        Raises
        ------
        EmbedderError
            If vectors do not have the dimension of those that stay here; nothing is changed then.
        """
        leaving = {one for one in {*remove, *add} if one in self.keys}
        parts = [np.atleast_2d(one) for one in vectors]
        if add and len(self.keys) > len(leaving):
            self.check_dimension(parts[0].shape[1])
        gone = [self.keys[one] for one in leaving]
        rows = self._rows_of(gone)
        self._starts = None
        for one, key in zip(leaving, gone, strict=True):
            del self.keys[one], self.items[key]
        if not self.items:
            self.faiss = None  # the next vectors may have another dimension
        elif gone:
            self.faiss.remove_ids(rows)
        if not add:
            return
        if self.faiss is None:
            self.faiss = faiss.IndexIDMap2(faiss.IndexFlatL2(parts[0].shape[1]))
        ends = self._next + np.cumsum([len(one) for one in parts])
        keys = [self._next, *ends[:-1].tolist()]
        self.faiss.add_with_ids(
            np.ascontiguousarray(np.concatenate(parts)), np.arange(self._next, ends[-1], dtype=np.int64)
        )
        self.items.update(zip(keys, add.values(), strict=True))
        self.keys.update(zip(add, keys, strict=True))
        self._next = int(ends[-1])

    def restore(self, items: Mapping[int, T], keys: Mapping[str, int], index: Any) -> None:
        """Take over what was saved, in place of what is here."""
        self.items, self.keys, self.faiss = dict(sorted(items.items())), dict(keys), index if items else None
        self._next, self._starts = int(self._list_numbers().max(initial=-1)) + 1, None

    @property
    def vectors(self) -> int:
        """How many vectors there are."""
        return 0 if self.faiss is None else int(self.faiss.ntotal)

    def _list_numbers(self) -> npt.NDArray[np.int64]:
        """The numbers of all vectors."""
        return np.empty(0, np.int64) if self.faiss is None else faiss.vector_to_array(self.faiss.id_map)

    def _owners(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The keys of the items that have these vectors."""
        if self._starts is None:
            self._starts = np.fromiter(self.items, dtype=np.int64, count=len(self.items))
        return self._starts[np.searchsorted(self._starts, rows, side="right") - 1]

    def _rows_of(self, keys: Sequence[int]) -> npt.NDArray[np.int64]:
        """The numbers of the vectors that these items have."""
        if not keys:
            return np.empty(0, np.int64)
        held = self._list_numbers()
        return held[np.isin(self._owners(held), keys)]

    def check_dimension(self, dimension: int) -> None:
        """Refuse vectors of another dimension."""
        if self.faiss is not None and self.faiss.d != dimension:
            raise EmbedderError(
                f"the embedding model made a vector of {dimension} numbers, but those of the index have "
                f"{self.faiss.d}; use the model the index was made with, or make the index anew"
            )

    def search(self, query: Vectors, k: int, allowed: Sequence[int] | None, tie: Callable[[int], Any]) -> list[Hit]:
        """The ``k`` items nearest to a query ``[1, dimension]``, of all or of those with certain keys.

        Of several at one distance, those come first for whose keys ``tie`` gives the least.
        """
        if not (self.items if allowed is None else allowed):
            return []
        self.check_dimension(query.shape[1])
        rows = self._nearest(query, k, allowed)
        vectors: Vectors = self.faiss.reconstruct_batch(rows)
        exact = np.linalg.norm(vectors.astype(np.float64) - query, axis=1)
        order = np.argsort(exact, kind="stable")
        nearest: dict[int, Hit] = {}
        keys = self._owners(rows[order]).tolist()
        for key, far, row in zip(keys, exact[order].tolist(), vectors[order], strict=True):
            nearest.setdefault(key, Hit(key, far, row))
        return sorted(nearest.values(), key=lambda hit: (hit.distance, tie(hit.key)))[:k]

    def _nearest(self, query: Vectors, k: int, allowed: Sequence[int] | None) -> npt.NDArray[np.int64]:
        """Numbers of the vectors that are as near as the nearest one of the ``k``-th item, or may be."""
        parameters, total = None, self.vectors
        if allowed is not None:
            rows = self._rows_of(allowed)
            parameters, total = faiss.SearchParameters(), len(rows)
            selector = faiss.IDSelectorBatch(rows)
            parameters.sel = selector
        count = int(min(k + 1, total))
        while True:
            squared, found = self.faiss.search(query, count, params=parameters)  # [1, count] each
            _, first = np.unique(self._owners(found[0]), return_index=True)  # where each item is found first
            last = np.sort(first)[k - 1] if len(first) >= k else -1
            limit = squared[0, last] * (1 + _TIE)
            if count == total or (len(first) >= k and squared[0, -1] > limit):
                near: npt.NDArray[np.int64] = found[0][squared[0] <= limit]
                return near
            count = min(2 * count, total)
