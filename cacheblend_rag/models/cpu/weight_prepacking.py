"""Copies of linear layers' weights in another form, by which a model multiplies while an engine runs it.

A copy is used only as long as a weight is what was copied. In all other cases, and where a copy does not serve, a layer
computes as it always does. Weights in bfloat16 are copied in the order of oneDNN, which arranges a weight for every
product otherwise: for few rows that costs as much as multiplying by it. Those in float32 are packed in float16.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import nn

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.cpu.int4_linear import Codes, are_few, int4_product
from cacheblend_rag.models.cpu.kept_codes import codes_of_layers
from cacheblend_rag.models.cpu.onednn_linear import (
    are_ordinary,
    direct_products,
    fits,
    gives,
    most_rows,
    multiplies_directly,
    onednn_product,
)
from cacheblend_rag.models.loading import in_hardware
from cacheblend_rag.models.memory import total_memory
from cacheblend_rag.models.modules import ForwardOverride, ForwardOverrides, is_compiled

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
# Elements of each weight that are compared when a pass begins.
_SAMPLES = 8
# Rows up to which a weight packed in float16 is the faster one (docs/benchmarks/ttft.md).
_FEW_ROWS = 32
# Rows of a weight that are compared with those in float16 at a time.
_TOGETHER = 1024
# Largest relative difference of a weight in float16; float32's own products are off by more.
_SAME = 2**-23


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


Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor | None]
"""``rows @ weight.T + bias`` by a copy; None where the copy does not serve these rows."""


class WeightState:
    """Identity of a weight when it was looked at, without keeping it alive."""

    __slots__ = ("_address", "_form", "_version", "_weight")

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weakref.ref(weight)
        self._version, self._address = weight._version, weight.data_ptr()
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
        return self.still(weight) and _form(weight) == self._form


def _form(weight: torch.Tensor) -> tuple[object, ...]:
    return weight.dtype, weight.device, weight.shape, weight.stride()


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """How to multiply by a copy, and what it is a copy of: one object, so that no thread sees half of a change."""

    product: Product
    seen: WeightState
    width: int


class CopyForward(ForwardOverride):
    """Multiplies by a copy of a linear layer's weight; all that it does not know is computed as ever.

    Parameters
    ----------
    module : Linear
    weights : CopiedWeights
        All of the model's copies.
    """

    __slots__ = ("copy", "seen", "weights")

    module: nn.Linear

    def __init__(self, module: nn.Linear, weights: CopiedWeights) -> None:
        super().__init__(module)
        self.weights: CopiedWeights = weakref.proxy(weights)  # in a circle, copies would outlive the last engine
        self.seen: WeightState | None = None  # the weight as it was when a pass last began, if it can be copied
        self.copy: WeightCopy | None = None

    def instead(self, input: torch.Tensor) -> torch.Tensor:
        module, copy = self.module, self.copy
        if copy is not None and type(module) is nn.Linear and copy.seen.still(module.weight):
            bias, dtype = module.bias, self.weights.dtype
            if are_ordinary(input, dtype, copy.width) and input.numel() > 0 and (bias is None or bias.dtype is dtype):
                try:
                    product = copy.product(input, bias)
                    if product is not None:
                        return product
                except (RuntimeError, MemoryError, AttributeError, TypeError) as error:
                    self.weights.fail(error)
        return self.weights.otherwise(self, input)

    def weight(self) -> nn.Parameter | None:
        """The layer's weight, if it can be copied."""
        module = self.module
        # Adapters, hooks and quantisation give a layer another class, another weight or a forward of its own.
        ordinary = type(module) is nn.Linear and module.__dict__.get("forward", self) is self
        weight = module.weight if ordinary else None
        if type(weight) is not nn.Parameter or weight.dtype is not self.weights.dtype or weight.device.type != "cpu":
            return None
        dense = weight.layout is torch.strided and weight.is_contiguous() and not weight.is_inference()
        return weight if dense and weight.numel() >= max(_LEAST, _SAMPLES) else None


class _Rows(threading.local):
    """Whose rows the thread that asks computes."""

    of_answers = False


