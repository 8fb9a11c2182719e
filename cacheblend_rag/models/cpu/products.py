"""Products of a model's linear layers on a CPU: a table of kernels, and the choice among them, made at load.

A kernel multiplies by a weight as it lies, or by a copy of it in another form. A copy is used only as long as a weight
is what was copied. The plain twin of each kernel is the layer's own ``forward``: where no kernel serves, a layer
computes as it always does.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.cpu.kernels import ANY_ROWS, arranged_by_onednn, most_rows, onednn_product
from cacheblend_rag.models.loading import in_hardware
from cacheblend_rag.models.memory import total_memory
from cacheblend_rag.models.modules import ForwardOverride, ForwardOverrides, is_compiled

_log = logging.getLogger(__name__)
# Elements of the smallest weight that is worth it; below, the call itself is the time.
_LEAST = 2**15
# Largest share of the machine's memory that copies take without being told to; the weights take as much again.
_SHARE = 0.25
# Elements of each weight that are compared when a pass begins.
_SAMPLES = 8
_FAULTS = (RuntimeError, MemoryError, AttributeError, TypeError)  # of private operators


@dataclass(frozen=True)
class Kernel:
    """A way to multiply rows by a weight, and what it serves.

    Parameters
    ----------
    name : str
    dtype : torch.dtype
        Of weights, rows and biases.
    multiply : callable
        ``rows @ weight.T + bias``, from rows ``[..., in]``, the weight in the kernel's form, and a bias or None.
    copy : callable or None
        Gives the weights of some layers in that form; it may leave layers out. None for weights as they lie.
    most_rows : int
        Rows that it serves at most.
    least_work : int
        Multiply-adds that it serves at least.
    """

    name: str
    dtype: torch.dtype
    multiply: Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor]
    copy: Callable[[Sequence[nn.Linear]], Mapping[nn.Linear, Any]] | None = None
    most_rows: int = ANY_ROWS
    least_work: int = 0


KERNELS = (
    # The processor says how many rows, see `most_rows`. Below the least work the longer call costs more than the
    # product (one core of an AMD EPYC with AVX-512: 20 rows by 256 x 256 in 31 and 29 us, 4 rows by 704 x 256 in 30 and
    # 34, one row by 1536 x 576 in 52 and 52; two cores with AVX2: one row by 192 x 576 in 24 and 39, by 576 x 576 in
    # 100 and 95, by 1536 x 576 in 281 and 164).
    Kernel("onednn", torch.float32, onednn_product, least_work=3 * 2**18),
    Kernel("arranged", torch.bfloat16, onednn_product, arranged_by_onednn),
)
"""All kernels. Of those that a model has, the first that serves some rows multiplies them."""


def products_of(model: nn.Module, parts: Iterable[nn.Module], option: bool | str, *, anew: bool) -> Products | None:
    """The products of a model's linear layers; None where PyTorch multiplies by the weights as they lie.

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
        return None
    layers = list(dict.fromkeys(layer for part in parts for layer in part.modules() if type(layer) is nn.Linear))
    with _table_lock:
        found = _by_model.get(model)
        products = None if found is None else found()
        kernels = _choose(model, layers, option)
        if not kernels:
            return None
        if products is not None and set(kernels) <= set(products.chosen):
            if anew:
                products.renew(layers)
            return products
        products = Products(model, layers, kernels)
        _by_model[model] = weakref.ref(products)
    if kernels[0].copy is not None:
        needed = _copied_bytes(layers, kernels[0].dtype)
        _log.info("prepacked copies of weights take %s bytes; none with prepack_weights=False", f"{needed:,}")
    return products


def _choose(model: nn.Module, layers: Sequence[nn.Linear], option: bool | str) -> list[Kernel]:
    """The kernels of a model, by the type of most of its weights, the processor and the memory."""
    elements = Counter[torch.dtype]()
    for layer in layers:  # some models keep small layers in float32, as that which chooses experts
        elements[layer.weight.dtype] += layer.weight.numel()
    auto = option == "auto"
    in_float32 = auto and elements[torch.float32] > elements[torch.bfloat16]
    reason = "most are in float32" if in_float32 else _why_no_copies(model, layers, auto)
    if reason is not None and not auto:
        raise ConfigError("prepack_weights", option, f"use 'auto' or False here: {reason}")
    if reason is not None:
        _log.debug("weights are not prepacked: %s", reason)
    if reason is None:
        return [kernel for kernel in KERNELS if kernel.copy is not None]
    if is_compiled(model) or not _copied_bytes(layers, torch.float32):
        return []
    return [replace(kernel, most_rows=most_rows()) for kernel in KERNELS if kernel.copy is None and most_rows()]


