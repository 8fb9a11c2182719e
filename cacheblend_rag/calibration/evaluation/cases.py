"""A question with its passages: what every data set is turned into."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Passage:
    """A text that may stand in the prompt.

    Parameters
    ----------
    title, text : str
    support : bool
        Whether the answer needs it, as far as the data set says.
    """

    title: str
    text: str
    support: bool = False

    @property
    def chunk(self) -> str:
        """The chunk it becomes."""
        return f"{self.title}\n{self.text}" if self.title else self.text


@dataclass(frozen=True)
class EvalCase:
    """A question.

    Parameters
    ----------
    id : str
    question : str
        Empty where the task asks for a summary of all passages.
    answers : tuple of str
        Gold answers; the first is the one whose tokens are looked at.
    passages : tuple of Passage
        What the prompt's chunks are chosen from.
    kind : str
        Question kind, for results by kind; may be empty.
    task : {"qa", "summary", "examples"}
        A question to answer, passages to summarise, or worked examples before another of their kind.
    group : str
        Set of documents the question is about; questions of one set are not independent.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]
    kind: str = ""
    task: str = "qa"
    group: str = ""


Cases = Callable[[int], Sequence[EvalCase]]
"""Gives questions for prompts of so many chunks, each with at least as many passages where there are so many."""


def digest(cases: Iterable[EvalCase]) -> str:
    """Identity of some cases and their order: another file is another run."""
    hasher = hashlib.sha256()
    for case in cases:
        hasher.update(json.dumps(asdict(case), sort_keys=True).encode())
        hasher.update(b"\n")
    return hasher.hexdigest()[:16]
