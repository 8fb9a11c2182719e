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
    """The key of an item that was found, its L2 distance and its vector, [dimension]."""

    key: int
    distance: float
    vector: Vectors


class ExactIndex(Generic[T]):
    """Items by key in the order in which they were added, and a faiss index of their vectors; for one thread at a time.

    The faiss index is made with the first vector, which tells the dimension. It is None while there are no items.
    """

    def __init__(self) -> None:
        self.items: dict[int, T] = {}
        self.keys: dict[str, int] = {}  # by the items' ids
        self.faiss: Any = None
        self._next = 0

    def replace(self, remove: Iterable[str], add: Mapping[str, T], vectors: Vectors) -> None:
        """Remove items by their ids, known or not, and add others by theirs, with a vector each.

        Raises
        ------
        EmbedderError
            If vectors do not have the dimension of those that stay here; nothing is changed then.
        """
        leaving = {one for one in {*remove, *add} if one in self.keys}
        if add and len(self.keys) > len(leaving):
            self.check_dimension(vectors.shape[1])
        gone = [self.keys.pop(one) for one in leaving]
        for key in gone:
            del self.items[key]
        if not self.items:
            self.faiss = None  # the next vectors may have another dimension
        elif gone:
            self.faiss.remove_ids(np.array(gone, dtype=np.int64))
        if not add:
            return
        if self.faiss is None:
            self.faiss = faiss.IndexIDMap2(faiss.IndexFlatL2(vectors.shape[1]))
        keys = range(self._next, self._next + len(add))
        self.faiss.add_with_ids(np.ascontiguousarray(vectors), np.array(keys, dtype=np.int64))
        self.items.update(zip(keys, add.values(), strict=True))
        self.keys.update(zip(add, keys, strict=True))
        self._next = keys.stop

    def restore(self, items: Mapping[int, T], keys: Mapping[str, int], index: Any) -> None:
        """Take over what was saved, in place of what is here."""
        self.items, self.keys, self.faiss = dict(items), dict(keys), index if items else None
        self._next = max(items, default=-1) + 1

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
        keys = self._nearest(query, k, allowed)
        vectors: Vectors = self.faiss.reconstruct_batch(keys)
        exact = np.linalg.norm(vectors.astype(np.float64) - query, axis=1)
        found = [Hit(key, far, row) for key, far, row in zip(keys.tolist(), exact.tolist(), vectors, strict=True)]
        return sorted(found, key=lambda hit: (hit.distance, tie(hit.key)))[:k]

    def _nearest(self, query: Vectors, k: int, allowed: Sequence[int] | None) -> npt.NDArray[np.int64]:
        """Keys of the ``k`` nearest vectors and of all that may be as near as the last of them."""
        parameters, total = None, len(self.items)
        if allowed is not None:
            parameters, total = faiss.SearchParameters(), len(allowed)
            selector = faiss.IDSelectorBatch(np.array(allowed, dtype=np.int64))
            parameters.sel = selector
        count = int(min(k + 1, total))
        while True:
            squared, keys = self.faiss.search(query, count, params=parameters)  # [1, count] each
            limit = squared[0, min(k, count) - 1] * (1 + _TIE)
            if count == total or squared[0, -1] > limit:
                near: npt.NDArray[np.int64] = keys[0][squared[0] <= limit]
                return near
            count = min(2 * count, total)
