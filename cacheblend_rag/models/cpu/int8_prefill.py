"""Products of weights and rows in 8 bits, for prompts.

A row is rounded to 255 even steps of its own, and so is each row of a weight. oneDNN multiplies the codes and adds up
in whole numbers, so a row's product does not depend on the rows beside it. Processors with AVX2 alone add two
neighbouring products in 16 bits. The steps of a weight are wide enough that this never overflows, on any processor: the
same codes then give the same products everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import nn

from cacheblend_rag.models.cpu.int8_linear import gives

# Shortest side of a weight that is multiplied in 8 bits: smaller ones gain little, and choose experts in some models.
_LEAST_SIDE = 512
# Attribute of attention modules: the projection that ends them. transformers calls it so in all families.
_OUTPUT = "o_proj"
# Names within a layer that PEFT has wrapped: the layer itself, and the beginning of those of its adapters' matrices.
_WRAPPED, _LORA = "base_layer", "lora_"
# Largest code of a row of rows, and what is added to it: oneDNN is slow with signed ones (decision 0018).
_LARGEST, _CENTRE = 127, 128
# Largest sum of two neighbouring codes of a weight: 255 times as much still fits into 16 bits with a sign.
_LARGEST_PAIR = 128
# Rows that are rounded and multiplied at a time, so that what is made of them stays in the processor's cache.
_TOGETHER = 256
# Rows of a weight that are rounded at a time, for the same reason.
_WEIGHT_ROWS = 128


def int8_layers(layers: Iterable[nn.Module], attention: str) -> list[nn.Linear]:
    """The linear layers of decoder layers that multiply prompts in 8 bits.

    Projections of queries, keys and values are none of them: with these in 8 bits answers move three to four times as
    far, for a fifteenth of the products (docs/decisions/0018-weights-in-eight-bits.md). Nor are adapters' matrices.
    A layer counts as it would without adapters: one that is switched off leaves the model what it is.

    Parameters
    ----------
    layers : iterable of Module
        Decoder layers.
    attention : str
        Attribute of each: its attention module.
    """
    found = []
    for layer in layers:
        inner = getattr(layer, attention)
        reading = {part for name, part in inner.named_modules() if name not in (_OUTPUT, f"{_OUTPUT}.{_WRAPPED}")}
        for name, part in layer.named_modules():
            if part not in reading and _LORA not in name and _is_large(part):
                found.append(part)
    return found


def _is_large(part: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is an ordinary linear layer that gains by products of 8 bits."""
    weight = part.weight if type(part) is nn.Linear else None
    if type(weight) is not nn.Parameter or weight.dtype not in (torch.float32, torch.bfloat16) or not weight.is_cpu:
        return False
    return min(weight.shape) >= _LEAST_SIDE and weight.shape[1] % 2 == 0


class Int8Weight:
    """A weight ``[out, in]`` in codes of 8 bits, with a step for each row.

    Parameters
    ----------
    weight : Tensor, [out, in]
        In float32 or bfloat16, on a CPU.
    """

    __slots__ = ("_packed", "_steps", "_zeros")

    def __init__(self, weight: torch.Tensor) -> None:
        codes, steps = codes_of(weight.detach())
        self._packed: Any = torch.ops.onednn.qlinear_prepack(codes, None)
        self._steps, self._zeros = steps, torch.zeros(len(steps), dtype=torch.int64, device="cpu")

    def __call__(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``rows @ weight.T + bias``; rows ``[..., in]``."""
        flat = rows.reshape(-1, rows.shape[-1])
        product = torch.empty(len(flat), len(self._steps), dtype=rows.dtype, device="cpu")
        for begin in range(0, len(flat), _TOGETHER):
            self._multiply(flat[begin : begin + _TOGETHER], product[begin : begin + _TOGETHER])
        if bias is not None:
            product += bias
        return product.view(*rows.shape[:-1], -1)

    def _multiply(self, rows: torch.Tensor, product: torch.Tensor) -> None:
        codes, steps = row_codes(rows)
        found = torch.ops.onednn.qlinear_pointwise(
            codes,
            1.0,
            _CENTRE,
            self._packed,
            self._steps,
            self._zeros,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        if product.dtype is found.dtype:
            torch.mul(found, steps, out=product)
        else:
            product.copy_(found.mul_(steps))


def codes_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight ``[out, in]`` as codes of 8 bits, ``[out, in]``, and a step for each row, ``[out]``.

    No code is beyond 127, and no two neighbours that are added in 16 bits come to more than 128.
    """
    codes = torch.empty(weight.shape, dtype=torch.int8, device="cpu")
    steps = torch.empty(len(weight), dtype=torch.float32, device="cpu")
    for begin in range(0, len(weight), _WEIGHT_ROWS):
        part = slice(begin, begin + _WEIGHT_ROWS)
        rows = weight[part].float()
        size = rows.abs()
        largest = size.amax(dim=1)
        pair = size.view(len(rows), -1, 2).sum(dim=2).amax(dim=1)
        # Rounding adds half a step to each of a pair at most.
        step = torch.maximum(largest / _LARGEST, pair / (_LARGEST_PAIR - 1)).clamp_min_(_TINY)
        steps[part] = step
        codes[part] = (rows / step[:, None]).round_()
    return codes, steps


def row_codes(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[rows, in]`` as codes around 128, ``[rows, in]``, and a step for each, ``[rows, 1]``."""
    rows = rows.float()
    scratch = torch.empty(rows.shape, dtype=torch.float32, device="cpu")
    largest = torch.abs(rows, out=scratch).amax(dim=1, keepdim=True)
    steps = largest.div_(_LARGEST).clamp_min_(_TINY)
    torch.div(rows, steps, out=scratch).add_(_CENTRE + 0.5)
    return scratch.to(torch.uint8), steps


_TINY = torch.finfo(torch.float32).tiny


@cache
def gives_int8() -> bool:
    """Whether the private operators are there and give whole sums; looked at once a process."""
    chance = torch.Generator("cpu").manual_seed(0)  # the global one is the caller's
    rows = torch.rand(9, 64, device="cpu", generator=chance) - 0.5
    weight = torch.rand(48, 64, device="cpu", generator=chance) - 0.5
    weight[:, :2], rows[:, :2] = 0.5, 0.5  # the largest pair that there may be
    (codes, steps), (row, row_steps) = codes_of(weight), row_codes(rows)
    sums = (row.double() - _CENTRE) @ codes.double().T
    expected = sums.float() * steps * row_steps
    return gives(lambda: Int8Weight(weight)(rows, None), expected, within=2**-22)
