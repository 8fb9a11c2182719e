"""Products of few rows by weights that lie on sixteen steps, by PyTorch's kernel for codes of 4 bits.

A file of 4 bits keeps each 32 weights of a row as codes with a step and a lowest value. transformers makes ordinary
weights of them, and multiplying a row by those takes as long as reading them. The codes are found again in the weights,
whatever made them. Nothing is quantised here: a weight that does not lie on such steps has no codes.

Finding them takes seconds, so they are kept beside the weights of a converted file. The kernel's order of them depends
on the processor, so each kind of processor has its own file. It is named by what the weights are, for they may have
changed since they were read. A file that is damaged, of other weights or of another PyTorch is made anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from cacheblend_rag.models.cpu.kernels import gives
from cacheblend_rag.models.model_folders import CODES, is_whole

_log = logging.getLogger(__name__)
MOST_ROWS = 4
"""Rows up to which the kernel is no slower (docs/decisions/0024-codes-of-four-bits.md)."""
# Weights of a row that share a step and a lowest value, and steps between the lowest and the highest.
_GROUP, _STEPS = 32, 15
# Groups that are looked at together, so that what is made of them stays in the processor's cache; and the first ones.
_TOGETHER, _FIRST = 1024, 64
# Largest distance from a step, over the largest weight of a group (rounding to bfloat16, three times, gives 2**-7.4),
# and over the step.
_TOLERANCE, _NEAR = 2**-6.5, 0.25
# Largest relative difference from the plain product; rounding gives about a fifth of it.
_ALIKE = 2**-6
# The kernel multiplies by so many rows of a weight at once.
_BLOCK = 16
# Raise when the same weights would have other codes.
_VERSION = 1
_PART = "codes-"
# Names of what this file writes.
_OURS = re.compile(rf"[0-9a-f]{{16}}\.safetensors|{_PART}.*")

_Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight ``[out, in]`` in codes of 4 bits.

    Parameters
    ----------
    packed : Tensor, [out, in / 2]
        The codes, in the order of PyTorch's kernel.
    steps : Tensor, [in / 32, out, 2]
        For each 32 weights of a row, the step and the value of code 8, in bfloat16.
    """

    packed: torch.Tensor
    steps: torch.Tensor


@torch.no_grad()
def find_codes(weight: torch.Tensor) -> Codes | None:
    """The codes of a weight that lies on steps; None for others, and where PyTorch lacks the kernel.

    Parameters
    ----------
    weight : Tensor, [out, in]
        In bfloat16, contiguous, on a CPU.

    Returns
    -------
    Codes or None
        Their product differs from the weight's by as much as rounding weights to bfloat16 makes.
    """
    if not begins_on_steps(weight):
        return None
    rows, width = weight.shape
    groups = weight.reshape(-1, _GROUP)
    codes = np.empty(groups.shape, dtype=np.int32)
    steps = np.empty((len(groups), 2), dtype=np.float32)
    for begin in range(0, len(groups), _TOGETHER):
        part = slice(begin, begin + _TOGETHER)
        if not _fit(groups[part].float().numpy().T.copy(), codes[part], steps[part]):
            return None
    return _packed(torch.from_numpy(codes).view(rows, width), torch.from_numpy(steps).view(rows, -1, 2))


@torch.no_grad()
def begins_on_steps(weight: torch.Tensor) -> bool:
    """Whether a weight may have codes, by its form and its first groups; an ordinary one is told at once."""
    rows, width = weight.shape
    if not weight.numel() or rows % _BLOCK or width % _GROUP or not _agrees():
        return False
    groups = weight.reshape(-1, _GROUP)[:_FIRST].float().numpy().T.copy()
    return _fit(groups, np.empty(groups.T.shape, np.int32), np.empty((groups.shape[1], 2), np.float32))


def int4_product(rows: torch.Tensor, codes: Codes, bias: torch.Tensor | None) -> torch.Tensor:
    """``rows @ weight.T + bias``; rows ``[..., in]`` in bfloat16."""
    flat = rows.reshape(-1, rows.shape[-1]).contiguous()
    product: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, codes.packed, _GROUP, codes.steps)
    product = product.view(*rows.shape[:-1], -1)
    return product if bias is None else product + bias


