"""Rouge-L of summaries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from cacheblend_rag.errors import MissingExtraError


@cache
def rouge_scorer() -> Any:
    """Rouge-L with stemming, as the paper measures it.

    Raises
    ------
    MissingExtraError
        If rouge-score is not installed.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise MissingExtraError("rouge-score", "benchmarks") from error
    return RougeScorer(["rougeL"], use_stemmer=True)


def best_rouge_l(answer: str, golds: Sequence[str]) -> float:
    """Rouge-L F-measure with the nearest of several gold answers.

    Raises
    ------
    MissingExtraError
        If rouge-score is not installed.
    """
    scorer = rouge_scorer()
    return max((float(scorer.score(gold, answer)["rougeL"].fmeasure) for gold in golds), default=0.0)
