"""Where questions come from: a file, or the splits of the reference archive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cacheblend_rag.checks import check_choice, check_whole
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.evaluation.quality.cases import EvalCase, Passage
from cacheblend_rag.evaluation.quality.datasets import load_cases
from cacheblend_rag.reference.measure import Case, held_out_cases
from cacheblend_rag.reference.questions import QUESTION_KINDS, WIDE_KINDS, QuestionKind

__all__ = ["CaseSource", "FileCases", "ReferenceCases", "open_source", "reference_case"]

_REFERENCE = "reference:"
_WIDE = "wide-"


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

    Kinds take turns, so that any first part of the questions has as much of each as all have.

    Parameters
    ----------
    split : {"dev", "test", "wide-dev", "wide-test"}
        The latter of the wider archive.
    per_kind : int or mapping of str to int
        Questions of each kind, or of those that are named.
    seed : int
    shuffled : bool
        Whether a passage may stand before the one that says who is meant.
    limit : int, optional
        Most questions of all kinds together.
    """

    split: str
    per_kind: int | Mapping[str, int]
    seed: int = 0
    shuffled: bool = False
    limit: int | None = None

    def __post_init__(self) -> None:
        check_choice("data", self.split, ("dev", "test", "wide-dev", "wide-test"))
        for kind in self._counts:
            check_choice("per_kind", kind, self._kinds)

    @property
    def _wide(self) -> bool:
        return self.split.startswith(_WIDE)

    @property
    def _kinds(self) -> tuple[QuestionKind, ...]:
        return WIDE_KINDS if self._wide else QUESTION_KINDS

    @property
    def _counts(self) -> Mapping[str, int]:
        same = self.per_kind
        return dict.fromkeys(self._kinds, same) if isinstance(same, int) else same

    def cases(self, chunks: int) -> list[EvalCase]:
        """See `CaseSource.cases`."""
        found = held_out_cases(
            max(self._counts.values()),
            passages=chunks,
            split="dev" if self.split.endswith("dev") else "test",
            seed=self.seed,
            shuffled=self.shuffled,
            wide=self._wide,
        )
        placed: list[tuple[float, EvalCase]] = []
        taken = dict.fromkeys(self._counts, 0)
        for number, case in enumerate(found):
            if taken.get(case.kind, 0) < (wanted := self._counts.get(case.kind, 0)):
                placed.append(
                    ((taken[case.kind] + 0.5) / wanted, reference_case(case, f"{self.split}-{self.seed}-{number}"))
                )
                taken[case.kind] += 1
        return [case for _, case in sorted(placed, key=lambda one: one[0])][: self.limit]


def reference_case(case: Case, name: str) -> EvalCase:
    """A question of the reference archive; all its passages stand in the prompt."""
    passages = tuple(Passage("", chunk, support=True) for chunk in case.chunks)
    return EvalCase(name, case.question, (case.sentence,), passages, case.kind, group=f"town {case.town}")


def open_source(
    data: str,
    *,
    form: str = "auto",
    limit: int | None = None,
    per_kind: int | Mapping[str, int] = 50,
    seed: int = 0,
    shuffled: bool = False,
) -> CaseSource:
    """Questions of a file, or of a split of the reference archive: ``reference:`` and a name of `ReferenceCases`.

    Raises
    ------
    DatasetError
        If the file cannot be used.
    ConfigError
        If a number is out of range.
    """
    counts = per_kind.values() if isinstance(per_kind, Mapping) else (per_kind,)
    if not counts:
        raise ConfigError("per_kind", per_kind, "name at least one kind")
    for name, value in (("limit", limit), *(("per_kind", count) for count in counts)):
        if value is not None:
            check_whole(name, value, 1)
    if data.startswith(_REFERENCE):
        return ReferenceCases(data.removeprefix(_REFERENCE), per_kind, seed, shuffled, limit)
    return FileCases(load_cases(data, form, limit))
