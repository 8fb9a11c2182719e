"""One replica: a whole server with a folder of its own, called without a socket.

The process that builds the application, Ray's controller and `_Agreement` import this file too. So what is heavy is
imported where a replica starts.
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cacheblend_rag.app.cli.configuration import GivenValue, server_settings
from cacheblend_rag.app.data_lock import FolderInUseError
from cacheblend_rag.app.fleet.calls import Call, Head, call_app
from cacheblend_rag.app.server.settings import ServerSettings
from cacheblend_rag.app.startup import no_search_for_garbage

if TYPE_CHECKING:
    from cacheblend_rag.app.fleet.summaries import SummarizedStore
    from cacheblend_rag.app.server.services.service import Service
    from cacheblend_rag.store.base import KVStore


class Replica:
    """A server's application over its own memory and folder.

    Parameters
    ----------
    given : mapping of str to GivenValue
        Options of the server.

    Raises
    ------
    CacheBlendError
        If the server cannot be started.
    """

    def __init__(self, given: Mapping[str, GivenValue]) -> None:
        from cacheblend_rag.app.server.app import SWITCH_INTERVAL, create_app
        from cacheblend_rag.app.server.services.logs import configure_logs

        sys.setswitchinterval(SWITCH_INTERVAL)
        settings = server_settings(given)
        with no_search_for_garbage():
            self._place, self._service, self._store = _started(settings)
            self._app = create_app(settings, self._service)
        configure_logs(settings.access_log)
        self._app.state.service = self._service
        engine = self._service.engine
        plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        arguments = partial(engine.tokenizer.decode, **plain), engine.fingerprint, engine.config.separator
        threading.Thread(target=self._store.read, args=arguments, daemon=True).start()

    async def answer(self, call: Call, *, chunks: Mapping[int, int], ids: str = "") -> AsyncIterator[Head | bytes]:
        """Answer a request.

        Parameters
        ----------
        call : Call
        chunks : mapping of int to int
            Its pieces; the router has looked at them, and at the next.
        ids : str
            Prefix of the ids of the only replica that can answer; empty if any replica can.
        """
        async for one in call_app(self._app, call):
            place = b"x-replica", str(self._place).encode()
            yield replace(one, headers=(*one.headers, place)) if isinstance(one, Head) else one

    def record_replica_metadata(self) -> dict[str, Any]:
        """The number of the replica's folder, and how ids of its answers begin; the router gets both at once."""
        return {"place": self._place, "ids": self._service.ids}

    def record_routing_stats(self) -> dict[str, Any]:
        """A summary of the chunks held here, which the router gets every second."""
        return {"held": self._store.summary()}

    async def check_health(self) -> None:
        """Raise if this replica does not work, so that Ray replaces it."""
        await self._service.check_working()

    def __del__(self) -> None:
        """Ray calls this when it stops a replica."""
        service: Service | None = getattr(self, "_service", None)
        if service is not None:
            del self._service
            service.begin_stop()
            service.close()


def _started(settings: ServerSettings) -> tuple[int, Service, SummarizedStore]:
    """A server in the first folder that no other replica uses, so that a restart finds its own."""
    from cacheblend_rag.app.fleet.summaries import SummarizedStore
    from cacheblend_rag.app.server.services.service import open_service

    folder, stores = settings.rag.data_path / "replicas", list[SummarizedStore]()

    def wrapped(store: KVStore) -> KVStore:
        stores.append(SummarizedStore(store))
        return stores[-1]

    place = 0
    while True:
        rag = replace(settings.rag, data_dir=folder / str(place))
        try:
            own = replace(settings, rag=rag, data=settings.documents_path)
            return place, open_service(own, wrapped, f"{secrets.token_hex(4)}-"), stores[-1]
        except FolderInUseError:
            place += 1
