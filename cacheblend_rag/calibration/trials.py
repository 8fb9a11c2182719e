"""Prompts with what full prefill would answer, on which rules are tried.

Most prompts lose nothing by full KV reuse, and no rule loses anything on them; a few lose much. Of many prompts, rules
are therefore tried on those that reuse gets most wrong, and on a few others that stand for the rest. The stored KV of
a prompt is kept in memory, to be fused by many rules.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from weakref import WeakValueDictionary

import torch

from cacheblend_rag.calibration.statistics import Interval, interval
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor import Fusion, FusionPlan, fuse
from cacheblend_rag.fusor.selection import SelectionRule, SelectNone
from cacheblend_rag.fusor.teacher_forcing import answer_log_probs, greedy_answer, kl_divergence, prefill_layerwise
from cacheblend_rag.fusor.work import work_share
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.kv import LayerKV, SegmentKV
from cacheblend_rag.prompt import Prompt, PromptTokenizer, TokenizedPrompt

ComputeKV = Callable[[str, tuple[int, ...], tuple[int, ...], int], SegmentKV]
"""The KV of a chunk, of its text, the ids that stand directly before it, its own ids, and the frequency regime."""

_CLEARLY = 1.1  # times the work that is allowed: a rule's work differs from prompt to prompt


@dataclass(frozen=True)
class _Fused:
    """A prompt fused by one rule.

    Parameters
    ----------
    fusion : Fusion
        The result.
    work : float
        Its work as a share of a full prefill's.
    """

    fusion: Fusion
    work: float


class PreparedPrompt:
    """A prompt whose prefix and chunks are stored, each computed once.

    Parameters
    ----------
    adapter : ModelAdapter
    tokenizer : PromptTokenizer
    prompt : Prompt
        With at least one chunk and a suffix.
    compute : callable, optional
        Computes the KV of a chunk; by default it is computed behind what opens a text.

    Raises
    ------
    ConfigError
        If it has no chunk with tokens that can be reused, or no suffix.
    """

    def __init__(
        self, adapter: ModelAdapter, tokenizer: PromptTokenizer, prompt: Prompt, compute: ComputeKV | None = None
    ) -> None:
        if not prompt.chunks or not prompt.suffix:
            raise ConfigError("prompt", prompt, "give at least one chunk, and the question as suffix")
        self.adapter = adapter
        self.tokens: TokenizedPrompt = tokenizer.tokenize(prompt)
        self._known: dict[range, SegmentKV] = {}
        self._regime = adapter.regime(len(self.tokens.input_ids)) or 0
        in_place: list[range] = []
        reused: list[range] = []
        for chunk in self.tokens.located:
            if not len(chunk.span):
                continue
            span, before = range(chunk.span.start, chunk.span.stop), tokenizer.context_ids(chunk.text) + chunk.head
            if compute is None:
                self._known[span] = adapter.segment_kv(before, self.ids(span), self._regime)
                exact = self.tokens.input_ids[: span.start] == before
            else:
                self._known[span] = compute(chunk.text, before, self.ids(span), self._regime)
                exact = False
            (in_place if exact else reused).append(span)
        chunks = list(self._known)
        if not chunks:
            raise ConfigError("prompt", prompt, "give at least one chunk of more than a word or two")
        if prefix := range(self.tokens.prefix.start, self.tokens.prefix.stop):
            self._known[prefix] = adapter.segment_kv((), self.ids(prefix), self._regime)
            in_place.append(prefix)
        self.plan = FusionPlan(
            self.tokens.input_ids,
            exact=in_place,
            reused=reused,
            unrotated=range(0, chunks[-1].stop),
            question=self.question,
        )

    @property
    def question(self) -> range:
        """Positions behind the last chunk."""
        return range(self.tokens.suffix.start, self.tokens.suffix.stop)

    @property
    def context(self) -> range:
        """Positions from the first chunk to the last."""
        return range(self.tokens.chunks[0].start, self.tokens.chunks[-1].stop)

    def ids(self, span: range) -> tuple[int, ...]:
        """Ids of some positions."""
        return self.tokens.input_ids[span.start : span.stop]

    def fuse(self, rule: SelectionRule) -> _Fused:
        """Fuse by a rule."""
        fusion = fuse(self.adapter, self.plan, self._buffers(self._known), rule)
        shape, tokens = self.adapter.shape, len(self.tokens.input_ids)
        return _Fused(fusion, work_share(shape, tokens, fusion.done))

    @cached_property
    def full(self) -> Fusion:
        """Full prefill: every row is computed."""
        return prefill_layerwise(self.adapter, self.tokens.input_ids)

    def _buffers(self, known: Mapping[range, SegmentKV]) -> list[LayerKV]:
        """Fresh buffers of every layer, with what is stored in place."""
        adapter = self.adapter
        shape = (1, adapter.kv_heads, len(self.tokens.input_ids), adapter.head_dim)
        layers = []
        for number in range(adapter.num_layers):
            keys = torch.zeros(shape, dtype=adapter.dtype, device=adapter.device)
            values = torch.zeros_like(keys)
            for span, kv in known.items():
                keys[0, :, span.start : span.stop] = kv.keys[number]
                values[0, :, span.start : span.stop] = kv.values[number]
            layers.append(LayerKV(keys, values))
        return layers


@dataclass(frozen=True)
class TriedRule:
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

    def merge(self, other: TriedRule) -> TriedRule:
        """The same rule on these prompts and on others."""
        counts = len(self.divergences), len(other.divergences)
        work = (counts[0] * self.work + counts[1] * other.work) / sum(counts)
        return TriedRule(self.rule, (*self.divergences, *other.divergences), work, self.whole and other.whole)


@dataclass(frozen=True, eq=False)
class FullAnswer:
    """Full prefill's answer to a prompt.

    Parameters
    ----------
    ids : sequence of int
        The greedy answer.
    log_probs : Tensor, [ids, vocab]
        The log-probabilities that its tokens were taken from.
    """

    ids: Sequence[int]
    log_probs: torch.Tensor


class FullAnswers:
    """Full prefill's answers to prompts, shared by sets of the same prompts for as long as one of them holds it.

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

    def answer(self, ids: tuple[int, ...]) -> FullAnswer:
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
    ) -> None:
        self._adapter, self._compute, self._on_prompt = adapter, compute, on_prompt
        self._known: dict[SelectionRule, TriedRule] = {}
        self._prompts = len(prompts)
        made = (self._prepare(full, tokenizer, prompt) for prompt in prompts)
        self._trials = [*made] if most is None or most >= len(prompts) else self._choose(made, most)

    def __len__(self) -> int:
        return self._prompts

    @property
    def counts(self) -> tuple[int, ...]:
        """How many prompts each of those that are tried stands for."""
        return tuple(trial.count for trial in self._trials)

    def _prepare(self, full: FullAnswers, tokenizer: PromptTokenizer, prompt: Prompt) -> _Trial:
        prepared = PreparedPrompt(self._adapter, tokenizer, prompt, self._compute)
        trial = _Trial(prepared, full.answer(prepared.tokens.input_ids))
        self._on_prompt()
        return trial

    def _choose(self, trials: Iterable[_Trial], most: int) -> list[_Trial]:
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

    def try_rule(self, rule: SelectionRule, tolerance: float = float("inf"), below: float = float("inf")) -> TriedRule:
        """Fuse every prompt by a rule.

        It is given up early if its mean divergence is sure to pass a tolerance, or if it does clearly more work than it
        should stay below.
        """
        known = self._known.get(rule)
        if known is None or not (known.whole or self._given_up(known.divergences, known.work, tolerance, below)):
            known = self._known[rule] = self._measure(rule, tolerance, below)
        return known

    def _measure(self, rule: SelectionRule, tolerance: float, below: float) -> TriedRule:
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
        return TriedRule(rule, tuple(divergences), fmean(works), whole)

    def _given_up(self, divergences: Sequence[float], work: float, tolerance: float, below: float) -> bool:
        """Whether the mean passes the tolerance even if nothing is lost on other prompts, or the work is too much."""
        return sum(divergences) > tolerance * self._prompts or work > _CLEARLY * below

    def _divergence(self, trial: _Trial, rule: SelectionRule) -> tuple[float, _Fused]:
        fused = trial.prepared.fuse(rule)
        cache = self._adapter.new_cache(fused.fusion.layers)
        found = answer_log_probs(self._adapter, cache, fused.fusion.logits, trial.full.ids)
        return float(kl_divergence(trial.full.log_probs, found).mean()), fused
