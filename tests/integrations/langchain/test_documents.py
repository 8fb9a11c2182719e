"""The pages for LangChain users: what they show runs, and their table is the matrix that is tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integrations.langchain.test_matrix import CHAINS, MODES
from tests.test_documents_run import run
from tests.toy import EMBEDDER_PATH

ROOT = Path(__file__).parents[3]
NAMES = ("langchain", "from-huggingface", "troubleshooting")
PAGES = {name: (ROOT / "docs" / "how-to" / f"{name}.md").read_text(encoding="utf-8") for name in NAMES}
EXPECTED = {
    "langchain": r"(.*\n)+0 hits, 3 misses\n(.*\n)*.* \(3 hits\)\n(.*\n)*.* [23] hits\n(.*\n)*.* 3 hits\n"
    r"(.*\n)*.* [23] hits\n(.*\n)*.* [3-9] hits\n(.*\n)*"
    r"\d+ documents are known\n\d+ documents are known to it\n\[\] 0\n((hit|miss) as it was retrieved .+\n){3}",
    "from-huggingface": r"\S",
    "troubleshooting": r"chunks=\('The harbour was dredged in 1912, and again after the war\.',\).*\n\(\)",
}


def code_of(name: str) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", PAGES[name], re.MULTILINE | re.DOTALL))


@pytest.mark.slow
@pytest.mark.pretrained
@pytest.mark.usefixtures("smollm2_gguf", "minilm_folder")
def test_the_page_runs_on_the_starter_models(tmp_path: Path) -> None:
    output = run(["-c", code_of("langchain")], tmp_path)
    assert "14 November 1963" in output
    assert re.search(EXPECTED["langchain"], output), output


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "langchain" else name for name in EXPECTED]
)
def test_examples_of_a_page_run(name: str, toy_chat_model: Path, tmp_path: Path) -> None:
    code, models = re.subn(r'"(smollm2|HuggingFaceTB/[^"]+)"', repr(str(toy_chat_model)), code_of(name))
    assert models
    output = run(["-c", code.replace('"minilm"', repr(str(EMBEDDER_PATH)))], tmp_path)
    assert re.search(EXPECTED[name], output), output


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
