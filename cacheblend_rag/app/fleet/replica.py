"""One replica: a whole server with a folder of its own, called without a socket, and what all replicas must share.

The process that builds the application, Ray's controller and `_Agreement` import this file too. So what is heavy is
imported where a replica starts.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from cacheblend_rag.app.cli.configuration import GivenValue, server_settings
from cacheblend_rag.app.data_lock import FolderInUseError
from cacheblend_rag.app.fleet.calls import Call, Head, call_app
from cacheblend_rag.app.server.settings import ServerSettings
from cacheblend_rag.app.startup import no_search_for_garbage
from cacheblend_rag.config import ENV_PREFIX, BlendConfig, options_of
from cacheblend_rag.errors import ConfigError

if TYPE_CHECKING:
    from cacheblend_rag.app.fleet.summaries import SummarizedStore
    from cacheblend_rag.app.server.services.service import Service
    from cacheblend_rag.store.base import KVStore

_NAMESPACE = "cacheblend-rag"
# Options that decide what is stored and what is answered.
_AGREED = [option.name for option in options_of(BlendConfig) if option.identity and option.name != "condition"]
_PROBE = "The harbour was dredged in 1912; naïve 数据 🙂\n\tdef f(x): return x ** 2"


def check_agreed(agreed: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a replica that differs from those before it.

    Parameters
    ----------
    agreed, own : mapping of str to object
        The settings of the first replica, and those of this one. Another machine may round ``"embedder"`` differently,
        the vectors of some texts.

    Raises
    ------
    ConfigError
        That names the first term that differs, and both values.
    """
    import numpy as np

    from cacheblend_rag.retrieval.embedder import same_model

    for name, here in own.items():
        there = agreed.get(name)
        if not (same_model(there, np.array(here)) if name == "embedder" else there == here):
            remedy = f"the other replicas have {there!r:.80}; give all of them the same, in one configuration"
            raise ConfigError(f"{name} of this replica", f"{here!s:.80}", remedy)


def agree(version: str, own: Mapping[str, Any]) -> None:
    """Agree with the other replicas of a configuration; the first replica sets the terms.

    Raises
    ------
    ConfigError
        As of `check_agreed`.
    """
    kept = _Agreement.options(  # type: ignore[attr-defined]
        name="agreement", namespace=_NAMESPACE, get_if_exists=True, lifetime="detached", num_cpus=0
    ).remote()
    check_agreed(ray.get(kept.agreed.remote(version, own)), own)


@ray.remote
class _Agreement:
    """Keeps the terms of the first replica of each configuration."""

    def __init__(self) -> None:
        self._terms: dict[str, Mapping[str, Any]] = {}

    def agreed(self, version: str, own: Mapping[str, Any]) -> Mapping[str, Any]:
        """The first terms of a configuration."""
        return self._terms.setdefault(version, own)


class Replica:
    """A server's application over its own memory and folder.

    Parameters
    ----------
    given : mapping of str to GivenValue
        Options of the server.
    version : str
        Name of the configuration. All replicas of one must agree.

    Raises
    ------
    CacheBlendError
        If the server cannot be started, or differs from the other replicas.
    """

    def __init__(self, given: Mapping[str, GivenValue], version: str) -> None:
        from cacheblend_rag.app.server.app import SWITCH_INTERVAL, create_app
        from cacheblend_rag.app.server.services.logs import configure_logs

        sys.setswitchinterval(SWITCH_INTERVAL)
        settings = server_settings(given)
        with no_search_for_garbage():
            self._place, self._service, self._store = _started(settings)
            self._app = create_app(settings, self._service)
        agree(version, terms_of(self._service))
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
            yield replace(one, headers=(*one.headers, self._header)) if isinstance(one, Head) else one

    @property
    def _header(self) -> tuple[bytes, bytes]:
        return b"x-replica", str(self._place).encode()

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


def terms_of(service: Service) -> dict[str, Any]:
    """The settings of a server whose model is loaded; secrets as digests."""
    engine, config = service.engine, service.engine.config
    return {
        "dtype": str(engine.adapter.dtype).removeprefix("torch."),
        "condition": engine.condition,
        **{name: getattr(config, name) for name in _AGREED},
        "salt": _digest(config.salt),
        "encryption": _digest(os.environ.get(ENV_PREFIX + "ENCRYPTION_KEY", "")),
        "tokenizer": _digest(engine.tokenizer.encode(_PROBE)),
        "embedder": service.embeddings.fingerprint.tolist(),
        "model": engine.fingerprint,
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
