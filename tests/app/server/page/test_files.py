"""The page's files by themselves: complete, from here alone, and without means to turn text into markup."""

from __future__ import annotations

import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[4] / "cacheblend_rag" / "app" / "server" / "page"
VENDOR = PAGE / "vendor"
FILES = sorted(path for path in PAGE.rglob("*") if path.is_file() and path.parent != VENDOR)
VENDORED = sorted(VENDOR.glob("*.js"))
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
MOST_LINES = 400
LOAD = re.compile(r'^import .*? from "(\..*?)";|\bimport\("(\..*?)"\)', re.MULTILINE | re.DOTALL)
MARKUP = (
    "innerHTML",
    "outerHTML",
    "AdjacentHTML",
    "setHTML",
    "HTMLUnsafe",
    "document.write",
    "eval(",
    "new Function",
    "srcdoc",
    "DOMParser",
)


class References(HTMLParser):
    """Files that the page's HTML loads, and whether anything stands inline."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag in ("script", "link", "img"):
            self.loaded += [given[name] or "" for name in ("src", "href") if name in given]
        self.inline += [f"{tag} {name}" for name in given if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)


@pytest.fixture(scope="module")
def references() -> References:
    """Of index.html."""
    parser = References()
    parser.feed((PAGE / "index.html").read_text(encoding="utf-8"))
    return parser


def test_all_that_the_page_loads_is_there_and_nothing_else(references: References) -> None:
    assert references.inline == []
    used = {PAGE / "index.html"}
    waiting = [PAGE / name.removeprefix("static/") for name in references.loaded]
    while waiting:
        path = waiting.pop().resolve()
        assert path.is_file(), path
        if path not in used and path in SCRIPTS:
            loaded = LOAD.findall(path.read_text(encoding="utf-8"))
            waiting += [path.parent / (source or later) for source, later in loaded]
        used.add(path)
    assert used == {*FILES, *VENDORED}


def test_files_of_others_are_as_they_were_distributed() -> None:
    told = (VENDOR / "README.md").read_text(encoding="utf-8")
    for path in VENDORED:
        row = next(line for line in told.splitlines() if line.startswith(f"| `{path.name}` |"))
        assert hashlib.sha256(path.read_bytes()).hexdigest() in row
        package, version = re.findall(r"`([^`]+)` (\d[\d.]+)", row)[0]
        assert f"{package} {version} (" in (VENDOR / "LICENSES.txt").read_text(encoding="utf-8")


def test_files_are_small_and_name_no_outside_address() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MOST_LINES, path
        outside = set(re.findall(r"(?:https?:)?//[\w-]+\.\w[^\s\"'<)]*", text))
        assert outside <= {"http://www.w3.org/2000/svg"}, path


def test_no_script_can_turn_text_into_markup() -> None:
    for path in SCRIPTS:
        text = path.read_text(encoding="utf-8")
        assert [word for word in MARKUP if word in text] == [], path
        assert not re.search(r"setTimeout\(\s*[\"'`]", text), path
