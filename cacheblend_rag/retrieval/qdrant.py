"""Reading a Qdrant collection page by page, as the vector stores of both frameworks need it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

_PAGE = 1000


def scroll(store: Any, payload: bool | Sequence[str] = True, condition: Any = None) -> Iterator[list[Any]]:
    """Points of a store's collection, without their vectors.

    Parameters
    ----------
    store : object
        Has Qdrant's ``client`` and a ``collection_name``.
    payload : bool or sequence of str
        Which fields of the payload.
    condition : Filter, optional

    Yields
    ------
    list of Record
        A page of them.
    """
    if not store.client.collection_exists(store.collection_name):
        return  # it is made with the first points
    offset = None
    while True:
        points, offset = store.client.scroll(
            store.collection_name,
            scroll_filter=condition,
            limit=_PAGE,
            offset=offset,
            with_payload=payload,
            with_vectors=False,
        )
        yield points
        if offset is None:
            return


def having(field: str, values: Sequence[str]) -> Any:
    """A filter of points whose payload has one of some values in a field."""
    from qdrant_client import models

    return models.Filter(must=[models.FieldCondition(key=field, match=models.MatchAny(any=list(values)))])
