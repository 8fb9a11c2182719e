"""The request about all tenants and their use, for a key that is for metrics."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from fastapi import Request
from pydantic import BaseModel

from cacheblend_rag.app.server.api.bodies import bounded_router
from cacheblend_rag.app.server.api.requests import service_of
from cacheblend_rag.app.server.services.use import TenantUse, use_of_all

router = bounded_router("/api", "Server")


class KeyInfo(BaseModel):
    """A key: its name, when it was made, and when it was last used since the server started."""

    name: str
    created: str | None
    last_used: str | None


class TenantInfo(BaseModel):
    """A tenant and its use; nothing of what its documents are called or hold.

    Counts of requests and tokens are those since the server started, also of keys that it has no more. They are null
    if one of its keys is counted together with others. What lies on the disk is null while it cannot be read.
    ``tokens_left`` is what is left of ``tokens_per_minute``; both are null without a limit.
    """

    tenant: str
    keys: list[KeyInfo]
    documents: int | None
    bytes: int | None
    limit_bytes: int
    conversations: int | None
    requests: int | None
    prompt_tokens: int | None
    answer_tokens: int | None
    tokens_left: int | None
    tokens_per_minute: int | None
    waiting: int
    last_asked: str | None


@router.get("/tenants")
async def tenants(request: Request) -> list[TenantInfo]:
    """Every tenant with its keys, what it has, and what it used."""
    service = service_of(request)
    limits = service.limits.disk_bytes, service.limits.tokens_per_minute
    return [_info(one, *limits) for one in await asyncio.to_thread(use_of_all, service)]


def _info(one: TenantUse, limit_bytes: int, tokens_per_minute: int | None) -> TenantInfo:
    used = one.used
    return TenantInfo(
        tenant=one.name,
        keys=[
            KeyInfo(name=key.name, created=key.created, last_used=_shown(used.latest.get(key.name))) for key in one.keys
        ],
        documents=one.documents,
        bytes=one.bytes,
        limit_bytes=limit_bytes,
        conversations=one.conversations,
        requests=used.requests,
        prompt_tokens=used.prompt_tokens,
        answer_tokens=used.answer_tokens,
        tokens_left=one.tokens_left,
        tokens_per_minute=tokens_per_minute,
        waiting=one.waiting,
        last_asked=_shown(max(used.latest.values(), default=None)),
    )


def _shown(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
