"""Layers that every request passes: its id, checks of size, host, origin and key, and headers of its answer."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cacheblend_rag.app.server.api.streams import EventStream, last_events
from cacheblend_rag.app.server.keys_file import LOOK_AGAIN
from cacheblend_rag.app.server.problems import Problem, noted_problem, too_large
from cacheblend_rag.app.server.security.tenants import Caller, Keys, RequestQuota
from cacheblend_rag.app.server.services.logs import ServedRequest, add_to_span, log_access, request_id, served
from cacheblend_rag.app.server.settings import ServerSettings, is_loopback

_SAFE = ("GET", "HEAD", "OPTIONS")
# Paths that need a key, where there are keys.
_GUARDED = ("/api/", "/v1/", "/metrics")
# Scripts come from the server's own files only, and none may parse HTML: text of documents can never become one.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
# Header of the id, of requests and of answers; OpenAI's clients show it as ``_request_id``.
_ID = "X-Request-ID"
_PLAIN = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Gatekeeper:
    """Layer that every request passes, and every answer, which gets the id of its request, or a new one.

    Parameters
    ----------
    app : ASGI application
    settings : ServerSettings
    keys : callable
        Those of the server.
    seen : callable
        Gets each request once it has ended, and its answer with it.
    """

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, keys: Callable[[], Keys], seen: Callable[[ServedRequest], None]
    ) -> None:
        self._app, self._settings, self._keys, self._seen = app, settings, keys, seen
        self._uploads, self._under_way = Counter[str | None](), Counter[str | None]()
        # Without keys all requests are those of one tenant, on its own machine.
        self._requests = RequestQuota(settings.limits.requests_per_minute if settings.guarded else None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        one = ServedRequest(scope["method"])
        served.set(one)
        given = Headers(scope=scope).get(_ID, "")
        token = request_id.set(given if _PLAIN.fullmatch(given) else f"req_{secrets.token_hex(12)}")
        try:
            await self._serve(scope, receive, send, one)
        finally:
            self._seen(one)
            log_access(one)
            request_id.reset(token)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, one: ServedRequest) -> None:
        started = time.perf_counter()

        async def noted(message: Message) -> None:
            one.bytes_out += len(message.get("body", b""))
            if message["type"] == "http.response.start":
                one.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[_ID] = request_id.get()
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            elif not message.get("more_body"):
                add_to_span(one)
            await send(message)

        most = self._settings.limits.body_of(scope["path"].endswith("/documents"))
        limited = _Limited(receive, noted, most, lambda: self._is_revoked(scope))
        try:
            problem = self._refusal(scope, limited.most)
            one.caller = scope.get("caller")
            if problem is not None:
                await problem.response()(scope, receive, noted)
            else:
                with self._counted(scope):
                    await self._app(scope, limited.receive, limited.send)
                await limited.end(scope["path"])
        except _TooLargeError:
            pass  # answered already
        except ClientDisconnect:
            scope.setdefault("state", {})["gone"] = True
        except Exception as error:
            problem = noted_problem(error)
            if not one.status:
                await problem.response()(scope, receive, noted)
        finally:
            one.seconds, one.bytes_in = time.perf_counter() - started, limited.read
            one.path = getattr(scope.get("route"), "path", None) or "other"  # never what the client wrote
            if scope.get("state", {}).get("gone") or not one.status:
                one.status = 499
            if limited.revoked:
                one.status = 401

    @contextmanager
    def _counted(self, scope: Scope) -> Iterator[None]:
        """Count what each tenant has under way; of uploads, the files lie on the disk before they are looked at."""
        mine = [scope["caller"].tenant] if "caller" in scope else []
        uploads = mine if _is_upload(scope) else []
        self._under_way.update(mine)
        self._uploads.update(uploads)
        try:
            yield
        finally:
            self._under_way.subtract(mine)
            self._uploads.subtract(uploads)

    def _is_revoked(self, scope: Scope) -> bool:
        """Whether the key of a request that was let in is not there any more, or is another tenant's by now."""
        caller: Caller | None = scope.get("caller")
        if caller is None:
            return False
        try:
            return self._keys().caller_of(Headers(scope=scope).get("authorization")).tenant != caller.tenant
        except Problem:
            return True

    def _refusal(self, scope: Scope, most: int) -> Problem | None:
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > most:
            return too_large(most)
        host = headers.get("host", "")
        # Another name that leads here is an attack from a page.
        if self._settings.is_loopback and not is_loopback(_split(f"//{host}").hostname or ""):
            return Problem(421, "wrong_host", "this server answers on its own machine only")
        if scope["path"].startswith(_GUARDED):  # before anything of a body is read
            try:
                caller = scope["caller"] = self._keys().caller_of(headers.get("authorization"))
            except Problem as unknown:
                return unknown
            if caller.tenant is None and scope["path"] != "/metrics":
                return Problem(403, "metrics_only", "this key only reads /metrics")
            if caller.tenant is not None and (problem := self._requests.refusal(caller.tenant)) is not None:
                return problem
            if self._under_way[caller.tenant] >= self._settings.limits.at_once:
                return Problem(429, "busy", "you already have as many requests running as are allowed", retry_after=5)
            if self._uploads[caller.tenant] >= self._settings.limits.uploading and _is_upload(scope):
                return Problem(429, "busy", "you are already sending as many uploads as are allowed", retry_after=5)
        origin = headers.get("origin")
        if origin is not None and scope["method"] not in _SAFE and _split(origin).netloc != host:
            return Problem(403, "wrong_origin", "pages of other servers may not use this one")
        return None


