"""Conversations of one tenant: what was asked and answered, and which documents each answer was made from.

Texts of passages are in the catalogue alone. An answer leaves with any document that it was made from: it is hidden
as soon as the document is deleted, and overwritten together with its text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, case, delete, func, insert, literal, select, update

from cacheblend_rag.app.server.storage.shares import end_shares_of, end_shares_without_conversation
from cacheblend_rag.app.server.storage.tables import (
    ERASED,
    Backend,
    conversations,
    documents,
    in_parts,
    quotes,
    shares,
    turns,
)

RUNNING = "running"


@dataclass(frozen=True)
class KeptConversation:
    """A conversation as it is listed.

    Parameters
    ----------
    id, title : str
        The title is empty until its owner gives one.
    about : dict
        Ids of the collections that it is answered from.
    created, changed : int
        Milliseconds since 1970.
    pinned : bool
    turns : int
        Questions.
    opening : str
        The first of them.
    """

    id: str
    title: str
    about: dict[str, Any]
    created: int
    changed: int
    pinned: bool
    turns: int
    opening: str


@dataclass(frozen=True)
class KeptTurn:
    """A question and its answer.

    Parameters
    ----------
    id : str
        Drawn by the client.
    state : str
        ``"running"``, ``"done"``, ``"stopped"``, ``"failed"``, or ``"erased"``: a document it was made from is deleted.
    server, answer_id : str
        Which server gives the answer, and by which id it is followed there while it runs.
    at, until : int
        When it was asked, and when it is over at the latest, in milliseconds since 1970.
    rating : int
        1 for good, -1 for bad, 0 for none.
    question, answer : str
    asked, told : dict
        How it was asked, and what came with the answer.
    """

    id: str
    state: str
    server: str
    answer_id: str
    at: int
    until: int
    rating: int
    question: str
    answer: str
    asked: dict[str, Any]
    told: dict[str, Any]


_DELETED = (
    select(quotes.c.turn)
    .join(documents, documents.c.id == quotes.c.document)
    .where(documents.c.gone == 1, quotes.c.turn == turns.c.number)
    .exists()
)
"""Whether a document is deleted that a turn was made from, and the turn is still to be overwritten."""
_HERE = conversations.c.gone == 0
_STATE = case((_DELETED, ERASED), else_=turns.c.state).label("shown")
_SEARCHED = (
    select(turns.c.conversation, turns.c.question, case((_DELETED, ""), else_=turns.c.answer))
    .join(conversations, conversations.c.id == turns.c.conversation)
    .where(_HERE)
)
_TURNS = select(
    turns.c.id,
    _STATE,
    turns.c.server,
    turns.c.answer_id,
    turns.c.at,
    turns.c.until,
    turns.c.rating,
    turns.c.question,
    turns.c.answer,
    turns.c.asked,
    turns.c.told,
).order_by(turns.c.number)
_counted = select(func.count()).where(turns.c.conversation == conversations.c.id).scalar_subquery()
_opening = (
    select(turns.c.question)
    .where(turns.c.conversation == conversations.c.id)
    .order_by(turns.c.number)
    .limit(1)
    .scalar_subquery()
)
_LISTED = (
    select(
        conversations.c.id,
        conversations.c.title,
        conversations.c.about,
        conversations.c.created,
        conversations.c.changed,
        conversations.c.pinned,
        _counted,
        func.coalesce(_opening, ""),
    )
    .where(_HERE)
    .order_by(conversations.c.pinned.desc(), conversations.c.changed.desc(), conversations.c.id)
)


class KeptConversations:
    """The conversations of one tenant.

    Parameters
    ----------
    backend : Backend
        The database that has them, beside the documents.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def listed(self) -> list[KeptConversation]:
        """All of them: first those that are pinned, then the latest."""
        return [_conversation(row) for row in self._backend.read(_LISTED)]

    def get(self, id: str) -> KeptConversation | None:
        """One of them."""
        rows = self._backend.read(_LISTED.where(conversations.c.id == id))
        return _conversation(rows[0]) if rows else None

    def holding(self, words: Sequence[str]) -> set[str]:
        """Ids of those that hold every word, in a question or an answer; the words are casefolded."""
        texts: dict[str, list[str]] = {}
        for id, *said in self._backend.read(_SEARCHED, slow=True):
            texts.setdefault(id, []).extend(said)
        for one in self.listed():
            texts.setdefault(one.id, []).append(one.title)
        found = {id: "\n".join(said).casefold() for id, said in texts.items()}
        return {id for id, text in found.items() if all(word in text for word in words)}

    def counts(self) -> tuple[int, int]:
        """How many there are, and bytes of all turns and of copies that are shared."""
        many = select(func.count()).where(_HERE).scalar_subquery()
        said, copied = (select(func.coalesce(func.sum(one.c.bytes), 0)).scalar_subquery() for one in (turns, shares))
        ((found, in_turns, in_shares),) = self._backend.read(select(many, said, copied))
        return int(found), int(in_turns) + int(in_shares)

    def create(self, id: str, about: dict[str, Any], now: int) -> None:
        """Begin one."""
        with self._backend.changing() as db:
            row = {"id": id, "title": "", "about": json.dumps(about), "created": now, "changed": now}
            db.execute(insert(conversations).values(row))

    def change(self, id: str, **values: Any) -> bool:
        """Change its title, what it is about, or whether it is pinned; whether it is there."""
        if "about" in values:
            values["about"] = json.dumps(values["about"])
        with self._backend.changing() as db:
            done = db.execute(update(conversations).where(conversations.c.id == id, _HERE).values(values))
        if "title" in values:
            self._backend.overwrite()  # the former one
        return bool(done.rowcount)

    def mark_deleted(self, ids: Iterable[str] | None) -> int:
        """Mark some as deleted, or all: they are not seen any more, and `purge` overwrites them; how many they were."""
        done = 0
        with self._backend.changing() as db:
            for some in [None] if ids is None else in_parts(ids):
                chosen = update(conversations).where(_HERE)
                chosen = chosen if some is None else chosen.where(conversations.c.id.in_(some))
                done += db.execute(chosen.values(gone=1, title="", about="{}")).rowcount
        return done

    # Turns ---------------------------------------------------------------------------------------

    def turns(self, conversation: str) -> list[KeptTurn]:
        """All of a conversation, the first one first."""
        return [_turn(row) for row in self._backend.read(_TURNS.where(turns.c.conversation == conversation))]

    def turn(self, conversation: str, id: str) -> KeptTurn | None:
        """One of them."""
        rows = self._backend.read(_TURNS.where(turns.c.conversation == conversation, turns.c.id == id))
        return _turn(rows[0]) if rows else None

    def begin(
        self, conversation: str, id: str, question: str, asked: dict[str, Any], answer_id: str, now: int, until: int
    ) -> bool:
        """Add a turn that is to be answered; False if its conversation is gone, or has one of this id."""
        written = json.dumps(asked, ensure_ascii=False)
        row: dict[str, Any] = {
            "conversation": conversation,
            "id": id,
            "state": RUNNING,
            "server": self._backend.server,
            "answer_id": answer_id,
            "until": until,
            "at": now,
            "bytes": _size(question, written),
            "question": question,
            "asked": written,
        }
        with self._backend.changing() as db:
            mine = (turns.c.conversation == conversation) & (turns.c.id == id)
            if db.execute(select(turns.c.number).where(mine)).first() is not None:
                return False
            known = update(conversations).where(conversations.c.id == conversation, _HERE).values(changed=now)
            if not db.execute(known).rowcount:
                return False
            db.execute(insert(turns).values(row))
        return True

    def quote(self, conversation: str, id: str, cited: Iterable[str], followed: Sequence[str]) -> None:
        """Note which documents of the tenant a turn is made from.

        With those come the documents of the turns that it follows. If another server has deleted one meanwhile, the
        turn counts as erased.
        """
        with self._backend.changing() as db:
            number = db.execute(
                select(turns.c.number).where(turns.c.conversation == conversation, turns.c.id == id)
            ).scalar()
            if number is None:
                return
            found = set(cited)
            for some in in_parts(followed):
                rows = select(quotes.c.document).join(turns, turns.c.number == quotes.c.turn)
                rows = rows.where(turns.c.conversation == conversation, turns.c.id.in_(some))
                found |= {row.document for row in db.execute(rows)}
            here = set[str]()
            for some in in_parts(found):
                known = select(documents.c.id).where(documents.c.id.in_(some), documents.c.gone == 0)
                here |= {row.id for row in db.execute(known)}
            if found != here:
                db.execute(update(turns).where(turns.c.number == number).values(state=ERASED))
            elif found:
                db.execute(insert(quotes), [{"turn": number, "document": one} for one in sorted(found)])

    def finish(self, conversation: str, id: str, state: str, answer: str, told: dict[str, Any]) -> bool:
        """A turn has its answer, or ended without one; False if nobody wants it any more."""
        written = json.dumps(told, ensure_ascii=False)
        more = _size(answer, written)
        with self._backend.changing() as db:
            running = turns.c.state == RUNNING
            mine = update(turns).where(turns.c.conversation == conversation, turns.c.id == id, running, ~_DELETED)
            values = {"state": state, "answer": answer, "told": written, "bytes": turns.c.bytes + more}
            return bool(db.execute(mine.values(values)).rowcount)

    def amend(
        self, conversation: str, id: str, told: dict[str, Any], answer: str | None = None, rating: int | None = None
    ) -> bool:
        """Add to what came with an answer, and perhaps correct or rate it; False if it is not there, or not whole."""
        mine = (turns.c.conversation == conversation) & (turns.c.id == id)
        with self._backend.changing() as db:
            row = db.execute(
                select(turns.c.told, turns.c.question, turns.c.asked, turns.c.answer, turns.c.rating).where(
                    mine, turns.c.state.not_in([RUNNING, ERASED]), ~_DELETED
                )
            ).first()
            if row is None:
                return False
            written = json.dumps(json.loads(row.told) | told, ensure_ascii=False)
            final = row.answer if answer is None else answer
            values = {"told": written, "answer": final, "rating": row.rating if rating is None else rating}
            values["bytes"] = _size(row.question, row.asked, final, written)
            db.execute(update(turns).where(mine).values(values))
        return True

    def runs(self, turn: KeptTurn, now: int) -> bool:
        """Whether an answer can still be under way: its time is not over, and its server runs."""
        return turn.state == RUNNING and turn.until >= now and self._backend.runs(turn.server)

    def end_all(self) -> None:
        """Nothing that this server was answering is under way any more: it was started anew."""
        with self._backend.changing() as db:
            mine = turns.c.state == RUNNING, turns.c.server == self._backend.server
            db.execute(update(turns).where(*mine).values(state="stopped"))


