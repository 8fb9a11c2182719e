"""Which copies of its weights a model multiplies by, and those in bfloat16 in the order of oneDNN.

oneDNN arranges a weight for every product. For few rows that costs as much as multiplying by it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.cpu.copied_weights import CopiedWeights, CopyForward, WeightCopy
from cacheblend_rag.models.cpu.float16_copies import Float16Copies, are_there
from cacheblend_rag.models.cpu.int4_linear import Codes, are_few, int4_product
from cacheblend_rag.models.cpu.kept_codes import codes_of_layers
from cacheblend_rag.models.cpu.onednn_linear import direct_products, multiplies_directly, onednn_product
from cacheblend_rag.models.loading import in_hardware
from cacheblend_rag.models.memory import total_memory
from cacheblend_rag.models.modules import is_compiled

_log = logging.getLogger(__name__)

Prepacking = Callable[[bool], AbstractContextManager[None]]
"""Gives a context within which a model multiplies by copies of weights, or by oneDNN.

It takes whether tokens of an answer are computed within.
"""

_FindCodes = Callable[[Sequence[nn.Linear]], Mapping[nn.Linear, Codes]]

# Float16 gains nothing on processors without arithmetic for it, float32 too little by another order alone
# (docs/benchmarks/ttft.md).
_DTYPE = torch.bfloat16
# Rows that the order of a copy is chosen for; it then serves any number well, where 1 serves only few.
_ROWS = 256
# Elements of the smallest weight that is prepacked; below, the call itself is the time.
_LEAST = 2**15
# Largest share of the machine's memory that copies take without being told to; the weights take as much again.
_SHARE = 0.25
# Largest relative difference from the plain product; rounding alone gives less than a tenth of it.
_TOLERANCE = 0.02


def prepacked_products(model: nn.Module, parts: Iterable[nn.Module], option: bool | str, *, anew: bool) -> Prepacking:
    """Let the linear layers of a model multiply by copies of weights or by oneDNN, where that helps.

    Parameters
    ----------
    model : transformers PreTrainedModel
        All who ask for the same model share its copies, which live as long as one of them does.
    parts : iterable of Module
        Whose linear layers are meant.
    option : bool or "auto"
        `BlendConfig.prepack_weights`.
    anew : bool
        Whether copies that others have made are made again: weights may have changed since in ways that
        leave no trace.

    Raises
    ------
    ConfigError
        If weights cannot be prepacked though they should be.
    """
    if option is False:
        return as_it_is
    layers = list(dict.fromkeys(layer for part in parts for layer in part.modules() if type(layer) is nn.Linear))
    copies = _copies(model, layers, option, anew)
    if copies is not None:
        return lambda decoding: copies.multiplying(answers=decoding)
    if option == "auto" and multiplies_directly(model, layers):
        direct = direct_products.get(model, layers)
        return lambda decoding: direct.in_use()
    return as_it_is


def drop_copies(model: nn.Module) -> None:
    """Free the copies of a model's weights; the next pass makes them again."""
    with _table_lock:
        known = _by_model.get(model)
        if known is not None and (copies := known()) is not None:
            copies.forget()


def as_it_is(decoding: bool) -> AbstractContextManager[None]:
    """A `Prepacking` of nothing: PyTorch multiplies by the weights as they lie."""
    return nullcontext()


def _copies(
    model: nn.Module, layers: Sequence[nn.Linear], option: bool | str, anew: bool
) -> Float16Copies | _PrepackedWeights | None:
    """The copies that all who run the model share; None where there are none, and none are asked for."""
    elements = Counter[torch.dtype]()
    for layer in layers:  # some models keep small layers in float32, as that which chooses experts
        elements[layer.weight.dtype] += layer.weight.numel()
    wide = option == "auto" and elements[torch.float32] > elements[_DTYPE]
    kind = Float16Copies if wide else _PrepackedWeights
    with _table_lock:
        known = _by_model.get(model)
        copies = known() if known is not None else None
        if isinstance(copies, kind):
            if anew:
                copies.renew(layers)
            return copies
        copies = Float16Copies(layers) if wide else _PrepackedWeights(layers, partial(codes_of_layers, model))
        reason = _why_not(model, copies) or (_why_not_unasked(copies) if option == "auto" else None)
        if reason is not None:
            if option == "auto":
                _log.debug("weights are not prepacked: %s", reason)
                return None
            raise ConfigError("prepack_weights", option, f"use 'auto' or False here: {reason}")
        _by_model[model] = weakref.ref(copies)
    _log.info("prepacked copies of weights take %s bytes; none with prepack_weights=False", f"{copies.nbytes:,}")
    return copies


