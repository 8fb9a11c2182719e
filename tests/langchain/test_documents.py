"""The pages for LangChain users: what they show runs, and their table is the matrix that is tested."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.langchain.test_matrix import CHAINS, MODES

ROOT = Path(__file__).parent.parent.parent
NAMES = ("langchain", "from-huggingface", "troubleshooting")
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in NAMES}
EXPECTED = {
    "langchain": r"\d+ documents are known\n\d hits",
    "from-huggingface": r"\S",
    "troubleshooting": r"chunks=\('The harbour was dredged in 1912, and again after the war\.',\).*\n\(\)",
}


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_shows_runs(name: str, tmp_path: Path) -> None:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGES[name], re.MULTILINE | re.DOTALL))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(EXPECTED[name], done.stdout), done.stdout


def test_the_table_is_the_tested_matrix() -> None:
    table = PAGES["langchain"].split("## What works")[1].split("\n\n")
    (rows,) = [part.splitlines()[2:] for part in table if part.startswith("| chain")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert len(cells) == len(CHAINS)
    for (_, plain, chat, modes), chain in zip(cells, CHAINS, strict=True):
        assert [plain, chat, modes] == ["yes" if len(chain.kinds) == 2 else "–", "yes", "all"]
    listed = re.search(r"Modes: (.*?)\.\n", PAGES["langchain"], re.DOTALL)
    assert listed is not None
    assert tuple(re.findall(r"`(\w+)`", listed[1])) == MODES
