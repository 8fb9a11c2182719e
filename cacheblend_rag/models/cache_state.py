"""The state of a cache as bytes: KV, states of recurrent layers, and the numbers beside them."""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from cacheblend_rag.models.cache import PreallocatedLayer

_SIZE = 8  # bytes of the description's length
# Attributes of a layer that grows in place; others of it say where its rows lie.
_GROWING = ("keys", "values", "is_initialized", "dtype", "device")
# A layer has these from its first rows on.
_LATER = ("dtype", "device")


def pack_cache(cache: Any) -> torch.Tensor | None:
    """All that a cache holds, as bytes on the CPU; None if a layer of it has something that is no plain value.

    Parameters
    ----------
    cache : transformers Cache

    Returns
    -------
    Tensor, [bytes] uint8, or None
        Nothing in it is pickled: a description in JSON, and the memory of all tensors behind it.
    """
    tensors = list[torch.Tensor]()
    try:
        layers = [[type(layer).__name__, _described(_attributes(layer), tensors)] for layer in cache.layers]
    except TypeError:
        return None
    told = json.dumps(layers).encode()
    parts = [torch.frombuffer(bytearray(len(told).to_bytes(_SIZE, "little") + told), dtype=torch.uint8)]
    parts += [one.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for one in tensors]
    return torch.cat(parts)


def unpack_cache(packed: torch.Tensor, cache: Any, device: torch.device, tokens: int) -> None:
    """Fill an empty cache of the same model with what `pack_cache` gave.

    Parameters
    ----------
    packed : Tensor, [bytes] uint8
        There may be more behind it.
    cache : transformers Cache
    device : torch.device
    tokens : int
        Those that the cache is behind; layers that grow have as many rows.

    Raises
    ------
    ValueError
        If it is of a cache of another kind, or behind more or fewer tokens.
    """
    data = packed.cpu().contiguous()
    end = _SIZE + int.from_bytes(data[:_SIZE].numpy().tobytes(), "little")
    try:
        layers = json.loads(data[_SIZE:end].numpy().tobytes())
        if [name for name, _ in layers] != [type(layer).__name__ for layer in cache.layers]:
            raise ValueError("its layers are of other kinds")
        reader = _Reader(data, end, device)
        for layer, (_, told) in zip(cache.layers, layers, strict=True):
            known = {*_attributes(layer), *_LATER}
            for name, value in reader.value(told).items():
                if name not in known:
                    raise ValueError(f"a layer of it has {name!r}")
                setattr(layer, name, value)
            if isinstance(layer, PreallocatedLayer) and not _holds(layer, tokens):
                raise ValueError(f"a layer of it does not hold the rows of {tokens} tokens")
    except (TypeError, KeyError, IndexError, AttributeError, RuntimeError, UnicodeDecodeError) as error:
        raise ValueError(f"it cannot be understood: {error!r}") from error


def _holds(layer: PreallocatedLayer, tokens: int) -> bool:
    """Whether a layer has keys and values of so many tokens; one that borrows those of another has none at all."""
    keys, values = layer.keys, layer.values
    if not layer.is_initialized:
        return keys is None and values is None
    one_kind = keys.dtype == values.dtype == layer.dtype and keys.shape[:3] == values.shape[:3]
    return bool(one_kind and keys.dim() == values.dim() == 4 and keys.shape[0] == 1 and keys.shape[2] == tokens)


def _attributes(layer: Any) -> dict[str, Any]:
    if isinstance(layer, PreallocatedLayer):
        return {name: getattr(layer, name, None) for name in _GROWING}
    return dict(vars(layer))


def _described(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A value in JSON: its kind, and what it is; tensors are put into a list.

    Raises
    ------
    TypeError
        If it is of no kind that can be described.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if isinstance(value, dict):
        return ["dict", [[key, _described(one, tensors)] for key, one in value.items() if _is_plain(key)]]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["device"]
    if _is_plain(value):
        return ["plain", value]
    raise TypeError(type(value).__name__)


def _is_plain(value: Any) -> bool:
    if not isinstance(value, str | int | float | bool | None):
        raise TypeError(type(value).__name__)
    return True


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(name)
    return found


class _Reader:
    """Reads values that were described, and their tensors one behind another."""

    def __init__(self, data: torch.Tensor, at: int, device: torch.device) -> None:
        self._data, self._at, self._device = data, at, device

    def value(self, told: Any) -> Any:
        kind, *more = told
        if kind == "tensor":
            return self._tensor(_dtype(more[0]), more[1])
        if kind == "dict":
            return {key: self.value(one) for key, one in more[0]}
        if kind == "dtype":
            return _dtype(more[0])
        if kind == "device":
            return self._device
        if kind != "plain":
            raise ValueError(f"it holds a {kind!r}")
        return more[0]

    def _tensor(self, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        begin, self._at = self._at, self._at + math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or self._at > len(self._data):
            raise ValueError("it ends within a tensor")
        made = torch.empty(shape, dtype=dtype)  # no larger than the record
        made.reshape(-1).view(torch.uint8).copy_(self._data[begin : self._at])
        return made.to(self._device)
