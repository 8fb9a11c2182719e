"""Several collections, and single documents of others, that one question is asked of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.services.collection import Collection, SearchHit


@dataclass(frozen=True)
class Part:
    """A collection, or some documents of it by their ids; None for all."""

    collection: Collection
    documents: tuple[str, ...] | None = None


class SeveralCollections(Collection):
    """Collections and documents that are searched together.

    Parameters
    ----------
    parts : sequence of Part
        Of each collection one.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(parts[0].collection.id, parts[0].collection.name)
        self.parts = tuple(parts)
        self.writable = any(one.collection.writable for one in parts)

    def chunk(self, document_id: str, number: int) -> SearchHit:
        """See `Collection.chunk`."""
        for part in self.parts:
            if part.documents is None or document_id in part.documents:
                try:
                    return part.collection.chunk(document_id, number)
                except Problem:  # another collection may have it
                    continue
        raise Problem(404, "no_chunk", "there is no such chunk")


def parts_of(collections: Iterable[Collection], documents: Iterable[tuple[Collection, str]]) -> list[Part]:
    """Whole collections, and single documents of those that are not whole, in this order."""
    whole = {one.id: Part(one) for one in collections}
    single: dict[str, Part] = {}
    for collection, document in documents:
        if collection.id not in whole:
            before = single.get(collection.id, Part(collection, ()))
            single[collection.id] = Part(collection, tuple(dict.fromkeys((*(before.documents or ()), document))))
    return [*whole.values(), *single.values()]


def search_all(find: Callable[[Part], list[SearchHit]], parts: Sequence[Part], k: int) -> list[SearchHit]:
    """The ``k`` nearest passages of all parts; of those with the same text the first one."""
    found: dict[str, SearchHit] = {}
    for one in sorted((hit for part in parts for hit in find(part)), key=lambda hit: hit.score):
        found.setdefault(one.text, one)
    return list(found.values())[:k]
