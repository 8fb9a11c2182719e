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


def test_the_folder_holds_two_dozen_articles_below_a_megabyte() -> None:
    assert 24 <= len(ARTICLES) <= 26
    assert {Path(name).suffix for name in ARTICLES} == {".md"}
    files = [path for path in ARTICLES_PATH.parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_000_000


def test_each_article_has_a_title_of_its_own_and_plain_paragraphs() -> None:
    for name, text in ARTICLES.items():
        title, blank, *rest = text.split("\n")
        assert re.fullmatch(r"# \S.*", title), name
        assert blank == "", name
        assert not any(line.startswith("# ") for line in rest), name
        assert not re.search(r"https?://|\]\(|<\w", text), name
        assert 300 <= len(text.split()) <= 800, name
    assert len({text.split("\n")[0] for text in ARTICLES.values()}) == len(ARTICLES)


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


def test_every_article_is_asked_about_and_some_questions_are_suggested() -> None:
    assert {name for one in QUESTIONS for name in one["files"]} == set(ARTICLES)
    assert sum(len(one["files"]) > 1 for one in QUESTIONS) >= 15
    suggested = [one for one in QUESTIONS if one["suggested"]]
    assert 8 <= len(suggested) <= 12
    assert sum(len(one["files"]) > 1 for one in suggested) >= 2
