"""Whether the blended pass of a model still agrees with the model: asked once, at load."""

from __future__ import annotations

import torch
import transformers

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.fusor.fusor import FusionPlan, fuse
from cacheblend_rag.fusor.selection.none import SelectNone
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.kv import LayerKV, SegmentKV
from cacheblend_rag.models.rope import rotate

__all__ = ["check_adapter"]

_TOKENS = 12
_STORED = 6
# Largest relative error by element type. A misread layer gives about 1; the order of additions alone
# gives about 1e-6, 1e-3 and 1e-2.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.2}


@torch.no_grad()
def check_adapter(adapter: ModelAdapter) -> None:
    """Blend a dozen tokens, half of them from stored KV, and compare with plain prefill.

    Costs three forward passes over a dozen tokens.

    Raises
    ------
    UnsupportedModelError
        If they differ, which happens when transformers has changed the family's layers, or when
        a model is not shaped like the family it is treated as.
    """
    vocabulary = int(adapter.config.vocab_size)
    ids = [(11 + 37 * number) % vocabulary for number in range(_TOKENS)]
    try:
        plain = adapter.prefill(ids).logits
        stored = adapter.segment_kv((), ids)
        errors = {
            "the logits": _error(_blended(adapter, ids, stored), plain),
            "the values of layer 0": _error(adapter.project_values(0, adapter.embed(ids)), stored.values[0]),
            "the keys of layer 0": _key_error(adapter, ids, stored),
        }
    except (AttributeError, TypeError, RuntimeError, ValueError, IndexError, KeyError) as error:
        failed = f"failed with {type(error).__name__} ({error})"
        raise UnsupportedModelError(_message(adapter, failed)) from error
    limit = _TOLERANCE.get(adapter.dtype, 0.2)
    # Written so that NaN counts as wrong.
    wrong = [f"{what} by {error:.2g}" for what, error in errors.items() if not error <= limit]
    if wrong:
        raise UnsupportedModelError(_message(adapter, f"differs in {' and '.join(wrong)} of their size"))


def _blended(adapter: ModelAdapter, ids: list[int], stored: SegmentKV) -> torch.Tensor:
    """Logits of the blended pass, the first positions taken from stored KV."""
    layers = []
    for keys, values in zip(stored.keys, stored.values, strict=True):
        kv = LayerKV(torch.zeros_like(keys)[None], torch.zeros_like(values)[None])
        kv.keys[0, :, :_STORED], kv.values[0, :, :_STORED] = keys[:, :_STORED], values[:, :_STORED]
        layers.append(kv)
    plan = FusionPlan(ids, exact=[range(_STORED)], reused=[], unrotated=range(_STORED))
    return fuse(adapter, plan, layers, SelectNone()).logits


def _key_error(adapter: ModelAdapter, ids: list[int], stored: SegmentKV) -> float:
    rotaries = adapter.rotary(len(ids))
    expected = rotate(stored.keys[0], rotaries.of_keys(0))
    return _error(adapter.project_keys(0, adapter.embed(ids), rotaries), expected)


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Length of the difference as a share of what was expected."""
    found, expected = found.float(), expected.float()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def _message(adapter: ModelAdapter, what: str) -> str:
    return (
        f"the blended pass of a {adapter.config.model_type!r} model {what}, compared with the model's own "
        f"forward pass under transformers {transformers.__version__}; use a version this package was tested "
        "with, or switch this check off if you know better"
    )
