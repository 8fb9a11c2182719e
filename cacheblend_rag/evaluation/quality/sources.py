"""Where questions come from: a file, or the splits of the reference archive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cacheblend_rag.checks import check_choice, check_whole
from cacheblend_rag.evaluation.quality.cases import EvalCase, Passage
from cacheblend_rag.evaluation.quality.datasets import load_cases
from cacheblend_rag.reference.measure import Case, held_out_cases

__all__ = ["CaseSource", "FileCases", "ReferenceCases", "open_source", "reference_case"]

_REFERENCE = "reference:"


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


@dataclass(frozen=True)
class ReferenceCases:
    """Questions of the reference archive, made anew for each number of chunks.

    Parameters
    ----------
    split : {"dev", "test"}
    per_kind : int
        Questions of each kind.
    seed : int
    shuffled : bool
        Whether a passage may stand before the one that says who is meant.
    """

    split: str
    per_kind: int
    seed: int = 0
    shuffled: bool = False

    def __post_init__(self) -> None:
        check_choice("data", self.split, ("dev", "test"))

    def cases(self, chunks: int) -> list[EvalCase]:
        """See `CaseSource.cases`."""
        split = "dev" if self.split == "dev" else "test"
        found = held_out_cases(
            self.per_kind,
            passages=chunks,
            split=split,  # type: ignore[arg-type]
            seed=self.seed,
            shuffled=self.shuffled,
        )
        return [reference_case(case, f"{split}-{self.seed}-{number}") for number, case in enumerate(found)]


def reference_case(case: Case, name: str) -> EvalCase:
    """A question of the reference archive; all its passages stand in the prompt."""
    passages = tuple(Passage("", chunk, support=True) for chunk in case.chunks)
    return EvalCase(name, case.question, (case.sentence,), passages, case.kind)


def open_source(
    data: str,
    *,
    form: str = "auto",
    limit: int | None = None,
    per_kind: int = 50,
    seed: int = 0,
    shuffled: bool = False,
) -> CaseSource:
    """Questions of a file, or of ``reference:dev`` and ``reference:test``.

    Raises
    ------
    DatasetError
        If the file cannot be used.
    ConfigError
        If a number is out of range.
    """
    for name, value in (("limit", limit), ("per_kind", per_kind)):
        if value is not None:
            check_whole(name, value, 1)
    if data.startswith(_REFERENCE):
        return ReferenceCases(data.removeprefix(_REFERENCE), per_kind, seed, shuffled)
    return FileCases(load_cases(data, form, limit))
