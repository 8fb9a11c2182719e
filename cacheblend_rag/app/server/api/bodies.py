"""Bodies of requests looked at before they are validated: how many values they hold, whether all of it is text, and
whether a truth value or a number stands where the other one is meant.

Validation takes a hundred times as long for a value that is wrong as reading it does. It runs on the server's one
event loop, so a body must be small enough for it first.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError, from_json

from cacheblend_rag.app.server.problems import Problem

MOST_VALUES = 20_000
"""Values that a body may hold: elements of lists, and values of objects."""


def _flag(given: Any) -> Any:
    if given is not None and not isinstance(given, bool):
        raise PydanticCustomError("bool_wanted", "use true or false")
    return given


def _no_flag(given: Any) -> Any:
    if isinstance(given, bool):
        raise PydanticCustomError("number_wanted", "use a number")
    return given


Flag = Annotated[bool, BeforeValidator(_flag)]
"""True or false, and no number or word that could stand for it."""
NO_FLAG = BeforeValidator(_no_flag)
"""Of a number: JSON's true and false are none."""


def bounded_router(prefix: str, tag: str) -> APIRouter:
    """A router whose bodies are looked at before they are validated."""
    return APIRouter(prefix=prefix, tags=[tag], route_class=_BoundedRoute)


class _BoundedRequest(Request):
    async def json(self) -> Any:
        """See `Request.json`.

        Raises
        ------
        HTTPException
            With the problem: 413 if there are too many values, 400 if a text is none.
        """
        body = (await self.body()).removeprefix(codecs.BOM_UTF8)
        try:
            found = from_json(body)
        except ValueError as error:
            json.loads(body.decode(errors="replace"))  # of what is no JSON at all FastAPI says so
            raise HTTPException(400, Problem(400, "not_unicode", f"body: it is not all text: {error}")) from None
        values, open_ones = 0, [found]
        while open_ones:
            if isinstance(one := open_ones.pop(), (dict, list)):
                values += len(one)
                open_ones += one.values() if isinstance(one, dict) else one
            if values > MOST_VALUES:
                problem = Problem(413, "too_many_values", f"a request's body may hold {MOST_VALUES:,} values here")
                raise HTTPException(problem.status, problem)  # FastAPI lets no other error through
        return found


class _BoundedRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See `APIRoute.get_route_handler`."""
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            return await handle(_BoundedRequest(request.scope, request.receive))

        return bounded
