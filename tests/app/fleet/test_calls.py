"""An application that is called without a socket."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, StreamingResponse

from cacheblend_rag.app.fleet.calls import Call, Head, call_app

app = FastAPI()
ended = asyncio.Event()


@app.post("/echo")
async def echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(await request.body() + f" {request.url.query} {request.client}".encode(), 201)


@app.get("/slow")
async def slow() -> StreamingResponse:
    async def pieces():  # type: ignore[no-untyped-def]
        try:
            while True:
                yield b"piece"
                await asyncio.sleep(0)
        finally:
            ended.set()

    return StreamingResponse(pieces())


async def test_request_is_answered() -> None:
    call = Call("POST", "/echo", b"a=1", ((b"content-type", b"text/plain"),), b"body", ("10.0.0.1", 5))
    head, *parts = [part async for part in call_app(app, call)]
    assert isinstance(head, Head)
    assert head.status == 201
    assert (b"content-type", b"text/plain; charset=utf-8") in head.headers
    assert b"".join(parts) == b"body a=1 Address(host='10.0.0.1', port=5)"


async def test_pieces_come_as_they_are_sent_and_the_application_sees_who_leaves() -> None:
    ended.clear()
    async with aclosing(call_app(app, Call("GET", "/slow"))) as answer:  # type: ignore[type-var]
        head, first = await anext(answer), await anext(answer)
        assert isinstance(head, Head)
        assert first == b"piece"
        assert not ended.is_set()
    assert ended.is_set()
