"""Commands and examples of the README and other pages, and the scripts in examples/, run as they are written."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from cacheblend_rag.app.cli import _parser
from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.models.model_folders import models_path
from docs.site import options
from tests.programs import run_program
from tests.toy import EMBEDDER_PATH

ROOT = Path(__file__).parent.parent
MODELS = models_path()  # before any test sets another cache folder
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
# What a reader of the README has: a retriever and an index.
OWN = """
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import Document, VectorStoreIndex

from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.llama_index.embedding import SentenceTransformerEmbedding
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings

texts = [path.read_text() for path in sorted(ARTICLES_PATH.glob("*.md"))]
retriever = InMemoryVectorStore.from_texts(texts, SentenceTransformerEmbeddings("minilm")).as_retriever()
embedding = SentenceTransformerEmbedding("minilm")
index = VectorStoreIndex.from_documents([Document(text=text) for text in texts], embed_model=embedding)
"""
SCRIPTS = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("*.py"))}
# Arguments that make a long example short.
SHORTENED = {"long_document.py": ["--characters", "2500", "--window", "2"]}
# A quick first command: fewer passages and a shorter answer.
QUICKLY = ["--top-k", "2", "--max-new-tokens", "16"]
# The output of a page's code, from top to bottom.
PAGES = {
    "contributing.md": r"2 hits, [1-9]\d* tokens recomputed on each layer\n",
    "how-to/adding-a-store.md": r"2 hits\n",
    "reference/engine-api.md": r"(.*\n)+ 2 hits, first token after \d+\.\d+ s\n",
    "reference/options.md": r"\d+ \d+ \([\d, ]+\)\n",
    "reference/selection.md": "",
    "how-to/shared-kv.md": r"first 0 hits, from \(.*\)\nsecond 2 hits, from \('s3', 's3'\)\n",
    "explanation/loading.md": r"\w+ \d\.\d\d s to load, \d\.\d\d s to recompute\n\d+\.\d\d dollars for 100 GB .+\n",
}
# Runs scripts one after another, each in a folder of its own. They read short articles if there are some. Their index
# is made once.
RUNNER = """
import os, pathlib, runpy, shutil, sys
import cacheblend_rag.app.collection
if os.path.isdir("articles"):
    cacheblend_rag.app.collection.ARTICLES_PATH = pathlib.Path("articles").resolve()
for number, script in enumerate(sys.argv[1:]):
    path, *arguments = script.split()
    print(f"<{os.path.basename(path)}>", flush=True)
    folder = f"run-{number}"
    os.mkdir(folder)
    if os.path.isdir("index"):
        shutil.copytree("index", f"{folder}/blend_data/index")
    os.chdir(folder)
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
    os.chdir("..")
    if os.path.isdir(f"{folder}/blend_data/index") and not os.path.isdir("index"):
        shutil.copytree(f"{folder}/blend_data/index", "index")
"""


def blocks(page: str, language: str) -> list[str]:
    """Blocks of code on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def tree(hits: int) -> str:
    """The spans of an agent's answer, as an example prints them."""
    found = rf"look up +[\d.]+ ms +{hits} of 3 chunks stored"
    steps = ["agent", "  tool look_up", "  chat \\S+", "    split", "    load", "    fuse", "    decode"]
    lines = [rf"{name} +[\d.]+ ms" for name in steps]
    return "\n".join([*lines[:4], f"    {found}", *lines[4:]]) + "\n"


def said(seen: str, ended: str, eaten: str, again: str) -> dict[str, str]:
    """The output of scripts: these answers about Surtsey and puffins, and so many hits as a conversation goes on."""
    first, second = rf"When was Surtsey first seen\? .*{seen}", rf"When did the eruption of Surtsey end\? .*{ended}"
    return {
        "agent.py": rf"{first}.*\n  0 hits, 3 misses\n{second}.*\n  [1-3] hits, ",
        "conversation.py": rf"{first}.*\n  0 hits, 2 misses; .+\n{second}.*\n  {again} hits, ",
        "llama_index_chat_engine.py": rf"{first}.*\n{second}",
        "llama_index_ingestion.py": rf"nodes, [\d,]+ bytes of KV\n.*{seen}(.*\n)+[\d,]+ bytes without surtsey\.md",
        "llama_index_query_engine.py": rf".*{seen}",
        "llama_index_streaming.py": rf"{seen}(.*\n)+0 hits, 2 misses, first .+\n.*{ended}(.*\n)+[12] hits, ",
        "retrieval_qa.py": rf".*{seen}",
        "long_document.py": rf"\d+ chunks, \d{{3,4}} tokens; .+\n.+ 2 windows in .+ {eaten}.*\n.+ 2 windows in ",
        "streaming_chain.py": rf"{first}.*\n{second}",
        "traced_agent.py": rf"sentence=.*{seen}.*\n{tree(0)}sentence=.*{seen}.*\n{tree(3)}",
    }


