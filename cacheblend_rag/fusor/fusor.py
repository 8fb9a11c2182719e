"""The blended pass: stored KV and a few recomputed rows become the KV of the whole prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from cacheblend_rag.fusor.mask import row_mask
from cacheblend_rag.fusor.selection.base import LayerView, SelectionRule
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.models.rope import rotate

__all__ = ["Fusion", "FusionPlan", "fuse"]


@dataclass(frozen=True)
class FusionPlan:
    """What is reused and what must be computed.

    Parameters
    ----------
    input_ids : sequence of int
        Ids of the prompt.
    exact : sequence of range
        Positions whose stored KV is what a full prefill would give: a stored prefix, and a
        chunk that stands directly behind what it was computed behind. Never recomputed.
    reused : sequence of range
        Positions of the other stored chunks; a selection rule decides on these.
    unrotated : range
        Positions from the first to the last whose stored keys still need their rotation.

    All other positions are computed on every layer, and so is the last one, whose logits are
    wanted.
    """

    input_ids: Sequence[int]
    exact: Sequence[range]
    reused: Sequence[range]
    unrotated: range


@dataclass(frozen=True)
class Fusion:
    """Result of the blended pass.

    Parameters
    ----------
    layers : tuple of LayerKV
        Rotated keys and values of all positions, layer by layer.
    logits : Tensor, [vocab]
        Logits of the last position.
    computed : tuple of Tensor, each [rows] long
        Positions whose KV was computed, layer by layer.
    recomputed_tokens : tuple of int
        How many of them are reused chunk tokens.
    deviation : Tensor or None, [tokens] float32
        KV deviation at the first check layer; NaN where none was measured.
    """

    layers: tuple[LayerKV, ...]
    logits: torch.Tensor
    computed: tuple[torch.Tensor, ...]
    recomputed_tokens: tuple[int, ...]
    deviation: torch.Tensor | None


def fuse(adapter: ModelAdapter, plan: FusionPlan, layers: Iterable[LayerKV], rule: SelectionRule) -> Fusion:
    """Run the blended pass (Fig. 5 and 9 of the paper).

    Parameters
    ----------
    adapter : ModelAdapter
        The model.
    plan : FusionPlan
        What is reused.
    layers : iterable of LayerKV
        Stored KV, layer by layer; its buffers are taken over and filled.
    rule : SelectionRule
        Which reused rows stay on which layer.
    """
    with adapter.blending():
        state = _Pass(adapter, plan, rule)
        fused = tuple(state.step(number, kv) for number, kv in enumerate(layers))
        logits = adapter.head(state.hidden[-1])
        return Fusion(fused, logits, tuple(state.computed), tuple(state.recomputed), state.deviation)


class _Pass:
    """State of one blended pass: the kept rows and their hidden vectors."""

    def __init__(self, adapter: ModelAdapter, plan: FusionPlan, rule: SelectionRule) -> None:
        self._adapter, self._plan, self._rule = adapter, plan, rule
        self._tokens = len(plan.input_ids)
        self._rotaries = adapter.rotary(self._tokens)  # of all positions, float32
        reused = torch.zeros(self._tokens, dtype=torch.bool)
        for span in plan.reused:
            reused[span.start : span.stop] = True
        wanted = ~reused | rule.starts
        for span in plan.exact:
            wanted[span.start : span.stop] = False
        wanted[-1] = True
        self._reused_tokens = int(reused.sum())
        reused[-1] = False  # the last row is always computed, so no rule decides on it
        self._rows = wanted.nonzero()[:, 0].to(adapter.device)  # [rows], rising
        self._optional = reused[wanted].to(adapter.device)  # [rows], true where a rule decides
        ids = torch.tensor(plan.input_ids)[wanted]
        self.hidden = adapter.embed(ids.tolist())  # [rows, hidden]
        self.computed: list[torch.Tensor] = []
        self.recomputed: list[int] = []
        self.deviation: torch.Tensor | None = None
        self._narrowed()

    def _narrowed(self) -> None:
        """Everything that depends on which rows are kept."""
        self._kept_rotaries = self._rotaries.at(self._rows).to(self._adapter.dtype)
        self._masks: dict[int | None, torch.Tensor | None] = {}
        self._recomputed_now = int(self._optional.sum())

    def step(self, layer: int, kv: LayerKV) -> LayerKV:
        """Fuse one layer; its buffers then hold rotated keys and values of all positions."""
        self._turn(layer, kv)
        if self._rule.checks(layer) and self._recomputed_now:
            self._check(layer, kv)
        self.hidden = self._adapter.run_layer(
            layer, self.hidden, kv, self._rows, self._kept_rotaries, self._mask(self._adapter.windows[layer])
        )
        self.computed.append(self._rows)
        self.recomputed.append(self._recomputed_now)
        return kv

    def _turn(self, layer: int, kv: LayerKV) -> None:
        """Rotate stored keys to their positions, in place; computed rows among them are overwritten later."""
        rotary = self._rotaries.of_keys(layer)
        span = slice(self._plan.unrotated.start, self._plan.unrotated.stop)
        if span.start < span.stop and rotary is not None:
            kv.keys[:, :, span] = rotate(kv.keys[:, :, span], rotary.at(span))

    def _check(self, layer: int, kv: LayerKV) -> None:
        """Let the rule drop rows before this layer."""
        candidates = self._optional.nonzero()[:, 0]
        positions = self._rows[candidates]

        def measure() -> torch.Tensor:
            new = self._adapter.project_values(layer, self.hidden[candidates]).float()
            stored = kv.values[0].index_select(1, positions).float()  # [kv_heads, candidates, head_dim]
            deviation = (new - stored).square().sum(dim=(0, 2)).sqrt()
            if self.deviation is None:
                self.deviation = torch.full((self._tokens,), float("nan"), device=deviation.device)
                self.deviation[positions] = deviation
            return deviation

        view = LayerView(layer, positions, self._reused_tokens, measure)
        kept = ~self._optional
        kept[candidates[self._rule.keep(view)]] = True
        stay = kept.nonzero()[:, 0]
        self._rows, self._optional, self.hidden = self._rows[stay], self._optional[stay], self.hidden[stay]
        self._narrowed()

    def _mask(self, window: int | None) -> torch.Tensor | None:
        if window not in self._masks:
            seen = row_mask(self._rows, self._tokens, window)
            self._masks[window] = self._adapter.kernel_mask(seen, len(self._rows))
        return self._masks[window]
