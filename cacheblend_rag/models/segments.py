"""KV of segments cut out of a pass over several, and the inputs of layers noted on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cacheblend_rag.models.kv import SegmentKV, as_kv_layers
from cacheblend_rag.models.rope import Rotaries, unrotate

__all__ = ["cut_out", "noting_inputs"]


@contextmanager
def noting_inputs(layers: Sequence[torch.nn.Module], wanted: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Within this, the input of some layers on this thread is noted, ``[batch, tokens, hidden]``."""
    noted: dict[int, torch.Tensor] = {}
    here = threading.get_ident()

    def noting(layer: int) -> Callable[..., None]:
        # Called without ``named`` by another thread that was calling the layer as the hook was removed.
        def note(module: Any, given: Any, named: Any = None) -> None:
            if threading.get_ident() == here:
                noted[layer] = given[0] if given else named["hidden_states"]

        return note

    hooks = [layers[at].register_forward_pre_hook(noting(at), with_kwargs=True) for at in wanted]
    try:
        yield noted
    finally:
        for hook in hooks:
            hook.remove()


def cut_out(
    layers: list[Any],
    queries: Sequence[Sequence[torch.Tensor]],
    lengths: Sequence[int],
    heads: Sequence[int],
    first: int,
    rotaries: Rotaries,
    kv_heads: int,
) -> list[SegmentKV]:
    """KV of each segment of a batch, keys with their rotation undone; none shares memory with another.

    Parameters
    ----------
    layers : list of cache layers
        With ``keys`` and ``values`` of ``[segments, kv_heads, tokens, head_dim]``; they are taken off it, so that their
        memory goes as that of the segments comes.
    queries : sequence of sequence of Tensor, each [heads, tokens behind the context, head_dim]
        For each layer whose queries are stored, those of every segment.
    lengths : sequence of int
        Tokens of each segment; what is behind them is padding.
    heads : sequence of int
        How many of these to leave out at each segment's beginning.
    first : int
        Position at which segments begin.
    rotaries : Rotaries
        Of the positions from there on.
    kv_heads : int
    """
    keys: list[list[torch.Tensor]] = [[] for _ in lengths]
    values: list[list[torch.Tensor]] = [[] for _ in lengths]
    for number in range(len(layers)):
        layer = layers.pop(0)
        turned = unrotate(layer.keys[:, :, first:], rotaries.of_keys(number))  # [segments, kv_heads, tokens, dim]
        for row, (head, length) in enumerate(zip(heads, lengths, strict=True)):
            keys[row].append(_copied(turned[row, :, head:length]))
            values[row].append(_copied(layer.values[row, :, first + head : first + length]))
    for of_layer in queries:
        for row, (head, length) in enumerate(zip(heads, lengths, strict=True)):
            for part, other in as_kv_layers(of_layer[row][:, head:length], kv_heads):
                keys[row].append(part)
                values[row].append(other)
    return [SegmentKV(tuple(k), tuple(v), rotated=False) for k, v in zip(keys, values, strict=True)]


def _copied(part: torch.Tensor) -> torch.Tensor:
    """The same in memory of its own: a view would keep the whole batch alive."""
    return part.clone(memory_format=torch.contiguous_format)
