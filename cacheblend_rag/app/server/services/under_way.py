"""Answers that go on while nobody reads them, and are read again from their beginning."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

from cacheblend_rag.app.server.keys_file import LOOK_AGAIN
from cacheblend_rag.app.server.problems import Problem, noted_problem

Told: TypeAlias = tuple[str, Any]
"""An event of an answer: its name and its data."""

# Answers of one tenant that have ended and can still be read, and those that may go on unread.
_ENDED, _UNREAD = 16, 8
_JOINED = ("token", "thought")


class AnswerUnderWay:
    """One answer on its way.

    Parameters
    ----------
    id : str
    events : async generator of (str, object)
        Makes the answer. Closing it ends that.
    ended : callable
        Awaited once it has ended, before its readers are told so.
    unread_seconds : float, optional
        For which it goes on without a reader; by default to its end.
    conversation : str, optional
        That it belongs to.
    wanted : callable, optional
        Whether anybody may still read it, else it is stopped.
    """

    def __init__(
        self,
        id: str,
        events: AsyncGenerator[Told],
        ended: Callable[[AnswerUnderWay], Awaitable[None]],
        unread_seconds: float | None = None,
        conversation: str | None = None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self.id, self.conversation = id, conversation
        self.told: list[Told] = []
        self.made_from: list[str] = []
        """Documents of the tenant whose text is in its prompt, or in answers before it there."""
        self.state = "running"
        self.error: Problem | None = None
        self.over = False
        """Whether no event comes any more."""
        self._ended, self._unread_seconds, self._wanted = ended, unread_seconds, wanted
        self._news, self._readers = asyncio.Event(), 0
        self._task = asyncio.create_task(self._run(events))
        self._look_later()

    @property
    def unread(self) -> bool:
        """Whether nobody reads it."""
        return not self._readers

    async def begun(self) -> None:
        """Wait for its first event behind the one that names it.

        Raises
        ------
        Problem
            If it is refused before that.
        """
        with _Reading(self):
            while len(self.told) < 2 and not self.over:
                await self._news.wait()
        if self.error is not None and self.told[1][0] == "error":
            raise self.error

    async def whole(self) -> None:
        """Wait until it is over.

        Raises
        ------
        Problem
            If it failed.
        """
        with _Reading(self):
            while not self.over:
                await self._news.wait()
        if self.error is not None:
            raise self.error

    async def read(self) -> AsyncIterator[Told]:
        """Its events from the first on; what has come already is told in few pieces."""
        at = 0
        with _Reading(self):
            while True:
                news, new = self._news, self.told[at:]
                at += len(new)
                for one in _joined(new):
                    yield one
                if self.over and at == len(self.told):
                    return
                if not new:
                    await news.wait()

    def stop(self) -> None:
        """End it where it is."""
        self._task.cancel()

    async def stopped(self) -> None:
        """End it, and wait until it has."""
        self.stop()
        await asyncio.wait({self._task})

    def text(self, name: str = "token") -> str:
        """All of its text, or of its thought."""
        return "".join(data["text"] for kind, data in self.told if kind == name)

    def data(self, name: str) -> Any:
        """Data of its last event of a name; None if there was none."""
        return next((data for kind, data in reversed(self.told) if kind == name), None)

    async def _run(self, events: AsyncGenerator[Told]) -> None:
        try:
            async with aclosing(events):
                async for one in events:
                    self.tell(one)
            self.state = "done"
        except asyncio.CancelledError:
            self.state = "stopped"
        except Exception as error:
            self._fail(error)
        try:
            await self._ended(self)
        except asyncio.CancelledError:
            self.state = "stopped"
        except Exception as error:
            self._fail(error)
        self.over = True
        self.tell(("stopped", {}) if self.state == "stopped" else ("done", {}))

    def _fail(self, error: Exception) -> None:
        self.state, self.error = "failed", noted_problem(error)
        self.tell(("error", {"code": self.error.code, "message": self.error.message}))

    def tell(self, one: Told) -> None:
        """Tell an event to all who read it, now or later."""
        self.told.append(one)
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _leave(self) -> None:
        if self.unread and self._unread_seconds is not None and not self.over:
            asyncio.get_running_loop().call_later(self._unread_seconds, self._give_up)

    def _look_later(self) -> None:
        asyncio.get_running_loop().call_later(LOOK_AGAIN, self._look)

    def _look(self) -> None:
        if not self._wanted():
            self.stop()
        elif not self.over:
            self._look_later()

    def _give_up(self) -> None:
        if self.unread:
            self.stop()


class _Reading:
    """Within it an answer has one reader more."""

    def __init__(self, answer: AnswerUnderWay) -> None:
        self._answer = answer

    def __enter__(self) -> None:
        self._answer._readers += 1

    def __exit__(self, *exc: object) -> None:
        self._answer._readers -= 1
        self._answer._leave()


def _joined(events: list[Told]) -> list[Told]:
    """Events with pieces of one text together."""
    found: list[Told] = []
    for name, data in events:
        if name in _JOINED and found and found[-1][0] == name:
            found[-1] = name, {"text": found[-1][1]["text"] + data["text"]}
        else:
            found.append((name, data))
    return found


class AnswersUnderWay:
    """The answers of one tenant that are read again.

    Parameters
    ----------
    ids : str
        Beginning of their ids.
    """

    def __init__(self, ids: str) -> None:
        self._ids = ids
        self._known: dict[str, AnswerUnderWay] = {}

    def id_for(self, turn: str | None) -> str:
        """An id for the next answer, by that of its turn if its client has drawn one.

        Raises
        ------
        Problem
            409 if there is an answer of this id.
        """
        id = self._ids + (turn or secrets.token_hex(12))
        if id in self._known:
            raise Problem(409, "turn_known", "turn: there is an answer of this id; draw another", field="turn")
        return id

    def add(self, answer: AnswerUnderWay) -> None:
        """Know an answer that has begun; of those that nobody reads the oldest is stopped where there are too many."""
        unread = [one for one in self._known.values() if one.unread and not one.over]
        for one in unread[: max(0, len(unread) + 1 - _UNREAD)]:
            one.stop()
        over = [one.id for one in self._known.values() if one.over]
        for old in over[: max(0, len(over) - _ENDED)]:
            del self._known[old]
        self._known[answer.id] = answer

    def get(self, id: str) -> AnswerUnderWay:
        """An answer by its id.

        Raises
        ------
        Problem
            404 if it is not known here.
        """
        found = self._known.get(id)
        if found is None:
            raise Problem(404, "no_answer", "no answer of this id is under way here, and none has just ended")
        return found

    def find(self, id: str) -> AnswerUnderWay | None:
        """An answer by its id, if it is known here."""
        return self._known.get(id)

    def forget(self, id: str) -> None:
        """Let go of an answer that has ended: nobody shall read it again."""
        self._known.pop(id, None)

    async def close(self) -> None:
        """Stop them all."""
        for one in list(self._known.values()):
            await one.stopped()
