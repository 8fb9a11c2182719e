"""Questions the page offers for the bundled articles."""

from __future__ import annotations

import json
from pathlib import Path

from cacheblend_rag.app import collection
from cacheblend_rag.errors import DatasetError


def suggestions_for(documents: Path) -> list[dict[str, str]]:
    """Suggested questions for a folder of documents; none but for the bundled articles.

    Raises
    ------
    DatasetError
        If the file of questions is there and cannot be read.
    """
    if not collection.is_bundled(documents) or not collection.QUESTIONS_PATH.exists():
        return []
    found = []
    try:
        for line in collection.QUESTIONS_PATH.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            if one["suggested"]:
                several = len(one["files"]) > 1
                note = {"note": "The answer needs more than one document."} if several else {}
                found.append({"question": one["question"], **note})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{str(collection.QUESTIONS_PATH)!r} is no file of questions: {error}") from error
    return found