class _TooLargeError(Exception):
    """The body went on past its limit."""


class _Limited:
    """Limits a request: the size of its body, and its lifetime to that of its key.

    The bytes are counted as they arrive, so a missing or false length does not matter. Once the key is revoked, the
    request goes as if its client had gone away: streams end, and what waits gives up. No answer begins after that.
    """

    _REVOKED = Problem(401, "unauthorized", "the key was revoked")

    def __init__(self, receive: Receive, send: Send, most: int, is_revoked: Callable[[], bool]) -> None:
        self._receive, self._send, self.most, self._is_revoked = receive, send, most, is_revoked
        self.read, self.revoked = 0, False
        self._begun = self._streams = False

    async def receive(self) -> Message:
        message = await self._next()
        self.read += len(message.get("body", b""))
        if self.read > self.most:
            await self._refuse(too_large(self.most))
            raise _TooLargeError
        return message

    async def _next(self) -> Message:
        while not self._is_revoked():
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN):
                    return await self._receive()
        await self._cut()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if not self._begun and self._is_revoked():
            await self._cut()
        if self.read > self.most or self.revoked:
            return
        self._begun = True
        await self._send(message)
        if message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self._streams = kind.startswith(EventStream.media_type)
        else:
            self._streams = self._streams and message.get("more_body", False)

    async def end(self, path: str) -> None:
        """Write the reason into a stream that was cut. The producer of its events has already stopped."""
        if self.revoked and self._streams:
            body = "".join(last_events(path, self._REVOKED)).encode()
            await self._send({"type": "http.response.body", "body": body})

    async def _cut(self) -> None:
        self.revoked = True
        await self._refuse(self._REVOKED)

    async def _refuse(self, problem: Problem) -> None:
        if not self._begun:
            self._begun = True
            await problem.response()({"type": "http"}, self._receive, self._send)


def _is_upload(scope: Scope) -> bool:
    return scope["method"] == "POST" and str(scope["path"]).endswith("/documents")


def _split(address: str) -> SplitResult:
    """The parts of an address that a client sent; all are empty if it is not a valid address."""
    try:
        return urlsplit(address)
    except ValueError:  # such as a bracket that is not closed
        return urlsplit("")
