"""``cacheblend-rag calibrate``: search, say what was found, and keep it where ``recompute_ratio="auto"`` reads it."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from tqdm import tqdm

from cacheblend_rag.calibration.quality import Methods, ReferenceAnswer
from cacheblend_rag.calibration.statistics import Interval, interval
from cacheblend_rag.config import BlendConfig, check_above_zero, check_whole
from cacheblend_rag.engine.decode import DecodeOptions
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.selection import RULES, SelectBoundary, SelectHKVD, SelectionRule, SelectNone, SelectQuery
from cacheblend_rag.loading import BlendSettings
from cacheblend_rag.models.plain import check_blends
from cacheblend_rag.prompt import Prompt

_log = logging.getLogger(__name__)
_BEHIND = {"sink": "the start of a text alone", "context": "contexts"}
_CLEARLY = 1.1  # times the work that is allowed: a rule's work differs from prompt to prompt
RATIOS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
"""Shares that are tried."""
_Make = Callable[[float], SelectionRule]
KINDS: Mapping[str, tuple[_Make, Sequence[float]]] = {
    # As a rule whose share can be raised later, and that recomputes nothing now.
    "nothing recomputed": (SelectBoundary, (0.0,)),
    "chunk starts": (SelectBoundary, RATIOS),
    "the question's attention": (SelectQuery, RATIOS),
    "KV deviation": (partial(SelectHKVD, (1,)), RATIOS),
}
"""Kinds of rules that are tried, by name, each with its shares from the least upward."""
_SLACK = 1.5  # of the tolerance: the prompts of the search are too few to drop what is a little beyond it
# A rule that does more work than this is not worth its trouble.
_MOST_WORK = 0.9


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How a model is calibrated: the search for the cheapest blending within a tolerance.

    Parameters
    ----------
    tolerance : float
        Mean KL divergence from full prefill that is allowed, in nats a token. On SmolLM2-135M-Instruct, putting the
        passages in another order moves answers by more than twice the default; see docs/benchmarks/three-models.md.
    check_share : float
        Share of the prompts that have no part in the search and check its result.
    most : int
        Prompts of the search on which rules are tried: half of them are those that full KV reuse gets most wrong, the
        others represent the rest. Twice as many check the result.
    answer_tokens : int
        Tokens of each answer of full prefill that are compared.
    """

    tolerance: float = 0.02
    check_share: float = 0.67
    most: int = 24
    answer_tokens: int = 32

    def __post_init__(self) -> None:
        check_above_zero("tolerance", self.tolerance)
        check_whole("answer_tokens", self.answer_tokens, 1)
        check_whole("most", self.most, 2)
        if not 0 < self.check_share < 1:
            raise ConfigError("check_share", self.check_share, "use a number above 0 and below 1")

    def run(
        self,
        engine: BlendEngine,
        prompts: Sequence[Prompt],
        *,
        corpus: Sequence[str] = (),
        progress: bool | None = None,
    ) -> tuple[BlendSettings, Finding]:
        """Find the cheapest blending within the tolerance.

        Parameters
        ----------
        engine : BlendEngine
            Its model, tokenizer and separator; its store is not used.
        prompts : sequence of Prompt
            As they will be asked; no answers are needed.
        corpus : sequence of str
            All chunks, those of a document one after another, as they are warmed; by default those of the prompts.
        progress : bool, optional
            Show a progress bar; by default if standard error is a terminal.

        Returns
        -------
        BlendSettings, Finding
            The settings to use (full prefill for a model that does not tolerate blending), and all findings.

        Raises
        ------
        UnsupportedModelError
            If the model is answered plainly.
        ConfigError
            If there are fewer than six prompts.
        """
        check_blends(engine.adapter)
        if len(prompts) < 6:
            raise ConfigError("prompts", len(prompts), "use at least 6")
        searched, checks = divided(prompts, self.check_share)
        decoding = DecodeOptions(max_new_tokens=self.answer_tokens, temperature=0.0)

        @lru_cache(3 * self.most)
        def answer(prompt: Prompt) -> ReferenceAnswer:
            methods = Methods(engine, prompt)
            return ReferenceAnswer(methods, methods.full_recompute(), decoding)

        hidden = None if progress is None else not progress
        with (
            ExitStack() as stack,
            tqdm(desc="calibrating", unit=" passes", disable=hidden) as bar,
            engine.products(),  # full prefill too is computed as requests are
        ):

            def trials(condition: str, of: Sequence[Prompt], most: int) -> TrialSet:
                return TrialSet(engines[condition], of, answer, most, on_prompt=bar.update)

            engines = {name: stack.enter_context(_behind(name, engine, prompts, corpus)) for name in _BEHIND}
            found = Search(
                {name: trials(name, searched, self.most) for name in engines},
                lambda name: trials(name, checks, 2 * self.most),
                engine.adapter.num_layers,
                self.tolerance,
            ).run()
        return settings_of(found, self.tolerance), found