def _why_not(model: nn.Module, copies: Float16Copies | _PrepackedWeights) -> str | None:
    """Why weights cannot be prepacked."""
    if not copies.nbytes:
        dtype = str(copies.dtype).removeprefix("torch.")
        return f"the model has no ordinary linear layers of some size in {dtype} on a CPU"
    if is_compiled(model):
        return "the model is compiled"
    if isinstance(copies, Float16Copies):
        return None if are_there() else "this PyTorch has no products by weights in float16 here"
    able = in_hardware(_DTYPE)
    if able is None:
        return "this PyTorch does not say whether it can"
    if not able:
        return "oneDNN has no bfloat16 products for this processor"
    return None


def _why_not_unasked(copies: Float16Copies | _PrepackedWeights) -> str | None:
    """Why prepacking may cost more than it gains."""
    # Where bfloat16 is not multiplied in hardware, arranging a weight is little beside multiplying by it.
    narrow = copies.dtype is _DTYPE
    if narrow and not getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)():
        return "this processor has no bfloat16 arithmetic of its own"
    needed, total = copies.nbytes, total_memory()
    if total is None or needed > _SHARE * total:
        return f"copies take {needed:,} bytes of a memory of {'unknown size' if total is None else f'{total:,}'}"
    return None


class _PrepackedWeights(CopiedWeights):
    """Linear weights in bfloat16, in oneDNN's order, and in codes of 4 bits where they lie on their steps."""

    dtype: ClassVar[torch.dtype] = _DTYPE

    def __init__(self, layers: Iterable[nn.Linear], find_codes: _FindCodes) -> None:
        self._find_codes = find_codes
        super().__init__(layers)

    @property
    def nbytes(self) -> int:
        """Bytes that copies take."""
        return self.weight_bytes

    def least(self) -> int:
        """See `CopiedWeights.least`."""
        return _LEAST

    def make(self, forwards: list[CopyForward], first: bool) -> None:
        """See `CopiedWeights.make`; weights that change later are no longer those of the file that had codes."""
        checked = set()
        codes = self._find_codes([forward.module for forward in forwards if first])
        for forward in forwards:
            seen, weight = forward.seen, forward.weight()
            if seen is None or weight is None:
                continue
            prepacked = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
            if weight.shape not in checked and not _agrees(weight, prepacked):
                raise RuntimeError("a prepacked product differs from the plain one")
            checked.add(weight.shape)
            product = partial(_product, prepacked, codes.get(forward.module))
            forward.copy = WeightCopy(product, seen, weight.shape[1])


def _product(
    prepacked: torch.Tensor, codes: Codes | None, rows: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    if codes is not None and are_few(rows):
        return int4_product(rows, codes, bias)
    return onednn_product(rows, prepacked, bias)


_by_model: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Float16Copies | _PrepackedWeights]]
_by_model = weakref.WeakKeyDictionary()
_table_lock = threading.Lock()


def _agrees(weight: torch.Tensor, prepacked: torch.Tensor) -> bool:
    """Whether the prepacked form gives the product that the weight gives."""
    rows = torch.arange(3 * weight.shape[1], dtype=torch.float32, device="cpu").cos().view(3, -1).to(_DTYPE)
    plain = nn.functional.linear(rows, weight).float()
    return bool((onednn_product(rows, prepacked, None).float() - plain).norm() <= _TOLERANCE * plain.norm())
