"""Requests about answers that are held against full prefill: how one was verified, and counts of the latest."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import Query, Request
from pydantic import BaseModel, Field

from cacheblend_rag.app.server.api.bodies import bounded_router
from cacheblend_rag.app.server.api.rag_bodies import Name
from cacheblend_rag.app.server.api.requests import Here
from cacheblend_rag.app.server.api.streams import unless_gone

router = bounded_router("/api", "RAG")
_MOST_SECONDS = 30


class VerificationInfo(BaseModel):
    """How an answer was held against full prefill.

    ``waiting``: it was not yet. ``verified``: the model itself gives this very answer. ``corrected``: it gives another
    one: ``position`` characters of the first answer stay, and ``after`` stands in the place of ``before``.
    ``given up``: it could not be checked, for the ``reason`` given.
    """

    id: str
    status: Literal["waiting", "verified", "corrected", "given up"]
    kept_tokens: int
    position: int
    before: str
    after: str
    reason: str
    ties: int
    seconds: float


class LatestInfo(BaseModel):
    """The latest answers of a model that were held against full prefill, up to 200.

    ``same`` of ``answers`` were the full model's word for word, the others were corrected. They are those of the key's
    tenant, since the server started. ``waiting`` counts answers of all models that are still to be checked.
    """

    model: str
    answers: Annotated[int, Field(ge=0)]
    same: Annotated[int, Field(ge=0)]
    waiting: Annotated[int, Field(ge=0)]


@router.get("/answers/{id}/verification")
async def verification(
    here: Here, request: Request, id: str, wait: Annotated[float, Query(ge=0, le=_MOST_SECONDS)] = 0
) -> VerificationInfo:
    """How an answer with ``"verify": "idle"`` was verified; waits so many seconds for it at most."""
    found = await unless_gone(request, here.verifications.result(id, wait))
    return VerificationInfo(**found.asdict())


@router.get("/verifications")
async def latest(here: Here, model: Name | None = None) -> LatestInfo:
    """How many of the latest answers were the full model's word for word, by default the first model's."""
    name = here.service.model_of(model).name
    return LatestInfo(model=name, **asdict(here.verifications.latest(name)))