def fits_weight(codes: Codes, weight: torch.Tensor) -> bool:
    """Whether codes are of this weight, by their forms and a product."""
    rows, width = weight.shape
    if rows % _BLOCK or codes.packed.shape != (rows, width // 2) or codes.packed.dtype is not torch.uint8:
        return False
    if codes.steps.shape != (width // _GROUP, rows, 2) or codes.steps.dtype is not torch.bfloat16 or not _agrees():
        return False
    wave = torch.arange(width, dtype=torch.float32, device="cpu").cos().to(torch.bfloat16)[None]
    plain = torch.nn.functional.linear(wave, weight).float()
    return bool((int4_product(wave, codes, None).float() - plain).norm() <= _ALIKE * plain.norm())


@np.errstate(over="ignore", invalid="ignore")  # numbers that are too large or none fit no steps
def _fit(groups: _Array, codes: _Array, steps: _Array) -> bool:
    """Write the codes, steps and values of code 8 of groups ``[32, groups]``, if all of them lie on steps."""
    low, high = groups.min(0), groups.max(0)
    span, above, most = high - low, groups - low, np.maximum(-low, high) * _TOLERANCE
    found, fits = _places(above, span / _STEPS, most)
    left = np.flatnonzero(~fits)
    for count in range(_STEPS - 1, 0, -1):
        if not len(left):
            break
        places, fits = _places(above[:, left], span[left] / count, most[left])
        found[:, left[fits]] = places[:, fits]
        left = left[~fits]
    if len(left):
        return False
    codes[:] = found.T
    # Lowest and highest are rounded; step and middle are those that come nearest to all weights.
    middle, centre = found.mean(0), groups.mean(0)
    along = np.einsum("ij,ij->j", found, groups) - _GROUP * middle * centre
    step = along / np.maximum(np.einsum("ij,ij->j", found, found) - _GROUP * middle**2, 0.5)
    steps[:, 0], steps[:, 1] = step, centre + step * (8 - middle)
    return bool(np.isfinite(steps).all())


def _places(above: _Array, step: _Array, most: _Array) -> tuple[_Array, _Array]:
    """The nearest step to each weight, and which groups have all of theirs on steps."""
    most = np.minimum(most, _NEAR * step)
    step = np.maximum(step, np.finfo(np.float32).tiny)
    places = above / step
    np.rint(places, out=places)
    away = places * step
    away -= above
    np.abs(away, out=away)
    return places, away.max(0) <= most


def _packed(codes: torch.Tensor, steps: torch.Tensor) -> Codes:
    """Codes ``[out, in]`` and steps ``[out, in / 32, 2]`` as the kernel takes them."""
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return Codes(packed, steps.transpose(0, 1).contiguous().to(torch.bfloat16))


@cache
def _agrees() -> bool:
    """Whether the private operators are there and give the product; looked at once a process."""
    chance = torch.Generator("cpu").manual_seed(0)  # the global one is the caller's
    rows = torch.rand(MOST_ROWS, 2 * _GROUP, device="cpu", generator=chance).to(torch.bfloat16)
    codes = torch.randint(0, _STEPS + 1, (48, 2 * _GROUP), device="cpu", dtype=torch.int32, generator=chance)
    steps = torch.rand(48, 2, 2, device="cpu", generator=chance).to(torch.bfloat16).float()
    weight = (codes.view(48, 2, _GROUP) - 8) * steps[..., :1] + steps[..., 1:]
    expected = rows.float() @ weight.view(48, -1).T
    return gives(lambda: int4_product(rows, _packed(codes, steps), None), expected)


def codes_of_layers(model: Any, layers: Sequence[nn.Linear]) -> dict[nn.Linear, Codes]:
    """Codes of those layers whose weights lie on steps; none for a model that was not converted from a GGUF file.

    Parameters
    ----------
    model : transformers PreTrainedModel
    layers : sequence of Linear
        Those of its layers whose weights are in bfloat16, contiguous and on a CPU.
    """
    folder = Path(str(getattr(model.config, "_name_or_path", "")))
    if not layers or not is_whole(folder):
        return {}
    names = {layer: name for name, layer in model.named_modules()}
    weights = {names[layer]: layer.weight.detach() for layer in layers if begins_on_steps(layer.weight)}
    if not weights:
        return {}
    file = folder / CODES / f"{_key(weights)}.safetensors"
    found = _read(file, weights)
    if found is None:
        _log.info("finding codes of 4 bits in the weights of %s, once", folder)
        each = ((name, find_codes(weight)) for name, weight in weights.items())
        found = {name: codes for name, codes in each if codes is not None}
        _write(file, found)
    return {layer: found[names[layer]] for layer in layers if names[layer] in found}


def _key(weights: Mapping[str, torch.Tensor]) -> str:
    """Of weights as they are now, and of the kernel."""
    kernel = torch.__version__, torch.backends.cpu.get_cpu_capability()
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        sums = list(threads.map(_checksum, weights.values()))
    facts = [(name, tuple(weight.shape), one) for (name, weight), one in zip(weights.items(), sums, strict=True)]
    return hashlib.sha256(repr((_VERSION, kernel, facts)).encode()).hexdigest()[:16]


def _checksum(weight: torch.Tensor) -> int:
    return zlib.crc32(weight.view(torch.uint8).numpy().data)


def _read(file: Path, weights: Mapping[str, torch.Tensor]) -> dict[str, Codes] | None:
    """Codes of a file by layer; None if there is none, or it does not fit the weights."""
    try:
        tensors = load_file(file)
        names = {name.rpartition(".")[0] for name in tensors}
        found = {name: Codes(tensors[f"{name}.codes"], tensors[f"{name}.steps"]) for name in names}
        fit = all(fits_weight(codes, weights[name]) for name, codes in found.items())
    except (OSError, SafetensorError, KeyError, RuntimeError):
        return None
    return found if fit else None


def _write(file: Path, found: Mapping[str, Codes]) -> None:
    """Keep codes in place of those of other processors or PyTorches; without room for them nothing is kept."""
    tensors = {f"{name}.codes": one.packed for name, one in found.items()}
    tensors |= {f"{name}.steps": one.steps for name, one in found.items()}
    try:
        file.parent.mkdir(exist_ok=True)
        for old in file.parent.iterdir():
            if _OURS.fullmatch(old.name):
                old.unlink()
        with tempfile.NamedTemporaryFile(prefix=_PART, dir=file.parent, delete=False) as part:
            pass
        try:
            save_file(tensors, part.name)
            os.replace(part.name, file)
        except BaseException:
            os.unlink(part.name)
            raise
    except (OSError, SafetensorError) as error:
        _log.debug("codes of 4 bits are not kept in %s: %s", file.parent, error)
