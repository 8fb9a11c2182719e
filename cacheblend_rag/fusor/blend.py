"""The blended pass: stored KV and a few recomputed rows become the KV of the whole prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from cacheblend_rag.fusor.scoring import question_attention
from cacheblend_rag.fusor.selection.base import LayerView, SelectionRule, StartView
from cacheblend_rag.fusor.work import ProjectedRows, RowsDone
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.attention.rows import RowMask
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.models.rope import rotate_in_place
from cacheblend_rag.models.row_layers import TOGETHER, RowLayers

SINK = 4
"""First positions, which each row sees in a scoring pass: what attends to nothing attends to them."""


@dataclass(frozen=True)
class FusionPlan:
    """Rows that are reused, and rows that must be computed.

    Parameters
    ----------
    input_ids : sequence of int
        Ids of the prompt.
    exact : sequence of range
        Positions whose stored KV is that of a full prefill: a stored prefix, and a chunk
        directly behind the text it was computed behind. They are never recomputed.
    reused : sequence of range
        Positions of the other stored chunks. A selection rule decides on these.
    unrotated : range
        Positions from the first to the last whose stored keys still need their rotation.
    question : range or None
        Positions of the question, at the end; by default those behind the last stored chunk.
    missing : sequence of range
        Positions that a scoring pass leaves out, of those that are computed: chunks that are not stored. CPU only.

    All other positions are computed on every layer. So is the last one, because its logits are needed.
    """

    input_ids: Sequence[int]
    exact: Sequence[range]
    reused: Sequence[range]
    unrotated: range
    question: range | None = None
    missing: Sequence[range] = ()


@dataclass(frozen=True)
class Fusion:
    """Result of the blended pass.

    Parameters
    ----------
    layers : sequence of LayerKV
        Rotated keys and values of all positions, layer by layer.
    logits : Tensor, [vocab]
        Logits of the last position.
    computed : tuple of Tensor, each [rows] long
        Positions whose KV was computed, layer by layer.
    recomputed_tokens : tuple of int
        How many of them are reused chunk tokens.
    reused_tokens : int
        Reused chunk tokens in all.
    deviation : Tensor or None, [tokens] float32
        KV deviation at the first check layer; NaN where it was not measured.
    done : RowsDone
        All rows that were worked on, those of checks and of a scoring pass included.
    """

    layers: Sequence[LayerKV]
    logits: torch.Tensor
    computed: tuple[torch.Tensor, ...]
    recomputed_tokens: tuple[int, ...]
    reused_tokens: int
    deviation: torch.Tensor | None
    done: RowsDone


def fuse(
    adapter: ModelAdapter,
    plan: FusionPlan,
    layers: Iterable[LayerKV],
    rule: SelectionRule,
    each_layer: Callable[[], object] | None = None,
) -> Fusion:
    """Run the blended pass (Fig. 5 and 9 of the paper).

    Parameters
    ----------
    adapter : ModelAdapter
        The model.
    plan : FusionPlan
        Reused and computed rows.
    layers : iterable of LayerKV
        Stored KV, layer by layer; its buffers are taken over and filled.
    rule : SelectionRule
        Which reused rows stay on which layer.
    each_layer : callable, optional
        Called before each layer, those of a scoring pass included; others may use the model then.
    """
    with adapter.blending() as row_layers:
        state = _Pass(adapter, row_layers, plan, rule.fit(adapter.num_layers), iter(layers), each_layer)
        fused = tuple(state.prefill_layers())
        logits = adapter.head(state.hidden[-1])
        done = RowsDone(tuple(state.computed), tuple(state.projected), state.scored, 1)
        return Fusion(fused, logits, done.computed, tuple(state.recomputed), state.reused_tokens, state.deviation, done)


class _Pass:
    """State of one blended pass: the kept rows and their hidden vectors."""

    def __init__(
        self,
        adapter: ModelAdapter,
        row_layers: RowLayers,
        plan: FusionPlan,
        rule: SelectionRule,
        layers: Iterator[LayerKV],
        each_layer: Callable[[], object] | None,
    ) -> None:
        self._adapter, self._row_layers, self._plan, self._rule = adapter, row_layers, plan, rule
        self._each_layer, self._layers, self._rotated = each_layer, layers, list[LayerKV]()
        self._tokens = len(plan.input_ids)
        self._rotaries = adapter.rotary(self._tokens)  # of all positions, float32
        self.computed: list[torch.Tensor] = []
        self.recomputed: list[int] = []
        self.projected: list[ProjectedRows] = []
        self.scored: tuple[torch.Tensor, ...] = ()
        self._measured: tuple[torch.Tensor, torch.Tensor] | None = None
        # Copied before anything is queued: later, the host would wait for that.
        self._ids = torch.tensor(plan.input_ids, dtype=torch.long).to(adapter.device)
        self._begin()
        self.hidden = adapter.embed(self._ids[self._rows])  # [rows, hidden]

    def _begin(self) -> None:
        """Sort the positions, and ask the rule which of the reused ones layer 0 computes."""
        plan, device = self._plan, self._adapter.device
        reused = torch.zeros(self._tokens, dtype=torch.bool)
        self._offsets = torch.zeros(self._tokens, dtype=torch.long)  # place within the chunk
        for span in plan.reused:
            reused[span.start : span.stop] = True
            self._offsets[span.start : span.stop] = torch.arange(len(span))
        always = ~reused
        for span in plan.exact:
            always[span.start : span.stop] = False
        always[-1] = True
        self.reused_tokens = int(reused.sum())
        reused[-1] = False  # the last row is always computed, so no rule decides on it
        candidates = reused.nonzero()[:, 0].to(device)
        self._offsets = self._offsets.to(device)
        self._always = always.nonzero()[:, 0].to(device)
        self._attention = self._score(always) if len(candidates) else None
        self._keep(candidates[self._rule.begin(self._view(candidates))])
        if len(self._chosen) in (0, len(candidates)):
            rows = always if not len(self._chosen) else always | reused
            self._trailing = bool(rows[-len(self._rows) :].all())

    def _score(self, always: torch.Tensor) -> torch.Tensor | None:
        """The question's attention to all positions, if the rule wants it; ``always`` is a mask on the CPU."""
        if not self._rule.score_layers:
            return None
        behind = max((span.stop for span in (*self._plan.reused, *self._plan.exact)), default=0)
        first = self._plan.question.start if self._plan.question else behind
        watched = max(1, int(always[first:].sum()))
        left_out = torch.zeros(self._tokens, dtype=torch.bool)
        for span in self._plan.missing:
            left_out[max(SINK, span.start) : min(span.stop, first)] = True
        hidden = left_out if left_out.any() else None
        rows = self._always if hidden is None else (always & ~hidden).nonzero()[:, 0]
        self.scored = (rows,) * (self._rule.score_layers[-1] + 1)
        return question_attention(
            self._row_layers,
            self._adapter.embed(self._ids[rows]),
            self._tokens,
            rows,
            watched,
            partial(self._kv, left_out=hidden),
            self._rotaries,
            self._rule.score_layers,
            hidden,
        )

    @property
    def deviation(self) -> torch.Tensor | None:
        """See `Fusion`; made when the pass is done, which need not wait for it."""
        if self._measured is None:
            return None
        positions, first = self._measured
        deviation = torch.full((self._tokens,), float("nan"), device=positions.device)
        deviation[positions] = first
        return deviation

    def _view(self, positions: torch.Tensor) -> StartView:
        """A rule's view of some positions."""
        attention = None if self._attention is None else self._attention[positions]
        return StartView(positions, self._offsets[positions], self.reused_tokens, attention)

    def _kv(self, layer: int, left_out: torch.Tensor | None = None) -> LayerKV:
        """A layer's stored KV, keys rotated; each layer is taken from the loader once, in order."""
        if self._each_layer is not None:
            self._each_layer()
        while len(self._rotated) <= layer:
            kv, rotary = next(self._layers), self._rotaries.of_keys(len(self._rotated))
            span = slice(self._plan.unrotated.start, self._plan.unrotated.stop)
            # In place; computed rows among them are overwritten later.
            if span.start < span.stop and rotary is not None and not kv.rotated:
                rotate_in_place(kv.keys[:, :, span], rotary.at(span))
            if left_out is not None:  # a mask does not hide what is not finite
                kv.keys[:, :, left_out] = 0
                kv.values[:, :, left_out] = 0
            self._rotated.append(kv)
        return self._rotated[layer]

    def _keep(self, chosen: torch.Tensor) -> None:
        """Keep these of the rows a rule decides on, and all others.

        How many they are follows from sizes alone: asking a GPU would wait for all that it still has to do.
        """
        self._chosen, self._trailing = chosen, False  # [chosen], positions, rising
        self._narrow(torch.cat((self._always, chosen)).sort().values)

    def _narrow(self, rows: torch.Tensor) -> None:
        """Everything that depends on which rows are kept."""
        self._rows = rows  # [rows], positions, rising
        self._kept_rotaries = self._rotaries.at(rows).to(self._adapter.dtype)
        self._masks: dict[int | None, RowMask | None] = {}

    def prefill_layers(self) -> Iterator[LayerKV]:
        """Fuse one layer after another; their buffers then hold rotated keys and values of all positions."""
        layer, count = 0, self._adapter.num_layers
        while layer < count:
            if self._rule.checks(layer) and len(self._chosen):
                self._check(layer, self._kv(layer))
            stop = self._stop(layer)
            self.computed += [self._rows] * (stop - layer)
            self.recomputed += [len(self._chosen)] * (stop - layer)
            kvs = [self._kv(at) for at in range(layer, stop)]
            if stop == count and not self._adapter.mixes_rows:
                self._end(layer, kvs[0])
            self.hidden = self._row_layers.run_layers(
                layer, self.hidden, kvs, self._rows, self._kept_rotaries, self._mask
            )
            yield from kvs
            layer = stop

    def _stop(self, layer: int) -> int:
        """The end of the layers from this one on that are one call: the next one, where layers run one by one."""
        if not self._row_layers.replays(len(self._rows)):
            return layer + 1
        # Layers that no check parts, the last one aside; KV comes in groups of about as many.
        last = self._adapter.num_layers - 1
        free = next((at for at in range(layer + 1, last) if self._rule.checks(at)), last)
        return layer + max(1, min(TOGETHER, free - layer))

    def _end(self, layer: int, kv: LayerKV) -> None:
        """Of the last layer, all rows but the last give keys and values only: nothing comes after them."""
        rows, rotaries = self._rows[:-1], self._rotaries.at(self._rows[:-1])
        if len(rows):
            keys, values = self._row_layers.project(layer, self.hidden[:-1], rotaries)
            kv.write(rows, keys[None], values[None])
        self.hidden = self.hidden[-1:]
        self._narrow(self._rows[-1:])

    def _check(self, layer: int, kv: LayerKV) -> None:
        """Let the rule drop rows before this layer."""
        before, positions = self._rows, self._chosen
        candidates = torch.searchsorted(before, positions)
        deviation = _Deviation(self._row_layers, layer, self.hidden[candidates], kv, positions)
        self._keep(positions[self._rule.keep(LayerView(**vars(self._view(positions)), layer=layer, measure=deviation))])
        if deviation.measured is not None:
            self.projected.append(ProjectedRows(layer, len(positions)))
            self._measured = self._measured or (positions, deviation.measured)
        self.hidden = self.hidden[torch.searchsorted(before, self._rows)]

    def _mask(self, window: int | None) -> RowMask | None:
        if window not in self._masks:
            self._masks[window] = self._row_layers.mask(self._rows, self._tokens, window, self._trailing)
        return self._masks[window]


class _Deviation:
    """KV deviation of some rows on one layer, measured once it is asked for; see `LayerView`."""

    def __init__(
        self, row_layers: RowLayers, layer: int, hidden: torch.Tensor, kv: LayerKV, positions: torch.Tensor
    ) -> None:
        self._row_layers, self._layer, self._hidden, self._kv = row_layers, layer, hidden, kv
        self._positions = positions
        self.measured: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        if self.measured is None:
            new = self._row_layers.project_values(self._layer, self._hidden).float()  # [kv_heads, candidates, head_dim]
            stored = self._kv.values[0].index_select(1, self._positions).float()
            self.measured = (new - stored).square().sum(dim=(0, 2)).sqrt()
        return self.measured
