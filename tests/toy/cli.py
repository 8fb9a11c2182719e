"""``cacheblend-rag`` with the toy in the place of starter models and bundled articles: ``python -m tests.toy.cli``.

So commands run in tests as documents show them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cacheblend_rag import config
from cacheblend_rag.app import collection
from tests.toy import DOCUMENTS_PATH, EMBEDDER_PATH, ENVIRONMENT, MODEL_PATH
from tests.toy.bundle import read_questions

SUGGESTED = (
    "Which street does Selma Bramdorf live on?",
    "Which company does Lars Mardahl work for?",
    "What did Felix Zanford speak about at Damsonweek?",
)


def write_questions(path: Path) -> None:
    """The toy's questions in the form of those about the bundled articles."""
    asked = read_questions()
    offered = {*SUGGESTED, *[one.question for one in asked if one.kind == "within"][:2]}
    lines = [
        {"question": one.question, "answer": one.sentence, "files": one.files, "suggested": one.question in offered}
        for one in asked
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def stand_in() -> None:
    """Put the toy in the place of starter models and bundled articles.

    Defaults of options that have been read before stay, so a command in a fork names the toy in its arguments.
    """
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    config.DEFAULT_MODEL, config.DEFAULT_EMBEDDER = str(MODEL_PATH), str(EMBEDDER_PATH)
    collection.ARTICLES_PATH = DOCUMENTS_PATH


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command."""
    stand_in()
    with tempfile.TemporaryDirectory() as folder:
        collection.QUESTIONS_PATH = Path(folder) / "questions.jsonl"
        write_questions(collection.QUESTIONS_PATH)
        from cacheblend_rag.app.cli import main as run

        return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
