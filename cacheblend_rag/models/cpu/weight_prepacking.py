"""Linear weights in the order in which oneDNN multiplies by them, arranged once instead of for every product.

For few rows, arranging a weight costs as much as multiplying by it. Copies are used only while an engine
runs the model, and only as long as a weight is what was copied; in all other cases a layer computes as
it always does.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.cpu.int4_linear import Codes, are_few, int4_product
from cacheblend_rag.models.cpu.int8_linear import coded_layers, int8_products
from cacheblend_rag.models.cpu.kept_codes import codes_of_layers
from cacheblend_rag.models.cpu.onednn_linear import are_ordinary, direct_products, multiplies_directly, onednn_product
from cacheblend_rag.models.loading import in_hardware
from cacheblend_rag.models.memory import total_memory
from cacheblend_rag.models.modules import ForwardOverride, ForwardOverrides, is_compiled

_log = logging.getLogger(__name__)

Prepacking = Callable[[], AbstractContextManager[None]]
"""Gives a context within which a model multiplies by prepacked weights, by codes of 8 bits, or by oneDNN."""

_FindCodes = Callable[[Sequence[nn.Linear]], Mapping[nn.Linear, Codes]]

# Float16 gains nothing on processors without arithmetic for it; float32 too little (docs/benchmarks/parts.md).
_DTYPE = torch.bfloat16
# Rows that the order of a copy is chosen for; it then serves any number well, where 1 serves only few.
_ROWS = 256
# Elements of the smallest weight that is prepacked; below, the call itself is the time.
_LEAST = 2**15
# Elements of each weight that are compared when a pass begins.
_SAMPLES = 8
# Largest share of the machine's memory that copies take without being told to; the weights take as much again.
_SHARE = 0.25
# Largest relative difference from the plain product; rounding alone gives less than a tenth of it.
_TOLERANCE = 0.02


def prepacked_products(model: nn.Module, parts: Iterable[nn.Module], option: bool | str, *, anew: bool) -> Prepacking:
    """Let the linear layers of a model multiply by prepacked weights, by codes or by oneDNN, where that helps.

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
        return nullcontext
    layers = list(dict.fromkeys(layer for part in parts for layer in part.modules() if type(layer) is nn.Linear))
    ordinary, coded = _ordinary_products(model, layers, option, anew), coded_layers(model, layers)
    if not coded:
        return ordinary
    by_codes = int8_products.get(model, coded)

    @contextmanager
    def both() -> Iterator[None]:
        with by_codes.in_use(), ordinary():
            yield

    return both


def drop_copies(model: nn.Module) -> None:
    """Free the prepacked copies of a model's weights; the next pass makes them again."""
    with _table_lock:
        known = _by_model.get(model)
        if known is not None and (prepacked := known()) is not None:
            prepacked.renew([forward.module for forward in prepacked._forwards])


def _ordinary_products(model: nn.Module, layers: Sequence[nn.Linear], option: bool | str, anew: bool) -> Prepacking:
    """Prepacking for layers whose weights are not quantised."""
    if option == "auto" and multiplies_directly(model, layers):
        return direct_products.get(model, layers).in_use
    with _table_lock:
        known = _by_model.get(model)
        prepacked = known() if known is not None else None
        if prepacked is None:
            prepacked = _PrepackedWeights(layers, partial(codes_of_layers, model))
            reason = _why_not(model, prepacked.nbytes) or (
                _why_not_unasked(prepacked.nbytes) if option == "auto" else None
            )
            if reason is not None:
                if option == "auto":
                    _log.debug("weights are not prepacked: %s", reason)
                    return nullcontext
                raise ConfigError("prepack_weights", option, f"use 'auto' or False here: {reason}")
            _by_model[model] = weakref.ref(prepacked)
            _log.info(
                "prepacked copies of weights take %s bytes; none with prepack_weights=False", f"{prepacked.nbytes:,}"
            )
        elif anew:
            prepacked.renew(layers)
    return prepacked.in_use


