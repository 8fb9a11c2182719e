"""Use of each tenant, for those who run the server: names, counts and times, and no text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.security.tenants import Keys, NamedKey
from cacheblend_rag.app.server.services.metrics import Use
from cacheblend_rag.app.server.services.service import Service, session_if_usable
from cacheblend_rag.app.server.storage.tables import DatabaseFault


@dataclass(frozen=True)
class TenantUse:
    """One tenant.

    Parameters
    ----------
    name : str
    keys : list of NamedKey
        Those that it has now.
    used : Use
        Requests and tokens since the server started, also of keys that are gone.
    documents, bytes, conversations : int or None
        Counts of what lies on the disk; None while its folder or database cannot be used.
    tokens_left : int or None
        Of what it may use in a minute; None without a limit.
    waiting : int
        Requests that wait for the model now.
    """

    name: str
    keys: list[NamedKey]
    used: Use
    documents: int | None
    bytes: int | None
    conversations: int | None
    tokens_left: int | None
    waiting: int


def use_of_all(service: Service) -> list[TenantUse]:
    """Every tenant that has a key, or had one while the server ran, by name."""
    # A key of the environment and one of the file may have one name: they are counted as one, and shown as one.
    known = {(one.tenant, one.name): one for one in service.keys.named()}
    keys = list(known.values()) or [NamedKey(Keys.LOCAL, Keys.LOCAL)] * (not service.settings.guarded)
    names = {one.tenant for one in keys} | set(service.sessions) | service.metrics.tenants()
    return [_use_of(service, name, [one for one in keys if one.tenant == name]) for name in sorted(names)]


def _use_of(service: Service, name: str, keys: list[NamedKey]) -> TenantUse:
    held: Sequence[int | None] = (None, None, None)
    session = session_if_usable(service, name)
    with suppress(Problem, DatabaseFault):  # the database may be away, or fail
        if session is not None:
            catalogue = session.library.catalogue
            held = catalogue.documents_held(), catalogue.bytes_used(), catalogue.kept.counts()[0]
    documents, used, conversations = held
    return TenantUse(
        name,
        keys,
        service.metrics.use_of(name),
        documents,
        used,
        conversations,
        service.quota.left(name),
        service.queue.waiting_of(name),
    )
