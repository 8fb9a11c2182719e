"""The OpenAI-compatible API: completions, conversations, responses, models, embeddings."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import Request

from cacheblend_rag.app.server.api.bodies import bounded_router
from cacheblend_rag.app.server.api.completions import AnswerRequest, Chat, Completion
from cacheblend_rag.app.server.api.openai_bodies import ChatBody, CompletionBody, EmbeddingBody, ResponsesBody
from cacheblend_rag.app.server.api.requests import Here
from cacheblend_rag.app.server.api.responses import Response
from cacheblend_rag.app.server.api.streams import EventStream, unless_gone
from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.services.logs import served
from cacheblend_rag.app.server.services.served_model import check_model
from cacheblend_rag.app.server.services.service import Session

router = bounded_router("/v1", "OpenAI")
_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "An answer, or its pieces."}
}


@router.get("/models")
async def models(here: Here) -> dict[str, Any]:
    """The models that answer. The embedder is left out, because clients offer every listed model for chats."""
    return {"object": "list", "data": [_model(here, name) for name in here.service.models]}


@router.get("/models/{model:path}")
async def model(here: Here, model: str) -> dict[str, Any]:
    """One of them, or the embedder."""
    check_model(model, [*here.service.models, here.service.embedder_name])
    return _model(here, model)


@router.post("/embeddings")
async def embeddings(here: Here, request: Request, body: EmbeddingBody) -> dict[str, Any]:
    """Vectors of texts, by the embedder that documents are found with."""
    service = here.service
    check_model(body.model, [service.embedder_name])
    texts = [body.input] if isinstance(body.input, str) else body.input
    if sum(map(len, texts)) > service.limits.prompt_chars:
        raise Problem(413, "too_long", f"all texts may have {service.limits.prompt_chars:,} characters", field="input")
    async with await unless_gone(request, service.queue.slot(here.name)) as slot:
        tokens = await slot.in_thread(service.embedder_tokens, texts)
        here.charge([tokens])
        vectors = await slot.in_thread(service.embeddings.embed_documents, texts)
    data = [
        {
            "object": "embedding",
            "index": number,
            "embedding": vector
            if body.encoding_format == "float"
            else base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode(),
        }
        for number, vector in enumerate(vectors)
    ]
    served.get().embedded(tokens)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": body.model, "usage": usage}


@router.post("/completions", responses=_STREAMED, response_model=None)
async def completions(here: Here, request: Request, body: CompletionBody) -> Any:
    """Go on with a text. Chunks stand between separators in it, or come as ``documents`` before it."""
    return await _answered(Completion(here, body), request)


@router.post("/chat/completions", responses=_STREAMED, response_model=None)
async def chat(here: Here, request: Request, body: ChatBody) -> Any:
    """Answer a conversation. ``documents`` stand in its system message."""
    return await _answered(Chat(here, body), request)


@router.post("/responses", responses=_STREAMED, response_model=None)
async def responses(here: Here, request: Request, body: ResponsesBody) -> Any:
    """Answer a conversation by a response. ``documents`` stand in its system message; no response is kept."""
    return await _answered(Response(here, body), request)


async def _answered(work: AnswerRequest, request: Request) -> Any:
    """All of a request's answers, or their pieces."""
    here = work.here
    here.check_quota(work.most * work.body.n)
    slot = await unless_gone(request, here.service.queue.slot(here.name))
    async with slot.kept():  # what the model is fed is made in the request's own turn
        await unless_gone(request, slot.in_thread(work.prepare))
    if work.body.stream:
        return EventStream(work.events(slot), slot, here.service.longest)
    async with slot:
        return await unless_gone(request, work.whole(slot))


def _model(here: Session, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": here.service.started, "owned_by": "local"}