def _why_not(model: nn.Module, needed: int) -> str | None:
    """Why weights of so many bytes cannot be prepacked."""
    if not needed:
        return "the model has no ordinary linear layers of some size in bfloat16 on a CPU"
    if is_compiled(model):
        return "the model is compiled"
    able = in_hardware(_DTYPE)
    if able is None:
        return "this PyTorch does not say whether it can"
    if not able:
        return "oneDNN has no bfloat16 products for this processor"
    return None


def _why_not_unasked(needed: int) -> str | None:
    """Why prepacking so many bytes may cost more than it gains."""
    # Where bfloat16 is not multiplied in hardware, arranging a weight is little beside multiplying by it.
    if not getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)():
        return "this processor has no bfloat16 arithmetic of its own"
    total = total_memory()
    if total is None or needed > _SHARE * total:
        return f"copies take {needed:,} bytes of a memory of {'unknown size' if total is None else f'{total:,}'}"
    return None


class _WeightState:
    """Identity of a weight when it was looked at, without keeping it alive."""

    __slots__ = ("_address", "_form", "_storage", "_version", "_weight")

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weakref.ref(weight)
        self._version, self._address = weight._version, weight.data_ptr()
        # Memory that was given back may come again at the same address, a storage never does.
        self._storage = _storage(weight)
        self._form = _form(weight)

    def still(self, weight: object) -> bool:
        """True if this is the same tensor, version and address as then. Every call asks, so no value is looked at."""
        return (
            isinstance(weight, torch.Tensor)
            and weight is self._weight()
            and weight._version == self._version
            and weight.data_ptr() == self._address
        )

    def wholly(self, weight: torch.Tensor) -> bool:
        """Whether a weight still is that in all but its values."""
        alike = self.still(weight) and _form(weight) == self._form
        return alike and self._storage == _storage(weight)


def _storage(weight: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]


def _form(weight: torch.Tensor) -> tuple[object, ...]:
    return weight.dtype, weight.device, weight.shape, weight.stride()


@dataclass(frozen=True, slots=True)
class _Copy:
    """A prepacked weight, with what it is a copy of: one object, so that no thread sees half of a change."""

    prepacked: torch.Tensor
    codes: Codes | None
    seen: _WeightState
    width: int


class _PrepackedForward(ForwardOverride):
    """Multiplies by a linear layer's prepacked weight; all that it does not know is computed plainly."""

    __slots__ = ("_trouble", "copy", "seen")

    module: nn.Linear

    def __init__(self, module: nn.Linear, trouble: _FailureNote) -> None:
        super().__init__(module)
        self._trouble = trouble
        self.seen: _WeightState | None = None  # the weight as it was when a pass last began, if it can be prepacked
        self.copy: _Copy | None = None

    def instead(self, input: torch.Tensor) -> torch.Tensor:
        module, copy = self.module, self.copy
        if copy is not None and type(module) is nn.Linear and copy.seen.still(module.weight):
            bias = module.bias
            if are_ordinary(input, _DTYPE, copy.width) and input.numel() > 0 and (bias is None or bias.dtype is _DTYPE):
                try:
                    if copy.codes is not None and are_few(input):
                        return int4_product(input, copy.codes, bias)
                    return onednn_product(input, copy.prepacked, bias)
                except (RuntimeError, AttributeError, TypeError) as error:
                    self.copy = None
                    self._trouble.note(error)
        output: torch.Tensor = self.plainly(input)
        return output

    def weight(self) -> nn.Parameter | None:
        """The layer's weight, if it can be prepacked."""
        module = self.module
        # Adapters, hooks and quantisation give a layer another class, another weight or a forward of its own.
        ordinary = type(module) is nn.Linear and module.__dict__.get("forward", self) is self
        weight = module.weight if ordinary else None
        if type(weight) is not nn.Parameter or weight.dtype is not _DTYPE or weight.device.type != "cpu":
            return None
        dense = weight.layout is torch.strided and weight.is_contiguous() and not weight.is_inference()
        return weight if dense and weight.numel() >= max(_LEAST, _SAMPLES) else None


class _FailureNote:
    """Whether a product by a prepacked weight has failed; it is said once."""

    def __init__(self) -> None:
        self.seen = False

    def note(self, error: object) -> None:
        if not self.seen:
            self.seen = True
            _log.warning("weights are not prepacked any more, products are plain: %s", error)


