"""Float32 products of few rows by weights packed in float16, for the tokens of an answer.

Multiplying few rows takes as long as reading the weight. Most checkpoints hold weights of 8 or 11 significant bits, and
a processor without their arithmetic runs them in float32. In float16 they are the same numbers in half of the bytes.
FBGEMM, which comes with PyTorch, multiplies float32 rows by them and adds up in float32. A weight that is not the same
in float16 has no copy.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn

from cacheblend_rag.models.cpu.copied_weights import CopiedWeights, CopyForward, WeightCopy, WeightState
from cacheblend_rag.models.cpu.onednn_linear import fits, gives, most_rows, onednn_product

# Rows up to which the packed weight is the faster one (docs/benchmarks/ttft.md).
_ROWS = 32
# Elements of the smallest weight that is packed; below, the call itself is the time.
_LEAST = 2**15
# Rows of a weight that are compared at a time.
_TOGETHER = 1024
# Largest relative difference of a weight in float16; float32's own products are off by more.
_TOLERANCE = 2**-23


class Float16Copies(CopiedWeights):
    """The linear layers of a float32 model; few rows of an answer's tokens are multiplied by packed weights.

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

    @property
    def nbytes(self) -> int:
        """Bytes that copies take."""
        return self.weight_bytes // 2

    def serves(self, rows: torch.Tensor) -> bool:
        """Whether rows are multiplied by packed weights."""
        return self.rows.of_answers and are_few(rows)

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

    def least(self) -> int:
        """See `CopiedWeights.least`."""
        return _LEAST

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
        if not self._weights.serves(rows):
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


def are_few(rows: torch.Tensor) -> bool:
    """Whether rows ``[..., in]`` are multiplied faster by packed weights."""
    return rows.shape[:-1].numel() <= _ROWS


def packed(weight: torch.Tensor) -> Any:
    """A float32 weight ``[out, in]`` in float16, in FBGEMM's order; None if it is not the same in float16."""
    return _packed(weight) if is_same(weight) else None


@torch.no_grad()
def is_same(weight: torch.Tensor) -> bool:
    """Whether a weight is the same in float16."""
    return all(map(_is_same, torch.split(weight, _TOGETHER)))


def _packed(weight: torch.Tensor) -> Any:
    return torch.ops.quantized.linear_prepack_fp16.default(weight.detach(), None)


def float16_product(rows: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """``rows @ weight.T + bias``; rows ``[..., in]`` in float32, the weight as `packed` gives it."""
    product: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16.default(rows, weight)
    return product if bias is None else product.add_(bias)


def _is_same(part: torch.Tensor) -> bool:
    """Whether rows of a weight are the same in float16, but for numbers too small to matter beside the others."""
    return bool((part.half().float() - part).norm() <= _TOLERANCE * part.norm())
