"""Errors as answers: one shape for the RAG API and for OpenAI clients."""

from __future__ import annotations

import json
import logging
import re
import traceback
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from cacheblend_rag.errors import (
    CacheBlendError,
    ConfigError,
    ContextLengthError,
    DocumentError,
    GenerationTimeoutError,
    MissingExtraError,
    PromptError,
    UnsupportedModelError,
)

_log = logging.getLogger(__name__)
_FIELD = re.compile(r"[a-z_][a-z0-9_]*")
_WORD = re.compile(r"[\w.:-]{1,40}")
_OF_WORDS = ("literal_error", "bool_wanted", "number_wanted", "unknown_word")
# Status and code of our own errors; of classes that an error has, the first counts.
_CODES: dict[type[CacheBlendError], tuple[int, str]] = {
    ContextLengthError: (400, "context_length_exceeded"),
    PromptError: (400, "bad_prompt"),
    DocumentError: (400, "bad_document"),
    GenerationTimeoutError: (504, "timeout"),
    UnsupportedModelError: (400, "unsupported_model"),
    CacheBlendError: (500, "failed"),
}
_FORMS = ("str", "int", "float", "bool", "none")


class ProblemDetail(BaseModel):
    """An error; ``type`` and ``param`` are there for OpenAI clients."""

    code: str
    message: str
    type: str
    param: str | None = None
    field: str | None = None


class ProblemBody(BaseModel):
    """The body of every answer that is an error."""

    error: ProblemDetail


class Problem(Exception):  # noqa: N818 - it is an answer
    """A request that is answered by an error.

    Parameters
    ----------
    status : int
        HTTP status.
    code : str
        A short name of what is wrong.
    message : str
        For people; never holds document text.
    field : str, optional
        The field of the request it is about.
    retry_after : int, optional
        Seconds after which another try makes sense.
    """

    def __init__(
        self, status: int, code: str, message: str, *, field: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.field, self.retry_after = status, code, message, field, retry_after

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        detail = {
            "code": self.code,
            "message": self.message,
            "type": kinds.get(self.status, kind),
            "param": self.field,
            "field": self.field,
        }
        return {"error": detail}

    def response(self) -> Response:
        """The answer."""
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after is not None else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def problem_of(error: BaseException) -> Problem:
    """The problem that a client sees for an error. For an unexpected error it says only that an error occurred."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, ConfigError):
        return Problem(400, "bad_value", f"{error.field} is not usable: {error.remedy}", field=error.field)
    if isinstance(error, MissingExtraError):
        return Problem(400, "not_installed", f"the server lacks a package for this: {error}")
    for kind, (status, code) in _CODES.items():
        if isinstance(error, kind):
            return Problem(status, code, str(error))
    return Problem(500, "internal", "something went wrong on the server; its log says more")


def noted_problem(error: BaseException) -> Problem:
    """`problem_of`; a fault of the server's is also logged, by kind and place: its message may quote a document."""
    problem = problem_of(error)
    if problem.status >= 500:
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        places = [f"{frame.filename}:{frame.lineno}" for frame in frames]
        _log.error("%s", problem.code, extra={"fields": {"error": type(error).__name__, "at": places}})
    return problem


def add_handlers(app: FastAPI) -> None:
    """Answer errors in the one shape."""

    @app.exception_handler(Problem)
    @app.exception_handler(CacheBlendError)
    async def known(request: Request, error: Exception) -> Response:
        return noted_problem(error).response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        where, message = _first_fault(error)
        # As OpenAI answers; its clients raise their BadRequestError for nothing else.
        status = 400 if request.url.path.startswith("/v1/") else 422
        return Problem(status, "invalid", f"{where or 'body'}: {message}", field=where or None).response()

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        if isinstance(error.detail, Problem):
            return error.detail.response()
        phrase = HTTPStatus(error.status_code).phrase
        answer = Problem(error.status_code, phrase.lower().replace(" ", "_"), phrase).response()
        answer.headers.update(error.headers or {})
        return answer


def _first_fault(error: RequestValidationError) -> tuple[str, str]:
    """The first field that is wrong, and how; empty if it is the whole body.

    A field that only other servers have is answered with the one to use, where a request is for an answer. Of values
    only numbers are repeated, and single words where words are listed: others may be text of documents.
    """
    found = error.errors()
    if found[0]["type"] == "json_invalid":
        return "", "it is not JSON"
    # A field of several forms has an error for each; the one that was understood the furthest is about its value.
    same = [one for one in found if one["loc"][:2] == found[0]["loc"][:2]]
    fault = max(same, key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))
    parts = [str(part) for part in fault["loc"][:-1] if part != "body" and _names_field(part)]
    last, value = fault["loc"][-1], fault.get("input")
    if fault["type"] == "extra_forbidden":
        return ".".join([*parts, str(last)[:100]]), "this is not supported here; leave it out"
    where = ".".join([*parts, str(last)] if last != "body" and _names_field(last) else parts)
    word = fault["type"] in _OF_WORDS and isinstance(value, str) and _WORD.fullmatch(value)
    number = isinstance(value, int | float) and fault["type"] != "value_error"
    shown = f", not {json.dumps(value, ensure_ascii=False)}" if word or number else ""
    return where, f"{fault['msg'].removeprefix('Value error, ').replace('Input should be', 'use', 1)}{shown}"


def _names_field(part: int | str) -> bool:
    """Whether a part of an error's location is a field of the request, not pydantic's name for a variant of a value."""
    return isinstance(part, int) or (bool(_FIELD.fullmatch(part)) and part not in _FORMS)


def too_large(most: int) -> Problem:
    """A request whose body has more bytes than it may have."""
    return Problem(413, "too_large", f"a request's body may have {most:,} bytes here")
