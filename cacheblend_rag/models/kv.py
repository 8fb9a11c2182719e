"""Plain containers of KV that every room may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class LayerKV:
    """Keys and values of one layer for every position of a prompt, as they come from the store.

    Parameters
    ----------
    keys : Tensor, [1, kv_heads, tokens, head_dim]
        Stored keys at their positions; not yet rotated, except for the prefix. Rows of
        positions that are not stored are undefined.
    values : Tensor, [1, kv_heads, tokens, head_dim]
        Stored values at their positions.
    rotated : bool
        Whether all keys are rotated already.
    """

    keys: torch.Tensor
    values: torch.Tensor
    rotated: bool = False

    @property
    def kv_heads(self) -> int:
        """Heads that keys and values have."""
        return self.keys.shape[1]

    def write(self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put those of some positions in their place."""
        self.keys.index_copy_(2, rows, keys)
        self.values.index_copy_(2, rows, values)


@dataclass(frozen=True)
class SegmentKV:
    """Keys and values of one segment on all layers.

    Parameters
    ----------
    keys, values : tuple of Tensor, each [kv_heads, tokens, head_dim]
        One entry a layer.
    rotated : bool
        Whether the keys carry the rotation of the positions at which they were computed.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    rotated: bool

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(tensor.nbytes for tensor in self.keys + self.values)

    @property
    def written(self) -> Written | None:
        """Its layers as a GPU takes several with one copy; None if they do not lie one behind another."""
        return None


class Written(NamedTuple):
    """Layers in the bytes of a codec, one behind another.

    Parameters
    ----------
    codec : str
    layers : Tensor, uint8 [layers, bytes]
        The bytes of each, and perhaps more to fill it up.
    """

    codec: str
    layers: torch.Tensor


@dataclass(frozen=True)
class JoinedKV(SegmentKV):
    """KV of a segment whose layers lie one behind the other, as they are.

    Parameters
    ----------
    block : Tensor, [layers, 2, kv_heads, tokens, head_dim]
        The tensor of which ``keys`` and ``values`` are views.
    """

    block: torch.Tensor

    @property
    def written(self) -> Written:
        """See `SegmentKV.written`."""
        return Written("raw", self.block.flatten(1).view(torch.uint8))

    @classmethod
    def copy_from(cls, kv: SegmentKV, device: torch.device) -> JoinedKV:
        """A copy on a device; on a CPU in pinned memory, from which a GPU reads without the processor's help."""
        shape = (len(kv.keys), 2, *kv.keys[0].shape)
        block = torch.empty(shape, dtype=kv.keys[0].dtype, device=device, pin_memory=device.type == "cpu")
        for layer, (keys, values) in enumerate(zip(kv.keys, kv.values, strict=True)):
            block[layer, 0].copy_(keys.detach(), non_blocking=True)
            block[layer, 1].copy_(values.detach(), non_blocking=True)
        if kv.keys[0].is_cuda or block.is_cuda:
            torch.cuda.synchronize()
        return cls(tuple(block[:, 0]), tuple(block[:, 1]), kv.rotated, block)


@dataclass(frozen=True)
class Prefilled:
    """Result of the model's own forward pass over a prompt.

    Parameters
    ----------
    cache : transformers Cache
        KV of all positions.
    logits : Tensor, [vocab]
        Logits of the last position.
    """

    cache: Any
    logits: torch.Tensor