def _why_no_copies(model: nn.Module, layers: Sequence[nn.Linear], unasked: bool) -> str | None:
    """Why weights in bfloat16 cannot be copied, or why copies may cost more than they gain."""
    needed, total = _copied_bytes(layers, torch.bfloat16), total_memory()
    if not needed:
        return "the model has no ordinary linear layers of some size in bfloat16 on a CPU"
    if is_compiled(model):
        return "the model is compiled"
    if not (able := in_hardware(torch.bfloat16)):
        lacking = "this PyTorch does not say whether it can"
        return lacking if able is None else "oneDNN has no bfloat16 products for this processor"
    # Where bfloat16 is not multiplied in hardware, arranging a weight is little beside multiplying by it.
    in_avx512 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    if unasked and not in_avx512():
        return "this processor has no bfloat16 arithmetic of its own"
    if unasked and (total is None or needed > _SHARE * total):
        return f"copies take {needed:,} bytes of a memory of {'unknown size' if total is None else f'{total:,}'}"
    return None


def _copied_bytes(layers: Iterable[nn.Linear], dtype: torch.dtype) -> int:
    """Bytes that copies of weights of a type take: two an element."""
    weights = (_weight_to_copy(layer, dtype) for layer in layers)
    return sum(2 * weight.numel() for weight in weights if weight is not None)


def _weight_to_copy(layer: nn.Module, dtype: torch.dtype) -> nn.Parameter | None:
    """The weight of a layer, if it can be copied."""
    # Adapters, hooks and quantisation give a layer another class, another weight or a forward of its own.
    ordinary = type(layer) is nn.Linear and isinstance(layer.__dict__.get("forward"), ForwardOverride | None)
    weight = layer.weight if ordinary else None
    if type(weight) is not nn.Parameter or weight.dtype is not dtype or weight.device.type != "cpu":
        return None
    dense = weight.layout is torch.strided and weight.is_contiguous() and not weight.is_inference()
    return weight if dense and weight.numel() >= max(_LEAST, _SAMPLES) else None


class _SeenWeight:
    """Identity of a weight when it was looked at, without keeping it alive."""

    __slots__ = ("_address", "_form", "_version", "_weight")

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weakref.ref(weight)
        self._version, self._address, self._form = weight._version, weight.data_ptr(), _form(weight)

    def still(self, weight: torch.Tensor) -> bool:
        """True if this is the same tensor, version and address as then. Every call asks, so no value is looked at."""
        return weight is self._weight() and weight._version == self._version and weight.data_ptr() == self._address

    def wholly(self, weight: torch.Tensor) -> bool:
        """Whether a weight still is that in all but its values."""
        return self.still(weight) and _form(weight) == self._form


def _form(weight: torch.Tensor) -> tuple[object, ...]:
    return weight.dtype, weight.device, weight.shape, weight.stride()


@dataclass(frozen=True, slots=True)
class _Copies:
    """Copies of a weight, and what it was: one object, so that no thread sees half of a change."""

    seen: _SeenWeight
    forms: dict[str, Any] = field(default_factory=dict)
    """By name of the kernel; None where it has none of this weight."""


class _LayerProducts(ForwardOverride):
    """Multiplies by the first kernel that serves; all that none knows is computed as ever."""

    __slots__ = ("copies", "products", "seen")

    module: nn.Linear

    def __init__(self, module: nn.Linear, products: Products) -> None:
        super().__init__(module)
        self.products: Products = weakref.proxy(products)  # in a circle, copies would outlive the last engine
        self.seen: _SeenWeight | None = None  # the weight as it was when a pass last began, if it can be copied
        self.copies: _Copies | None = None

    def instead(self, input: torch.Tensor) -> torch.Tensor:
        module, products = self.module, self.products
        weight, bias = module.weight, module.bias
        if type(module) is nn.Linear and type(weight) is nn.Parameter and _are_ordinary(input, weight, bias):
            rows = input.shape[:-1].numel()
            for kernel in products.kernels:
                served = 0 < rows <= kernel.most_rows
                if not served or weight.dtype is not kernel.dtype or rows * weight.numel() < kernel.least_work:
                    continue
                try:
                    form = weight if kernel.copy is None else products.form(kernel, self.copies, weight)
                    if form is not None:
                        return kernel.multiply(input, form, bias)
                except _FAULTS as error:
                    products.fail(kernel, error)
        output: torch.Tensor = self.plainly(input)
        return output

    def is_as_seen(self, weight: nn.Parameter | None) -> bool:
        """Whether the weight to copy is what it was when a pass last began, in all but its values."""
        if weight is None or self.seen is None:
            return weight is None and self.seen is None
        return self.seen.wholly(weight)


