"""The bundled collection of articles, and questions about it.

Attributes
----------
ARTICLES_PATH : Path
    Folder of Markdown files, one article a file.
QUESTIONS_PATH : Path
    Questions about the articles, one JSON object a line, with the keys ``question``, ``answer``, ``files`` (names of
    the articles that hold the answer) and ``suggested`` (whether the page offers the question).
"""

from pathlib import Path

ARTICLES_PATH = Path(__file__).parent / "articles"
QUESTIONS_PATH = Path(__file__).parent / "questions.jsonl"

__all__ = ["ARTICLES_PATH", "QUESTIONS_PATH", "is_bundled"]


def is_bundled(folder: Path) -> bool:
    """Whether a folder is that of the bundled articles."""
    return folder.resolve() == ARTICLES_PATH.resolve()
