"""How the KV of a layer is written: as it is, or in fewer bits.

Keys are stored before rotation, where each channel keeps its own range over all tokens. So they
are scaled channel by channel. Values have no such channels. They are scaled token by token.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.models.kv import SegmentKV, Written
from cacheblend_rag.store.stored_kv import RecordInfo

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
Buffer: TypeAlias = Any
"""Bytes that can be written, such as a `bytearray` or the memory of a tensor."""
_KEY_AXIS, _VALUE_AXIS = 1, 2  # of [kv_heads, tokens, head_dim]: what one scale spans


class Codec(ABC):
    """Writes and reads the KV of one layer.

    Parameters
    ----------
    name : str
        Its name in a record's header.
    """

    name: str

    def layer_bytes(self, info: RecordInfo) -> int:
        """Bytes one layer takes."""
        return self._size(info, _KEY_AXIS) + self._size(info, _VALUE_AXIS)

    def token_bytes(self, info: RecordInfo) -> float:
        """Bytes a token takes on all layers."""
        return info.layers * self.layer_bytes(info) / info.tokens

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> list[memoryview]:
        """Keys, then values, each ``[kv_heads, tokens, head_dim]``, as bytes in pieces.

        A piece may be the memory of the tensors themselves.

        Raises
        ------
        StoreError
            If a value is not finite or too large for the codec's scales.
        """
        return [*self._pack(keys.detach().cpu(), _KEY_AXIS), *self._pack(values.detach().cpu(), _VALUE_AXIS)]

    def decode(self, data: Buffer, info: RecordInfo) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each ``[kv_heads, tokens, head_dim]`` of the record's element type.

        They may be views of ``data``.
        """
        keys = self._unpack(data, 0, info, _KEY_AXIS)
        return keys, self._unpack(data, self._size(info, _KEY_AXIS), info, _VALUE_AXIS)

    def decode_into(self, data: Buffer, info: RecordInfo, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write what `decode` gives into tensors of its shape, wherever they lie."""
        self._unpack_into(data, 0, info, _KEY_AXIS, keys)
        self._unpack_into(data, self._size(info, _KEY_AXIS), info, _VALUE_AXIS, values)

    @abstractmethod
    def _size(self, info: RecordInfo, axis: int) -> int:
        """Bytes of the keys or the values of one layer."""

    @abstractmethod
    def _pack(self, tensor: torch.Tensor, axis: int) -> list[memoryview]: ...

    @abstractmethod
    def _unpack(self, data: Buffer, offset: int, info: RecordInfo, axis: int) -> torch.Tensor: ...

    def _unpack_into(self, data: Buffer, offset: int, info: RecordInfo, axis: int, target: torch.Tensor) -> None:
        target.copy_(self._unpack(data, offset, info, axis))


class RawCodec(Codec):
    """The model's own element type, bit for bit."""

    name = "raw"

    def _size(self, info: RecordInfo, axis: int) -> int:
        return math.prod(_shape(info)) * DTYPES[info.dtype].itemsize

    def _pack(self, tensor: torch.Tensor, axis: int) -> list[memoryview]:
        return [_bytes(tensor)]

    def _unpack(self, data: Buffer, offset: int, info: RecordInfo, axis: int) -> torch.Tensor:
        return _view(data, offset, DTYPES[info.dtype], _shape(info))


class ScaledCodec(Codec):
    """One byte an element, and a scale for each channel of the keys and each token of the values.

    A scale is a power of two. So each element type holds what is decoded without rounding, and encoding it again loses
    nothing: a record stays the same, however often it moves from folder to folder.
    """

    name = "int8"
    _largest = 127.0

    def _size(self, info: RecordInfo, axis: int) -> int:
        return 4 * math.prod(_reduce(info, axis)) + math.prod(_shape(info))

    def _pack(self, tensor: torch.Tensor, axis: int) -> list[memoryview]:
        least = tensor.float().abs().amax(dim=axis, keepdim=True) / self._largest
        if not bool(least.isfinite().all()):
            raise StoreError(f"the KV holds values that the codec {self.name!r} cannot scale")
        mantissa, exponent = torch.frexp(least)  # least = mantissa * 2**exponent, mantissa from 0.5 to below 1
        power = torch.ldexp(torch.ones_like(least), exponent - (mantissa == 0.5).int())
        scale = torch.where(least == 0, 1.0, power)
        codes = (tensor.float() / scale).round_().clamp_(-self._largest, self._largest)
        return [_bytes(scale), _bytes(codes.to(torch.int8))]

    def _unpack(self, data: Buffer, offset: int, info: RecordInfo, axis: int) -> torch.Tensor:
        target = torch.empty(_shape(info), dtype=DTYPES[info.dtype])
        self._unpack_into(data, offset, info, axis, target)
        return target

    def _unpack_into(self, data: Buffer, offset: int, info: RecordInfo, axis: int, target: torch.Tensor) -> None:
        scale = _view(data, offset, torch.float32, _reduce(info, axis))
        small = _view(data, offset + scale.nbytes, torch.int8, _shape(info))
        if target.device.type == "cpu":
            torch.mul(small, scale, out=target)
        else:
            target.copy_(small * scale)


CODECS: dict[str, Codec] = {codec.name: codec for codec in (RawCodec(), ScaledCodec())}


class EncodedKV(SegmentKV):
    """KV of a segment in the bytes of a codec, decoded whenever it is asked for.

    Parameters
    ----------
    info : RecordInfo
    codec : Codec
    layers : sequence of Tensor, uint8 [bytes]
        Each as the codec wrote it, and perhaps longer; or all in one tensor, ``[layers, bytes]``.
    """

    info: RecordInfo
    codec: Codec
    layers: Sequence[torch.Tensor] | torch.Tensor

    def __init__(self, info: RecordInfo, codec: Codec, layers: Sequence[torch.Tensor] | torch.Tensor) -> None:
        vars(self).update(info=info, codec=codec, layers=layers, rotated=info.rotated)  # its class is frozen

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each ``[kv_heads, tokens, head_dim]``."""
        return self.codec.decode(self.layers[layer].numpy(), self.info)

    def decode(self) -> SegmentKV:
        """The same KV, decoded to the model's element type."""
        keys, values = zip(*map(self.layer, range(self.info.layers)), strict=True)
        return SegmentKV(keys, values, self.rotated)

    @property
    def keys(self) -> tuple[torch.Tensor, ...]:
        """See `SegmentKV`."""
        return self.decode().keys

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """See `SegmentKV`."""
        return self.decode().values

    @property
    def nbytes(self) -> int:
        """See `SegmentKV`."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def written(self) -> Written | None:
        """See `SegmentKV.written`."""
        return Written(self.codec.name, self.layers) if isinstance(self.layers, torch.Tensor) else None

    def join(self, pinned: bool) -> EncodedKV:
        """A copy whose layers are contiguous."""
        block = torch.empty((len(self.layers), len(self.layers[0])), dtype=torch.uint8, pin_memory=pinned)
        return EncodedKV(self.info, self.codec, torch.stack(tuple(self.layers), out=block))


def codec_named(name: str) -> Codec:
    """A codec by its name.

    Raises
    ------
    ConfigError
        If there is no codec of this name.
    """
    if name not in CODECS:
        raise ConfigError("codec", name, "use one of " + ", ".join(map(repr, CODECS)))
    return CODECS[name]


def _shape(info: RecordInfo) -> tuple[int, int, int]:
    return info.kv_heads, info.tokens, info.head_dim


def _reduce(info: RecordInfo, axis: int) -> tuple[int, ...]:
    shape = list(_shape(info))
    shape[axis] = 1
    return tuple(shape)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def _view(data: Buffer, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