class CopiedWeights(ForwardOverrides[CopyForward]):
    """Copies of the linear weights of one model; subclasses say in which form.

    Parameters
    ----------
    layers : iterable of Linear
    """

    dtype: ClassVar[torch.dtype]
    """Type of the weights that are copied, and of rows and biases."""

    def __init__(self, layers: Iterable[nn.Linear]) -> None:
        super().__init__(())
        self.rows = _Rows()
        self.failed = False
        """Whether a product by a copy, or making one, has failed; then there are no copies any more."""
        self._renewed: list[nn.Linear] | None = list(layers)
        self._begin()

    @contextmanager
    def multiplying(self, *, answers: bool) -> Iterator[None]:
        """`in_use`, on this thread; ``answers`` if tokens of answers are computed within."""
        before, self.rows.of_answers = self.rows.of_answers, answers
        try:
            with self.in_use():
                yield
        finally:
            self.rows.of_answers = before

    def make(self, forwards: list[CopyForward], first: bool) -> None:
        """Give forwards their copies.

        Parameters
        ----------
        forwards : list of CopyForward
            Those that have none; of each ``seen`` is known.
        first : bool
            Whether weights are those that the model came with.

        Raises
        ------
        RuntimeError, MemoryError, AttributeError, TypeError
            If no copies can be made here.
        """
        raise NotImplementedError

    def otherwise(self, forward: CopyForward, input: torch.Tensor) -> torch.Tensor:
        """The layer's result where no copy serves."""
        output: torch.Tensor = forward.plainly(input)
        return output

    @property
    def nbytes(self) -> int:
        """Bytes that copies take: two for an element in either form."""
        weights = (forward.weight() for forward in self._forwards)
        return sum(2 * weight.numel() for weight in weights if weight is not None)

    def renew(self, layers: Iterable[nn.Linear]) -> None:
        """Begin again with these layers when the next pass begins; one that is under way goes on by its copies."""
        with self._lock:
            self._renewed = list(layers)
            if not self._users:
                self._begin()

    def forget(self) -> None:
        """Free all copies; the next pass makes them again."""
        self.renew([forward.module for forward in self._forwards])

    def _begin(self) -> None:
        self._forwards = self._ours(CopyForward(layer, self) for layer in self._renewed or ())
        self._renewed = None
        self._samples: torch.Tensor | None = None

    @torch.no_grad()
    def _put(self) -> None:
        """Bring copies up to date, and put them to use."""
        if self._renewed is not None and self._users == 1:
            self._begin()
        first = self._samples is None
        # Copies of weights that have changed are made again once the weights rest: training between requests
        # would pay for them again and again.
        if self._unchanged() or first:
            wanted = [one for one in self._forwards if one.seen is not None and one.copy is None]
            try:
                if not self.failed and torch.backends.mkldnn.enabled:
                    self.make(wanted, first)
            except (RuntimeError, MemoryError, AttributeError, TypeError) as error:
                self.fail(error)
        for forward in self._forwards:
            if forward.copy is not None and torch.backends.mkldnn.enabled:
                forward.put()

    def fail(self, error: object) -> None:
        """Make no copies any more, and use none."""
        if not self.failed:
            _log.warning("weights are not prepacked any more, products are plain: %s", error)
        self.failed = True
        self._drop()

    def _drop(self) -> None:
        for forward in self._forwards:
            forward.copy = None

    def _unchanged(self) -> bool:
        """Whether all weights are what they were when last looked at; if not, copies are dropped.

        All of them, for what changes one weight in sight may change others out of it: writing through
        ``.data`` moves no version, and shows only in the values.
        """
        weights = [forward.weight() for forward in self._forwards]
        unchanged = self._samples is not None and torch.equal(_samples(weights), self._samples)
        if unchanged and all(map(_is_as_seen, self._forwards, weights)):
            return True
        self._drop()
        for forward, weight in zip(self._forwards, weights, strict=True):
            forward.seen = None if weight is None else WeightState(weight)
        self._samples = _samples(weights)
        return False