@contextmanager
def _behind(
    condition: str, engine: BlendEngine, prompts: Sequence[Prompt], corpus: Sequence[str]
) -> Iterator[BlendEngine]:
    """An engine over a store of its own that has the chunks of prompts, computed under a condition as warming does."""
    config = BlendConfig(
        condition=condition,
        codec="raw",
        min_tokens=0,
        prompt_cache=0,
        write_back="inline",
        separator=engine.config.separator,
        prepack_weights=engine.config.prepack_weights,
    )
    wanted = dict.fromkeys(chunk.strip() for prompt in prompts for chunk in prompt.chunks)
    texts = list(dict.fromkeys([*(text.strip() for text in corpus), *wanted]))
    make = partial(BlendEngine, engine.model, engine.tokenizer, config=config, fingerprint=engine.fingerprint)
    with TemporaryDirectory() as folder, make(store=folder) as made:
        made.chunks.warm(texts, only=wanted.keys(), progress=False)
        yield made


def divided(prompts: Sequence[Prompt], check_share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to search on, and those that only check the result."""
    searched: list[Prompt] = []
    checks: list[Prompt] = []
    for number, prompt in enumerate(prompts):
        held_back = int((number + 1) * check_share) > int(number * check_share)
        (checks if held_back else searched).append(prompt)
    return searched, checks


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


class TrialSet:
    """Prompts on which rules are tried, each compared with full prefill's own answer.

    Most prompts lose nothing by full KV reuse or by any rule, but a few lose much. Rules are therefore tried on the
    prompts that reuse gets most wrong, and on a few others that represent the rest.

    Parameters
    ----------
    engine : BlendEngine
        Its store has the chunks.
    prompts : sequence of Prompt
    answer : callable
        Full prefill's answer to a prompt.
    most : int
        Prompts on which rules are tried, if there are more: half are those on which full KV reuse is farthest from full
        prefill; the others are drawn from the rest and represent it.
    on_prompt : callable
        Called after each prompt that was tried.
    """

    def __init__(
        self,
        engine: BlendEngine,
        prompts: Sequence[Prompt],
        answer: Callable[[Prompt], ReferenceAnswer],
        most: int,
        on_prompt: Callable[[], object] = lambda: None,
    ) -> None:
        self._engine, self._answer, self._on_prompt = engine, answer, on_prompt
        self._known: dict[SelectionRule, TriedRule] = {}
        self._prompts = len(prompts)
        self._trials = [(prompt, 1) for prompt in prompts]  # with how many prompts each stands for
        if most < len(prompts):
            ranked = sorted(prompts, key=lambda prompt: -self._try(prompt, SelectNone())[0])
            hard, rest = ranked[: most // 2], ranked[most // 2 :]
            drawn = random.Random(0).sample(rest, most - most // 2)
            each, over = divmod(len(rest), len(drawn))
            self._trials = [(prompt, 1) for prompt in hard]
            self._trials += [(prompt, each + (place < over)) for place, prompt in enumerate(drawn)]

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
        found: list[tuple[float, tuple[Prompt, int]]] = []
        divergences: list[float] = []
        works: list[float] = []
        for trial in self._trials:
            if works and self._given_up(divergences, fmean(works), tolerance, below):
                break
            prompt, count = trial
            divergence, work = self._try(prompt, rule)
            found.append((divergence, trial))
            divergences += [divergence] * count
            works += [work] * count
        whole = len(divergences) == self._prompts
        if whole:  # from now on the hard ones first, so that what fails is soon seen
            self._trials = [trial for _, trial in sorted(found, key=lambda one: -one[0])]
            divergences.sort(reverse=True)
        return TriedRule(rule, tuple(divergences), fmean(works), whole)

    def _given_up(self, divergences: Sequence[float], work: float, tolerance: float, below: float) -> bool:
        """Whether the mean passes the tolerance even if nothing is lost on other prompts, or the work is too much."""
        return sum(divergences) > tolerance * self._prompts or work > _CLEARLY * below

    def _try(self, prompt: Prompt, rule: SelectionRule) -> tuple[float, float]:
        """Divergence and work of a rule on a prompt."""
        engine, answer = self._engine.with_config(selection=rule), self._answer(prompt)
        fused = engine.fuse(prompt)
        if fused.report.misses:  # of a chunk whose ids differ in this prompt; it is stored now
            fused = engine.fuse(prompt)
        self._on_prompt()
        return answer.divergence(fused.cache, fused.logits), fused.report.work


@dataclass(frozen=True)
class Finding:
    """Result of a search.

    Parameters
    ----------
    condition : str
        The best condition for chunks, as in `BlendConfig`.
    reuse : mapping of str to TriedRule
        By condition, what is lost without any recompute.
    chosen : TriedRule or None
        The cheapest rule within the tolerance, on the prompts of the search; None if no rule is within it.
    checked : TriedRule or None
        The same on prompts that had no part in the search.
    candidates : sequence of (str, TriedRule)
        Rules that were checked, the chosen one last: the name of the kind, and its result on the prompts of the search.
    """

    condition: str
    reuse: Mapping[str, TriedRule]
    chosen: TriedRule | None
    checked: TriedRule | None
    candidates: Sequence[tuple[str, TriedRule]]


class Search:
    """The search: the cheapest rule that keeps a model's answers within a tolerance of full prefill's.

    1. Chunks are computed after contexts, and after the start of a text only. Rules are tried on the side where full
       KV reuse is nearer to full prefill.
    2. For each kind of rule, the least share is found that keeps the tolerance on the prompts of the search. A rule
       that does more work than the best kind so far is left after one prompt.
    3. The cheapest is checked on prompts that were held back until then. If it fails there, its share is too small, and
       the search goes on.

    Parameters
    ----------
    searched : mapping of str to TrialSet
        By condition, prompts that rules are searched on.
    checks : callable
        Of a condition makes the prompts that the result is checked on, once they are needed.
    tolerance : float
        Mean KL divergence from full prefill that is allowed, in nats a token. The upper end of the 95%
        interval must keep it on all prompts, and the mean on those held back.
    """

    def __init__(
        self,
        searched: Mapping[str, TrialSet],
        checks: Callable[[str], TrialSet],
        layers: int,
        tolerance: float,
    ) -> None:
        self._searched, self._make_checks, self._tolerance = searched, checks, tolerance
        self._rules = {kind: [make(ratio).fit(layers) for ratio in ratios] for kind, (make, ratios) in KINDS.items()}
        self._too_small = dict.fromkeys(KINDS, 0)  # how many shares of a kind are, by the prompts held back

    def run(self) -> Finding:
        """Search, choose and check.

        A few prompts have most of the divergence, so neither a mean nor a few prompts are enough: the interval over all
        prompts decides.
        """
        reuse = {name: one.try_rule(SelectNone()) for name, one in self._searched.items()}
        condition = min(reuse, key=lambda name: reuse[name].divergence.mean)
        checks: TrialSet | None = None
        candidates: list[tuple[str, TriedRule]] = []
        while (found := self._cheapest(self._searched[condition])) is not None:
            kind, one = found
            candidates.append(found)
            if checks is None:
                checks = self._make_checks(condition)
            checked = checks.try_rule(one.rule, self._tolerance)
            _log.info("%s: work %.1f%%, divergence %.4g", one.rule, 100 * one.work, checked.divergence.mean)
            together = one.merge(checked)
            if together.whole and max(checked.divergence.mean, together.divergence.high) <= self._tolerance:
                return Finding(condition, reuse, one, checked, candidates)
            self._too_small[kind] = self._rules[kind].index(one.rule) + 1
        return Finding(condition, reuse, None, None, candidates)

    def _cheapest(self, trials: TrialSet) -> tuple[str, TriedRule] | None:
        """The least work that may keep the tolerance, by the prompts of the search, and the kind of its rule."""
        best: tuple[str, TriedRule] | None = None
        for kind in KINDS:
            found = self._least(kind, trials, best[1].work if best else _MOST_WORK)
            best = best if found is None else (kind, found)
        return best

    def _least(self, kind: str, trials: TrialSet, below: float) -> TriedRule | None:
        """The least share of a kind that keeps the tolerance with less work than ``below``, by halving, if any does."""
        rules, allowed, found = self._rules[kind], _SLACK * self._tolerance, None
        low, high = self._too_small[kind], len(rules)
        while low < high:
            middle = (low + high) // 2
            tried = trials.try_rule(rules[middle], allowed, below)
            if tried.whole and tried.divergence.mean <= allowed:
                high, found = middle, tried if tried.work < below else found
            elif tried.work > below:
                high = middle
            else:
                low = middle + 1
        return found


def settings_of(found: Finding, tolerance: float) -> BlendSettings:
    """The options that a finding stands for."""
    if found.chosen is None or found.checked is None:
        prompts = len(found.reuse[found.condition].divergences)
        return BlendSettings("all", recompute_ratio=1.0, tolerance=tolerance, prompts=prompts)
    rule, seen = found.chosen.rule, found.chosen.merge(found.checked)
    values: dict[str, Any] = {option.name: getattr(rule, option.name) for option in fields(rule)}  # type: ignore[arg-type]
    return BlendSettings(
        selection=next(name for name, kind in RULES.items() if type(rule) is kind),
        condition=found.condition,
        recompute_ratio=values.pop("recompute_ratio", BlendSettings.recompute_ratio),
        selection_options={name: tuple(one) if isinstance(one, list) else one for name, one in values.items()},
        tolerance=tolerance,
        divergence=seen.divergence.mean,
        highest=seen.divergence.high,
        work=seen.work,
        prompts=len(seen.divergences),
    )


def report(settings: BlendSettings, found: Finding) -> str:
    """The findings in words."""
    lines = []
    for condition, tried in found.reuse.items():
        lost = tried.divergence.mean
        lines.append(f"full KV reuse, chunks computed behind {_BEHIND[condition]}: {lost:.4f} nats a token")
    if found.candidates:
        lines += ["", f"{'checked on prompts held back':<34}share   work  divergence, of those searched on"]
    for kind, tried in found.candidates:
        share = getattr(tried.rule, "recompute_ratio", 0.0)
        lines.append(f"  {kind:<32}{share:>5.1%}  {tried.work:>5.1%}  {tried.divergence.mean:>10.4f}")
    if found.checked is None:
        lines += [
            "",
            "this model does not tolerate blending: nothing that saves work stays within "
            f"{settings.tolerance:g} nats a token of full prefill; auto will prefill every prompt in full",
        ]
        return "\n".join(lines)
    lines += [
        "",
        f"chosen: chunks behind {_BEHIND[settings.condition]}, {_describe(settings)}",
        f"  work        {settings.work:.1%} of full prefill's",
        f"  divergence  {settings.divergence:.4f} nats a token, 95% interval to {settings.highest:.4f}, where "
        f"{settings.tolerance:g} is allowed",
        f"  held back   {found.checked.divergence.mean:.4f} on the prompts that had no part in the search",
    ]
    return "\n".join(lines)


def _describe(settings: BlendSettings) -> str:
    """A rule with its share, in words."""
    if settings.recompute_ratio == 0:
        return "nothing recomputed"
    share = f"{settings.recompute_ratio:.1%} of their tokens recomputed"
    if settings.selection == "hkvd":
        return f"{share}, those of highest KV deviation at layer {settings.selection_options['check_layers'][0]}"
    if settings.selection == "query":
        return f"{share}, those that the question attends to most"
    return f"{share}, the first of each chunk"
