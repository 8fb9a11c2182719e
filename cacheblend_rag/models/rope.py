"""RoPE: rotation of keys to a position and back, and where a model's rotations come from.

Appendix A of the CacheBlend paper.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from cacheblend_rag.models.gpu import has_kernels

# Pairs of dimensions that are rotated at a time on a CPU.
_BLOCK = 2**18


@dataclass(frozen=True)
class Layout:
    """How a family lays out its rotation.

    Parameters
    ----------
    interleaved : bool
        Whether dimensions 0 and 1, 2 and 3, … rotate together; otherwise dimension i rotates with
        the one half the rotated width further on.
    cosines : {"halves", "pairs", "once", "complex"}
        How the model's table of cosines lists each frequency: all of them twice in a row, each
        one twice in place, or once; or once, as the real part of complex numbers.
    """

    interleaved: bool = False
    cosines: str = "halves"


@dataclass(frozen=True)
class Rotary:
    """Cosine and sine of some positions, with the model's attention scaling in both.

    Parameters
    ----------
    cos, sin : Tensor, [tokens, width], float32
        As the model's own layers take them; the width depends on the layout.
    layout : Layout
        Which dimensions rotate together, and how ``cos`` and ``sin`` are listed.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    layout: Layout = Layout()

    def at(self, rows: torch.Tensor | slice) -> Rotary:
        """Those of some positions only."""
        return Rotary(self.cos[rows], self.sin[rows], self.layout)

    def to(self, dtype: torch.dtype) -> Rotary:
        """In another element type; complex numbers stay what they are."""
        if self.layout.cosines == "complex":
            return self
        return Rotary(self.cos.to(dtype), self.sin.to(dtype), self.layout)

    def for_layer(self) -> Any:
        """Rotations as a decoder layer takes them, for a batch of one."""
        if self.layout.cosines == "complex":
            return torch.complex(self.cos, self.sin)[None]
        return self.cos[None], self.sin[None]

    def frequencies(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine with each frequency listed once, ``[tokens, rotary_dim / 2]``."""
        if self.layout.cosines in ("once", "complex"):
            return self.cos, self.sin
        if self.layout.cosines == "pairs":
            return self.cos[..., ::2], self.sin[..., ::2]
        half = self.cos.shape[-1] // 2
        return self.cos[..., :half], self.sin[..., :half]


@dataclass(frozen=True)
class Rotaries:
    """Cosine and sine of some positions for every layer of a model.

    Parameters
    ----------
    tables : mapping of str to Rotary
        By name; more than one in models whose layers have different bases.
    names : sequence of str
        Name of each layer's table.
    rotates : sequence of bool
        Whether a layer rotates its keys; layers without positions (NoPE) do not.
    """

    tables: Mapping[str, Rotary]
    names: Sequence[str]
    rotates: Sequence[bool]

    def layer(self, layer: int) -> Rotary:
        """Rotations as the model gives them to a layer, whether the layer uses them or not."""
        return self.tables[self.names[layer]]

    def of_keys(self, layer: int) -> Rotary | None:
        """The rotation of a layer's keys; None if it does not rotate them."""
        return self.layer(layer) if self.rotates[layer] else None

    def at(self, rows: torch.Tensor | slice) -> Rotaries:
        """Those of some positions only."""
        tables = {name: table.at(rows) for name, table in self.tables.items()}
        return Rotaries(tables, self.names, self.rotates)

    def to(self, dtype: torch.dtype) -> Rotaries:
        """In another element type."""
        tables = {name: table.to(dtype) for name, table in self.tables.items()}
        return Rotaries(tables, self.names, self.rotates)


def rotate(keys: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """Rotate keys ``[…, tokens, head_dim]`` to their positions; computed in float32.

    Without a rotation, keys come back as they are.
    """
    if rotary is None:
        return keys
    rotated = keys.clone()
    rotate_in_place(rotated, rotary)
    return rotated


def rotate_in_place(keys: torch.Tensor, rotary: Rotary) -> None:
    """`rotate` within the memory of the keys."""
    rotate_keys(keys, *rotary.frequencies(), rotary.layout.interleaved)


def unrotate(keys: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """Undo `rotate`, the attention scaling included; computed in float32."""
    if rotary is None:
        return keys
    cos, sin = rotary.frequencies()
    scale = cos.square() + sin.square()
    rotated = keys.clone()
    rotate_keys(rotated, cos / scale, -sin / scale, rotary.layout.interleaved)
    return rotated


def rotate_keys(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    """Rotate pairs of dimensions in place; what lies behind them is left alone (a partial rotation)."""
    whole = keys.dim() == 4 and len(keys) == 1 and keys.stride(-1) == 1 and not keys.requires_grad
    if has_kernels(keys.device) and whole and cos.dim() == 2 and cos.stride() == sin.stride():
        from cacheblend_rag.models.gpu.rowwise import rotate

        rotate(keys, cos, sin, interleaved)
        return
    first, second = pairs_of(keys, cos.shape[-1], interleaved)
    tokens = keys.shape[-2]
    # On a CPU what is needed besides is kept small: fresh memory costs more than the arithmetic.
    step = max(1, _BLOCK * tokens // max(1, first.numel())) if keys.device.type == "cpu" else max(1, tokens)
    for start in range(0, tokens, step):
        at = slice(start, start + step)
        turn_pairs(first[..., at, :], second[..., at, :], cos[..., at, :], sin[..., at, :])


def pairs_of(keys: torch.Tensor, pairs: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the dimensions that rotate together."""
    if interleaved:
        return keys[..., : 2 * pairs : 2], keys[..., 1 : 2 * pairs : 2]
    return keys[..., :pairs], keys[..., pairs : 2 * pairs]


def turn_pairs(first: torch.Tensor, second: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate ``(first, second)`` in place, in float32: ``(x cos - y sin, y cos + x sin)``."""
    if first.dtype == torch.float32:
        before = first.clone()
        first.mul_(cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).addcmul_(before, sin)
        return
    x, y = first.float(), second.float()
    first.copy_((x * cos).addcmul_(y, sin, value=-1))
    second.copy_(y.mul_(cos).addcmul_(x, sin))


_ONE_TABLE = ""
_ROUNDED = 1024  # tables are made for a multiple of so many positions


class Positions:
    """A model's rotary embedding, and the frequency regimes it has.

    Two RoPE types change their frequencies with the length of the whole prompt, and with them the
    values of all layers but the first:

    - LongRoPE has two sets of frequencies, one for prompts beyond a length;
    - dynamic NTK has other frequencies for every length beyond the one it was trained at.

    Parameters
    ----------
    config : transformers PretrainedConfig
    module : torch Module
        The model's rotary embedding.
    layout : Layout
        How its tables are laid out.
    rotates : sequence of bool
        Whether each layer rotates its keys.
    """

    def __init__(self, config: Any, module: Any, layout: Layout, rotates: Sequence[bool]) -> None:
        self._module, self._layout, self._rotates = module, layout, tuple(rotates)
        # RoPE parameters by table name; models with several bases list them by layer type.
        parameters = config.rope_parameters
        several = {name: value for name, value in parameters.items() if isinstance(value, dict)}
        kinds: Mapping[str, Mapping[str, Any]] = several or {_ONE_TABLE: parameters}
        single = _ONE_TABLE in kinds
        self._names = tuple(_ONE_TABLE if single else config.layer_types[n] for n in range(len(rotates)))
        self._types = {name: kinds.get(name, {}).get("rope_type", "default") for name in dict.fromkeys(self._names)}
        self._long = sorted(
            int(kinds[name]["original_max_position_embeddings"])
            for name, rope_type in self._types.items()
            if rope_type == "longrope"
        )
        self._dynamic = any("dynamic" in rope_type for rope_type in self._types.values())
        self._trained = int(config.max_position_embeddings)
        # Of the longest prompt so far; the same for all prompts where frequencies do not depend on their length.
        self._kept: tuple[int, torch.device, Rotaries] | None = None

    @property
    def regimes(self) -> tuple[int, ...]:
        """All regimes in which KV may be stored, 0 first."""
        return (0, *dict.fromkeys(self._long))

    def regime(self, tokens: int) -> int | None:
        """The frequency regime of a prompt of this many tokens.

        Returns
        -------
        int or None
            The length that the prompt exceeds and that gave it other frequencies, 0 if there is
            none. None if hardly another prompt has the same frequencies (dynamic NTK beyond the
            trained length), so that storing KV is of no use.
        """
        if self._dynamic and tokens > self._trained:
            return None
        return max((length for length in self._long if tokens > length), default=0)

    def alike(self, lengths: Iterable[int], regime: int) -> bool:
        """Whether texts of these lengths, as parts of prompts of a regime, have the same frequencies side by side."""
        own = ((tokens, self.regime(tokens)) for tokens in lengths)
        return len({-tokens if found is None else max(found, regime) for tokens, found in own}) == 1

    def rotaries(self, tokens: int, start: int, regime: int, device: torch.device) -> Rotaries:
        """Cosine and sine of positions ``start`` to ``start + tokens``, in float32."""
        if start or self._dynamic or self._long:
            return self._make(tokens, start, regime, device)
        if self._kept is None or self._kept[0] < tokens or self._kept[1] != device:
            size = -(-tokens // _ROUNDED) * _ROUNDED
            self._kept = size, device, self._make(size, 0, regime, device)
        return self._kept[2].at(slice(tokens))

    def _make(self, tokens: int, start: int, regime: int, device: torch.device) -> Rotaries:
        self.settle(device)
        positions = torch.arange(start, start + tokens, device=device)
        with self.use_regime(regime):
            tables = {name: self._table(name, positions) for name in self._types}
        return Rotaries(tables, self._names, self._rotates)

    def settle(self, device: torch.device) -> None:
        """Let dynamic NTK forget the longest prompt it has seen, so that results never depend on it."""
        if self._dynamic:
            for name in self._types:
                self._table(name, torch.zeros(1, dtype=torch.long, device=device))

    @contextmanager
    def use_regime(self, regime: int) -> Iterator[None]:
        """Within this, shorter texts get the frequencies of a prompt of that regime, on this thread.

        The model chooses by the highest position, so one is added that lies in the regime, and its
        cosine and sine are dropped again.
        """
        if not regime:
            yield
            return

        here = threading.get_ident()

        # Called without ``kwargs`` by another thread that was calling the module as the hook was removed.
        def lengthen(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] = MappingProxyType({})) -> Any:
            if threading.get_ident() != here:
                return None
            given = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
            longer = torch.cat((given, given.new_full((len(given), 1), regime)), dim=1)
            if "position_ids" in kwargs:
                return args, {**kwargs, "position_ids": longer}
            return (args[0], longer, *args[2:]), kwargs

        def shorten(module: Any, args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> Any:
            return tuple(table[:, :-1] for table in output) if threading.get_ident() == here else None

        hooks = (
            self._module.register_forward_pre_hook(lengthen, with_kwargs=True),
            self._module.register_forward_hook(shorten),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _table(self, name: str, positions: torch.Tensor) -> Rotary:
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        which = () if name == _ONE_TABLE else (name,)
        made = self._module(like, positions[None], *which)
        cos, sin = (made.real, made.imag) if self._layout.cosines == "complex" else made
        return Rotary(cos[0], sin[0], self._layout)