def _samples(weights: Iterable[nn.Parameter | None]) -> torch.Tensor:
    """A few elements of each weight that can be copied, bit by bit, ``[weights, bytes]``."""
    there = [weight for weight in weights if weight is not None]
    parts = [weight.as_strided((_SAMPLES,), ((weight.numel() - 1) // (_SAMPLES - 1),)) for weight in there]
    return torch.stack(parts).view(torch.uint8) if parts else torch.empty(0, dtype=torch.uint8, device="cpu")


def _is_as_seen(forward: CopyForward, weight: nn.Parameter | None) -> bool:
    if weight is None or forward.seen is None:
        return weight is None and forward.seen is None
    return forward.seen.wholly(weight)


class Float16Copies(CopiedWeights):
    """The linear layers of a float32 model; few rows of an answer's tokens are multiplied by weights packed in float16.

    Multiplying few rows takes as long as reading the weight. Most checkpoints hold weights of 8 or 11 significant bits,
    and a processor without their arithmetic runs them in float32. In float16 they are the same numbers in half of the
    bytes. FBGEMM, which comes with PyTorch, multiplies float32 rows by them and adds up in float32. A weight that is
    not the same in float16 has no copy.

    All else is multiplied by oneDNN where that is faster. So the first token never waits for packing, which is done
    once, when the second is computed. `multiplying` is told whether rows are of tokens: the same input is multiplied
    in the same way in every process.

    Parameters
    ----------
    layers : iterable of Linear
    """

    dtype: ClassVar[torch.dtype] = torch.float32

    def __init__(self, layers: Iterable[nn.Linear]) -> None:
        self._packing = threading.Lock()
        super().__init__(layers)

    def pack_all(self) -> None:
        """Pack all weights that are not yet.

        Raises
        ------
        RuntimeError, MemoryError
            If there is no memory for it, or no thread.
        """
        with self._packing, ThreadPoolExecutor(torch.get_num_threads()) as threads:
            torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")  # FBGEMM crashes where there is no memory
            copies = [forward.copy.product for forward in self._forwards if forward.copy is not None]
            ours = (one for one in copies if isinstance(one, _Float16Copy))
            # Compared on this thread: for each other one that compares, PyTorch starts as many again.
            list(threads.map(_Float16Copy.pack, (one for one in ours if one.is_to_be_packed())))

    def make(self, forwards: list[CopyForward], first: bool) -> None:
        """See `CopiedWeights.make`; nothing is packed yet."""
        for forward in forwards:
            if forward.seen is not None:
                product = _Float16Copy(self, forward.module, forward.seen)
                forward.copy = WeightCopy(product, forward.seen, forward.module.in_features)

    def otherwise(self, forward: CopyForward, input: torch.Tensor) -> torch.Tensor:
        """See `CopiedWeights.otherwise`."""
        module = forward.module
        if fits(input, module):
            return onednn_product(input, module.weight, module.bias)
        return super().otherwise(forward, input)

    def _put(self) -> None:
        super()._put()
        if most_rows():
            for forward in self._forwards:
                forward.put()


class _Float16Copy:
    """A weight that is packed when the first few rows come."""

    __slots__ = ("_done", "_module", "_packed", "_seen", "_weights")

    def __init__(self, weights: Float16Copies, module: nn.Linear, seen: WeightState) -> None:
        self._weights: Float16Copies = weakref.proxy(weights)  # see `CopyForward`
        self._module, self._seen = module, seen
        self._done, self._packed = False, None

    def __call__(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        if not (self._weights.rows.of_answers and are_few_for_float16(rows)):
            return None
        if not self._done:
            self._weights.pack_all()
        return None if self._packed is None else float16_product(rows, self._packed, bias)

    def is_to_be_packed(self) -> bool:
        """Whether the weight is not packed yet, is still the one that was seen, and is the same in float16."""
        weight = self._module.weight
        if self._done or not self._seen.still(weight):
            return False
        self._done = not is_same(weight)
        return not self._done

    def pack(self) -> None:
        """Pack the weight, if it is still the one that was seen."""
        weight = self._module.weight
        if self._seen.still(weight):
            self._packed, self._done = _packed(weight), True


@cache
def are_there() -> bool:
    """Whether the operators are there and give the product; looked at once a process."""
    chance = torch.Generator("cpu").manual_seed(0)  # the global one is the caller's
    rows, weight = (torch.rand(count, 96, device="cpu", generator=chance) for count in (3, 40))
    weight = weight.half().float()
    return gives(lambda: float16_product(rows, packed(weight), None), rows @ weight.T, within=2**-20)


def are_few_for_float16(rows: torch.Tensor) -> bool:
    """Whether rows ``[..., in]`` are multiplied faster by packed weights."""
    return rows.shape[:-1].numel() <= _FEW_ROWS


def packed(weight: torch.Tensor) -> Any:
    """A float32 weight ``[out, in]`` in float16, in FBGEMM's order; None if it is not the same in float16."""
    return _packed(weight) if is_same(weight) else None


@torch.no_grad()
def is_same(weight: torch.Tensor) -> bool:
    """Whether a weight is the same in float16."""
    # But for numbers too small to matter beside the others.
    parts = torch.split(weight, _TOGETHER)
    return all(bool((part.half().float() - part).norm() <= _SAME * part.norm()) for part in parts)


def _packed(weight: torch.Tensor) -> Any:
    return torch.ops.quantized.linear_prepack_fp16.default(weight.detach(), None)


def float16_product(rows: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """``rows @ weight.T + bias``; rows ``[..., in]`` in float32, the weight as `packed` gives it."""
    product: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16.default(rows, weight)
    return product if bias is None else product.add_(bias)


class _PrepackedWeights(CopiedWeights):
    """Linear weights in bfloat16, in oneDNN's order, and in codes of 4 bits where they lie on their steps."""

    dtype: ClassVar[torch.dtype] = _DTYPE

    def __init__(self, layers: Iterable[nn.Linear], find_codes: _FindCodes) -> None:
        self._find_codes = find_codes
        super().__init__(layers)

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
