"""Arguments of the application."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from cacheblend_rag.app.fleet.routing import RoutingRule


class FleetArguments(BaseModel):
    """The arguments that a configuration of Ray Serve gives under ``args``.

    Parameters
    ----------
    replicas : int
        Replicas at the beginning; for all the time if there is no ``autoscaling``.
    autoscaling : dict, optional
        ``autoscaling_config`` of Ray Serve, such as ``{"min_replicas": 2, "max_replicas": 8}``.
    actor : dict
        ``ray_actor_options`` of a replica, such as ``{"num_gpus": 1}``.
    ingresses : int
        Processes that take requests. They hold no model.
    imbalance_limit : float
        See `RoutingRule`.
    options : dict
        Sections of a file of options of ``cacheblend-rag serve``, such as ``{"rag": {"model": "smollm2"}}``.
    """

    model_config = ConfigDict(extra="forbid")

    replicas: int = Field(default=1, ge=1)
    autoscaling: dict[str, Any] | None = None
    actor: dict[str, Any] = Field(default_factory=dict)
    ingresses: int = Field(default=1, ge=1)
    imbalance_limit: float = Field(default=RoutingRule.imbalance_limit, gt=0)
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)

    @property
    def several(self) -> bool:
        """Whether there may be more than one replica."""
        most = (self.autoscaling or {}).get("max_replicas", 1)
        return self.replicas > 1 or most > 1