class _PrepackedWeights(ForwardOverrides[_PrepackedForward]):
    """Prepacked copies of the linear weights of one model."""

    def __init__(self, layers: Iterable[nn.Linear], find_codes: _FindCodes) -> None:
        super().__init__(())
        self._trouble, self._find_codes = _FailureNote(), find_codes
        self.renew(layers)

    @property
    def nbytes(self) -> int:
        """Bytes that copies take."""
        weights = (forward.weight() for forward in self._forwards)
        return sum(weight.nbytes for weight in weights if weight is not None)

    def renew(self, layers: Iterable[nn.Linear]) -> None:
        """Begin again with these layers; copies are made, and codes are found, when a pass begins."""
        with self._lock:
            self._remove()
            self._forwards = self._ours(_PrepackedForward(layer, self._trouble) for layer in layers)
            self._samples: torch.Tensor | None = None

    @torch.no_grad()
    def _put(self) -> None:
        """Bring copies up to date, and put them to use."""
        if self._trouble.seen or not torch.backends.mkldnn.enabled:
            self._drop()
            return
        first = self._samples is None
        # Copies of weights that have changed are made again once the weights rest: training between requests
        # would pay for them again and again.
        if self._unchanged() or first:
            self._pack(first)
        for forward in self._forwards:
            if forward.copy is not None:
                forward.put()

    def _drop(self) -> None:
        for forward in self._forwards:
            forward.copy = None

    def _unchanged(self) -> bool:
        """Whether all weights are what they were when last looked at; if not, copies are dropped.

        All of them, for what changes one weight in sight may change others out of it: writing through
        ``.data`` moves no version, and shows only in the values.
        """
        weights = [forward.weight() for forward in self._forwards]
        samples = _samples([weight for weight in weights if weight is not None])
        unchanged = self._samples is not None and torch.equal(samples, self._samples)
        if unchanged and all(map(_is_as_seen, self._forwards, weights)):
            return True
        self._drop()
        for forward, weight in zip(self._forwards, weights, strict=True):
            forward.seen = None if weight is None else _WeightState(weight)
        self._samples = samples
        return False

    def _pack(self, first: bool) -> None:
        checked = set()
        # Weights that change later are no longer those that the model came with.
        layers = [forward.module for forward in self._forwards if forward.seen is not None and first]
        codes = self._find_codes(layers)
        for forward in self._forwards:
            seen, weight = forward.seen, forward.weight()
            if seen is None or weight is None or forward.copy is not None:
                continue
            try:
                prepacked = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
                if weight.shape not in checked and not _agrees(weight, prepacked):
                    raise RuntimeError("a prepacked product differs from the plain one")
            except (RuntimeError, AttributeError, TypeError) as error:
                self._trouble.note(error)
                self._drop()
                return
            checked.add(weight.shape)
            forward.copy = _Copy(prepacked, codes.get(forward.module), seen, weight.shape[1])


_by_model: weakref.WeakKeyDictionary[nn.Module, weakref.ref[_PrepackedWeights]] = weakref.WeakKeyDictionary()
_table_lock = threading.Lock()


def _agrees(weight: torch.Tensor, prepacked: torch.Tensor) -> bool:
    """Whether the prepacked form gives the product that the weight gives."""
    rows = torch.arange(3 * weight.shape[1], dtype=torch.float32, device="cpu").cos().view(3, -1).to(_DTYPE)
    plain = nn.functional.linear(rows, weight).float()
    return bool((onednn_product(rows, prepacked, None).float() - plain).norm() <= _TOLERANCE * plain.norm())


def _samples(weights: list[nn.Parameter]) -> torch.Tensor:
    """A few elements of each weight, bit by bit, ``[weights * samples]``."""
    if not weights:
        return torch.empty(0, dtype=torch.int16, device="cpu")
    parts = [weight.as_strided((_SAMPLES,), ((weight.numel() - 1) // (_SAMPLES - 1),)) for weight in weights]
    return torch.cat(parts).view(torch.int16)


def _is_as_seen(forward: _PrepackedForward, weight: nn.Parameter | None) -> bool:
    if weight is None or forward.seen is None:
        return weight is None and forward.seen is None
    return forward.seen.wholly(weight)