def _are_ordinary(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether rows can be multiplied by a weight on a CPU, and nothing looks at how that is done."""
    dtype = weight.dtype
    ordinary = type(rows) is torch.Tensor and rows.dtype is dtype and rows.is_cpu and rows.dim() > 1
    traced = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
    fit = rows.shape[-1] == weight.shape[1] and (bias is None or bias.dtype is dtype)
    return ordinary and not traced and fit and weight.is_cpu and weight.is_contiguous()


class Products(ForwardOverrides[_LayerProducts]):
    """The linear layers of a model, and the kernels that multiply by their weights for a while.

    Parameters
    ----------
    model : transformers PreTrainedModel
    layers : iterable of Linear
    kernels : sequence of Kernel
        In the order of preference.
    """

    def __init__(self, model: nn.Module, layers: Iterable[nn.Linear], kernels: Sequence[Kernel]) -> None:
        super().__init__(())
        self._model, self.chosen, self.kernels = model, tuple(kernels), tuple(kernels)
        self._copying = threading.Lock()
        self._renewed: list[nn.Linear] | None = list(layers)
        self._begin()

    def renew(self, layers: Iterable[nn.Linear]) -> None:
        """Begin again with these layers at the next pass that begins alone; one under way goes on by its copies."""
        with self._lock:
            self._renewed = list(layers)
            if not self._users:
                self._begin()

    def _begin(self) -> None:
        self._forwards = self._ours(_LayerProducts(layer, self) for layer in self._renewed or ())
        self._renewed = None
        self._samples: torch.Tensor | None = None

    @torch.no_grad()
    def _put(self) -> None:
        """Notice weights that changed, and put products in their places."""
        if self._renewed is not None and self._users == 1:
            self._begin()
        if not torch.backends.mkldnn.enabled:
            return
        if any(kernel.copy is not None for kernel in self.kernels):
            self._look()
        any_weight = any(kernel.copy is None for kernel in self.kernels)
        for forward in self._forwards:
            if any_weight or forward.copies is not None:
                forward.put()

    def _look(self) -> None:
        """Drop all copies if any weight has changed, and let them be made again once the weights rest.

        All of them, for what changes one weight in sight may change others out of it: writing through ``.data`` moves
        no version, and shows only in the values. Once they rest, for training between requests would pay for copies
        again and again.
        """
        weights = [_weight_to_copy(forward.module, self.chosen[0].dtype) for forward in self._forwards]
        samples, first = _samples(weights), self._samples is None
        resting = self._samples is not None and torch.equal(samples, self._samples)
        as_seen = map(_LayerProducts.is_as_seen, self._forwards, weights)
        if not resting or not all(as_seen):
            self._samples, resting = samples, False
            for forward, weight in zip(self._forwards, weights, strict=True):
                forward.seen, forward.copies = None if weight is None else _SeenWeight(weight), None
        for forward in self._forwards if resting or first else ():
            if forward.seen is not None and forward.copies is None:
                forward.copies = _Copies(forward.seen)

    def form(self, kernel: Kernel, copies: _Copies | None, weight: torch.Tensor) -> Any:
        """The copy of a weight for a kernel, or None; all that the kernel lacks are made when one is asked for."""
        if copies is None or not copies.seen.still(weight):
            return None
        if kernel.name not in copies.forms:
            self._copy(kernel)
        return copies.forms.get(kernel.name)

    @torch.no_grad()
    def _copy(self, kernel: Kernel) -> None:
        with self._copying:
            lacking = {
                forward.module: copies
                for forward in self._forwards
                if (copies := forward.copies) is not None
                and kernel.name not in copies.forms
                and copies.seen.still(forward.module.weight)
            }
            made = kernel.copy(list(lacking)) if kernel.copy is not None and lacking else {}
            for layer, copies in lacking.items():
                copies.forms[kernel.name] = made.get(layer)

    def fail(self, kernel: Kernel, error: object) -> None:
        """Use a kernel no more, and make no copies any more."""
        if kernel in self.kernels:
            _log.warning("weights are not prepacked any more, products are plain: %s", error)
        self.kernels = tuple(other for other in self.kernels if other is not kernel and other.copy is None)
        for forward in self._forwards:
            forward.copies = None


def _samples(weights: Iterable[nn.Parameter | None]) -> torch.Tensor:
    """A few elements of each weight that can be copied, bit by bit, ``[weights, bytes]``."""
    there = [weight for weight in weights if weight is not None]
    parts = [weight.as_strided((_SAMPLES,), ((weight.numel() - 1) // (_SAMPLES - 1),)) for weight in there]
    return torch.stack(parts).view(torch.uint8) if parts else torch.empty(0, dtype=torch.uint8, device="cpu")


_by_model: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Products]] = weakref.WeakKeyDictionary()
_table_lock = threading.Lock()
