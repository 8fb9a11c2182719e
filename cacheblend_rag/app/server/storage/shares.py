"""Read-only copies of conversations: as they stood, with the passages that their answers were made from.

A copy holds texts of documents, so it ends with the first document that it quotes. It is not shown any more as soon as
that is deleted, and is overwritten together with its text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, exists, insert, literal, select

from cacheblend_rag.app.server.storage.tables import (
    ERASED,
    Backend,
    conversations,
    documents,
    in_parts,
    quotes,
    share_quotes,
    shares,
    turns,
)


@dataclass(frozen=True)
class Share:
    """A copy as it is listed.

    Parameters
    ----------
    id : str
        By which it is read.
    conversation, title : str
        Which it is of, and what that was called.
    created : int
        Milliseconds since 1970.
    turns : int
        Questions in it.
    """

    id: str
    conversation: str
    title: str
    created: int
    turns: int


_FIELDS = (shares.c.id, shares.c.conversation, shares.c.title, shares.c.created, shares.c.turns)
_THERE = exists().where(documents.c.id == share_quotes.c.document, documents.c.gone == 0)
_LASTS: ColumnElement[bool] = exists().where(
    conversations.c.id == shares.c.conversation, conversations.c.gone == 0
) & ~exists().where(share_quotes.c.share == shares.c.id, ~_THERE.correlate(share_quotes))
"""Whether its conversation is there, and every document that it quotes."""


class Shares:
    """The copies of one tenant.

    Parameters
    ----------
    backend : Backend
        The database that has them, beside the conversations.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def listed(self) -> list[Share]:
        """All of them, the latest first."""
        rows = select(*_FIELDS).where(_LASTS).order_by(shares.c.created.desc(), shares.c.id)
        return [Share(*row) for row in self._backend.read(rows)]

    def get(self, id: str) -> tuple[Share, Any] | None:
        """One of them with what it holds."""
        rows = self._backend.read(select(*_FIELDS, shares.c.content).where(shares.c.id == id, _LASTS))
        return None if not rows else (Share(*rows[0][:-1]), json.loads(rows[0].content))

    def add(self, share: Share, written: str, size: int, copied: Collection[str]) -> bool:
        """Keep a copy (JSON) of some turns of a conversation; False if one was erased or deleted meanwhile."""
        row = {**share.__dict__, "bytes": size, "content": written}
        with self._backend.changing() as db:
            numbers = list[int]()
            for some in in_parts(copied):
                mine = (turns.c.conversation == share.conversation) & turns.c.id.in_(some) & (turns.c.state != ERASED)
                numbers += [found.number for found in db.execute(select(turns.c.number).where(mine))]
            if len(numbers) < len(copied):
                return False
            db.execute(insert(shares).values(row))
            for part in in_parts(numbers):
                quoted = select(literal(share.id), quotes.c.document).where(quotes.c.turn.in_(part)).distinct()
                known = select(share_quotes.c.document).where(share_quotes.c.share == share.id)
                new = quoted.where(quotes.c.document.not_in(known))
                db.execute(insert(share_quotes).from_select(["share", "document"], new))
            if db.execute(select(shares.c.id).where(shares.c.id == share.id, _LASTS)).first() is None:
                _end(db, [share.id])
                return False
        return True

    def end(self, id: str) -> int:
        """End one, and overwrite it; how many there were."""
        with self._backend.changing() as db:
            done = _end(db, [id])
        self._backend.overwrite()
        return done


def end_shares_of(db: Connection, document: str) -> None:
    """Remove within a change all copies that quote a document."""
    _end(db, db.scalars(select(share_quotes.c.share).where(share_quotes.c.document == document)).all())


def end_shares_without_conversation(db: Connection) -> None:
    """Remove within a change all copies whose conversation is marked as deleted."""
    gone = select(conversations.c.id).where(conversations.c.gone == 1)
    _end(db, db.scalars(select(shares.c.id).where(shares.c.conversation.in_(gone))).all())


def _end(db: Connection, ids: Iterable[str]) -> int:
    done = 0
    for some in in_parts(ids):
        db.execute(delete(share_quotes).where(share_quotes.c.share.in_(some)))
        done += db.execute(delete(shares).where(shares.c.id.in_(some))).rowcount
    return done
