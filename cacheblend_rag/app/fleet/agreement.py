"""What all replicas must have in common, or they would share no KV or give different answers."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import ray

from cacheblend_rag.errors import ConfigError

__all__ = ["Terms", "agree", "check_agreed"]

_NAMESPACE = "cacheblend-rag"


@dataclass(frozen=True)
class Terms:
    """What one replica works with.

    Parameters
    ----------
    dtype : str
        Element type of the model.
    separator, split_at_separator : str, bool
        Text between chunks, and whether prompts are split at it.
    condition, contexts, learned : str, int, str
        What chunks are computed behind; of a learned context its digest.
    selection, check_layers, metric, recompute_ratio, recompute_ratios, selection_options, min_tokens
        Which tokens are recomputed, as `BlendConfig` has them; options of the rule as JSON.
    codec, compress : str, bool
        How records are written.
    salt, encryption : str
        Digests of secrets.
    tokenizer : str
        Digest of its ids of a text.
    embedder : tuple of tuple of float
        What the embedder makes of some texts. Another machine may round differently.
    model : str
        Identity of the model's weights.
    """

    dtype: str
    separator: str
    split_at_separator: bool
    condition: str
    contexts: int
    learned: str
    selection: str
    check_layers: tuple[int, ...]
    metric: str
    recompute_ratio: float | str
    recompute_ratios: tuple[float, ...]
    selection_options: str
    min_tokens: int
    codec: str
    compress: bool
    salt: str
    encryption: str
    tokenizer: str
    embedder: tuple[tuple[float, ...], ...]
    model: str


def check_agreed(agreed: Terms, own: Terms) -> None:
    """Refuse a replica that differs from those before it.

    Raises
    ------
    ConfigError
        That names the first field that differs, and both values.
    """
    from cacheblend_rag.retrieval.embedder_fingerprint import same_model  # for `_Agreement`, this file is light

    for one in fields(Terms):
        there, here = getattr(agreed, one.name), getattr(own, one.name)
        same = same_model(there, np.array(here)) if one.name == "embedder" else there == here
        if not same:
            remedy = f"the other replicas have {there!r:.80}; give all of them the same, in one configuration"
            raise ConfigError(f"{one.name} of this replica", f"{here!s:.80}", remedy)


def agree(version: str, own: Terms) -> None:
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
        self._terms: dict[str, Terms] = {}

    def agreed(self, version: str, own: Terms) -> Terms:
        """The first terms of a configuration."""
        return self._terms.setdefault(version, own)
