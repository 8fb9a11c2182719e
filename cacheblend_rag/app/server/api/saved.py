"""Prompts that a tenant has saved, and its rated answers as a file for the evaluation."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Query, Response
from pydantic import BaseModel, StringConstraints

from cacheblend_rag.app.server.api.bodies import bounded_router
from cacheblend_rag.app.server.api.kept import whole
from cacheblend_rag.app.server.api.rag_bodies import FoundChunk, Question, TurnId, _Body
from cacheblend_rag.app.server.api.requests import Here
from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.services.service import Session
from cacheblend_rag.app.server.storage.prompts import SavedPrompt

router = bounded_router("/api", "RAG")
_MOST = 200  # saved prompts of a tenant


class PromptBody(_Body):
    """A prompt to be saved: its ``text`` and what it is called."""

    title: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=200)]
    text: Question


class PromptInfo(BaseModel):
    """A prompt that was saved."""

    id: str
    title: str
    text: str


@router.get("/prompts")
async def prompts(here: Here) -> list[PromptInfo]:
    """Prompts that were saved, by title."""
    here.conversations.check_kept()
    return [PromptInfo(**asdict(one)) for one in await here.in_thread(here.library.catalogue.prompts.all)]


@router.post("/prompts", status_code=201)
async def save_prompt(here: Here, body: PromptBody) -> PromptInfo:
    """Save a prompt."""
    return await _put(here, SavedPrompt(secrets.token_hex(8), body.title, body.text))


@router.put("/prompts/{id}")
async def change_prompt(here: Here, id: TurnId, body: PromptBody) -> PromptInfo:
    """Give a prompt another title and text."""
    return await _put(here, SavedPrompt(id, body.title, body.text))


async def _put(here: Session, prompt: SavedPrompt) -> PromptInfo:
    most = here.service.limits.question_chars
    if len(prompt.text) > most:
        raise Problem(413, "too_long", f"text may have {most:,} characters", field="text")
    if not await here.in_thread(_written, here, prompt):
        raise Problem(409, "too_many_prompts", f"there may be {_MOST} saved prompts; delete one first")
    return PromptInfo(**asdict(prompt))


def _written(here: Session, prompt: SavedPrompt) -> bool:
    here.conversations.check_kept()  # only now: the request may have waited while the last key was revoked
    return here.library.catalogue.prompts.put(prompt, _MOST)


@router.delete("/prompts/{id}", status_code=204)
async def delete_prompt(here: Here, id: str) -> Response:
    """Delete a prompt."""
    here.conversations.check_kept()
    if not await here.in_thread(here.library.catalogue.prompts.delete, id):
        raise Problem(404, "no_prompt", "there is no such prompt")
    return Response(status_code=204)


@router.get(
    "/ratings",
    response_class=Response,
    responses={
        200: {
            "content": {"application/x-ndjson": {}},
            "description": "A line of JSON for each answer, in the form that `cacheblend-rag eval --data` reads. Of "
            "bad answers `answers` is empty, to be filled in, and `given` has the answer. The header `X-Left-Out` "
            "counts the rated answers that have no line.",
        }
    },
)
async def ratings(here: Here, rating: Annotated[int, Query(ge=-1, le=1)] = 1) -> Response:
    """Answers that were rated good, or bad; questions that are not understood alone are left out."""
    if not rating:
        raise Problem(422, "invalid", "rating: use 1 for good answers, -1 for bad ones", field="rating")
    lines, left_out = await here.in_thread(_rated, here, rating)
    text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines)
    return Response(text, media_type="application/x-ndjson", headers={"X-Left-Out": str(left_out)})


def _rated(here: Session, rating: int) -> tuple[list[dict[str, Any]], int]:
    """Rated answers as lines, and how many others there are."""
    found, left_out = [], 0
    for one in here.conversations.listed():
        for turn in whole(here, one.id, rating).all_turns:
            alone = not turn.asked.get("follows") or (turn.report or {}).get("stands_alone", True)
            passages = [_passage(source) for source in turn.sources if source.text.strip()]
            if alone and passages and turn.answer.strip():
                told = (
                    {"answers": [turn.answer.strip()]} if rating > 0 else {"answers": [], "given": turn.answer.strip()}
                )
                case = {"id": f"{one.id}/{turn.id}", "question": turn.question, **told, "passages": passages}
                found.append({**case, "kind": "good" if rating > 0 else "bad", "group": one.id})
            else:
                left_out += 1
    return found, left_out


def _passage(source: FoundChunk) -> dict[str, str]:
    return {"title": source.document, "text": source.text}
