"""One prompt by every method: time, work, the answer, and how far it is from full prefill's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from cacheblend_rag.calibration.comparison import (
    PrefillResult,
    blended,
    full_recompute,
    prefix_caching,
    shared_cache,
    time_once,
)
from cacheblend_rag.calibration.datasets import EvalCase
from cacheblend_rag.calibration.statistics import best_f1, exact_match, first_line
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import MissingExtraError
from cacheblend_rag.fusor.teacher_forcing import answer_log_probs, kl_divergence
from cacheblend_rag.fusor.work import RowsDone, work_share
from cacheblend_rag.prompt import Prompt, PromptTokenizer
from docs.benchmarks.evaluation.answers import GreedyAnswers
from docs.benchmarks.evaluation.methods import Variant
from docs.benchmarks.evaluation.rouge import best_rouge_l

DEPTH = 24
"""Layers of the model to which work is scaled, so that shallow models compare with usual ones."""

_NEW_TOKENS = {"qa": 32, "examples": 128, "summary": 512}
# Gold tokens that are looked at: distributions over a large vocabulary take room.
_GOLD = 128


class Subject:
    """A model that is asked the same by every method.

    Parameters
    ----------
    engine : BlendEngine
        Its store holds the chunks.
    max_new_tokens : int
        Of an answer; 0 takes what suits the task, and what its gold answers take.
    answers : bool
        Whether answers are generated.
    """

    def __init__(self, engine: BlendEngine, max_new_tokens: int = 0, answers: bool = True) -> None:
        self.engine, self.answers, self._most = engine, answers, max_new_tokens
        self.segments = PromptTokenizer(engine.tokenizer, engine.config.separator)
        self._views: dict[str, BlendEngine] = {}

    def answer_tokens(self, case: EvalCase) -> int:
        """Most tokens generated for an answer: what suits the task, but no fewer than its gold answers take."""
        return self._most or max(_NEW_TOKENS[case.task], *(len(self._answer_ids(gold)) for gold in case.answers))

    def room(self, case: EvalCase) -> int:
        """Tokens an answer may take, generated or gold."""
        return max(self.answer_tokens(case), len(self.gold_ids(case, "")))

    def gold_ids(self, case: EvalCase, suffix: str) -> list[int]:
        """Ids of the first gold answer behind a prompt's suffix, and the end token."""
        return self._answer_ids(case.answers[0], suffix or ":")

    def _answer_ids(self, answer: str, before: str = ":") -> list[int]:
        space = "" if before[-1:].isspace() else " "
        ids = list(self.segments.continued_ids(space + answer, before))[: _GOLD - 1]
        end = self.engine.tokenizer.eos_token_id
        return ids if end is None else [*ids, int(end)]

    def measure(self, case: EvalCase, prompt: Prompt, variants: Iterable[Variant]) -> list[dict[str, Any]]:
        """Measure each method, full prefill first; results are fit for JSON.

        Times are in seconds, ``work`` is a share of full prefill's (``work_24`` scaled to 24 layers),
        ``rows`` the mean share of the prompt's rows computed a layer.
        """
        trial = _Trial(self, case, prompt)
        return [trial.measure(one) for one in variants]

    def view(self, variant: Variant) -> BlendEngine:
        """The engine with a variant's rule."""
        if variant.label not in self._views:
            self._views[variant.label] = self.engine.with_config(selection=variant.rule, min_tokens=0, verify="off")
        return self._views[variant.label]


class _Trial:
    """One prompt under measurement."""

    def __init__(self, subject: Subject, case: EvalCase, prompt: Prompt) -> None:
        self._subject, self._case, self._prompt = subject, case, prompt
        self._engine = subject.engine
        self._ids = self._engine.tokenize(prompt).input_ids
        self._gold = subject.gold_ids(case, prompt.suffix)
        self._warm = False
        self._full: torch.Tensor | None = None  # full prefill's log-probabilities over the gold answer
        self._answers = GreedyAnswers(self._engine, self._ids, subject.answer_tokens(case))

    def measure(self, variant: Variant) -> dict[str, Any]:
        """Measure a method."""
        prefill = self._prefill(variant)
        if variant.rule is not None and not self._warm:
            prefill()  # stores the prefix, so that no method pays for it; records are then in the page cache
            self._warm = True
        seconds, made = time_once(prefill)
        forced = answer_log_probs(self._engine.adapter, shared_cache(made.cache), made.logits, self._gold)
        if self._full is None:
            self._full = forced
        says = forced.argmax(dim=-1)
        return {
            "label": variant.label,
            "method": variant.method,
            "ratio": variant.ratio,
            "ttft": seconds,
            "rows": sum(made.computed) / (len(made.computed) * len(self._ids)),
            **self._work(made.done),
            "hits": made.report.hits if made.report else 0,
            "misses": made.report.misses if made.report else 0,
            "kl": float(kl_divergence(self._full, forced).mean()),
            "agreement": float((says == self._full.argmax(dim=-1)).float().mean()),
            "forced_exact": says.tolist() == self._gold,
            **self._answered(made, says),
        }

    def _prefill(self, variant: Variant) -> Callable[[], PrefillResult]:
        if variant.method == "full":
            return full_recompute(self._engine, self._prompt)
        if variant.method == "prefix":
            return prefix_caching(self._engine, self._prompt)
        return blended(self._subject.view(variant), self._prompt)

    def _work(self, done: RowsDone | None) -> dict[str, float]:
        if done is None:
            return {"work": 1.0, "work_24": 1.0}
        shape, tokens = self._engine.adapter.shape, len(self._ids)
        deep = max(DEPTH, self._engine.adapter.num_layers)
        return {"work": work_share(shape, tokens, done), "work_24": work_share(shape, tokens, done, deep)}

    def _answered(self, made: PrefillResult, says: torch.Tensor) -> dict[str, Any]:
        if not self._subject.answers:
            return {}
        return scored(self._case, self._answers.text(made.cache, made.logits, self._gold, says.tolist()))


def scored(case: EvalCase, text: str) -> dict[str, Any]:
    """The text of an answer, and how good it is."""
    answer = text.strip() if case.task == "summary" else first_line(text)
    try:
        rouge = best_rouge_l(answer, case.answers)
    except MissingExtraError:
        rouge = None  # only for short answers: without it, a run over summaries does not begin
    return {
        "answer": answer,
        "f1": best_f1(answer, case.answers),
        "em": exact_match(answer, case.answers),
        "rouge_l": rouge,
    }