def run(arguments: Sequence[str], folder: Path) -> str:
    """Run ``python *arguments`` in a folder, with a home of its own but for the starter models; its standard output."""
    models = folder / "cacheblend_rag" / "models"
    if not models.exists():
        MODELS.mkdir(parents=True, exist_ok=True)
        models.parent.mkdir(exist_ok=True)
        models.symlink_to(MODELS, target_is_directory=True)
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = run_program(arguments, folder, environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_articles(folder: Path) -> None:
    """The beginnings of three of the bundled articles."""
    folder.mkdir()
    for name in ("snow-leopard.md", "surtsey.md", "telescope.md"):
        beginning = (ARTICLES_PATH / name).read_text(encoding="utf-8").split("\n\n")[:4]
        (folder / name).write_text("\n\n".join(beginning), encoding="utf-8")


def check_first_command(folder: Path, *given: str) -> str:
    """The README's first command answers with its sources and compares every method; its output."""
    install, ask = COMMANDS[0].strip().split(" && ")
    assert install == 'pip install -c constraints.txt ".[app]"'
    program, *arguments = shlex.split(ask)
    assert program == "cacheblend-rag"
    output = run(["-m", "cacheblend_rag.app.cli", *arguments, *QUICKLY, *given], folder)
    assert len(re.findall(r"^  \d\. \S+\.md: ", output, re.MULTILINE)) == 2
    assert "(0 hits, 2 misses; " in output
    words = r"(same|other) words, (nearer|further) than another order \(KL \d+\.\d{3}\)"
    for method, near in (
        ("full recompute", "–"),
        ("prefix caching", r"same words, nearer than another order \(KL 0\.00\d\)"),
        ("full reuse", words),
        ("blended", words),
    ):
        assert re.search(rf"^  {method} +[\d.]+ ms +[\d.]+× +\d+%  {near}", output, re.MULTILINE), output
    return output


def test_the_first_command_answers_with_sources_and_a_comparison(toy_chat_model: Path, tmp_path: Path) -> None:
    write_articles(tmp_path / "articles")
    check_first_command(tmp_path, "--docs", "articles", *toy_models(toy_chat_model))


@pytest.mark.slow
@pytest.mark.pretrained
@pytest.mark.usefixtures("smollm2_gguf", "minilm_folder")
def test_the_first_command_answers_rightly_on_the_starter_models(tmp_path: Path) -> None:
    assert re.search(r"^Answer: .*1963", check_first_command(tmp_path), re.MULTILINE)


def test_the_second_command_is_what_continuous_integration_runs() -> None:
    command = COMMANDS[1].strip()
    assert command == 'pip install -c constraints.txt -e ".[test]" && python -m pytest'
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert command.replace("pip install", "pip install -q") in script.splitlines()


def toy_models(model: Path) -> list[str]:
    """A command's arguments that name this model and the toy's embedder in place of the starter models."""
    return ["--model", str(model), "--embedder", str(EMBEDDER_PATH)]


def on_the_toy(code: str, model: Path) -> str:
    """Code that names this model and the toy's embedder in place of the starter models."""
    return code.replace('"smollm2"', repr(str(model))).replace('"minilm"', repr(str(EMBEDDER_PATH)))


def check(codes: Mapping[str, str], expected: Mapping[str, str], folder: Path) -> None:
    """Programs print as expected, by name. One process runs them one after another."""
    for name, code in codes.items():
        (folder / name).write_text(code, encoding="utf-8")
    output = run(["-c", RUNNER, *(" ".join([str(folder / name), *SHORTENED.get(name, [])]) for name in codes)], folder)
    shown = dict(re.findall(r"^<(\S+\.py)>\n(.*?)(?=^<\S+\.py>\n|\Z)", output, re.MULTILINE | re.DOTALL))
    assert list(shown) == list(codes)
    for name, text in shown.items():
        assert re.search(expected[name], text), f"{name} printed {text!r}"


@pytest.mark.slow
@pytest.mark.pretrained
@pytest.mark.usefixtures("smollm2_gguf", "minilm_folder")
def test_the_code_of_the_readme_runs(tmp_path: Path) -> None:
    write_articles(tmp_path / "articles")
    check({"readme.py": "\n".join([OWN, *EXAMPLES])}, {"readme.py": r"1963(.*\n)*.*1963(.*\n)*.*1963"}, tmp_path)


def test_the_code_of_pages_runs(toy_chat_model: Path, tmp_path: Path) -> None:
    codes = {}
    for page in PAGES:
        code = "\n".join(blocks((ROOT / "docs" / page).read_text(encoding="utf-8"), "python"))
        codes[f"{Path(page).stem}.py"] = on_the_toy(code, toy_chat_model)
    expected = {f"{Path(page).stem}.py": rf"\A{text}\Z" for page, text in PAGES.items()}
    codes["readme.py"], expected["readme.py"] = on_the_toy("\n".join([OWN, *EXAMPLES]), toy_chat_model), r"\S"
    write_articles(tmp_path / "articles")
    check(codes, expected, tmp_path)


@pytest.mark.slow
def test_example_scripts(toy_chat_model: Path, tmp_path: Path) -> None:
    codes = {
        name: on_the_toy((ROOT / "examples" / name).read_text(encoding="utf-8"), toy_chat_model) for name in SCRIPTS
    }
    write_articles(tmp_path / "articles")
    check(codes, said("", "", "", again="[2-9]"), tmp_path)


@pytest.mark.slow
@pytest.mark.pretrained
@pytest.mark.usefixtures("smollm2_gguf", "minilm_folder")
def test_example_scripts_on_the_starter_models(tmp_path: Path) -> None:
    check(SCRIPTS, said("14 November 1963", "5 June 1967", "fish", again="[3-9]"), tmp_path)


def test_the_tutorial_runs_from_top_to_bottom(toy_chat_model: Path, tmp_path: Path) -> None:
    check_tutorial(tmp_path, toy_chat_model)


@pytest.mark.slow
@pytest.mark.pretrained
@pytest.mark.usefixtures("smollm2_gguf", "minilm_folder")
def test_the_tutorial_runs_on_the_starter_models(tmp_path: Path) -> None:
    check_tutorial(tmp_path)


def check_tutorial(tmp_path: Path, toy: Path | None = None) -> None:
    """The tutorial's code gives what the page says, on the starter models or on the toy in place of them."""
    models = [] if toy is None else toy_models(toy)
    page = (ROOT / "docs" / "tutorial" / "ten-minutes.md").read_text(encoding="utf-8")
    install, *commands = blocks(page, "bash")
    assert install.strip() == COMMANDS[0].split(" && ")[0]
    (code,) = blocks(page, "python")
    output = ""
    for command in commands:
        if command.startswith("cacheblend-rag "):
            output += run(["-m", "cacheblend_rag.app.cli", *shlex.split(command)[1:], *models], tmp_path)
        else:
            subprocess.run(["bash", "-euc", command], cwd=tmp_path, check=True)
    output += run(["-c", code if toy is None else on_the_toy(code, toy)], tmp_path)
    asked, asked_again, chain = re.split(r"^(?=Time to first token)", output, flags=re.MULTILINE)
    assert len(re.findall(r"^  \d\. \S+\.md: .*  \[new\]$", asked, re.MULTILINE)) == 3
    assert "(0 hits, 3 misses; " in asked_again
    assert len(re.findall(r"^  \d\. \S+\.md: .*  \[disk\]$", asked_again, re.MULTILINE)) == 3
    assert "(3 hits, 0 misses; " in chain
    assert re.search(r"\n0 hits, 3 misses, first .+\n(.*\n)+3 hits, 0 misses, first ", chain), chain


def test_the_readme_example_is_the_script() -> None:
    """But for the retriever, which is the reader's own in the README."""
    script = (ROOT / "examples" / "retrieval_qa.py").read_text(encoding="utf-8")
    *imports, body = EXAMPLES[0].split("\n\n")
    assert all(line in script.splitlines() for part in imports for line in part.splitlines())
    assert script.endswith(f"\n{body}")


def test_relative_links_in_documents_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "tests" / "toy" / "README.md", *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_tables_of_options_are_those_of_the_fields() -> None:
    """`python -m docs.site.options` writes them anew."""
    for path, page in ((options.PAGE, options.options_page), (options.COMMANDS, options.commands_page)):
        text = path.read_text(encoding="utf-8")
        assert page(text) == text


def commands_of(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A command's parser and those of its parts, each with its name."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part, below in action.choices.items():
                yield from commands_of(below, f"{name} {part}".strip())


def test_every_command_and_argument_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8")
    parts = re.split(r"^##+ (.+)\n", page, flags=re.MULTILINE)
    documented = {}
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        _, _, made = text.partition("<!-- options -->")
        rows, also = re.findall(r"^\| `(\S+?)[ `]", made, re.MULTILINE), re.findall(r"^Also: .*$", made, re.MULTILINE)
        documented[name] = {*rows, *(flag for line in also for flag in re.findall(r"`(\S+)`", line))}
    shared = documented.pop("Options of several commands")
    assert all(any(flag in flags for flags in documented.values()) for flag in shared)
    found = {
        name: {
            action.option_strings[0] if action.option_strings else str(action.metavar or action.dest.upper())
            for action in parser._actions
            if not isinstance(action, (argparse._HelpAction, argparse._SubParsersAction))
        }
        for name, parser in commands_of(_parser())
        if name
    }
    assert documented == found
