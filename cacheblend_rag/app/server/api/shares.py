"""Read-only copies of conversations, which a tenant shares with all who have a key."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import Response
from pydantic import BaseModel

from cacheblend_rag.app.server.api.bodies import bounded_router
from cacheblend_rag.app.server.api.kept import TurnInfo, whole
from cacheblend_rag.app.server.api.requests import Here
from cacheblend_rag.app.server.security.tenants import Keys
from cacheblend_rag.app.server.services.service import Service, Session, session_if_usable
from cacheblend_rag.app.server.storage.shares import Share

router = bounded_router("/api", "RAG")


class ShareInfo(BaseModel):
    """A copy that is shared under its ``id``; ``created`` is in milliseconds since 1970."""

    id: str
    conversation: str
    title: str
    created: int
    turns: int


class SharedPassage(BaseModel):
    """A passage that an answer was made from, as it stood."""

    document: str
    page: int | None
    chunk: int
    text: str


class SharedTurn(BaseModel):
    """A question and its answer, which may have been ``stopped`` before its end."""

    question: str
    answer: str
    state: Literal["done", "stopped"] = "done"
    at: int
    sources: list[SharedPassage]


class SharedConversation(BaseModel):
    """A conversation as it stood when it was shared."""

    title: str
    created: int
    all_turns: list[SharedTurn]


@router.get("/shares")
async def shares(here: Here) -> list[ShareInfo]:
    """Conversations that you share, the latest first."""
    return [_info(one) for one in await here.in_thread(here.shares.listed)]


@router.post("/conversations/{id}/shares", status_code=201)
async def share(here: Here, id: str) -> ShareInfo:
    """Share a conversation as it is now, with the passages that its answers were made from.

    All who have a key of this server read it by the id, until it is ended or something of it is deleted.
    """
    return _info(await here.in_thread(_shared, here, id))


@router.delete("/shares/{id}", status_code=204)
async def end_share(here: Here, id: str) -> Response:
    """Let nobody read a copy any more."""
    await here.in_thread(here.shares.end, id)
    return Response(status_code=204)


@router.get("/shared/{id}")
async def shared(here: Here, id: str) -> SharedConversation:
    """Read a conversation that somebody shares."""
    return await here.in_thread(_read, here, id)


def _shared(here: Session, id: str) -> Share:
    found = whole(here, id)
    turns = [one for one in found.all_turns if one.state in ("done", "stopped") and one.answer.strip()]
    content: Any = [_copied(one).model_dump() for one in turns]
    # Not the conversation's first question: its answer may be erased, and then it is no part of the copy.
    title = found.title or (turns[0].question if turns else "")
    return here.shares.add(id, title, content, [one.id for one in turns])


def _copied(one: TurnInfo) -> SharedTurn:
    passages = [SharedPassage(**source.model_dump(include=set(SharedPassage.model_fields))) for source in one.sources]
    state: Any = one.state
    return SharedTurn(question=one.question, answer=one.answer, state=state, at=one.at, sources=passages)


def _read(here: Session, id: str) -> SharedConversation:
    # An id of nobody's is looked for as well, so that it takes as long as a wrong one of somebody.
    found, content = (_owner(here.service, id) or here).shares.read(id)
    return SharedConversation(title=found.title, created=found.created, all_turns=content)


def _owner(service: Service, id: str) -> Session | None:
    """The session of the tenant whose copies have ids that begin so, if it has a key now."""
    names = {one.tenant for one in service.keys.named()} if service.settings.guarded else {Keys.LOCAL}
    usable = [one for name in names if (one := session_if_usable(service, name)) is not None]
    return {one.shares.sign: one for one in usable}.get(id.partition("_")[0])


def _info(one: Share) -> ShareInfo:
    return ShareInfo(**one.__dict__)
