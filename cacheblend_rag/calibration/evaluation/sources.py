"""Where questions come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cacheblend_rag.calibration.evaluation.cases import EvalCase
from cacheblend_rag.calibration.evaluation.datasets import load_cases
from cacheblend_rag.config import check_whole

__all__ = ["CaseSource", "FileCases", "open_source"]


class CaseSource(Protocol):
    """Gives questions for prompts of so many chunks."""

    def cases(self, chunks: int) -> list[EvalCase]:
        """Questions, each with at least as many passages where there are so many."""


@dataclass(frozen=True)
class FileCases:
    """Questions that are there already; the same for every number of chunks."""

    known: Sequence[EvalCase]

    def cases(self, chunks: int) -> list[EvalCase]:
        """See `CaseSource.cases`."""
        return list(self.known)


def open_source(data: str, *, form: str = "auto", limit: int | None = None) -> CaseSource:
    """Questions of a file.

    Raises
    ------
    DatasetError
        If the file cannot be used.
    ConfigError
        If the limit is out of range or the format is not known.
    """
    if limit is not None:
        check_whole("limit", limit, 1)
    return FileCases(load_cases(data, form, limit))
