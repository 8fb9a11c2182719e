"""Prompts with what full prefill would answer, on which rules are tried.

Most prompts lose nothing by full KV reuse, and no rule loses anything on them; a few lose much. Of many prompts, rules
are therefore tried on those that reuse gets most wrong, and on a few others that stand for the rest.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any
from weakref import WeakValueDictionary

import torch

from cacheblend_rag.calibration.evaluation.statistics import Interval, interval
from cacheblend_rag.calibration.prepared import ComputeKV, Fused, PreparedPrompt
from cacheblend_rag.fusor.selection import SelectionRule, SelectNone
from cacheblend_rag.fusor.teacher_forcing import answer_log_probs, kl_divergence, prefill_layerwise
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.prompt import Prompt, PromptTokenizer

_CLEARLY = 1.1  # times the work that is allowed: a rule's work differs from prompt to prompt


@dataclass(frozen=True)
class Tried:
    """A rule on some prompts.

    Parameters
    ----------
    rule : SelectionRule
    divergences : tuple of float
        KL divergence from full prefill for each prompt, mean over the tokens that full prefill generates. That of a
        prompt which stands for others is there as often.
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

    def joined(self, other: Tried) -> Tried:
        """The same rule on these prompts and on others."""
        counts = len(self.divergences), len(other.divergences)
        work = (counts[0] * self.work + counts[1] * other.work) / sum(counts)
        return Tried(self.rule, (*self.divergences, *other.divergences), work, self.whole and other.whole)


@dataclass(frozen=True, eq=False)
class FullAnswer:
    """What full prefill answers to a prompt.

    Parameters
    ----------
    ids : sequence of int
        The greedy answer.
    log_probs : Tensor, [ids, vocab]
        What its tokens were taken from.
    """

    ids: Sequence[int]
    log_probs: torch.Tensor


class FullAnswers:
    """What full prefill answers to prompts, shared by sets of the same prompts for as long as one of them holds it.

    Parameters
    ----------
    adapter : ModelAdapter
    answer_tokens : int
        Most tokens generated.
    end_ids : sequence of int
        Tokens that end an answer.
    """

    def __init__(self, adapter: ModelAdapter, answer_tokens: int = 32, end_ids: Sequence[int] = ()) -> None:
        self._adapter, self._most, self._end_ids = adapter, answer_tokens, frozenset(end_ids)
        self._held: WeakValueDictionary[tuple[int, ...], FullAnswer] = WeakValueDictionary()

    def of(self, ids: tuple[int, ...]) -> FullAnswer:
        """The answer to a prompt of these ids."""
        if (held := self._held.get(ids)) is None:
            full = prefill_layerwise(self._adapter, ids)
            cache = self._adapter.new_cache(full.layers)
            answer = greedy_answer(self._adapter, cache, full.logits, self._most, self._end_ids)
            held = self._held[ids] = FullAnswer(*answer)
        return held


@dataclass(frozen=True)
class _Trial:
    """A prompt, its answer, and how many prompts it stands for."""

    prepared: PreparedPrompt
    full: FullAnswer
    count: int = 1


