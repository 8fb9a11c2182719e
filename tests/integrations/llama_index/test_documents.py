"""The page about LlamaIndex runs, and its table says what the tests cover."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integrations.llama_index.test_matrix import CHAT_ENGINES, MODES, QUERY_ENGINES
from tests.test_documents_run import run
from tests.toy import EMBEDDER_PATH, MODEL_PATH

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "how-to" / "llama_index.md").read_text(encoding="utf-8")


CODE = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


@pytest.mark.slow
@pytest.mark.pretrained
@pytest.mark.usefixtures("smollm2_gguf", "minilm_folder")
def test_the_page_runs_on_the_starter_models(tmp_path: Path) -> None:
    assert "14 November 1963" in run(["-c", CODE], tmp_path)


def test_the_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    code = CODE.replace('"smollm2"', repr(str(MODEL_PATH))).replace('"minilm"', repr(str(EMBEDDER_PATH)))
    assert code.count(str(MODEL_PATH)) > 0 < code.count(str(EMBEDDER_PATH))
    assert run(["-c", code], tmp_path).strip()


def test_the_table_is_the_matrix() -> None:
    rows = {}
    table = PAGE.split("## What works")[1].split("\n## ")[0]
    for row in re.findall(r"^\| (.*) \|$", table, re.MULTILINE)[1:]:
        name, *marks = row.split(" | ")
        rows[name] = tuple(mode for mode, mark in zip(MODES, marks, strict=True) if mark == "yes")
    for name, (_, modes) in QUERY_ENGINES.items():
        shown = f"{name.replace('_', '-')} query engine" if f"`{name}`" not in PAGE else f"query engine, `{name}`"
        assert rows.pop(shown) == modes
    for name, (_, modes) in CHAT_ENGINES.items():
        shown = f"chat engine, `{name.partition(',')[0]}`"
        assert set(modes) <= set(rows[shown])
    agents = {name: modes for name, modes in rows.items() if not name.startswith("chat engine")}
    assert agents == {
        f"`{one}Agent`, query engine or retriever tool": ("async", "astream") for one in ("Function", "ReAct")
    }
