"""Copies of linear layers' weights in another form, used only as long as a weight is what was copied.

A copy is used while an engine runs the model. In all other cases, and where a copy does not serve, a layer computes as
it always does.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from cacheblend_rag.models.cpu.onednn_linear import are_ordinary
from cacheblend_rag.models.modules import ForwardOverride, ForwardOverrides

_log = logging.getLogger(__name__)

Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor | None]
"""``rows @ weight.T + bias`` by a copy; None where the copy does not serve these rows."""

# Elements of each weight that are compared when a pass begins.
_SAMPLES = 8


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
        return weight if dense and weight.numel() >= max(self.weights.least(), _SAMPLES) else None


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
        self._begin(layers)

    @contextmanager
    def multiplying(self, *, answers: bool) -> Iterator[None]:
        """`in_use`, on this thread; ``answers`` if tokens of answers are computed within."""
        before, self.rows.of_answers = self.rows.of_answers, answers
        try:
            with self.in_use():
                yield
        finally:
            self.rows.of_answers = before

    def least(self) -> int:
        """Elements of the smallest weight that is copied; below, the call itself is the time."""
        raise NotImplementedError

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
    def weight_bytes(self) -> int:
        """Bytes of the weights that are copied."""
        weights = (forward.weight() for forward in self._forwards)
        return sum(weight.nbytes for weight in weights if weight is not None)

    def renew(self, layers: Iterable[nn.Linear]) -> None:
        """Begin again with these layers when the next pass begins; one that is under way goes on by its copies."""
        with self._lock:
            self._renewed = list(layers)
            if not self._users:
                self._begin(self._renewed)

    def forget(self) -> None:
        """Free all copies; the next pass makes them again."""
        self.renew([forward.module for forward in self._forwards])

    def _begin(self, layers: Iterable[nn.Linear]) -> None:
        self._forwards = self._ours(CopyForward(layer, self) for layer in layers)
        self._renewed: list[nn.Linear] | None = None
        self._samples: torch.Tensor | None = None

    @torch.no_grad()
    def _put(self) -> None:
        """Bring copies up to date, and put them to use."""
        if self._renewed is not None and self._users == 1:
            self._begin(self._renewed)
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
