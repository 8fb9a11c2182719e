"""The application: replicas of the server behind an ingress."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from cacheblend_rag.app.cli.configuration import Given, given_options, given_sections, server_settings
from cacheblend_rag.app.fleet.arguments import FleetArguments
from cacheblend_rag.app.fleet.ingress import Ingress
from cacheblend_rag.app.fleet.replica import Replica
from cacheblend_rag.app.fleet.router import ChunkRouter
from cacheblend_rag.errors import ConfigError

# A replica has a queue of its own, which refuses in the words of the API.
_ONGOING = 1_000
_STOPPING = 40  # seconds until a replica that is told to stop is killed


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
    return build_given(arguments, given)


def build_given(
    arguments: FleetArguments,
    given: Mapping[str, Given],
    routing: Mapping[str, Any] | None = None,
    **options: Any,
) -> serve.Application:
    """The application with options that are read already.

    Parameters
    ----------
    arguments : FleetArguments
    given : mapping of str to Given
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
    if arguments.several and settings.guarded and settings.database is None:
        remedy = "several replicas with keys need one, for the salts of their tenants: name a PostgreSQL database"
        raise ConfigError("database", None, remedy)
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
    version = hashlib.sha256(pickle.dumps(sorted((name, one.value) for name, one in given.items()))).hexdigest()
    bound = replicas.bind(dict(given), version)
    app: serve.Application = ingress.bind(
        bound, settings.limits, settings.rag.config.separator, settings.rag.top_k, settings.database is not None
    )
    return app
