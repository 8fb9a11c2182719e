"""The page on the server: what it shows runs, and its tables are complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cacheblend_rag.cli import _parser
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.folder_rag import FolderRAGOptions
from cacheblend_rag.reference import DOCUMENTS_PATH
from cacheblend_rag.reference.bundle import read_questions
from cacheblend_rag.server.settings import Limits, ServerSettings
from cacheblend_rag.server.suggestions import suggestions_for
from tests.server.common import Running, client_of, read_events, running, settle

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
CODE = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
(SHELL,) = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SAID = (r"^.+ [1-9]\d*\n.+ [1-9]\d*\n", r"'output_tokens': \d+", r"listening on \('127\.0\.0\.1', \d+\)")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server as ``cacheblend-rag serve`` starts it, on another port."""
    options = FolderRAGOptions(data_dir=tmp_path_factory.mktemp("reference"), device="cpu", config=BlendConfig())
    with running(ServerSettings(rag=options, port=0, api_keys={})) as made:
        yield made


def here(code: str, server: Running) -> str:
    return code.replace("http://127.0.0.1:8000", server.url)


@pytest.mark.parametrize("number", range(len(CODE)))
def test_examples_in_python_run(reference: Running, number: int, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", "-c", here(CODE[number], reference)]
    for _ in range(2 if number == 0 else 1):  # what the first run misses is stored for the second
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        settle(reference.service)
    assert re.search(SAID[number], done.stdout), done.stdout


def test_examples_with_curl_run(reference: Running, tmp_path: Path) -> None:
    command = ["bash", "-euo", "pipefail", "-c", here(SHELL, reference)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert '"stage": "done"' in done.stdout
    assert '"name":"letter.md","chunks":1' in done.stdout
    assert "event: report" in done.stdout


def test_the_bundled_archive_is_answered_from_with_suggestions(reference: Running) -> None:
    with client_of(reference) as client:
        state = client.get("/api/state").json()
        (base,) = [one for one in state["collections"] if one["id"] == "archive"]
        assert base["bundled"]
        assert base["documents"] > 50
        assert "--model" in state["notice"]
        assert 3 <= len(state["suggestions"]) <= 8
        first = state["suggestions"][0]["question"]
        events = read_events(client.post("/api/collections/archive/ask", json={"question": first}).text)
    answer = "".join(data["text"] for name, data in events if name == "token")
    (asked,) = [one for one in read_questions() if one.question == first]
    assert any(gold in answer for gold in asked.answers)


def test_suggestions_are_questions_of_the_archive_and_of_it_alone(tmp_path: Path) -> None:
    known = {one.question for one in read_questions()}
    offered = suggestions_for(DOCUMENTS_PATH)
    assert {one["question"] for one in offered} <= known
    assert len({one["question"] for one in offered}) == len(offered)
    assert any("note" in one for one in offered)
    assert suggestions_for(tmp_path) == []


def test_every_option_and_request_is_in_the_page(reference: Running) -> None:
    help_text = _parser()._subparsers._group_actions[0].choices["serve"].format_help()  # type: ignore[union-attr]
    for option in set(re.findall(r"--[a-z-]+", help_text)) - {"--help", "--device", "--dtype"}:
        assert f"`{option}`" in PAGE, option
    with client_of(reference) as client:
        paths = client.get("/openapi.json").json()["paths"]
    shown = PAGE.replace("{document}", "{}").replace("{number}", "{}").replace("{id}", "{}").replace("{job}", "{}")
    for path in paths:
        if not path.startswith("/v1/models/"):
            assert re.sub(r"\{\w+\}", "{}", path) in shown, path


def test_limits_in_the_page_are_those_of_the_code() -> None:
    limits = Limits()
    assert (limits.body_bytes, limits.upload_bytes) == (4_000_000, 20_000_000)
    assert (limits.document_chars, limits.prompt_chars) == (5_000_000, 1_000_000)
    assert (limits.queue, limits.queue_seconds, limits.answer_seconds) == (64, 120.0, 300.0)
    assert (limits.parse_seconds, limits.parse_bytes) == (60.0, 2_000_000_000)
