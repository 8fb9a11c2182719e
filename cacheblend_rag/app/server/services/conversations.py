"""Conversations that the server keeps for a tenant: their limits, their answers, and what becomes of them."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.services.library import Library
from cacheblend_rag.app.server.services.under_way import AnswerUnderWay
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.app.server.storage.conversations import RUNNING, KeptConversation, KeptTurn
from cacheblend_rag.app.server.storage.tables import ERASED
from cacheblend_rag.report import Verification

_log = logging.getLogger(__name__)
_TURNS = 1_000  # of one conversation
_GONE = "there is no such conversation"


class Conversations:
    """The conversations of one tenant.

    Parameters
    ----------
    library : Library
        Its documents; the conversations lie beside them.
    limits : Limits
    kept : bool
        Whether there are any.
    has_key : callable
        Whether the tenant has a key now. What is kept goes with the last one, and nothing may come after.
    clock : callable
        Seconds since 1970.
    """

    def __init__(
        self,
        library: Library,
        limits: Limits,
        kept: bool,
        has_key: Callable[[], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._library, self._limits, self._kept, self._clock = library, limits, kept, clock
        self._has_key = has_key
        self._store = library.catalogue.kept
        self._given_up = set[tuple[str, str]]()  # turns whose answer could not be written down
        if kept:
            self._store.end_all()

    def check_kept(self) -> None:
        """Refuse requests about conversations where none are kept, or not for this tenant any more.

        Raises
        ------
        Problem
            403, or 401 if the last key was revoked since the request came.
        """
        if not self._has_key():
            raise Problem(401, "unauthorized", "the key was revoked")
        if not self._kept:
            raise Problem(403, "not_kept", "this server keeps no conversations; its option keep_conversations says so")

    def listed(self, searched: str = "") -> list[KeptConversation]:
        """All of them, or those that hold every word searched for: first those that are pinned, then the latest."""
        self.check_kept()
        words = searched.casefold().split()
        found = self._store.listed()
        if not words:
            return found
        holding = self._store.holding(words)
        return [one for one in found if one.id in holding]

    def create(self, about: dict[str, Any]) -> KeptConversation:
        """Begin one.

        Raises
        ------
        Problem
            409 if there are too many, 507 if they take too much, or the disk is full.
        """
        self.check_kept()
        many = self.check_room()
        if many >= self._limits.conversations:
            message = f"you have {many:,} conversations, which is the most; delete some, or ask in one of them"
            raise Problem(409, "too_many_conversations", message)
        id = secrets.token_hex(8)
        self._store.create(id, about, self._now())
        return self.get(id)

    def get(self, id: str) -> KeptConversation:
        """One of them.

        Raises
        ------
        Problem
            404 if there is none.
        """
        self.check_kept()
        found = self._store.get(id)
        if found is None:
            raise Problem(404, "no_conversation", _GONE)
        return found

    def change(self, id: str, **values: Any) -> KeptConversation:
        """Give it a title, pin it, or let it be about something else.

        Raises
        ------
        Problem
            404 if there is none.
        """
        self.check_kept()
        if not self._store.change(id, **values):
            raise Problem(404, "no_conversation", _GONE)
        return self.get(id)

    def turns(self, id: str) -> list[KeptTurn]:
        """All turns of one."""
        return [self._as_known(id, one) for one in self._store.turns(id)]

    def check_not_erased(self, id: str, answer_id: str) -> None:
        """Refuse an answer whose conversation is gone, or that was made from what is deleted.

        Raises
        ------
        Problem
            404.
        """
        self.get(id)
        if any(one.answer_id == answer_id and one.state == ERASED for one in self._store.turns(id)):
            raise Problem(404, "no_answer", "this answer was erased: a document that it was made from is deleted")

    def delete(self, ids: Iterable[str] | None) -> list[str]:
        """Delete some, or all; ids of their answers that are under way.

        Raises
        ------
        Problem
            404 if one is not there, 507 if the disk is so full that this cannot be written down.
        """
        self.check_kept()
        chosen = [one.id for one in self._store.listed()] if ids is None else list(ids)
        running = [turn.answer_id for id in chosen for turn in self._store.turns(id) if turn.state == RUNNING]
        deletions = self._library.catalogue.deletions
        done = deletions.with_reserve(lambda: self._store.mark_deleted(None if ids is None else chosen))
        if ids is not None and not done:
            raise Problem(404, "no_conversation", _GONE)
        self._library.erasing.erase()
        return running

    # Answers -------------------------------------------------------------------------------------

    def begin(self, conversation: str, turn: str, question: str, asked: dict[str, Any], answer_id: str) -> KeptAnswer:
        """Add a question to one; its answer is to come.

        Raises
        ------
        Problem
            404 if it is gone, 409 if it has a turn of this id or too many, 507 if all take too much.
        """
        known = self.get(conversation)
        self.check_room()
        if known.turns >= _TURNS:
            raise Problem(409, "too_many_turns", f"a conversation may have {_TURNS:,} questions; begin another")
        for one in asked["follows"]:
            before = self._store.turn(conversation, one)
            if before is None or before.state == ERASED:
                why = "was never kept: leave out its turn, or" if before is None else "was erased:"
                message = f"an answer that this question follows {why} load the conversation again"
                raise Problem(409, "history_erased", message, field="history")
        longest = self._limits.queue_seconds + self._limits.answer_seconds + 60.0
        now = self._now()
        if not self._store.begin(conversation, turn, question, asked, answer_id, now, now + int(longest * 1000)):
            self.get(conversation)  # it may be gone by now
            raise Problem(409, "turn_known", "this conversation has a turn of this id already", field="turn")
        return KeptAnswer(self._library, conversation, turn, lambda: self._given_up.add((conversation, turn)))

    def amend(self, conversation: str, turn: str, told: dict[str, Any], rating: int | None) -> None:
        """Add to what came with an answer, or rate it.

        Raises
        ------
        Problem
            404 if there is no such answer.
        """
        self.get(conversation)
        if not self._store.amend(conversation, turn, told, rating=rating):
            raise Problem(404, "no_turn", "there is no such answer; it may have been erased, or is under way")

    def check_room(self, more: int = 0) -> int:
        """Refuse so many more bytes where there is no room for them; how many conversations there are.

        Raises
        ------
        Problem
            507.
        """
        many, used = self._store.counts()
        most = self._limits.conversation_bytes
        if used >= most or used + more > most:
            wanted = f", and this has {more:,} more" if more else ""
            message = f"your conversations take {used:,} bytes and may take {most:,}{wanted}: delete some"
            raise Problem(507, "conversation_quota", message)
        return many

    def _as_known(self, conversation: str, turn: KeptTurn) -> KeptTurn:
        """A turn whose server is gone ended without an answer, and so did one whose answer could not be kept."""
        given_up = (conversation, turn.id) in self._given_up
        over = turn.state == RUNNING and (given_up or not self._store.runs(turn, self._now()))
        return replace(turn, state="stopped") if over else turn

    def _now(self) -> int:
        return int(self._clock() * 1000)


class KeptAnswer:
    """An answer that a conversation is to have; `give_up` is called where it cannot have it."""

    def __init__(self, library: Library, conversation: str, turn: str, give_up: Callable[[], object]) -> None:
        self._store, self.give_up = library.catalogue.kept, give_up
        self._conversation, self._turn = conversation, turn

    def quote(self, documents: Sequence[str], followed: Sequence[str]) -> None:
        """Note documents of the tenant that it is made from, and the turns that it follows."""
        self._store.quote(self._conversation, self._turn, documents, followed)

    def finish(self, answer: AnswerUnderWay) -> None:
        """Write it down; of its passages, where they are found."""
        report = answer.data("report")
        sources = [
            {name: value for name, value in one.items() if name != "text"} for one in answer.data("sources") or ()
        ]
        told: dict[str, Any] = {"sources": sources}
        if thought := answer.text("thought"):
            told["thought"] = thought
        if report is not None:
            told |= {"report": {**report, "prompt": []}, "verification": report.get("verification")}
        if answer.error is not None:
            told["error"] = answer.error.message
        text = _final(answer.text(), told.get("verification"))
        self._store.finish(self._conversation, self._turn, answer.state, text, told)

    def verified(self, first: str, found: Verification) -> None:
        """Write down how it was verified; a correction stands in its place."""
        known = found.asdict()
        try:
            self._store.amend(self._conversation, self._turn, {"verification": known}, _final(first, known))
        except Problem as problem:  # the page asks for it, too
            _log.warning("how an answer was verified cannot be kept: %s", problem.message)


def _final(text: str, verification: dict[str, Any] | None) -> str:
    """The text that stands in the place of an answer, once it is known how that was verified."""
    if verification is not None and verification["status"] == "corrected":
        kept = text[: verification["position"]]
        text = kept + verification["after"] if text == kept + verification["before"] else text
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")  # PostgreSQL takes no NUL
