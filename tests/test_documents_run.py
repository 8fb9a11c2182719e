"""The README's commands and examples, and the scripts in examples/, run as they are written."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cacheblend_rag.reference import QUESTIONS_PATH

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
# What examples must say beyond saying something.
SAID = {
    "llama_index_streaming.py": r"\n6 hits, 0 misses, first token after \d+ ms",
    "llama_index_chat_engine.py": r"work for\? .+\nWhere does Lars Mardahl live\? .+",
    "streaming_chain.py": r"work for\? .+\nWhich animal .+\? .+",
    "conversation.py": r"Velvetmas\? .+\n  ([5-9]|1\d) hits, ",  # those of earlier turns, at least
    "agent.py": r"live\? .+\n  [1-6] hits, ",
    "long_document.py": r"\d+ chunks, \d{4} tokens; .+\n.+ windows in .+\n.+ windows in ",
    "llama_index_ingestion.py": r"\d+ nodes, [\d,]+ bytes of KV\n(.*\n)+[\d,]+ bytes without \S+\.md",
}
# Arguments that make a long example short.
SHORTENED = {"long_document.py": ["--tokens", "3000"]}


def run(arguments: list[str], folder: Path) -> str:
    """Run a command in a folder, with a home of its own; its standard output."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def gold(question: str) -> str:
    """The gold value of a question about the bundled archive."""
    lines = map(json.loads, QUESTIONS_PATH.read_text(encoding="utf-8").splitlines())
    return next(str(line["answers"][0]) for line in lines if line["question"] == question)


def test_the_first_command_answers_with_sources_and_a_comparison(tmp_path: Path) -> None:
    install, ask = COMMANDS[0].strip().split(" && ")
    assert install == 'pip install -c constraints.txt ".[app]"'
    program, *arguments = shlex.split(ask)
    assert program == "cacheblend-rag"
    output = run([sys.executable, "-m", "cacheblend_rag.cli", *arguments], tmp_path)
    value = gold(arguments[1])
    answer = re.search(r"^Answer: +(.*)$", output, re.MULTILINE)
    assert answer is not None
    assert value in answer[1]
    assert len(re.findall(r"^  \d\. \S+\.md: ", output, re.MULTILINE)) == 6
    assert "(6 hits, 0 misses; " in output
    for method in ("full recompute", "prefix caching", "full reuse", "blended"):
        assert re.search(rf"^  {method} +[\d.]+ ms +[\d.]+×", output, re.MULTILINE), output


def test_the_second_command_is_what_continuous_integration_runs() -> None:
    command = COMMANDS[1].strip()
    assert command == 'pip install -c constraints.txt -e ".[test]" && python -m pytest'
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert script.strip().endswith(command.replace("pip install", "pip install -q"))


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_readme_examples(code: str, tmp_path: Path) -> None:
    assert run([sys.executable, "-W", "ignore", "-c", code], tmp_path).strip()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_example_scripts(script: Path, tmp_path: Path) -> None:
    output = run([sys.executable, "-W", "ignore", str(script), *SHORTENED.get(script.name, [])], tmp_path)
    assert re.search(SAID.get(script.name, r"\S"), output), output


def test_the_readme_example_is_the_script() -> None:
    script = (ROOT / "examples" / "retrieval_qa.py").read_text(encoding="utf-8")
    assert EXAMPLES[0] in script


def test_relative_links_in_documents_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_option_is_documented() -> None:
    from cacheblend_rag import BlendConfig

    page = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    for name in BlendConfig.names():
        assert f"| `{name}` | `CACHEBLEND_RAG_{name.upper()}` |" in page, name
