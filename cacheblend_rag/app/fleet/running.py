"""The application on this machine."""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve

from cacheblend_rag.app.cli.configuration import Given, server_settings
from cacheblend_rag.app.fleet.application import build_given
from cacheblend_rag.app.fleet.arguments import FleetArguments
from cacheblend_rag.errors import CacheBlendError

_NAME = "cacheblend-rag"
_STORE_BYTES = 200_000_000  # of objects between processes: requests and pieces of answers pass through it


@contextmanager
def fleet(given: Mapping[str, Given], replicas: int, **build: Any) -> Iterator[str]:
    """Replicas on this machine, in a cluster of Ray's of its own; the address they answer at.

    Parameters
    ----------
    given : mapping of str to Given
        Options of the server.
    replicas : int
    **build
        Further arguments of `build_given`.

    Raises
    ------
    CacheBlendError
        If an option cannot be used, or the replicas do not start.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray keeps one in the home folder
    settings = server_settings(given)
    share = (os.cpu_count() or 1) / replicas
    actor: dict[str, Any] = {"num_cpus": min(share, 1.0) if share < 2 else int(share)}
    if settings.rag.on_gpu:
        import torch

        actor["num_gpus"] = torch.cuda.device_count() / replicas
    # What keeps a replica from starting here keeps it from starting again.
    build = {"max_constructor_retry_count": replicas, **build}
    application = build_given(FleetArguments(replicas=replicas, actor=actor), given, **build)
    port = settings.port or _free_port(settings.host)
    # Sockets lie in it, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp" if os.path.isdir("/tmp") else None) as folder:
        ray.init(
            address="local",
            num_cpus=(os.cpu_count() or 1) + 2,  # for actors that are not ours
            include_dashboard=False,
            object_store_memory=_STORE_BYTES,
            _temp_dir=folder,
            configure_logging=False,
        )
        try:
            quiet = {"enable_access_log": False, "log_level": "WARNING"}
            serve.start(http_options={"host": settings.host, "port": port}, logging_config=quiet)
            try:
                serve.run(application, name=_NAME, logging_config=quiet)
            except RuntimeError as error:
                raise CacheBlendError(f"the replicas do not start: {_reason()}") from error
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            yield f"http://{host}:{port}"
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]
            ray.shutdown()


def serve_fleet(given: Mapping[str, Given], replicas: int) -> int:
    """Serve until interrupted; the process's exit status."""
    stopped = threading.Event()
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with fleet(given, replicas) as address:
        signal.signal(signal.SIGTERM, lambda *_: stopped.set())  # Ray has set one of its own
        print(f"Open {address}", file=sys.stderr, flush=True)
        try:
            stopped.wait()
        except KeyboardInterrupt:
            pass
    return 0


def _reason() -> str:
    """The last error of replicas that do not start."""
    told = "\n".join(one.message for one in serve.status().applications[_NAME].deployments.values())
    errors = re.findall(r"^[\w.]*Error: (.+)$", told, re.MULTILINE)
    return errors[-1] if errors else told.strip()


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listening:
        return int(listening.getsockname()[1])
