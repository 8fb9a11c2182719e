"""Caches that are handed to transformers' layers: of some rows, of KV alone, and preallocated ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.models.projections import PlainKV


class ScatterCache:
    """Takes the new rows of one layer, and shows the layer all positions."""

    def __init__(self, kv: LayerKV, rows: torch.Tensor, form: PlainKV) -> None:
        self._kv, self._rows, self._form = kv, rows, form

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new = self._form.from_cached(keys, values)
        self._kv.write(self._rows, new.keys, new.values)
        return self._form.to_cached(self._kv)


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


@dataclass(eq=False)
class JoinedLayers:
    """KV of one answer on all layers in one tensor, to which kernels add a row on each layer in one call.

    Parameters
    ----------
    block : Tensor, [layers, 2, kv_heads, rows and room, head_dim]
    used : int
        Rows that are there.
    """

    block: torch.Tensor
    used: int
    _entries: tuple[int, torch.Tensor] | None = field(default=None, repr=False)

    @classmethod
    def allocate(cls, layers: Sequence[PreallocatedLayer], rows: int) -> JoinedLayers:
        """Allocate room for the rows of some layers and more, and move the layers' KV into it."""
        first = layers[0].keys
        _, heads, used, width = first.shape
        block = first.new_empty((len(layers), 2, heads, used + rows + _ROWS, width))
        joined = cls(block, used)
        for layer, kv in zip(layers, block, strict=True):
            kv[0, :, :used], kv[1, :, :used] = layer.keys[0], layer.values[0]
            layer.join(joined, kv)
        return joined

    @property
    def room(self) -> int:
        """Rows that each head of a layer has room for."""
        return self.block.shape[3]

    @property
    def entries(self) -> torch.Tensor:
        """Address of each layer's keys, of its values, and their room, ``[layers, 3]`` int64, on the CPU."""
        address = self.block.data_ptr()
        if self._entries is None or self._entries[0] != address:  # a copy lies elsewhere
            layer, part = (stride * self.block.itemsize for stride in self.block.stride()[:2])
            begin = torch.arange(len(self.block)) * layer + address
            self._entries = address, torch.stack((begin, begin + part, torch.full_like(begin, self.room)), dim=1)
        return self._entries[1]


class PreallocatedLayer(DynamicLayer):  # type: ignore[misc]
    """transformers' `DynamicLayer`, growing within room kept behind its rows.

    `DynamicLayer` puts all keys and values into new memory for every token. That costs a copy of
    the whole cache a token, and, on a thread of its own, asking the system for that memory again
    and again.
    """

    before_update: Callable[[], object] | None = None
    """Called before rows are added: a place between two layers of a pass."""
    joined: JoinedLayers | None = None
    """Where its rows lie with those of the other layers, if they do."""
    _room: _Buffers | None = None
    _held: tuple[Any, Any] = (None, None)

    def _part(self, part: int) -> Any:
        """Keys (0) or values (1), of the rows that are there."""
        return self._held[part] if self.joined is None else self._held[part][:, :, : self.joined.used]

    @property
    def keys(self) -> Any:
        """Keys of all rows, ``[batch, kv_heads, rows, head_dim]``."""
        return self._part(0)

    @keys.setter
    def keys(self, keys: Any) -> None:
        self._held, self.joined = (keys, self._part(1)), None

    @property
    def values(self) -> Any:
        """Values of all rows, ``[batch, kv_heads, rows, head_dim]``."""
        return self._part(1)

    @values.setter
    def values(self, values: Any) -> None:
        self._held, self.joined = (self._part(0), values), None

    def __copy__(self) -> PreallocatedLayer:
        other = type(self)()
        other.__dict__ |= {**self.__dict__, "_held": (self.keys, self.values), "joined": None}
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> PreallocatedLayer:
        """A copy with memory of its own, and no room behind its rows."""
        other = type(self)()
        if self.is_initialized:
            other.hold(self.keys.clone(), self.values.clone())
        return other

    def join(self, joined: JoinedLayers, kv: torch.Tensor) -> None:
        """Hold rows with those of other layers from now on, in ``kv``, ``[2, kv_heads, rows and room, head_dim]``."""
        self._held, self.joined, self._room = (kv[None, 0], kv[None, 1]), joined, None

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
            # Room for these rows and then some, with what there is copied into it.
            self._room = _Buffers(_enlarge(self.keys, rows), _enlarge(self.values, rows), self.keys.shape[2])
        self.keys, self.values = self._room.add(key_states, value_states)
        return self.keys, self.values

    def take_back(self, rows: int) -> None:
        """Forget the newest rows. The next rows overwrite them, so no other reader may use them."""
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


