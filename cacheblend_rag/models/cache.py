"""Caches that are handed to transformers' layers: of some rows, of KV alone, and preallocated ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.models.projections import PlainKV


class ScatterCache:
    """Takes the new rows of one layer, and shows the layer all positions."""

    def __init__(self, kv: LayerKV, rows: torch.Tensor, form: PlainKV) -> None:
        self._kv, self._rows, self._form = kv, rows, form

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new = self._form.held(keys, values)
        self._kv.write(self._rows, new.keys, new.values)
        return self._form.cached(self._kv)


class Enough(Exception):  # noqa: N818
    """All keys and values are there; what the model would make of them is not wanted."""


class LastLayer(DynamicLayer):  # type: ignore[misc]
    """The cache of the last layer, behind whose keys and values the pass may end."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        super().update(*args, **kwargs)
        raise Enough


# Rows of room made at a time: enough that copying is rare, little beside the KV of a prompt.
_ROWS = 128


@dataclass
class _Buffers:
    """Buffers with space behind the rows that are used."""

    keys: torch.Tensor  # [batch, kv_heads, rows and room, head_dim]
    values: torch.Tensor
    used: int

    @classmethod
    def holding(cls, keys: torch.Tensor, values: torch.Tensor, rows: int) -> _Buffers:
        """Room for some rows and then some, with what there is copied into it."""
        return cls(_enlarged(keys, rows), _enlarged(values, rows), keys.shape[2])

    def follows(self, keys: torch.Tensor, rows: int) -> bool:
        """Whether these keys are all that lies here, with space for so many rows."""
        # Layers copied one from another share their room; the first to go on takes the space.
        here = keys.data_ptr() == self.keys.data_ptr() and keys.shape[:2] == self.keys.shape[:2]
        return here and keys.shape[2] == self.used and rows <= self.keys.shape[2]

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new rows; views of all rows."""
        start, self.used = self.used, self.used + keys.shape[2]
        self.keys[:, :, start : self.used] = keys
        self.values[:, :, start : self.used] = values
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]


class PreallocatedLayer(DynamicLayer):  # type: ignore[misc]
    """transformers' `DynamicLayer`, growing within room kept behind its rows.

    `DynamicLayer` puts all keys and values into new memory for every token. That costs a copy of
    the whole cache a token, and, on a thread of its own, asking the system for that memory again
    and again.
    """

    keys: torch.Tensor
    values: torch.Tensor
    before_update: Callable[[], object] | None = None
    """Called before rows are added: a place between two layers of a pass."""
    _room: _Buffers | None = None

    def hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Begin with these keys and values, which are taken over."""
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values, self.is_initialized = keys, values, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add rows; all keys and values, ``[batch, kv_heads, tokens, head_dim]``."""
        if self.before_update is not None:
            self.before_update()
        # Writing in place would disturb a graph. On a GPU a copy takes less time than the calls it saves.
        if self.get_seq_length() == 0 or torch.is_grad_enabled() or key_states.device.type != "cpu":
            self._room = None
            keys, values = super().update(key_states, value_states)
            return keys, values
        rows = self.keys.shape[2] + key_states.shape[2]
        if self._room is None or not self._room.follows(self.keys, rows):
            self._room = _Buffers.holding(self.keys, self.values, rows)
        self.keys, self.values = self._room.add(key_states, value_states)
        return self.keys, self.values

    def take_back(self, rows: int) -> None:
        """Forget the newest rows. The next ones are written in their place, so nobody else may look at these."""
        kept = self.get_seq_length() - rows
        if self._room is not None and self._room.follows(self.keys, kept):
            self._room.used = kept
        self.keys, self.values = self.keys[:, :, :kept], self.values[:, :, :kept]

    def reset(self) -> None:
        """Forget everything, room included."""
        self._room = None
        super().reset()


def preallocate(cache: Cache) -> Cache:
    """The same cache; its layers that keep all positions grow in place from now on."""
    cache.layers = [PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def all_preallocated(cache: Cache) -> bool:
    """Whether every layer keeps all positions and grows in place, so that `take_back` can be used."""
    return all(isinstance(layer, PreallocatedLayer) for layer in cache.layers)


def take_back(cache: Cache, rows: int) -> None:
    """Forget the newest rows of a cache whose layers all grow in place."""
    for layer in cache.layers:
        layer.take_back(rows)


@contextmanager
def called_at_each_layer(cache: Cache, called: Callable[[], object] | None) -> Iterator[None]:
    """Within this, something is called in each layer of a pass, where its cache is a `PreallocatedLayer`."""
    layers = [layer for layer in cache.layers if isinstance(layer, PreallocatedLayer)]
    for layer in layers:
        layer.before_update = called
    try:
        yield
    finally:
        for layer in layers:
            layer.before_update = None


def _enlarged(rows: torch.Tensor, wanted: int) -> torch.Tensor:
    room = rows.new_empty((*rows.shape[:2], wanted + _ROWS, rows.shape[3]))
    room[:, :, : rows.shape[2]] = rows
    return room
