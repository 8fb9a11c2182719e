"""Prompts with what full prefill would answer, on which rules are tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cacheblend_rag.evaluation.prepared import DEPTH, PreparedPrompt
from cacheblend_rag.evaluation.quality.statistics import Interval, interval
from cacheblend_rag.fusor import Fusion
from cacheblend_rag.fusor.forcing import answer_log_probs, kl_divergence
from cacheblend_rag.fusor.selection import SelectionRule
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.modes import evaluating
from cacheblend_rag.prompt import Prompt, SegmentTokenizer

__all__ = ["TrialSet", "Tried"]

_BATCH = 8
# A rule whose mean is this many times over the tolerance after a batch is given up.
_HOPELESS = 3.0


@dataclass(frozen=True)
class Tried:
    """A rule on some prompts.

    Parameters
    ----------
    rule : SelectionRule
    divergences : tuple of float
        KL divergence from full prefill for each prompt, mean over the tokens that full prefill generates.
    work : float
        Mean work as a share of full prefill's.
    whole : bool
        Whether all prompts were tried, or it was given up before.
    """

    rule: SelectionRule
    divergences: tuple[float, ...]
    work: float
    whole: bool

    @property
    def divergence(self) -> Interval:
        """Mean with its 95% interval over prompts."""
        return interval(self.divergences)


class TrialSet:
    """Prompts, each with the tokens that full prefill generates for it.

    Parameters
    ----------
    adapter : ModelAdapter
    tokenizer : SegmentTokenizer
    prompts : sequence of Prompt
    answer_tokens : int
        Most tokens generated.
    end_ids : sequence of int
        Tokens that end an answer.
    scaled : bool
        Count work as in a model of 24 layers, see `work_share`.
    on_prompt : callable
        Called after each prompt that was prepared or tried.
    known : iterable of mapping
        What ``on_tried`` was given before, of these prompts: rules that need not be tried again.
    on_tried : callable
        Called with what was found of a rule, fit for JSON.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        tokenizer: SegmentTokenizer,
        prompts: Sequence[Prompt],
        *,
        answer_tokens: int = 16,
        end_ids: Sequence[int] = (),
        scaled: bool = False,
        on_prompt: Callable[[], object] = lambda: None,
        known: Iterable[Mapping[str, Any]] = (),
        on_tried: Callable[[dict[str, Any]], object] = lambda found: None,
    ) -> None:
        self._adapter, self._scaled, self._on_prompt, self._on_tried = adapter, scaled, on_prompt, on_tried
        self._known = {str(found["rule"]): found for found in known}
        self._prepared: list[PreparedPrompt] = []
        self._answers: list[tuple[list[int], torch.Tensor]] = []
        for prompt in prompts:
            prepared = PreparedPrompt(adapter, tokenizer, prompt)
            self._answers.append(_generate(adapter, prepared.full, answer_tokens, frozenset(end_ids)))
            prepared.forget_full()
            self._prepared.append(prepared)
            on_prompt()

    @property
    def depth(self) -> int:
        """Layers by which work is counted."""
        return max(DEPTH, self._adapter.num_layers) if self._scaled else self._adapter.num_layers

    def __len__(self) -> int:
        return len(self._prepared)

    def try_rule(self, rule: SelectionRule, tolerance: float = float("inf")) -> Tried:
        """Fuse every prompt by a rule; one that is far beyond a tolerance is given up early."""
        key = repr(rule)
        known = self._known.get(key)
        if known is None or not (known["whole"] or _hopeless(known["divergences"], tolerance)):
            known = self._known[key] = {"rule": key, **self._tried(rule, tolerance)}
            self._on_tried(known)
        work = known["scaled_work" if self._scaled else "work"]
        return Tried(rule, tuple(known["divergences"]), work, known["whole"])

    def _tried(self, rule: SelectionRule, tolerance: float) -> dict[str, Any]:
        divergences: list[float] = []
        works: list[tuple[float, float]] = []
        for number, (prepared, (ids, full)) in enumerate(zip(self._prepared, self._answers, strict=True)):
            if number and number % _BATCH == 0 and _hopeless(divergences, tolerance):
                break
            fused = prepared.fuse(rule)
            cache = self._adapter.new_cache(fused.fusion.layers)
            found = answer_log_probs(self._adapter, cache, fused.fusion.logits, ids)
            divergences.append(float(kl_divergence(full, found).mean()))
            works.append((fused.work, fused.scaled_work))
            self._on_prompt()
        work, scaled = (sum(of) / len(works) for of in zip(*works, strict=True))
        whole = len(works) == len(self._prepared)
        return {"divergences": divergences, "work": work, "scaled_work": scaled, "whole": whole}


def _hopeless(divergences: Sequence[float], tolerance: float) -> bool:
    return sum(divergences) / len(divergences) > _HOPELESS * tolerance


def _generate(
    adapter: ModelAdapter, fusion: Fusion, count: int, end_ids: frozenset[int]
) -> tuple[list[int], torch.Tensor]:
    """Ids that greedy decoding writes, the end token included, and the distributions they were taken from."""
    cache, logits = adapter.new_cache(fusion.layers), fusion.logits
    ids: list[int] = []
    rows: list[torch.Tensor] = []
    with evaluating(adapter.model), torch.no_grad():
        while True:
            rows.append(logits.float().log_softmax(dim=-1))
            ids.append(int(rows[-1].argmax()))
            if len(ids) == count or ids[-1] in end_ids:
                return ids, torch.stack(rows)
            given = torch.tensor([[ids[-1]]], device=adapter.device)
            logits = adapter.model(given, past_key_values=cache, use_cache=True).logits[0, -1]
