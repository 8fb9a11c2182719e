"""The blended pass: stored KV and a few recomputed rows become the KV of the whole prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cacheblend_rag.fusor.selection import LayerView, SelectionRule, StartView
from cacheblend_rag.fusor.work import RowsDone
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.attention import RowMask
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.models.rope import Rotaries, rotate_in_place
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
    cache : transformers Cache
        The same, ready for decoding.
    logits : Tensor, [vocab]
        Logits of the last position.
    recomputed_tokens : tuple of int
        How many reused chunk tokens were computed, layer by layer.
    deviation : Tensor or None, [tokens] float32
        KV deviation at the first check layer; NaN where it was not measured.
    done : RowsDone
        All rows that were worked on, those of checks and of a scoring pass included.
    """

    layers: Sequence[LayerKV]
    cache: Any
    logits: torch.Tensor
    recomputed_tokens: tuple[int, ...]
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
    return Fusion(fused, adapter.new_cache(fused), logits, tuple(state.recomputed), state.deviation, done)


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
        self.projected: list[tuple[int, int]] = []  # layers and rows
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
        self._reused_tokens = int(reused.sum())
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
        return StartView(positions, self._offsets[positions], self._reused_tokens, attention)

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
            together, stop = self._row_layers.replays(len(self._rows)), layer + 1
            if together:  # layers that no check parts, the last one aside; KV comes in groups of about as many
                free = next((at for at in range(layer + 1, count - 1) if self._rule.checks(at)), count - 1)
                stop = layer + max(1, min(TOGETHER, free - layer))
            self.computed += [self._rows] * (stop - layer)
            self.recomputed += [len(self._chosen)] * (stop - layer)
            kvs = [self._kv(at) for at in range(layer, stop)]
            if stop == count and not self._adapter.mixes_rows:
                self._end(layer, kvs[0])
            how = self._rows, self._kept_rotaries
            if together and len(self._rows) > 1:
                self.hidden = self._row_layers.replay(layer, self.hidden, kvs, *how)
            else:
                window = self._row_layers.windows[layer]
                if window not in self._masks:
                    self._masks[window] = self._row_layers.mask(self._rows, self._tokens, window, self._trailing)
                self.hidden = self._row_layers.run_layer(layer, self.hidden, kvs[0], *how, self._masks[window])
            yield from kvs
            layer = stop

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
        hidden, measured = self.hidden[candidates], list[torch.Tensor]()

        def measure() -> torch.Tensor:
            if not measured:
                new = self._row_layers.project_values(layer, hidden).float()  # [kv_heads, candidates, head_dim]
                stored = kv.values[0].index_select(1, positions).float()
                measured.append((new - stored).square().sum(dim=(0, 2)).sqrt())
            return measured[0]

        self._keep(positions[self._rule.keep(LayerView(**vars(self._view(positions)), layer=layer, measure=measure))])
        if measured:
            self.projected.append((layer, len(positions)))
            self._measured = self._measured or (positions, measured[0])
        self.hidden = self.hidden[torch.searchsorted(before, self._rows)]


def question_attention(
    row_layers: RowLayers,
    hidden: torch.Tensor,
    tokens: int,
    rows: torch.Tensor,
    watched: int,
    layer_kv: Callable[[int], LayerKV],
    rotaries: Rotaries,
    score_layers: Sequence[int],
    left_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean attention of the last rows over some layers, ``[tokens]`` float32; parameters as in `attention_rows`."""
    if left_out is None:
        last, own = range(len(rows) - watched, len(rows)), rotaries.at(rows).to(row_layers.dtype)
        mean = row_layers.sum_attention(hidden, tokens, rows, last, layer_kv, own, score_layers)
        if mean is not None:
            return mean
    # The plain twin.
    found = attention_rows(row_layers, hidden, rows, watched, layer_kv, rotaries, score_layers, left_out)
    return torch.stack([found[layer].float().mean(dim=(0, 1)) for layer in score_layers]).mean(dim=0)


def attention_rows(
    row_layers: RowLayers,
    hidden: torch.Tensor,
    rows: torch.Tensor,
    watched: int,
    layer_kv: Callable[[int], LayerKV],
    rotaries: Rotaries,
    layers: Sequence[int],
    left_out: torch.Tensor | None = None,
) -> dict[int, torch.Tensor]:
    """Attention of the last of some rows over given KV, on some layers.

    Parameters
    ----------
    row_layers : RowLayers
    hidden : Tensor, [rows, hidden]
        Input of layer 0 for the rows.
    rows : Tensor, [rows], long
        Positions that are computed, rising; their KV is overwritten.
    watched : int
        How many of them, from the end, are looked at.
    layer_kv : callable
        Rotated KV of all positions of a layer.
    rotaries : Rotaries
        Of all positions.
    layers : sequence of int
        Layers that are looked at, rising; nothing beyond the last is computed.
    left_out : Tensor or None, [tokens], bool
        Positions that no row sees, on a CPU; their KV must be finite.

    Returns
    -------
    dict of int to Tensor, each [heads, watched, tokens]
    """
    found: dict[int, torch.Tensor] = {}
    cut, positions = len(rows) - watched, rows.tolist()
    at_rows = rotaries.at(rows).to(row_layers.dtype)
    masks: dict[tuple[int | None, int | None], RowMask | None] = {}

    def run(running: RowLayers, layer: int, part: slice) -> torch.Tensor:
        """Some of the rows through a layer."""
        some, window, kv = rows[part], running.windows[layer], layer_kv(layer)
        if part.stop is not None:
            # Behind them, KV of rows that come later is undefined, and a mask does not hide what is not finite.
            tokens = positions[part][-1] + 1
            kv = LayerKV(kv.keys[:, :, :tokens], kv.values[:, :, :tokens])
        like = part.start, window  # parts that begin alike run in the same form of attention
        if like not in masks:
            masks[like] = running.mask(some, kv.keys.shape[2], window, left_out=left_out)
        return running.run_layer(layer, hidden[part], kv, some, at_rows.at(part), masks[like])

    for layer in range(layers[-1] + 1):
        if layer not in layers:
            hidden = run(row_layers, layer, slice(None))
            continue
        # Rows of one layer need only each other's KV, so those that are not looked at go first and
        # are spared the plain form of attention, which holds all weights in memory.
        before = run(row_layers, layer, slice(0, cut)) if cut else hidden[:0]
        seen: list[torch.Tensor] = []
        after = run(row_layers.watched(layer, seen), layer, slice(cut, None))
        hidden = torch.cat((before, after))
        found[layer] = seen[0]
    return found
