"""How many tokens a model's config says it can take."""

from __future__ import annotations

from typing import Any

__all__ = ["context_window"]


def context_window(config: Any) -> int | None:
    """Most tokens of a prompt with its answer.

    That is ``max_position_embeddings``, which a sliding window does not change: it bounds what a layer sees, not
    where a token may stand. Configs of two RoPE types keep there the length before it was stretched by ``factor``:
    dynamic NTK always, YaRN by custom.

    Parameters
    ----------
    config : transformers PretrainedConfig

    Returns
    -------
    int or None
        None if the config does not say it.
    """
    config = config.get_text_config()
    given = getattr(config, "max_position_embeddings", None)
    if not given:
        return None
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [one for one in (parameters, *parameters.values()) if isinstance(one, dict)]
    return max(int(given), *(_stretched(kind, given) for kind in kinds), 0)


def _stretched(kind: dict[str, Any], given: int) -> int:
    """What RoPE parameters stretch a window to; 0 for types whose window is as given."""
    factor = kind.get("factor") or 1.0
    if kind.get("rope_type") == "dynamic":
        return int(given * factor)
    if kind.get("rope_type") == "yarn":
        return int(kind.get("original_max_position_embeddings", 0) * factor)
    return 0
