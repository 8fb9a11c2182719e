"""The page on the server: what it shows runs, and its tables are complete."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cacheblend_rag.app.server.api.rag import suggestions_for
from tests.app.server.common import Running, client_of, read_events, settle
from tests.programs import run_program
from tests.toy.bundle import read_questions

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "how-to" / "server.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs" / "reference" / "server-api.md").read_text(encoding="utf-8")
CODE = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
(SHELL,) = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SAID = (
    r"^.+ [1-9]\d*\n.+ [1-9]\d*\n",
    r"'output_tokens': \d+",
    r"island='\w+' year=\d+",
    r"(.* (in)?completed? \d+\n){2}.+",
    r"listening on \('127\.0\.0\.1', \d+\)",
)


def here(code: str, server: Running) -> str:
    return code.replace("http://127.0.0.1:8000", server.url)


def run_interpreter(
    arguments: list[str], folder: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """`run_program` by an interpreter that has imported nothing."""
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize(
    "number",
    # Code that makes a server of its own takes long.
    [pytest.param(at, marks=pytest.mark.slow if "FolderRAGOptions" in CODE[at] else ()) for at in range(len(CODE))],
)
def test_examples_in_python_run(toy: Running, number: int, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    # Options have their defaults from import on, so what makes a server is run by an interpreter of its own.
    run = run_program if "FolderRAGOptions" not in CODE[number] else run_interpreter
    page = CODE[number].replace("[:3]", "[:6]")  # the toy's documents are shorter than the articles
    code = f"from tests.toy.cli import stand_in\nstand_in()\n{here(page, toy)}"
    for _ in range(2 if number == 0 else 1):  # what the first run misses is stored for the second
        done = run(["-c", code], tmp_path, environment)
        assert done.returncode == 0, done.stderr
        settle(toy.service)
    assert re.search(SAID[number], done.stdout), done.stdout


def test_examples_with_curl_run(toy: Running, tmp_path: Path) -> None:
    command = ["bash", "-euo", "pipefail", "-c", here(SHELL, toy)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r'"name":"letter\.md"[^}]*"passages":1,[^}]*"state":"ready"', done.stdout)
    assert "event: report" in done.stdout


def test_the_bundled_articles_are_answered_from_with_suggestions(toy: Running) -> None:
    with client_of(toy) as client:
        state = client.get("/api/state").json()
        assert state["folder"]["bundled"]
        assert state["documents"] > 50
        assert 3 <= len(state["suggested"]) <= 8
        first = state["suggested"][0]["question"]
        events = read_events(client.post("/api/ask", json={"question": first}).text)
    answer = "".join(data["text"] for name, data in events if name == "token")
    (asked,) = [one for one in read_questions() if one.question == first]
    assert any(gold in answer for gold in asked.answers)


def test_suggestions_are_those_of_the_bundled_articles_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    articles, questions = tmp_path / "articles", tmp_path / "questions.jsonl"
    articles.mkdir()
    monkeypatch.setattr("cacheblend_rag.app.collection.ARTICLES_PATH", articles)
    monkeypatch.setattr("cacheblend_rag.app.collection.QUESTIONS_PATH", questions)
    assert suggestions_for(articles) == []
    records = [
        {"question": "Who?", "answer": "She.", "files": ["a.md"], "suggested": True},
        {"question": "When?", "answer": "Then.", "files": ["a.md"], "suggested": False},
        {"question": "Where?", "answer": "There.", "files": ["a.md", "b.md"], "suggested": True},
    ]
    questions.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    first, second = suggestions_for(articles)
    assert (first["question"], first["note"], second["question"]) == ("Who?", None, "Where?")
    assert "more than one document" in str(second["note"])
    assert suggestions_for(tmp_path) == []


def test_every_request_is_in_the_pages(toy: Running) -> None:
    with client_of(toy) as client:
        paths = client.get("/openapi.json").json()["paths"]
    shown = re.sub(r"\{\w+\}", "{}", PAGE + REFERENCE)
    for path in paths:
        if not path.startswith("/v1/models/"):
            assert re.sub(r"\{\w+\}", "{}", path) in shown, path
