"""Bodies of requests looked at before they are validated: how many values they hold, whether all of it is text, and
whether a truth value or a number stands where the other one is meant.

Validation takes a hundred times as long for a value that is wrong as reading it does. It runs on the server's one
event loop, so a body must be small enough for it first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.routing import APIRoute
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from cacheblend_rag.app.server.problems import Problem

MOST_VALUES = 20_000
"""Values that a body may hold: elements of lists, and values of objects."""
_HALF_PAIR = re.compile("[\ud800-\udfff]")
# A half of a pair can only be escaped: its bytes are no UTF-8.
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


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
        body = await self.body()
        try:
            found = json.loads(body.decode("utf-8-sig"))  # json guesses other encodings, and lets halves of pairs pass
        except UnicodeDecodeError:
            raise HTTPException(400, Problem(400, "not_unicode", "body: it is not UTF-8")) from None
        problem = _fault_of(found, _ESCAPED_HALF.search(body) is not None)
        if problem is not None:
            raise HTTPException(problem.status, problem)  # FastAPI lets no other error through
        return found


class _BoundedRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See `APIRoute.get_route_handler`."""
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            return await handle(_BoundedRequest(request.scope, request.receive))

        return bounded


def _fault_of(body: Any, may_hold_halves: bool) -> Problem | None:
    """The reason why a body cannot be used, if there is one; ends as soon as it is known."""
    values, open_ones = 0, [("", body)]
    while open_ones:
        place, one = open_ones.pop()
        if isinstance(one, (dict, list)):
            values += len(one)
            if values > MOST_VALUES:
                return Problem(413, "too_many_values", f"a request's body may hold {MOST_VALUES:,} values here")
            if isinstance(one, dict) and may_hold_halves and any(map(_HALF_PAIR.search, one)):
                return _half(place)
            named = one.items() if isinstance(one, dict) else (("", inner) for inner in one)
            open_ones += [(place or str(name), inner) for name, inner in named]
        elif may_hold_halves and isinstance(one, str) and _HALF_PAIR.search(one):
            return _half(place)
    return None


def _half(place: str) -> Problem:
    where = place if _HALF_PAIR.search(place) is None else ""
    message = f"{where or 'body'}: half a surrogate pair is not text; leave it out"
    return Problem(400, "not_unicode", message, field=where or None)
