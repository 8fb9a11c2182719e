"""Takes requests, finds their pieces, lets a replica answer, and forwards what it says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any, cast

from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from cacheblend_rag.app.fleet.calls import Call, Head
from cacheblend_rag.app.fleet.pieces import texts_in, weighed_pieces
from cacheblend_rag.app.server.api.streams import last_events
from cacheblend_rag.app.server.problems import Problem, too_large
from cacheblend_rag.app.server.settings import Limits

_ANSWERED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_QUESTIONS = ("/api/ask", "/api/compare")
_ANSWER = re.compile(r"/api/answers/([^/-]+-)[^/]+/verification")
_READS = re.compile(r"/v1/.*|/api/(?:ask|compare|search)")
# Seconds that a search for the passages of a question may take; later ones go to any replica.
_SEARCHING = 5.0
_TRIES = 2
_LOST = Problem(503, "replica_lost", "the replica that answered has stopped; ask again", retry_after=1)


class Ingress:
    """The front of all replicas.

    Parameters
    ----------
    replicas : DeploymentHandle
    limits : Limits
    separator : str
        Text between chunks in prompts that come as one text.
    passages : int
        Passages of a question that does not say how many.
    """

    def __init__(self, replicas: DeploymentHandle[Any], limits: Limits, separator: str, passages: int) -> None:
        self._replicas, self._limits = replicas.options(stream=True), limits
        self._separator, self._passages = separator, passages

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        try:
            call = await self._read(request)
            return await self._answered(call, await self._chunks(call))
        except Problem as problem:
            return problem.response()

    async def _read(self, request: Request) -> Call:
        path = request.url.path
        most = self._limits.body_of(path.endswith("/documents"))
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > most:
            raise too_large(most)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise too_large(most)
        client = None if request.client is None else (request.client.host, request.client.port)
        query = request.scope["query_string"]
        return Call(request.method, path, query, tuple(request.scope["headers"]), bytes(body), client)

    async def _chunks(self, call: Call) -> dict[int, int]:
        """The pieces of a request by which a replica is chosen."""
        question = call.path in _QUESTIONS
        if call.method != "POST" or not (question or call.path in _ANSWERED):
            return {}
        try:
            body = json.loads(call.body)
            if not question:
                return weighed_pieces(texts_in(body), self._separator)
        except (ValueError, RecursionError):
            return {}  # a replica says what is wrong with it
        if not isinstance(body, dict):
            return {}
        with contextlib.suppress(TimeoutError, RayActorError):
            async with asyncio.timeout(_SEARCHING):
                return await self._found(call, body)
        return {}

    async def _found(self, call: Call, body: dict[str, Any]) -> dict[int, int]:
        """The pieces of the passages that a question will be answered from.

        A question that follows others goes where its conversation began: there its prompt may be kept.
        """
        # The question that the conversation began with.
        history = body.get("history")
        first = history[0] if isinstance(history, list) and history else body
        question = str(first.get("question", "") if isinstance(first, dict) else "")
        query = {"question": question, "top_k": body.get("top_k") or self._passages}
        query |= {"documents": body["documents"]} if body.get("documents") else {}
        kept = [one for one in call.headers if not one[0].lower().startswith((b"content-", b"transfer-"))]
        headers = (*kept, (b"content-type", b"application/json"))
        search = Call("POST", "/api/search", b"", headers, json.dumps(query).encode(), call.client)
        answer = self._sent(search, {})
        try:
            head, *parts = [part async for part in answer]
        finally:
            answer.cancel()  # type: ignore[no-untyped-call]  # it may have taken too long
        if not isinstance(head, Head) or head.status != 200:
            return {}
        return weighed_pieces(one["text"] for one in json.loads(b"".join(parts))["passages"])

    def _sent(self, call: Call, chunks: dict[int, int]) -> DeploymentResponseGenerator[Any]:
        answer = _ANSWER.fullmatch(call.path)  # the replica that gave the id has the answer
        ids = answer[1] if answer else ""
        return cast("DeploymentResponseGenerator[Any]", self._replicas.answer.remote(call, chunks=chunks, ids=ids))

    async def _answered(self, call: Call, chunks: dict[int, int]) -> Response:
        reads = call.method in ("GET", "HEAD") or bool(_READS.fullmatch(call.path))
        for _ in range(_TRIES if reads else 1):
            answer = self._sent(call, chunks)
            try:
                head, first = await anext(answer), await anext(answer, b"")
            except RayActorError:  # nothing was sent yet
                continue
            except BaseException:  # the client has gone
                answer.cancel()  # type: ignore[no-untyped-call]
                raise
            response = StreamingResponse(_forwarded(call, head, first, answer), head.status)
            # Ray Serve adds the id that the request came to us with.
            response.raw_headers = [one for one in head.headers if one[0] != b"x-request-id"]
            return response
        raise _LOST


async def _forwarded(
    call: Call, head: Head, first: bytes, answer: DeploymentResponseGenerator[Any]
) -> AsyncIterator[bytes]:
    """The body of an answer; of events, the last one is an error if the replica is lost."""
    try:
        if first:
            yield first
        async for piece in answer:
            yield piece
    except RayActorError:
        if not any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in head.headers):
            raise  # the connection breaks, so that nobody takes the answer for a whole one
        yield "".join(last_events(call.path, _LOST)).encode()
    finally:
        answer.cancel()  # type: ignore[no-untyped-call]  # the client may have gone
