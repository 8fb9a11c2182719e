"""Which positions a kept row may attend to."""

from __future__ import annotations

import torch

from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.attention.rows import RowMask, as_positions


def kept_mask(
    adapter: ModelAdapter,
    rows: torch.Tensor,
    tokens: int,
    window: int | None,
    trailing: bool = False,
    left_out: torch.Tensor | None = None,
) -> RowMask | None:
    """`row_mask` in the form the model's attention takes, see `ModelAdapter.kernel_mask`.

    With ``trailing`` the rows are known to be the last positions, which a GPU is not asked again. Positions that are
    ``left_out``, ``[positions]`` bool on a CPU, are seen by none.
    """
    if adapter.takes_positions:
        return as_positions(rows, tokens, window, trailing)
    mask = row_mask(rows, tokens, window)
    if left_out is not None:
        seen = torch.arange(tokens)[None] <= rows[:, None] if mask is None else mask[0, 0]
        mask = (seen & ~left_out[:tokens])[None, None]
    return adapter.kernel_mask(mask, rows, tokens, window)


def row_mask(rows: torch.Tensor, tokens: int, window: int | None) -> torch.Tensor | None:
    """Mask by position: each row sees what the plain model would show it.

    Kept rows are scattered, so a triangle aligned to the last row and column, as public
    implementations use, would show them keys of the future.

    Parameters
    ----------
    rows : Tensor, [rows], long
        Positions of the kept rows, rising.
    tokens : int
        Positions in all.
    window : int or None
        Sliding window of the layer.

    Returns
    -------
    Tensor, [1, 1, rows, tokens], bool, or None
        True where a row sees a position; None if the rows are the last positions and no window
        applies, for which kernels have a causal form of their own.
    """
    if window is not None and window >= tokens:
        window = None
    if window is None and int(rows[0]) == tokens - len(rows):
        return None
    columns = torch.arange(tokens, device=rows.device)
    mask = columns[None] <= rows[:, None]
    if window is not None:
        mask &= columns[None] > rows[:, None] - window
    return mask[None, None]
