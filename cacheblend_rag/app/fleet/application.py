"""The application: replicas of the server behind an ingress, as Ray Serve deploys it and on this machine."""

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
from ray.serve.config import RequestRouterConfig

from cacheblend_rag.app.cli.configuration import GivenValue, given_options, given_sections, server_settings
from cacheblend_rag.app.fleet.arguments import FleetArguments
from cacheblend_rag.app.fleet.ingress import Ingress
from cacheblend_rag.app.fleet.replica import Replica
from cacheblend_rag.app.fleet.router import ChunkRouter
from cacheblend_rag.errors import CacheBlendError, ConfigError

# A replica has a queue of its own, which refuses in the words of the API.
_ONGOING = 1_000
_STOPPING = 40  # seconds until a replica that is told to stop is killed
_NAME = "cacheblend-rag"
_STORE_BYTES = 200_000_000  # of objects between processes: requests and pieces of answers pass through it


def build(arguments: FleetArguments) -> serve.Application:
    """The application that a configuration of Ray Serve describes.

    Raises
    ------
    ConfigError
        If an option cannot be used.
    """
    given = given_options(None, given_sections(arguments.options, "args.options"))
    if arguments.several and server_settings(given).rag.dtype == "auto":
        remedy = 'with several replicas name one, such as "bfloat16" or "float32": machines choose differently'
        raise ConfigError("dtype", "auto", remedy)
    return _build_given(arguments, given)


def _build_given(
    arguments: FleetArguments, given: Mapping[str, GivenValue], routing: Mapping[str, Any] | None = None, **options: Any
) -> serve.Application:
    """The application with options that are read already.

    Parameters
    ----------
    arguments : FleetArguments
    given : mapping of str to GivenValue
    routing : mapping, optional
        Class and arguments of another router, as `RequestRouterConfig` takes them.
    **options
        Further options of Ray Serve for the replicas.

    Raises
    ------
    ConfigError
        If an option cannot be used.
    """
    settings = server_settings(given)
    if settings.also_models:
        remedy = "replicas on Ray Serve have one model each: leave this out, or run a server without Ray"
        raise ConfigError("also_models", ", ".join(settings.also_models), remedy)
    rule = {"imbalance_limit": arguments.imbalance_limit}
    routing = routing or {"request_router_class": ChunkRouter, "request_router_kwargs": rule}
    if arguments.autoscaling is None:
        options["num_replicas"] = arguments.replicas
    else:
        options["autoscaling_config"] = {"initial_replicas": arguments.replicas, **arguments.autoscaling}
    replicas = serve.deployment(Replica).options(  # type: ignore[attr-defined]
        name="replicas",
        max_ongoing_requests=_ONGOING,
        graceful_shutdown_timeout_s=_STOPPING,
        ray_actor_options=arguments.actor,
        request_router_config=RequestRouterConfig(**{"request_routing_stats_period_s": 1.0, **routing}),
        **options,
    )
    ingress = serve.deployment(Ingress).options(  # type: ignore[attr-defined]
        name="ingress",
        num_replicas=arguments.ingresses,
        max_ongoing_requests=_ONGOING * 10,
        ray_actor_options={"num_cpus": 0},
    )
    bound = replicas.bind(dict(given))
    app: serve.Application = ingress.bind(bound, settings.limits, settings.rag.config.separator, settings.rag.top_k)
    return app


@contextmanager
def fleet(given: Mapping[str, GivenValue], replicas: int, **build: Any) -> Iterator[str]:
    """Replicas on this machine, in a cluster of Ray's of its own; the address they answer at.

    Parameters
    ----------
    given : mapping of str to GivenValue
        Options of the server.
    replicas : int
    **build
        Another ``routing``, or further options of Ray Serve for the replicas.

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
    # An error that keeps a replica from starting here keeps it from starting again.
    build = {"max_constructor_retry_count": replicas, **build}
    application = _build_given(FleetArguments(replicas=replicas, actor=actor), given, **build)
    port = settings.port
    if not port:
        with socket.create_server((settings.host, 0)) as listening:
            port = int(listening.getsockname()[1])
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
                deployments = serve.status().applications[_NAME].deployments.values()
                messages = "\n".join(one.message for one in deployments)
                errors = re.findall(r"^[\w.]*Error: (.+)$", messages, re.MULTILINE)
                reason = errors[-1] if errors else messages.strip()
                raise CacheBlendError(f"the replicas do not start: {reason}") from error
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            yield f"http://{host}:{port}"
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]
            ray.shutdown()


def serve_fleet(given: Mapping[str, GivenValue], replicas: int) -> int:
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
