"""What all replicas must have in common, or they would share no KV or give different answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import ray

from cacheblend_rag.errors import ConfigError

_NAMESPACE = "cacheblend-rag"


def check_agreed(agreed: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a replica that differs from those before it.

    Parameters
    ----------
    agreed, own : mapping of str to object
        What the first replica works with, and what this one does. Another machine may round ``"embedder"`` differently,
        what the embedding model makes of some texts.

    Raises
    ------
    ConfigError
        That names the first term that differs, and both values.
    """
    from cacheblend_rag.retrieval.embedder_fingerprint import same_model  # for `_Agreement`, this file is light

    for name, here in own.items():
        there = agreed.get(name)
        if not (same_model(there, np.array(here)) if name == "embedder" else there == here):
            remedy = f"the other replicas have {there!r:.80}; give all of them the same, in one configuration"
            raise ConfigError(f"{name} of this replica", f"{here!s:.80}", remedy)


def agree(version: str, own: Mapping[str, Any]) -> None:
    """Agree with the other replicas of a configuration; the first one says to what.

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