def joined_layers(cache: Cache) -> JoinedLayers | None:
    """The KV of an answer in one tensor, with room for one more row; None if its layers cannot lie so."""
    layers = cache.layers
    if not all_preallocated(cache) or not layers[0].is_initialized:
        return None
    joined: JoinedLayers | None = layers[0].joined
    if joined is None or joined.used == joined.room or any(layer.joined is not joined for layer in layers):
        if len(layers[0].keys) != 1 or len({layer.keys.shape for layer in layers}) != 1:
            return None
        joined = JoinedLayers.allocate(layers, 1)
    return joined


def all_preallocated(cache: Cache) -> bool:
    """Whether every layer keeps all positions and grows in place, so that `take_back` can be used."""
    return all(isinstance(layer, PreallocatedLayer) for layer in cache.layers)


def take_back(cache: Cache, rows: int) -> None:
    """Forget the newest rows of a cache whose layers all grow in place."""
    for layer in cache.layers:
        layer.take_back(rows)


def first_rows(cache: Cache, tokens: int) -> Cache | None:
    """A cache of the first tokens of another; None if a layer has not kept them.

    It shows the rows of the other one, and writes none of them: what is added to it lies elsewhere.

    Parameters
    ----------
    cache : transformers Cache
    tokens : int
    """
    layers = [_cut(layer, tokens) for layer in cache.layers]
    return None if None in layers else Cache(layers=layers)


def _cut(layer: Any, tokens: int) -> Any:
    if not isinstance(layer, (PreallocatedLayer, DynamicSlidingWindowLayer)) or not layer.is_initialized:
        return None
    length = layer.get_seq_length()
    if length < tokens or (length > tokens and layer.keys.shape[2] < length):
        return None
    keys, values = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]
    if isinstance(layer, PreallocatedLayer):
        cut = PreallocatedLayer()
        cut.hold(keys, values)
        return cut
    cut = copy.copy(layer)  # it makes new tensors as it grows
    cut.keys, cut.values, cut.cumulative_length = keys, values, tokens
    return cut


class CacheMark:
    """A place in the growth of a cache, to which it can be taken back.

    Layers that keep all positions forget their newest rows. One that keeps a window has lost the oldest of them
    meanwhile, and gets back what it held.

    Parameters
    ----------
    cache : transformers Cache
    """

    def __init__(self, cache: Cache) -> None:
        self._held = {
            number: copy.copy(layer)
            for number, layer in enumerate(cache.layers)
            if not isinstance(layer, PreallocatedLayer)
        }

    def take_back(self, cache: Cache, added: int, left: int) -> int:
        """Forget the newest rows.

        Parameters
        ----------
        cache : transformers Cache
        added : int
            Rows that were added since.
        left : int
            How many of them are to be forgotten, at least.

        Returns
        -------
        int
            How many were.
        """
        rows = added if self._held else left
        for number, layer in enumerate(cache.layers):
            if number in self._held:
                cache.layers[number] = self._held[number]
            else:
                layer.take_back(rows)
        return rows


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


def tokens_read(cache: Cache, otherwise: int) -> int:
    """Number of tokens that a cache has read; not reliable for a cache that holds only states."""
    try:
        return int(cache.get_seq_length())
    except ValueError:
        return otherwise


def held_bytes(cache: Cache) -> int:
    """Bytes of memory that the tensors in a cache's layers keep from being used otherwise, of whatever kind."""

    def tensors(value: Any) -> Iterator[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict | list | tuple):
            for one in value.values() if isinstance(value, dict) else value:
                yield from tensors(one)

    parts = [one.untyped_storage() for layer in cache.layers for one in tensors(layer.__dict__)]
    return sum({part.data_ptr(): part.nbytes() for part in parts}.values())


def _enlarge(rows: torch.Tensor, wanted: int) -> torch.Tensor:
    room = rows.new_empty((*rows.shape[:2], wanted + _ROWS, rows.shape[3]))
    room[:, :, : rows.shape[2]] = rows
    return room
