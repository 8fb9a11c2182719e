"""A sequence's state as llama.cpp writes it: positions, then keys and values of each layer.

::

    magic, sequence             4 bytes each
    streams (1), cells          4 bytes each
    of each cell                its position, the number of its sequences, and these, 4 bytes each
    V transposed (0), layers    4 bytes each
    two words                   whether keys and values are rotated (0, 0)
    keys of each layer          element type (4 bytes), bytes of a cell (8 bytes), the cells
    values of each layer        likewise

This is the layout of build 11548 for KV in F16 with flash attention. `StateLayout` compares it with what the library
writes, so a library with another layout is refused when a model is loaded.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch

from cacheblend_rag.errors import ModelLoadError
from cacheblend_rag.llama_cpp.library import F16

_START = struct.Struct("<4I")  # magic, sequence, streams, cells
_MIDDLE = struct.Struct("<4I")  # V transposed, layers, two words about rotation
_LAYER = struct.Struct("<iQ")  # element type, bytes of a cell


class StateLayout:
    """Reads and writes states of one model.

    Parameters
    ----------
    written : numpy array of uint8
        A state of some cells of one sequence, as the library wrote it.
    layers, kv_heads : int

    Raises
    ------
    ModelLoadError
        If the layout differs.
    """

    def __init__(self, written: np.ndarray, layers: int, kv_heads: int) -> None:
        self.layers, self.kv_heads, data = layers, kv_heads, memoryview(written)  # type: ignore[arg-type]
        try:
            magic, _, streams, cells = _START.unpack_from(data)
            at = _START.size
            owners = {struct.unpack_from("<I", data, at + number * 12 + 4)[0] for number in range(cells)}
            at += cells * 12
            transposed, count, *words = _MIDDLE.unpack_from(data, at)
            at += _MIDDLE.size
            widths = []
            for _ in range(2 * layers):
                kind, width = _LAYER.unpack_from(data, at)
                widths.append((kind, width))
                at += _LAYER.size + cells * width
        except struct.error:
            raise _other_layout() from None
        plain = (streams, owners, transposed, count, at) == (1, {1}, 0, layers, written.size)
        if not plain or {kind for kind, _ in widths} != {F16}:
            raise _other_layout()
        self._magic, self._words = magic, words
        self.widths = [width for _, width in widths]
        if len(set(self.widths)) != 1 or self.widths[0] % (2 * kv_heads):
            raise _other_layout()
        self.head_dim = self.widths[0] // (2 * kv_heads)

    def size(self, cells: int) -> int:
        """Bytes of a state of so many cells."""
        return int(_START.size + 12 * cells + _MIDDLE.size + sum(_LAYER.size + cells * width for width in self.widths))

    def cells(self, size: int) -> int:
        """Cells of a state of so many bytes."""
        return (size - self.size(0)) // (self.size(1) - self.size(0))

    def read(self, state: np.ndarray, start: int, stop: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Keys and values of the cells at positions from ``start`` up to ``stop``, in their order.

        Returns
        -------
        two lists of Tensor, each [kv_heads, tokens, head_dim] float16
            One entry a layer; copies.
        """
        cells = int(state[12:16].view("<u4")[0])
        head = state[_START.size : _START.size + 12 * cells].view("<i4").reshape(cells, 3)
        positions = head[:, 0]
        order = np.argsort(positions, kind="stable")
        order = order[(positions[order] >= start) & (positions[order] < stop)]
        if len(order) != stop - start:
            raise ValueError(f"the state holds {len(order)} of the {stop - start} positions from {start} to {stop}")
        plain = bool((np.diff(order) == 1).all())
        rows = slice(int(order[0]), int(order[0]) + len(order)) if plain and len(order) else order
        at = _START.size + 12 * cells + _MIDDLE.size
        tensors = []
        for width in self.widths:
            at += _LAYER.size
            block = state[at : at + cells * width].view(np.float16).reshape(cells, self.kv_heads, self.head_dim)[rows]
            tensors.append(torch.from_numpy(np.ascontiguousarray(block.transpose(1, 0, 2))))
            at += cells * width
        return tensors[: self.layers], tensors[self.layers :]

    def write(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], start: int) -> np.ndarray:
        """The state of a sequence with these keys and values at the positions from ``start`` on.

        Parameters
        ----------
        keys, values : sequence of Tensor, each [kv_heads, tokens, head_dim]
            One entry a layer.
        start : int
            Position of the first token.
        """
        cells = keys[0].shape[1]
        state = np.empty(self.size(cells), np.uint8)
        data = memoryview(state)  # type: ignore[arg-type]
        _START.pack_into(data, 0, self._magic, 0, 1, cells)
        at = _START.size
        head = np.zeros((cells, 3), "<i4")
        head[:, 0], head[:, 1] = np.arange(start, start + cells), 1
        state[at : at + 12 * cells] = head.view(np.uint8).reshape(-1)
        at += 12 * cells
        _MIDDLE.pack_into(data, at, 0, self.layers, *self._words)
        at += _MIDDLE.size
        for width, tensor in zip(self.widths, (*keys, *values), strict=True):
            _LAYER.pack_into(data, at, F16, width)
            at += _LAYER.size
            block = torch.from_numpy(state[at : at + cells * width].view(np.float16))
            block.view(cells, self.kv_heads, self.head_dim).copy_(tensor.transpose(0, 1))
            at += cells * width
        return state


def _other_layout() -> ModelLoadError:
    return ModelLoadError(
        "this build of llama.cpp lays out the state of a sequence in a way that is not known; install the one that was "
        'tried: pip install "cacheblend-rag[llama-cpp]"'
    )