def erase_answers(db: Connection, document: str) -> None:
    """Overwrite within a change all answers that were made from a document, and copies that quote it."""
    end_shares_of(db, document)
    made = select(quotes.c.turn).where(quotes.c.document == document)
    size = func.length(turns.c.question) + func.length(turns.c.asked)
    erased = {"state": ERASED, "answer": "", "told": "{}", "rating": 0, "bytes": size}
    db.execute(update(turns).where(turns.c.number.in_(made)).values(erased))
    db.execute(delete(quotes).where(quotes.c.document == document))


def has_deleted(backend: Backend) -> bool:
    """Whether conversations are to be overwritten."""
    return bool(backend.read(select(literal(1)).select_from(conversations).where(conversations.c.gone == 1).limit(1)))


def purge_deleted(backend: Backend, most: int) -> None:
    """Remove conversations that are marked as deleted, up to so many turns of them."""
    gone = select(conversations.c.id).where(conversations.c.gone == 1)
    some = select(turns.c.number).where(turns.c.conversation.in_(gone)).limit(most)
    with backend.changing() as db:
        end_shares_without_conversation(db)
        numbers = [row.number for row in db.execute(some)]
        for part in in_parts(numbers):
            db.execute(delete(quotes).where(quotes.c.turn.in_(part)))
            db.execute(delete(turns).where(turns.c.number.in_(part)))
        if len(numbers) < most:
            db.execute(delete(conversations).where(conversations.c.gone == 1))


def _size(*texts: str) -> int:
    return sum(len(one.encode()) for one in texts)


def _conversation(row: Any) -> KeptConversation:
    id, title, about, created, changed, pinned, many, opening = row
    return KeptConversation(id, title, json.loads(about), created, changed, bool(pinned), int(many), opening)


def _turn(row: Any) -> KeptTurn:
    id, state, server, answer_id, at, until, rating, question, answer, asked, told = row
    if state == ERASED:
        answer, told, rating = "", "{}", 0
    return KeptTurn(
        id, state, server, answer_id, at, until, rating, question, answer, json.loads(asked), json.loads(told)
    )
