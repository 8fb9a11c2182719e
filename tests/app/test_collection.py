"""The bundled collection: its articles, their sources, and the questions about them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from cacheblend_rag.app.collection import ARTICLES_PATH, QUESTIONS_PATH

ARTICLES = {path.name: path.read_text(encoding="utf-8") for path in sorted(ARTICLES_PATH.iterdir())}
QUESTIONS: list[dict[str, Any]] = [json.loads(line) for line in QUESTIONS_PATH.read_text(encoding="utf-8").splitlines()]
SOURCES = Path(ARTICLES_PATH.parent, "SOURCES.md").read_text(encoding="utf-8")


def test_every_article_names_its_sources() -> None:
    entries = re.split(r"^## ", SOURCES, flags=re.MULTILINE)[1:]
    named = {entry.split("\n")[0]: entry.split("\n")[1:] for entry in entries}
    assert set(named) == set(ARTICLES)
    assert all(sum(line.startswith("- ") for line in lines) >= 2 for lines in named.values())
    assert "Apache-2.0" in SOURCES


def test_questions_have_the_fields_that_readers_expect() -> None:
    assert 60 <= len(QUESTIONS) <= 80
    for one in QUESTIONS:
        assert list(one) == ["question", "answer", "aliases", "files", "suggested"]
        assert one["question"].endswith("?")
        assert one["answer"].strip()
        assert all(alias.strip() and alias != one["answer"] for alias in one["aliases"])
        assert isinstance(one["suggested"], bool)
    assert len({one["question"] for one in QUESTIONS}) == len(QUESTIONS)


def test_each_answer_stands_in_a_named_article() -> None:
    for one in QUESTIONS:
        assert one["files"], one
        assert len(set(one["files"])) == len(one["files"]), one
        assert set(one["files"]) <= set(ARTICLES), one
        accepted = [text.casefold() for text in (one["answer"], *one["aliases"])]
        assert any(text in ARTICLES[name].casefold() for name in one["files"] for text in accepted), one
