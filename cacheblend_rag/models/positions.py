"""Where a model's rotations come from: its tables of cosines, and what decides on them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch

from cacheblend_rag.models.rope import Layout, Rotaries, Rotary

__all__ = ["Positions"]

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
    turns : sequence of bool
        Whether each layer rotates its keys.
    """

    def __init__(self, config: Any, module: Any, layout: Layout, turns: Sequence[bool]) -> None:
        self._module, self._layout, self._turns = module, layout, tuple(turns)
        kinds = _rope_kinds(config)
        single = _ONE_TABLE in kinds
        self._names = tuple(_ONE_TABLE if single else config.layer_types[n] for n in range(len(turns)))
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
            return self._made(tokens, start, regime, device)
        if self._kept is None or self._kept[0] < tokens or self._kept[1] != device:
            size = -(-tokens // _ROUNDED) * _ROUNDED
            self._kept = size, device, self._made(size, 0, regime, device)
        return self._kept[2].at(slice(tokens))

    def _made(self, tokens: int, start: int, regime: int, device: torch.device) -> Rotaries:
        self.settle(device)
        positions = torch.arange(start, start + tokens, device=device)
        with self.within(regime):
            tables = {name: self._table(name, positions) for name in self._types}
        return Rotaries(tables, self._names, self._turns)

    def settle(self, device: torch.device) -> None:
        """Let dynamic NTK forget the longest prompt it has seen, so that results never depend on it."""
        if self._dynamic:
            for name in self._types:
                self._table(name, torch.zeros(1, dtype=torch.long, device=device))

    @contextmanager
    def within(self, regime: int) -> Iterator[None]:
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
        cos, sin = self._module(like, positions[None], *which)
        return Rotary(cos[0], sin[0], self._layout)


def _rope_kinds(config: Any) -> Mapping[str, Mapping[str, Any]]:
    """RoPE parameters by table name; models with several bases list them by layer type."""
    parameters = config.rope_parameters
    if any(isinstance(value, dict) for value in parameters.values()):
        return {name: value for name, value in parameters.items() if isinstance(value, dict)}
    return {_ONE_TABLE: parameters}
