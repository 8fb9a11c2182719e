"""The blended pass inside llama.cpp: stored KV is put in place, and chosen rows are computed again from left to right.

llama.cpp computes all layers of a token at once, and only at the end of a sequence. So a rule decides once for all
layers. The rows that it chooses are computed in their order, behind the final KV of what stands before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice

import torch

from cacheblend_rag.fusor.blend import Fusion, FusionPlan
from cacheblend_rag.fusor.selection import SelectionRule, StartView
from cacheblend_rag.fusor.work import RowsDone
from cacheblend_rag.llama_cpp.adapter import LlamaAdapter
from cacheblend_rag.llama_cpp.cache import SequenceCache
from cacheblend_rag.models.kv import LayerKV

_TILE = 64  # rows of a call from which on llama.cpp computes attention in tiles (docs/decisions/0029)
_LONG = 1024  # tokens of a prompt from which on that is worth it
_GROUP = 256  # rows of a call at most, in such a prompt
_BLOCK = 16  # rows that are chosen together
_TOGETHER = 16  # sequences that a pass takes at once, beside its own


def fuse(
    adapter: LlamaAdapter,
    plan: FusionPlan,
    layers: Iterable[LayerKV],
    rule: SelectionRule,
    each_layer: object = None,
) -> Fusion:
    """Run the blended pass; parameters as for `cacheblend_rag.fusor.fuse`. Nothing is called between its layers."""
    return _Pass(adapter, plan, rule.fit(adapter.num_layers)).run(list(layers))


class _Pass:
    """State of one blended pass."""

    def __init__(self, adapter: LlamaAdapter, plan: FusionPlan, rule: SelectionRule) -> None:
        self._adapter, self._runtime, self._plan, self._rule = adapter, adapter.runtime, plan, rule
        self._ids, self._tokens = list(plan.input_ids), len(plan.input_ids)
        spans = sorted((*plan.exact, *plan.reused), key=lambda span: span.start)
        self._stored = [span for span in spans if len(span)]
        # The last row is always computed, because its logits are needed.
        self._question = min(max((span.stop for span in self._stored), default=0), self._tokens - 1)
        if plan.question is not None:
            self._question = min(self._tokens - 1, max(self._question, plan.question.start))
        self._asked = self._question
        if self._tokens >= _LONG:  # rows before the question come with it at no cost
            self._question = min(self._question, self._tokens - _TILE)

    def run(self, layers: Sequence[LayerKV]) -> Fusion:
        runtime = self._runtime
        placed = SequenceCache(runtime, runtime.take(), 0)
        self._put_in_place(layers, placed.sequence)
        scored, attention = self._score(placed)
        chosen = self._chosen(attention)
        final = SequenceCache(runtime, runtime.take(), 0)
        at, again = 0, chosen
        if len(chosen) and len(chosen) == sum(row < self._question for span in self._plan.reused for row in span):
            # Rows that were computed on the way stood behind stored KV, of which nothing stays.
            inexact = torch.ones(self._question, dtype=torch.bool)
            for span in self._plan.exact:
                inexact[span.start : span.stop] = False
            again = inexact.nonzero()[:, 0]
        for group in self._groups(again):
            self._compute_together(group, at, placed.sequence, final.sequence)
            at = group[-1].stop
        if at < self._question:
            runtime.copy(placed.sequence, final.sequence, at, self._question)
        logits = runtime.compute(self._ids[self._question :], self._question, final.sequence, 1)[-1]
        final.length = self._tokens
        return self._fusion(final, chosen, logits, scored)

    def _groups(self, chosen: torch.Tensor) -> Iterator[list[range]]:
        """Stretches that are computed in one call: alone, or in long prompts in few calls of as many rows each."""
        long = self._tokens >= _LONG
        while len(chosen):
            calls = -(-len(chosen) // _GROUP) if long else 1
            group = list(islice(_stretches(chosen[: -(-len(chosen) // calls)]), _TOGETHER if long else 1))
            chosen = chosen[sum(map(len, group)) :]
            yield group

    def _compute_together(self, group: Sequence[range], at: int, placed: int, final: int) -> None:
        """Compute stretches, and append them to the final sequence with the stored rows between.

        Each stretch is computed in a sequence of its own, so it sees the stored KV of the others' rows.
        """
        runtime = self._runtime
        with ExitStack() as stack:
            own = [stack.enter_context(runtime.sequence()) for _ in group]
            for stretch, sequence in zip(group, own, strict=True):
                runtime.copy(final, sequence, 0, at)
                runtime.copy(placed, sequence, at, stretch.start)
            rows = [(self._ids[row], row, one) for part, one in zip(group, own, strict=True) for row in part]
            runtime.step(rows, 0)
            for stretch, sequence in zip(group, own, strict=True):
                runtime.copy(placed, final, at, stretch.start)
                runtime.copy(sequence, final, stretch.start, stretch.stop)
                at = stretch.stop

    def _put_in_place(self, layers: Sequence[LayerKV], target: int) -> None:
        """Build a sequence of stored KV, from left to right; what is not stored is computed on the way."""
        runtime, at = self._runtime, 0
        for begin in range(0, len(self._stored), _TOGETHER):
            some = self._stored[begin : begin + _TOGETHER]
            with ExitStack() as stack:
                # All are moved before anything is computed: then llama.cpp rotates keys once.
                moved = [self._moved(layers, span, stack.enter_context(runtime.sequence())) for span in some]
                for span, own in zip(some, moved, strict=True):
                    start, stop = min(span.start, self._question), min(span.stop, self._question)
                    if at < start:
                        runtime.compute(self._ids[at:start], at, target)
                    runtime.copy(own, target, start, stop)
                    at = stop
        if at < self._question:
            runtime.compute(self._ids[at : self._question], at, target)

    def _moved(self, layers: Sequence[LayerKV], span: range, own: int) -> int:
        """An empty sequence, given the stored KV of some positions."""
        self._runtime.place(self._adapter.state_of(layers, slice(span.start, span.stop)), own)
        self._runtime.shift(own, span.start)
        return own

    def _score(self, placed: SequenceCache) -> tuple[bool, torch.Tensor | None]:
        """The question's attention to all positions, if the rule wants it."""
        if not self._rule.score_layers or not any(map(len, self._plan.reused)):
            return False, None
        runtime, layers = self._runtime, self._rule.score_layers
        queries = runtime.queries(self._ids[self._question :], self._question, placed.sequence, layers)
        keys = runtime.kv(placed.sequence, 0, self._tokens)[0]  # [kv_heads, tokens, head_dim] a layer
        runtime.cut(placed.sequence, self._question)
        rows, first = slice(self._asked - self._question, None), self._asked
        seen = [_attention(own[rows], keys[layer].float(), first) for layer, own in zip(layers, queries, strict=True)]
        return True, torch.stack(seen).mean(dim=0)

    def _chosen(self, attention: torch.Tensor | None) -> torch.Tensor:
        """Positions that are recomputed, rising."""
        positions, offsets, blocks = list[int](), list[int](), list[int]()
        for span in self._plan.reused:
            count, first = -(-len(span) // _BLOCK), blocks[-1] + 1 if blocks else 0
            for offset, position in enumerate(span):
                if position < self._question:
                    positions.append(position)
                    offsets.append(offset)
                    blocks.append(first + offset * count // len(span))
        if not positions:
            return torch.empty(0, dtype=torch.long)
        at, block = torch.tensor(positions), torch.tensor(blocks)
        rows = torch.bincount(block)
        seen = None
        if attention is not None:
            seen = (torch.zeros(len(rows)).index_add_(0, block, attention[at]) / rows)[block]
        reused = sum(map(len, self._plan.reused))
        chosen = self._rule.begin(StartView(at, torch.tensor(offsets), reused, seen))
        if seen is None:
            return at[chosen]
        # Each stretch is a call of llama.cpp: a block is computed as a whole, or left if little of it was chosen.
        return at[(2 * torch.bincount(block[chosen], minlength=len(rows)) >= rows)[block]]

    def _fusion(self, final: SequenceCache, chosen: torch.Tensor, logits: torch.Tensor, scored: bool) -> Fusion:
        rows = torch.ones(self._tokens, dtype=torch.bool)
        for span in self._stored:
            rows[span.start : min(span.stop, self._question)] = False
        rows[chosen] = True
        layers = self._adapter.num_layers
        computed = (rows.nonzero()[:, 0],) * layers
        question = torch.arange(self._question, self._tokens)
        done = RowsDone(computed, scored=(question,) * layers if scored else ())
        again = len(chosen) + sum(max(0, span.stop - max(span.start, self._question)) for span in self._plan.reused)
        return Fusion(self._adapter.whole_layers(final), final, logits, (again,) * layers, None, done)


def _attention(queries: torch.Tensor, keys: torch.Tensor, first: int) -> torch.Tensor:
    """Mean attention of the question's rows to each position, over heads and rows.

    Parameters
    ----------
    queries : Tensor, [rows, heads, head_dim]
    keys : Tensor, [kv_heads, tokens, head_dim]
    first : int
        Position of the first row.
    """
    rows, heads, width = queries.shape
    kv_heads, tokens, _ = keys.shape
    # [kv_heads, heads that share one, rows, width]
    grouped = queries.view(rows, kv_heads, heads // kv_heads, width).permute(1, 2, 0, 3)
    scores = grouped @ keys[:, None].transpose(2, 3) / width**0.5  # [kv_heads, shared, rows, tokens]
    hidden = torch.arange(tokens) > first + torch.arange(rows)[:, None]
    attention: torch.Tensor = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1).mean(dim=(0, 1, 2))
    return attention


def _stretches(positions: torch.Tensor) -> Iterator[range]:
    """Rising positions as ranges of neighbours."""
    found = positions.tolist()
    start = 0
    for at in range(1, len(found) + 1):
        if at == len(found) or found[at] != found[at - 1] + 1:
            yield range(found[start], found[at - 1] + 1)
            start = at
