"""Conversations that the server keeps, and answers that go on while nobody reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field, StringConstraints

from cacheblend_rag.app.server.api.bodies import bounded_router
from cacheblend_rag.app.server.api.rag_bodies import Among, AskAmong, AskBody, FoundChunk, Name, WholeAnswer, _Body
from cacheblend_rag.app.server.api.requests import Here
from cacheblend_rag.app.server.api.streams import EventStream, event, unless_gone
from cacheblend_rag.app.server.problems import Problem, noted_problem
from cacheblend_rag.app.server.services.collection import Collection
from cacheblend_rag.app.server.services.conversations import KeptAnswer
from cacheblend_rag.app.server.services.service import Session
from cacheblend_rag.app.server.services.under_way import AnswerUnderWay, Told
from cacheblend_rag.app.server.storage.conversations import KeptConversation, KeptTurn

router = bounded_router("/api", "RAG")
# Seconds for which an answer without a conversation goes on unread: a page that is loaded again is back by then.
_UNREAD = 20.0
_Noted: TypeAlias = Callable[[Sequence[tuple[str, str]]], Awaitable[None]]
_Title = Annotated[str, StringConstraints(strip_whitespace=True, max_length=200)]


class NewConversation(_Body):
    """A conversation to be begun; ``collections`` are ids of what it is answered from."""

    collections: Annotated[list[Name], Field(min_length=1, max_length=50)]


class ConversationChange(_Body):
    """Changes of a conversation; an empty ``title`` is that of its first question."""

    title: _Title | None = None
    pinned: bool | None = None


class AnswerChange(_Body):
    """An addition to an answer: a ``rating``, 1 for good, -1 for bad, 0 for none; or ``rows`` of a comparison."""

    rating: Annotated[int, Field(ge=-1, le=1)] | None = None
    rows: Annotated[list[dict[str, str | float | bool | None]], Field(max_length=10)] | None = None


class ConversationInfo(BaseModel):
    """A conversation as it is listed; times are milliseconds since 1970.

    ``title`` is empty until its owner gives one; ``opening`` is its first question.
    """

    id: str
    title: str
    opening: str
    collections: list[str]
    created: int
    changed: int
    pinned: bool
    turns: int


class TurnInfo(BaseModel):
    """A question and its answer.

    While its ``state`` is ``running``, ``answer_id`` is the id by which it is read. ``erased``: a document was deleted
    that the answer was made from. ``asked`` is how it was asked. Texts of ``sources`` are empty where their document
    is gone. ``verification`` says whether the answer was corrected; ``answer`` is the corrected one.
    """

    id: str
    state: Literal["running", "done", "stopped", "failed", "erased"]
    answer_id: str
    at: int
    question: str
    answer: str
    thought: str
    asked: dict[str, Any]
    sources: list[FoundChunk]
    report: dict[str, Any] | None
    verification: dict[str, Any] | None
    rows: list[dict[str, Any]] | None
    error: str | None
    rating: int


class ConversationWhole(ConversationInfo):
    """A conversation with all that was said."""

    all_turns: list[TurnInfo]


# Conversations ------------------------------------------------------------------------------


@router.get("/conversations")
async def conversations(here: Here, search: Annotated[str, Query(max_length=500)] = "") -> list[ConversationInfo]:
    """Conversations that are kept, or those that hold every word of ``search``: pinned ones first, then the latest."""
    return [_info(one) for one in await here.in_thread(here.conversations.listed, search)]


@router.post("/conversations", status_code=201)
async def begin_conversation(here: Here, body: NewConversation) -> ConversationInfo:
    """Begin a conversation, to be kept until it is deleted."""
    for id in body.collections:
        here.collection(id)
    return _info(await here.in_thread(here.conversations.create, {"collections": body.collections}))


@router.delete("/conversations", status_code=204)
async def delete_conversations(here: Here) -> Response:
    """Delete all conversations."""
    return await _deleted(here, None)


@router.get("/conversations/{id}")
async def conversation(here: Here, id: str) -> ConversationWhole:
    """A conversation with all that was said."""
    return await here.in_thread(whole, here, id)


@router.patch("/conversations/{id}")
async def change_conversation(here: Here, id: str, body: ConversationChange) -> ConversationInfo:
    """Give a conversation a title, or pin it."""
    values: dict[str, Any] = {}
    if body.title is not None:
        values["title"] = body.title
    if body.pinned is not None:
        values["pinned"] = int(body.pinned)
    if not values:
        return _info(await here.in_thread(here.conversations.get, id))
    return _info(await here.in_thread(partial(here.conversations.change, id, **values)))


@router.delete("/conversations/{id}", status_code=204)
async def delete_conversation(here: Here, id: str) -> Response:
    """Delete a conversation; an answer to it that is under way is stopped."""
    return await _deleted(here, [id])


@router.patch("/conversations/{id}/turns/{turn}", status_code=204)
async def change_answer(here: Here, id: str, turn: str, body: AnswerChange) -> Response:
    """Rate an answer, or add a comparison of methods to it."""
    told = {} if body.rows is None else {"rows": body.rows}
    await here.in_thread(here.conversations.amend, id, turn, told, body.rating)
    return Response(status_code=204)


async def _deleted(here: Session, ids: Sequence[str] | None) -> Response:
    for id in await here.in_thread(here.conversations.delete, ids):
        if (answer := here.under_way.find(id)) is not None:
            answer.stop()
            here.under_way.forget(id)
    here.verifications.forget_texts()
    here.service.ingestion.wake()
    return Response(status_code=204)


def _info(one: KeptConversation) -> ConversationInfo:
    return ConversationInfo(**_named(one))


def _named(one: KeptConversation) -> dict[str, Any]:
    found = asdict(one)
    return found | {"collections": found.pop("about").get("collections", [])}


def whole(here: Session, id: str, rating: int | None = None) -> ConversationWhole:
    """A conversation with all that was said, or with the answers that were rated so."""
    found = here.conversations.get(id)
    texts: dict[tuple[str, str, int], str] = {}
    chosen = [one for one in here.conversations.turns(id) if rating is None or one.rating == rating]
    turns = [_turn(here, one, texts) for one in chosen]
    return ConversationWhole(**_named(found), all_turns=turns)


def _turn(here: Session, one: KeptTurn, texts: dict[tuple[str, str, int], str]) -> TurnInfo:
    told = one.told
    return TurnInfo(
        **{name: getattr(one, name) for name in ("id", "state", "answer_id", "at", "question", "answer", "rating")},
        asked=one.asked,
        thought=told.get("thought", ""),
        sources=[_source(here, source, texts) for source in told.get("sources", ())],
        report=told.get("report"),
        verification=told.get("verification"),
        rows=told.get("rows"),
        error=told.get("error"),
    )


def _source(here: Session, kept: dict[str, Any], texts: dict[tuple[str, str, int], str]) -> FoundChunk:
    """A passage that an answer was made from, with its text as the collection has it now."""
    place = kept["collection"], kept["document_id"], kept["chunk"]
    if place not in texts:
        try:
            texts[place] = here.collection(place[0]).chunk(*place[1:]).text
        except Problem:  # it is gone
            texts[place] = ""
    return FoundChunk(**kept, text=texts[place])


# Answers ------------------------------------------------------------------------------------


@router.get(
    "/answers/{id}/events",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {"text/event-stream": {}},
            "description": "The events of the answer from its beginning; what has come already is told in few pieces.",
        }
    },
)
async def answer_events(here: Here, id: str) -> EventStream:
    """Read an answer that goes on, or has just ended, from its beginning."""
    answer = here.under_way.get(id)
    await here.in_thread(_check_not_deleted, here, answer)
    return _read(here, answer)


@router.delete("/answers/{id}", status_code=204)
async def stop_answer(here: Here, id: str) -> Response:
    """Stop an answer, if it is under way here; what there is of it stays."""
    if (answer := here.under_way.find(id)) is not None:
        await answer.stopped()
    return Response(status_code=204)


def _check_not_deleted(here: Session, answer: AnswerUnderWay) -> None:
    """Refuse what was deleted meanwhile, perhaps on another server.

    Raises
    ------
    Problem
        404 if the conversation of the answer is gone, or a document that it was made from.
    """
    if answer.conversation is not None:
        here.conversations.check_not_erased(answer.conversation, answer.id)
    if not all(map(here.library.catalogue.holds, answer.made_from)):
        raise Problem(404, "no_document", "a document that this answer was made from is not there any more")
    for one in answer.data("sources") or ():
        here.collection(one["collection"]).chunk(one["document_id"], one["chunk"])


def _read(here: Session, answer: AnswerUnderWay) -> EventStream:
    async def events() -> AsyncIterator[str]:
        async for one in answer.read():
            yield event(*one)

    return EventStream(events(), None, here.service.longest + here.service.limits.queue_seconds)


async def going_on(
    here: Session,
    request: Request,
    collection: Collection,
    body: AskBody,
    answered: Callable[[_Noted], AsyncGenerator[Told]],
) -> Any:
    """Answer a question that goes on while nobody reads it.

    Parameters
    ----------
    here : Session
    request : Request
    collection : Collection
        Its passages answer it.
    body : AskBody
    answered : callable
        Makes the answer's events; it is given what to do once the passages are known.
    """
    id, keeping = here.under_way.id_for(body.turn), _Keeping(here, body)
    if body.conversation is not None:
        asked = _asked(body, collection)
        begin = partial(here.conversations.begin, body.conversation, body.turn or id, body.question, asked, id)
        await keeping.begin(begin)

    async def noted(sources: Sequence[tuple[str, str]]) -> None:
        own = [document for of, document in sources if here.collection(of).writable]
        before = [one.document_id for turn in body.history for one in turn.sources]
        answer.made_from = await here.in_thread(_made_from, here, own, before)
        await keeping.quote(answer.made_from)

    async def events() -> AsyncGenerator[Told]:
        yield "answer", {"id": id}
        async with aclosing(answered(noted)) as told:
            async for one in told:
                yield one

    unread, conversation = (_UNREAD, None) if keeping.kept is None else (None, body.conversation)
    answer = AnswerUnderWay(id, events(), keeping.end, unread, conversation, here.has_key)
    here.under_way.add(answer)
    if body.stream:
        await unless_gone(request, answer.begun())
        return _read(here, answer)
    await unless_gone(request, answer.whole())
    found = [FoundChunk(**one) for one in answer.data("sources") or ()]
    report = answer.data("report")
    if report is None:
        raise Problem(409, "stopped", "the answer was stopped before its end")
    not_kept = (answer.data("not_kept") or {}).get("message")
    return WholeAnswer(
        answer=answer.text(), thought=answer.text("thought"), sources=found, report=report, not_kept=not_kept
    )


def _made_from(here: Session, own: Sequence[str], before: Sequence[str]) -> list[str]:
    """Documents of the tenant that an answer is made from, with those of the questions before it."""
    held = (one for one in dict.fromkeys(before) if here.library.catalogue.holds(one))
    return list(dict.fromkeys([*own, *held]))


class _Keeping:
    """An answer on its way into its conversation, if it has one. On a full disk it is given and not kept."""

    def __init__(self, here: Session, body: AskBody) -> None:
        self._here, self._follows = here, [one.turn for one in body.history if one.turn]
        self.kept: KeptAnswer | None = None
        self.problem: Problem | None = None
        """Why it cannot be kept."""

    async def begin(self, begin: Callable[[], KeptAnswer]) -> None:
        """Write the question down."""
        try:
            self.kept = await self._here.in_thread(begin)
        except Problem as problem:
            if problem.code != "disk_full":
                raise
            self._give_up(problem)

    async def quote(self, documents: Sequence[str]) -> None:
        """Write down what the answer is made from; an answer of which that is not known is not kept."""
        if self.kept is not None:
            try:
                await self._here.in_thread(self.kept.quote, documents, self._follows)
            except Problem as problem:
                if problem.code != "disk_full":
                    raise
                self._give_up(problem)

    async def end(self, answer: AnswerUnderWay) -> None:
        """Write the answer down, or tell that it is not kept."""
        if (kept := self.kept) is not None:
            try:
                await asyncio.shield(self._here.in_thread(kept.finish, answer))
            except Problem as problem:
                self._give_up(problem)
            else:
                _follow_verification(self._here, kept, answer)
        if self.problem is not None:
            noted_problem(self.problem)
            answer.tell(("not_kept", {"code": self.problem.code, "message": self.problem.message}))

    def _give_up(self, problem: Problem) -> None:
        self.problem = problem
        if self.kept is not None:
            self.kept.give_up()
            self.kept = None


def _asked(body: AskBody, collection: Collection) -> dict[str, Any]:
    """How a question was asked, as the conversation keeps it."""
    given = body.model_dump(include=_SETTINGS, exclude_none=True)
    follows = [one.turn for one in body.history if one.turn]
    among = body if isinstance(body, AskAmong) else Among(collections=[collection.id])
    return {**given, "collections": among.collections, "documents": among.documents, "follows": follows}


_SETTINGS = {"k", "ratio", "rule", "max_tokens", "instructions", "model", "reasoning", "verify", "temperature"}


def _follow_verification(here: Session, kept: KeptAnswer, answer: AnswerUnderWay) -> None:
    """Write down how an answer was verified, once that is known, and tell it as long as its conversation has it."""
    found = (answer.data("report") or {}).get("verification") or {}
    if found.get("status") == "waiting" and answer.conversation is not None:
        first, check = answer.text(), partial(here.conversations.check_not_erased, answer.conversation, answer.id)
        here.verifications.follow(found["id"], lambda known: kept.verified(first, known), check)
