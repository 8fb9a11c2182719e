"""``cacheblend-rag calibrate``: search, say what was found, and keep it where ``recompute_ratio="auto"`` reads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from cacheblend_rag.calibration.profiler import keep_profile
from cacheblend_rag.calibration.progress import Progress
from cacheblend_rag.calibration.prompts import Corpus
from cacheblend_rag.calibration.search import KINDS, Finding, Search, TrialSets
from cacheblend_rag.calibration.trials import ComputeKV, FullAnswers, TrialSet
from cacheblend_rag.config import check_above_zero, check_whole
from cacheblend_rag.engine.decode import end_ids_of
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.selection import RULES, SelectionRule
from cacheblend_rag.loading import BlendSettings, MachineProfile
from cacheblend_rag.models.plain import check_blends
from cacheblend_rag.prompt import Prompt, PromptTokenizer

_BEHIND = {"context": "contexts", "sink": "the start of a text alone"}


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """How a model is calibrated.

    Parameters
    ----------
    tolerance : float
        Mean KL divergence from full prefill that is allowed, in nats a token. On SmolLM2-135M-Instruct, putting the
        passages in another order moves answers by more than twice the default; see docs/benchmarks/three-models.md.
    check_share : float
        Share of the prompts that have no part in the search and check its result.
    most : int
        Prompts on which rules are tried, of those that are searched on: half of them the ones that full KV reuse gets
        most wrong, the others to stand for the rest. Of those that check the result, twice as many.
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


def calibrate(
    engine: BlendEngine,
    prompts: Sequence[Prompt],
    options: CalibrationOptions | None = None,
    *,
    corpus: Sequence[str] = (),
    progress: bool | None = None,
) -> tuple[BlendSettings, Finding]:
    """Find the cheapest blending within a tolerance.

    Parameters
    ----------
    engine : BlendEngine
        Its model, tokenizer and separator; its store is not used.
    prompts : sequence of Prompt
        As they will be asked; no answers are needed.
    options : CalibrationOptions, optional
    corpus : sequence of str
        All chunks, those of a document one after another, as they are warmed; by default those of the prompts.
    progress : bool, optional
        Say what will be done, how long that may take, and how far it is. By default a bar shows the last on a terminal,
        and elsewhere a line every half a minute. False says nothing.

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
    options = options or CalibrationOptions()
    if len(prompts) < 6:
        raise ConfigError("prompts", len(prompts), "use at least 6")
    searched, checks = _divide(prompts, options.check_share)
    segments = PromptTokenizer(engine.tokenizer, engine.config.separator)
    with ExitStack() as stack:
        end_ids = end_ids_of(engine.model.generation_config, engine.tokenizer)
        full = FullAnswers(engine.adapter, options.answer_tokens, end_ids)
        computes = _computes(engine, segments, [*corpus, *(chunk for prompt in prompts for chunk in prompt.chunks)])
        about = f"{len(prompts)} prompts: {len(searched)} are searched on, {len(checks)} only check the result"
        passes = _expected_passes(len(searched), len(checks), options.most, len(computes))
        bar = stack.enter_context(Progress("calibrating", about, passes, exact=False, shown=progress))

        def trials(condition: str, of: Sequence[Prompt], most: int) -> TrialSet:
            return TrialSet(
                engine.adapter,
                segments,
                of,
                full=full,
                most=most,
                compute=computes[condition],
                on_prompt=bar.update,
            )

        stack.enter_context(engine.products())
        conditions = {
            name: TrialSets(
                trials(name, searched, options.most),
                partial(trials, name, checks, 2 * options.most),
            )
            for name in computes
        }
        found = Search(conditions, engine.adapter.num_layers, options.tolerance).run()
    settings = settings_of(found, options.tolerance)
    return settings, found


def _computes(engine: BlendEngine, tokenizer: PromptTokenizer, chunks: Sequence[str]) -> dict[str, ComputeKV | None]:
    """Functions that compute chunks, by condition; None where the engine does it by itself."""
    return {"sink": None, "context": Corpus(engine.adapter, tokenizer, chunks).compute}


def _expected_passes(searched: int, checks: int, most: int, conditions: int) -> int:
    """Passes over prompts of a search that gives no rule up early, and keeps the first that it checks."""
    tried = min(most, searched)
    halvings = sum(math.ceil(math.log2(len(ratios) + 1)) for _, ratios in KINDS.values())
    prepared = conditions * searched + checks
    return prepared + (conditions + halvings) * tried + min(2 * most, checks)


def _divide(prompts: Sequence[Prompt], check_share: float) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to search on, and those that only check the result."""
    searched: list[Prompt] = []
    checks: list[Prompt] = []
    for number, prompt in enumerate(prompts):
        held_back = int((number + 1) * check_share) > int(number * check_share)
        (checks if held_back else searched).append(prompt)
    return searched, checks


def settings_of(found: Finding, tolerance: float) -> BlendSettings:
    """The options that a finding stands for."""
    if found.chosen is None or found.checked is None:
        prompts = len(found.reuse[found.condition].divergences)
        return BlendSettings("all", recompute_ratio=1.0, tolerance=tolerance, prompts=prompts)
    rule, seen = found.chosen.rule, found.chosen.merge(found.checked)
    values = {option.name: getattr(rule, option.name) for option in fields(rule)}  # type: ignore[arg-type]
    return BlendSettings(
        selection=_name(rule),
        condition=found.condition,
        recompute_ratio=values.pop("recompute_ratio", BlendSettings.recompute_ratio),
        selection_options={name: _plain(value) for name, value in values.items()},
        tolerance=tolerance,
        divergence=seen.divergence.mean,
        highest=seen.divergence.high,
        work=seen.work,
        prompts=len(seen.divergences),
    )


def _name(rule: SelectionRule) -> str:
    return next(name for name, kind in RULES.items() if type(rule) is kind)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, tuple)) else value


def keep_settings(engine: BlendEngine, settings: BlendSettings) -> Path:
    """Write settings into the profile beside the engine's store; its path.

    Engines that are made from now on and leave the choice to ``recompute_ratio="auto"`` use them.

    Raises
    ------
    ConfigError
        If the store has no folder.
    StoreError
        If the profile cannot be read or written.
    """
    _, path = keep_profile(engine.store, MachineProfile(blends={engine.fingerprint: settings}))
    return path


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
