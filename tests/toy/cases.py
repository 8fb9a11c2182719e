"""Questions drawn from the toy's generator, for evaluation.

``python -m tests.toy.cases test --per-kind 50 --chunks 6 --out cases.jsonl`` writes them into a file that
``cacheblend-rag eval --data cases.jsonl`` and ``cacheblend-rag calibrate --data cases.jsonl`` read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cacheblend_rag.calibration.datasets import EvalCase, Passage
from cacheblend_rag.config import check_choice, check_whole
from cacheblend_rag.errors import ConfigError
from tests.toy.measure import Case, held_out_cases
from tests.toy.questions import QUESTION_KINDS, WIDE_KINDS, QuestionKind

__all__ = ["SPLITS", "ToyCases", "toy_case", "write_cases"]

SPLITS = ("dev", "test", "wide-dev", "wide-test")
_WIDE = "wide-"


@dataclass(frozen=True)
class ToyCases:
    """Questions of the toy's archives, made anew for each number of chunks.

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
        check_choice("split", self.split, SPLITS)
        if not self._counts:
            raise ConfigError("per_kind", self.per_kind, "name at least one kind")
        for kind, count in self._counts.items():
            check_choice("per_kind", kind, self._kinds)
            check_whole("per_kind", count, 1)

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
        """Questions, each with so many passages."""
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
                placed.append(((taken[case.kind] + 0.5) / wanted, toy_case(case, f"{self.split}-{self.seed}-{number}")))
                taken[case.kind] += 1
        return [case for _, case in sorted(placed, key=lambda one: one[0])][: self.limit]


def toy_case(case: Case, name: str) -> EvalCase:
    """A question as evaluation wants it; all its passages stand in the prompt."""
    passages = tuple(Passage("", chunk, support=True) for chunk in case.chunks)
    return EvalCase(name, case.question, (case.sentence,), passages, case.kind, group=f"town {case.town}")


def write_cases(cases: Sequence[EvalCase], path: Path) -> Path:
    """Write questions into a file that ``--data`` reads; the file."""
    path.write_text("".join(json.dumps(asdict(case)) + "\n" for case in cases), encoding="utf-8")
    return path


def _counts(text: str) -> int | dict[str, int]:
    """How many of each kind, or of those that are named."""
    if "=" not in text:
        return int(text)
    return {kind.strip(): int(count) for kind, _, count in (part.partition("=") for part in text.split(","))}


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m tests.toy.cases", description=__doc__)
    parser.add_argument("split", choices=SPLITS)
    parser.add_argument("--per-kind", type=_counts, default=50, metavar="N", help="of each kind, or KIND=N,KIND=N,…")
    parser.add_argument("--chunks", type=int, default=6, metavar="N", help="passages of a question")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffled", action="store_true", help="what is referred to may stand behind")
    parser.add_argument("--limit", type=int, metavar="N", help="only so many questions")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(argv)
    source = ToyCases(args.split, args.per_kind, args.seed, args.shuffled, args.limit)
    write_cases(source.cases(args.chunks), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
