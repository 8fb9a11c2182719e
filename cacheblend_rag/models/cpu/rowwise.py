"""Operations of a decoder layer on each row by itself, computed block by block on a CPU.

A feed-forward network between its two products is several times as wide as the model. Over a whole prompt that is
tens of megabytes of fresh memory a layer, which cost more than what is computed in them; over a block of rows
the same few megabytes serve again and again, and stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from cacheblend_rag.models.modules import ForwardOverride, ForwardOverrides, OneForEach

# Rows a block; fewer make products by weights slower, and the rows that blending keeps mostly fit into one.
_ROWS = 512


def row_by_row(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of the modules that surely treat each row by itself: norms, and networks of ordinary linear layers.

    LoRA's layers are made of such. Others may well do so too: mixtures of experts (which would read each expert's
    weights for every block) and quantised layers (some of which take one scale for all rows).
    """
    return [module for module in modules if all(map(_ordinary, module.modules()))]


def _ordinary(part: nn.Module) -> bool:
    own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
    if hasattr(part, "quantization_scheme"):  # compressed-tensors quantises within an ordinary linear layer
        return False
    if type(part) is nn.Linear:
        return all(type(tensor) is nn.Parameter for tensor in own)
    norm = all(tensor.dim() < 2 for tensor in own)
    return norm and not isinstance(part, nn.ModuleList | nn.modules.batchnorm._BatchNorm)


class _InBlocks(ForwardOverride):
    """Computes block by block; whatever is not plainly rows is left to the module's own ``forward``."""

    __slots__ = ()

    def instead(self, *args: Any, **kwargs: Any) -> Any:
        rows = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(rows, torch.Tensor) or rows.dim() < 2 or torch.is_grad_enabled():
            return self.plainly(*args, **kwargs)
        size = max(1, _ROWS // max(1, rows.shape[:-2].numel()))  # rows of a batch count together
        blocks = torch.split(rows, size, dim=-2)
        if len(blocks) == 1:
            return self.plainly(rows)
        first = self.plainly(blocks[0])
        out = first.new_empty((*rows.shape[:-1], first.shape[-1]))
        out[..., :size, :] = first
        for number, block in enumerate(blocks[1:], 1):
            out[..., number * size : (number + 1) * size, :] = self.plainly(block)
        return out


computed_in_blocks = OneForEach[ForwardOverrides[_InBlocks]](lambda modules: ForwardOverrides(map(_InBlocks, modules)))
"""Lets modules of a model compute many rows block by block while `ForwardOverrides.in_use`."""