class TrialSet:
    """Prompts, each with the tokens that full prefill generates for it.

    Parameters
    ----------
    adapter : ModelAdapter
    tokenizer : PromptTokenizer
    prompts : sequence of Prompt
    most : int, optional
        Prompts on which rules are tried, if there are more: half of them those on which full KV reuse is farthest from
        full prefill, the others drawn from the rest, which they stand for.
    full : FullAnswers
        Answers of the same model.
    compute : callable, optional
        Computes chunks behind contexts; see `PreparedPrompt`.
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
        tokenizer: PromptTokenizer,
        prompts: Sequence[Prompt],
        *,
        full: FullAnswers,
        most: int | None = None,
        compute: ComputeKV | None = None,
        on_prompt: Callable[[], object] = lambda: None,
        known: Iterable[Mapping[str, Any]] = (),
        on_tried: Callable[[dict[str, Any]], object] = lambda found: None,
    ) -> None:
        self._adapter, self._compute, self._on_prompt, self._on_tried = adapter, compute, on_prompt, on_tried
        self._known = {str(found["rule"]): found for found in known}
        self._prompts = len(prompts)
        made = (self._prepared(full, tokenizer, prompt) for prompt in prompts)
        self._trials = [*made] if most is None or most >= len(prompts) else self._chosen(made, most)

    def __len__(self) -> int:
        return self._prompts

    def _prepared(self, full: FullAnswers, tokenizer: PromptTokenizer, prompt: Prompt) -> _Trial:
        prepared = PreparedPrompt(self._adapter, tokenizer, prompt, self._compute)
        trial = _Trial(prepared, full.of(prepared.tokens.input_ids))
        self._on_prompt()
        return trial

    def _chosen(self, trials: Iterable[_Trial], most: int) -> list[_Trial]:
        """Those that reuse gets most wrong, the worst first, and some of the rest; no others are held in memory."""
        worst: list[tuple[float, int, _Trial]] = []
        drawn: list[_Trial] = []
        hard, rest, seen = most // 2, most - most // 2, 0
        chooser = random.Random(0)
        for number, trial in enumerate(trials):
            entry = (self._divergence(trial, SelectNone())[0], number, trial)
            if len(worst) < hard:
                heapq.heappush(worst, entry)
                continue
            other = heapq.heappushpop(worst, entry)[2] if hard else trial
            seen += 1
            if len(drawn) < rest:
                drawn.append(other)
            elif (place := chooser.randrange(seen)) < rest:
                drawn[place] = other
        each, over = divmod(seen, len(drawn))
        others = [replace(trial, count=each + (place < over)) for place, trial in enumerate(drawn)]
        return [trial for _, _, trial in sorted(worst, key=lambda one: -one[0])] + others

    def try_rule(self, rule: SelectionRule, tolerance: float = float("inf"), below: float = float("inf")) -> Tried:
        """Fuse every prompt by a rule.

        It is given up early if its mean divergence is sure to pass a tolerance, or if it does clearly more work than it
        should stay below.
        """
        key = repr(rule)
        known = self._known.get(key)
        if known is None or not (
            known["whole"] or self._given_up(known["divergences"], known["work"], tolerance, below)
        ):
            known = self._known[key] = {"rule": key, **self._tried(rule, tolerance, below)}
            self._on_tried(known)
        return Tried(rule, tuple(known["divergences"]), known["work"], known["whole"])

    def _tried(self, rule: SelectionRule, tolerance: float, below: float) -> dict[str, Any]:
        found: list[tuple[float, _Trial]] = []
        divergences: list[float] = []
        works: list[float] = []
        for trial in self._trials:
            if works and self._given_up(divergences, fmean(works), tolerance, below):
                break
            divergence, fused = self._divergence(trial, rule)
            found.append((divergence, trial))
            divergences += [divergence] * trial.count
            works += [fused.work] * trial.count
            self._on_prompt()
        whole = len(divergences) == self._prompts
        if whole:  # from now on the hard ones first, so that what fails is soon seen
            self._trials = [trial for _, trial in sorted(found, key=lambda one: -one[0])]
            divergences.sort(reverse=True)
        return {"divergences": divergences, "work": fmean(works), "whole": whole}

    def _given_up(self, divergences: Sequence[float], work: float, tolerance: float, below: float) -> bool:
        """Whether the mean passes the tolerance even if nothing is lost on other prompts, or the work is too much."""
        return sum(divergences) > tolerance * self._prompts or work > _CLEARLY * below

    def _divergence(self, trial: _Trial, rule: SelectionRule) -> tuple[float, Fused]:
        fused = trial.prepared.fuse(rule)
        cache = self._adapter.new_cache(fused.fusion.layers)
        found = answer_log_probs(self._adapter, cache, fused.fusion.logits, trial.full.ids)
        return float(kl_divergence(trial.full.log_probs, found).mean()), fused


def greedy_answer(
    adapter: ModelAdapter, cache: Any, logits: torch.Tensor, count: int, end_ids: Collection[int]
) -> tuple[list[int], torch.Tensor]:
    """What greedy decoding writes behind a prompt.

    Parameters
    ----------
    adapter : ModelAdapter
    cache : transformers Cache
        KV of the prompt; it grows by the answer.
    logits : Tensor, [vocab]
        Of the prompt's last position.
    count : int
        Most tokens.
    end_ids : collection of int
        Tokens that end the answer.

    Returns
    -------
    list of int, Tensor
        Ids, the end token included, and the log-probabilities they were taken from, ``[ids, vocab]``.
    """
    ids: list[int] = []
    rows: list[torch.Tensor] = []
    while True:
        rows.append(logits.float().log_softmax(dim=-1))
        ids.append(int(rows[-1].argmax()))
        if len(ids) == count or ids[-1] in end_ids:
            return ids, torch.stack(rows)
        logits = adapter.extend(cache, ids[-1:])[-1]
