"""Checks once, at load, that the blended pass of a model agrees with the model."""

from __future__ import annotations

import threading

import torch
import transformers

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.fusor.blend import FusionPlan, fuse
from cacheblend_rag.fusor.selection import SelectNone
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.models.quantised import is_quantised

_TOKENS = 12
_STORED = 6
# Largest relative error by element type. A misread layer gives about 1; the order of additions alone
# gives about 1e-6, 1e-3 and 1e-2.
_COARSE = 0.2
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: _COARSE}


@torch.no_grad()
def check_adapter(adapter: ModelAdapter) -> None:
    """Blend a dozen tokens, half of them from stored KV, and compare with plain prefill.

    Costs about three forward passes over a dozen tokens. If they differ, another dozen is tried: where two experts are
    nearly equal, rounding alone chooses another one. A layer that is misread differs over any tokens.

    Raises
    ------
    UnsupportedModelError
        If they differ, which happens when transformers has changed the family's layers, or when
        a model is not shaped like the family it is treated as.
    """
    vocabulary = int(adapter.config.vocab_size)
    # Quantised layers may round what they read to 8 bits: a difference of rounding grows to that step.
    limit = _COARSE if is_quantised(adapter.model) else _TOLERANCE.get(adapter.dtype, _COARSE)
    for first in (11, 12):
        try:
            errors = errors_of(adapter, [(first + 37 * number) % vocabulary for number in range(_TOKENS)])
        except (AttributeError, TypeError, RuntimeError, ValueError, IndexError, KeyError) as error:
            failed = f"failed with {type(error).__name__} ({error})"
            raise UnsupportedModelError(_message(adapter.config.model_type, failed)) from error
        # Written so that NaN counts as wrong.
        wrong = [f"{what} by {error:.2g}" for what, error in errors.items() if not error <= limit]
        if not wrong:
            return
    raise UnsupportedModelError(_message(adapter.config.model_type, f"differs in {' and '.join(wrong)} of their size"))


def errors_of(adapter: ModelAdapter, ids: list[int]) -> dict[str, float]:
    """Relative error of each thing the blended pass relies on."""
    # The model's own pass comes first: compressed-tensors unpacks its weights in the first pass of the whole model.
    expected = adapter.prefill(ids).logits
    (first,), shape = adapter.segments_kv((), [ids[:_STORED]]), (1, adapter.kv_heads, _TOKENS, adapter.head_dim)
    stored = [LayerKV(keys.new_zeros(shape), keys.new_zeros(shape)) for keys in first.keys]
    for layer, keys, values in zip(stored, first.keys, first.values, strict=True):
        layer.keys[0, :, :_STORED], layer.values[0, :, :_STORED] = keys, values
    inputs: list[torch.Tensor] = []  # of each layer, [rows, hidden]

    me = threading.get_ident()

    def note(module: torch.nn.Module, given: tuple[torch.Tensor]) -> None:
        if threading.get_ident() == me:  # the user's model may be answering on another thread
            inputs.append(given[0][0])

    hooks = [layer.register_forward_pre_hook(note) for layer in adapter.layers]
    plan = FusionPlan(ids, exact=[range(_STORED)], reused=[], unrotated=range(_STORED))
    try:
        fusion = fuse(adapter, plan, stored, SelectNone())
    finally:
        for hook in hooks:
            hook.remove()
    rotaries = adapter.rotary(_TOKENS)
    wrong_keys, wrong_values = [], []
    with adapter.blending() as layers:
        for number, (hidden, kv) in enumerate(zip(inputs, fusion.layers, strict=True)):
            rows = slice(_TOKENS - len(hidden), _TOKENS)  # the last layer is run on the last one only
            projected, _ = layers.project(number, hidden, rotaries.at(rows))
            wrong_keys.append(_error(projected, kv.keys[0, :, rows]))
            wrong_values.append(_error(layers.project_values(number, hidden), kv.values[0, :, rows]))
    return {
        "the logits": _error(fusion.logits, expected),
        "the keys of a layer": max(wrong_keys),
        "the values of a layer": max(wrong_values),
    }


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Length of the difference as a share of what was expected."""
    found, expected = found.float(), expected.float()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def _message(model_type: str, what: str) -> str:
    return (
        f"the blended pass of a {model_type!r} model {what}, compared with the model's own "
        f"forward pass under transformers {transformers.__version__}; use a version this package was tested with"
    )
