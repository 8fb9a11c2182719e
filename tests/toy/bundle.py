"""Questions about the bundled archive."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.toy import QUESTIONS_PATH


@dataclass(frozen=True)
class BundledQuestion:
    """A question about the bundled archive; ``files`` are the documents it needs."""

    id: str
    kind: str
    question: str
    answers: tuple[str, ...]
    sentence: str
    files: tuple[str, ...]


def read_questions(path: Path = QUESTIONS_PATH) -> tuple[BundledQuestion, ...]:
    """Questions of a file."""
    return tuple(BundledQuestion(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines())
