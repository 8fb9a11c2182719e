"""The bundled collection of articles, and questions about it.

Attributes
----------
ARTICLES_PATH : Path
    Folder of Markdown files, one article a file.
QUESTIONS_PATH : Path
    Questions about the articles, one JSON object a line, with the keys ``question``, ``answer``, ``files`` (names of
    the articles that hold the answer) and ``suggested`` (whether the page offers the question).
MANUAL_FOLDERS : tuple of str
    Folders of the project's own documentation that answer questions about it.
"""

from pathlib import Path

ARTICLES_PATH = Path(__file__).parent / "articles"
QUESTIONS_PATH = Path(__file__).parent / "questions.jsonl"
MANUAL_FOLDERS = ("tutorial", "how-to", "reference", "explanation")

__all__ = ["ARTICLES_PATH", "MANUAL_FOLDERS", "QUESTIONS_PATH", "is_bundled", "manual_path"]


def is_bundled(folder: Path) -> bool:
    """Whether a folder is that of the bundled articles."""
    return folder.resolve() == ARTICLES_PATH.resolve()


def manual_path() -> Path | None:
    """The project's own documentation: in the installed package, or in its source tree; None if neither is there."""
    here = Path(__file__).resolve().parent
    places = (here / "manual", here.parents[2] / "docs")
    return next((path for path in places if (path / "explanation" / "engine.md").is_file()), None)
