"""Computes and stores each missing record once across threads and processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeVar

from cacheblend_rag.store.base import KVRecord, KVStore

_log = logging.getLogger(__name__)
_Item = TypeVar("_Item")


def compute_if_missing(
    store: KVStore, wanted: Mapping[str, _Item], make: Callable[[Sequence[_Item]], Sequence[KVRecord]]
) -> dict[str, bool | None]:
    """Make together the records that are not stored, and store them.

    Parameters
    ----------
    store : KVStore
    wanted : mapping of str to item
        Source of each record, by its key.
    make : callable
        Makes the records of several items.

    Returns
    -------
    dict of str to bool or None
        By key, whether the record was made; None if another thread or process is just making it.

    Raises
    ------
    Exception
        The error of the first item that failed. The others are stored all the same.
    """
    done: dict[str, bool | None] = {}
    ours: dict[str, _Item] = {}
    with ExitStack() as claims:
        for key, item in wanted.items():
            if store.contains(key):
                done[key] = False
            elif not claims.enter_context(store.claim(key)):
                done[key] = None
            elif store.contains(key):  # whoever had the claim before has stored it
                done[key] = False
            else:
                ours[key], done[key] = item, True
        if ours:
            _compute_and_store(store, ours, make)
    return done


def _compute_and_store(
    store: KVStore, ours: Mapping[str, _Item], make: Callable[[Sequence[_Item]], Sequence[KVRecord]]
) -> None:
    """Make all in one go, or one by one if that fails; an item that fails does not cost the others."""
    records: Sequence[KVRecord] = ()
    try:
        records = make([*ours.values()])
    except Exception as error:
        if len(ours) == 1:
            raise
        _log.warning("%d records cannot be made together and are made one by one: %s", len(ours), error)
    failed: list[Exception] = []
    for number, (key, item) in enumerate(ours.items()):
        try:
            store.put(key, records[number] if records else make([item])[0])
        except Exception as error:
            failed.append(error)
    for other in failed[1:]:
        _log.warning("of %d records, one more could not be stored: %s", len(ours), other)
    if failed:
        raise failed[0]
