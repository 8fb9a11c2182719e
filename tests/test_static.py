"""Style. Types are checked by `mypy`, which `.ci/run` runs too."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cacheblend_rag import __version__

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "command", ["ruff check --output-format concise .", "ruff format --check ."], ids=["lint", "format"]
)
def test_clean(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_docstrings_and_comments_name_their_subject() -> None:
    """A sentence that begins with "What ..." or "Who ..." leaves the noun to the reader."""
    begins = re.compile(r'^\s*(?:#|""")? ?(?:What|Who|Whoever|Whatever) (?!.*\?)')
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "cacheblend_rag").rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if begins.match(line)
    ]
    assert found == []


def test_names_of_tests_begin_with_their_subject() -> None:
    """Without an article, a pronoun, or a clause that stands for the subject."""
    begins = re.compile(r"^\s*(?:async )?def test_(?:an?|it|of|what|whatever|who|whoever|where)_", re.MULTILINE)
    found = [
        f"{path.relative_to(ROOT)}: {name.group().strip()}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in begins.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_version_is_written_once() -> None:
    """Everything that names it elsewhere reads the metadata of the package."""
    written = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert __version__ == written
    files = [*(ROOT / "cacheblend_rag").rglob("*.py"), *(ROOT / "docs" / "how-to").rglob("*.*")]
    assert [str(one) for one in files if written in one.read_text(encoding="utf-8")] == []
