"""Write the bundled archive: ``python -m tests.toy.bundle``.

One town of the test split becomes a folder of small Markdown files, one passage each, and a file of questions.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cacheblend_rag.errors import DocumentError
from tests.toy import DOCUMENTS_PATH, QUESTIONS_PATH
from tests.toy.archive import Town, build_town
from tests.toy.questions import QUESTION_KINDS, ask_all

BUNDLED_SEED = 7
_QUESTIONS_A_KIND = 60


@dataclass(frozen=True)
class BundledQuestion:
    """A question about the bundled archive; ``files`` are the documents it needs."""

    id: str
    kind: str
    question: str
    answers: tuple[str, ...]
    sentence: str
    files: tuple[str, ...]


def file_names(town: Town) -> tuple[str, ...]:
    """Return a readable, unique file name for each passage."""
    taken: dict[str, int] = {}
    names = []
    for passage in town.passages:
        slug = re.sub(r"[^a-z0-9]+", "-", passage.title.lower()).strip("-")
        taken[slug] = taken.get(slug, 0) + 1
        names.append(f"{slug}.md" if taken[slug] == 1 else f"{slug}-{taken[slug]}.md")
    return tuple(names)


def bundled_questions(town: Town, per_kind: int = _QUESTIONS_A_KIND) -> tuple[BundledQuestion, ...]:
    """Choose questions of every kind about a town."""
    rng = random.Random(f"bundle/{town.seed}")
    names, asked = file_names(town), ask_all(town)
    chosen = []
    for kind in QUESTION_KINDS:
        of_kind = [question for question in asked if question.kind == kind]
        chosen += rng.sample(of_kind, min(per_kind, len(of_kind)))
    return tuple(
        BundledQuestion(
            item.id,
            item.kind,
            item.question,
            item.answers,
            item.sentence,
            tuple(names[index] for index in item.needs),
        )
        for item in chosen
    )


def read_questions(path: Path = QUESTIONS_PATH) -> tuple[BundledQuestion, ...]:
    """Read a question file.

    Raises
    ------
    DocumentError
        If the file cannot be read or is not of this kind.
    """
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return tuple(
            BundledQuestion(
                record["id"],
                record["kind"],
                record["question"],
                tuple(record["answers"]),
                record["sentence"],
                tuple(record["files"]),
            )
            for record in records
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DocumentError(f"{path} is not a readable question file: {error}") from error


def write_bundle(town: Town, documents: Path, questions: Path) -> None:
    """Write the folder of passages and the file of questions; Markdown files already there are replaced."""
    documents.mkdir(parents=True, exist_ok=True)
    for old in documents.glob("*.md"):
        old.unlink()
    for name, passage in zip(file_names(town), town.passages, strict=True):
        (documents / name).write_text(passage.chunk + "\n", encoding="utf-8")
    lines = [json.dumps(asdict(item), ensure_ascii=False) for item in bundled_questions(town)]
    questions.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m tests.toy.bundle", description=__doc__)
    parser.add_argument("--seed", type=int, default=BUNDLED_SEED)
    parser.add_argument("--documents", type=Path, default=DOCUMENTS_PATH)
    parser.add_argument("--questions", type=Path, default=QUESTIONS_PATH)
    args = parser.parse_args(argv)
    write_bundle(build_town(args.seed, "test"), args.documents, args.questions)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
