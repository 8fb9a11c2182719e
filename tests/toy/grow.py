"""Make a deeper model, or one of another family, from trained weights, so that training need not begin anew.

New layers begin as identity: what they write into the residual stream is zero, and training moves it from there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cacheblend_rag.errors import ConfigError

ARCHITECTURES = ("llama", "qwen3")
Places = tuple[int | None, ...]
"""For each layer of a grown model the layer it begins as, None for a new one."""

_KEPT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
    "rope_parameters",
    "rms_norm_eps",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def spread(old: int, layers: int) -> Places:
    """Place ``old`` layers among ``layers`` as evenly as can be, new ones between them.

    Raises
    ------
    ConfigError
        If there are fewer layers than before.
    """
    if layers < old:
        raise ConfigError("layers", layers, f"use at least {old}, as the model to start from has, or say which to keep")
    begun = {at * layers // old: at for at in range(old)}
    return tuple(begun.get(at) for at in range(layers))


def parse_places(text: str) -> Places:
    """Read ``"0,1,-,2"``: a comma between layers, a hyphen for a new one.

    Raises
    ------
    ConfigError
        If anything else stands there.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part == "-" or part.isdecimal() for part in parts):
        raise ConfigError("arrange", text, "give layers of the model to start from, and - for new ones: 0,1,-,2")
    return tuple(None if part == "-" else int(part) for part in parts)


def grow(model: Any, architecture: str, places: Places, ids: torch.Tensor) -> Any:
    """Return a new model with the weights of ``model``.

    With places in the old order and the same architecture it computes the same function. Where queries and keys are
    normalised and were not before, it computes nearly the same: each norm begins with one weight, the mean RMS of
    what it now normalises, so the direction of every query and key is kept, and its length on average.

    Parameters
    ----------
    model : transformers.LlamaForCausalLM or transformers.Qwen3ForCausalLM
    architecture : {"llama", "qwen3"}
    places : tuple
    ids : torch.Tensor
        [rows, length], text on which lengths are measured.

    Raises
    ------
    ConfigError
        If the architecture is unknown or lacks the norms that the model has, or a place names no layer.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    old = model.config
    if architecture not in ARCHITECTURES or (old.model_type, architecture) == ("qwen3", "llama"):
        raise ConfigError(
            "architecture", architecture, f"a llama grows into any of {ARCHITECTURES}, others into their own"
        )
    unknown = [place for place in places if place is not None and place >= old.num_hidden_layers]
    if unknown:
        raise ConfigError("arrange", unknown, f"the model to start from has layers 0 to {old.num_hidden_layers - 1}")
    kept = {name: getattr(old, name) for name in _KEPT}
    config = AutoConfig.for_model(architecture, num_hidden_layers=len(places), **kept)
    grown = AutoModelForCausalLM.from_config(config)
    _copy_rest(model, grown)
    lengths = _mean_lengths(model, ids) if architecture != old.model_type else None
    with torch.no_grad():
        for layer, place in zip(grown.model.layers, places, strict=True):
            if place is None:
                nn.init.zeros_(layer.self_attn.o_proj.weight)
                nn.init.zeros_(layer.mlp.down_proj.weight)
                continue
            layer.load_state_dict(model.model.layers[place].state_dict(), strict=lengths is None)
            if lengths is not None:
                for norm, length in zip((layer.self_attn.q_norm, layer.self_attn.k_norm), lengths[place], strict=True):
                    norm.weight.fill_(length)
    return grown


def _copy_rest(model: Any, grown: Any) -> None:
    """Copy all weights that belong to no layer."""
    rest = {name: weight for name, weight in model.state_dict().items() if not name.startswith("model.layers.")}
    grown.load_state_dict(rest, strict=False)


def _mean_lengths(model: Any, ids: torch.Tensor) -> list[tuple[float, float]]:
    """Mean RMS of the queries and of the keys of each layer, over heads and positions."""
    seen: list[float] = []

    def watch(_: nn.Module, __: Any, out: torch.Tensor) -> None:
        heads = out.float().reshape(*out.shape[:-1], -1, model.config.head_dim)
        seen.append(float(heads.pow(2).mean(-1).sqrt().mean()))

    attentions = [layer.self_attn for layer in model.model.layers]
    hooks = [part.register_forward_hook(watch) for each in attentions for part in (each.q_proj, each.k_proj)]
    try:
        with torch.no_grad():
            model.model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return list(zip(seen[::2], seen[1::2], strict=True))
