"""KV found through pointers on the GPU: what was recorded for one prompt's buffers then serves another's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cacheblend_rag.models.kv import LayerKV


@dataclass(frozen=True)
class KVPointers:
    """Keys and values of a layer, as kernels find them through pointers.

    Parameters
    ----------
    entries : Tensor, [3] or [rows, 3], int64
        Addresses of the keys and of the values, and the positions that each head has room for. One entry for all rows,
        or one for each row if the rows belong to different answers.
    kv_heads : int
    """

    entries: torch.Tensor
    kv_heads: int

    @property
    def by_row(self) -> bool:
        """Whether each row has keys and values of its own."""
        return self.entries.dim() == 2

    @staticmethod
    def written(kv: LayerKV) -> tuple[int, int, int]:
        """The entry of a layer whose keys and values are without gaps."""
        return kv.keys.data_ptr(), kv.values.data_ptr(), kv.keys.shape[2]


def kernel_arguments(kv: LayerKV | KVPointers) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Arguments of kernels for keys and values (or the pointers in place of both), and the strides of their heads."""
    if isinstance(kv, KVPointers):
        return kv.entries, kv.entries, 0, 0
    return kv.keys, kv.values, kv.keys.stride(1), kv.values.stride(1)
