"""The command line over a tiny model and documents of the user's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cacheblend_rag.cli import main
from tests import tiny
from tests.toy import EMBEDDER_PATH


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.model(num_hidden_layers=2).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CACHEBLEND_RAG_MIN_TOKENS", "0")
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(4):
        (folder / f"passage-{number}.md").write_text(f"Passage {number}\n{tiny.text(60, number)}\n", encoding="utf-8")
    return folder


def ask(model: Path, docs: Path, data: Path, *more: str) -> int:
    known = ["--docs", str(docs), "--model", str(model), "--embedder", str(EMBEDDER_PATH), "--data-dir", str(data)]
    return main(["ask", "Which leaf fell?", *known, "--max-new-tokens", "4", "--device", "cpu", *more])


def test_warm_chunks_hit_and_files_are_followed(
    model_path: Path, docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    assert ask(model_path, docs, data, "--top-k", "2", "--warm") == 0
    first = capsys.readouterr()
    assert "4 chunks of 4 files indexed (4 embedded now)" in first.err
    assert "(0 hits, 2 misses; " in first.out, "an answer does not wait until all is stored"
    assert "Storing the KV of these passages" in first.err
    assert "2 computed" in first.err
    assert "2 there already" in first.err

    (docs / "passage-1.md").write_text(f"Passage 1\n{tiny.text(60, 99)}\n", encoding="utf-8")
    (docs / "passage-2.md").unlink()
    assert ask(model_path, docs, data, "--top-k", "3", "--warm") == 0
    second = capsys.readouterr()
    assert "3 chunks of 3 files indexed (1 embedded now)" in second.err
    assert "(2 hits, 1 misses; " in second.out
    assert "3 there already" in second.err


def test_comparison_shows_every_method(
    model_path: Path, docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(model_path, docs, tmp_path / "data", "--compare", "--ratio", "0.3") == 0
    output = capsys.readouterr().out
    for method in ("full recompute", "prefix caching", "full reuse", "blended"):
        assert f"  {method}" in output


def test_a_full_store_leaves_chunks_out_and_still_answers(
    model_path: Path, docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ["--docs", str(docs), "--data-dir", str(tmp_path / "data")]
    models = ["--model", str(model_path), "--embedder", str(EMBEDDER_PATH)]
    assert main(["cache", "warm", *folders, *models, "--size-limit", "100kB", "--device", "cpu"]) == 0
    assert ask(model_path, docs, tmp_path / "data", "--size-limit", "100kB") == 0
    seen = capsys.readouterr()
    assert "left out because the KV store is full; raise --size-limit" in seen.err
    assert "Answer:" in seen.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratio", "2"], "recompute_ratio=2.0 is not usable: use a number from 0 to 1"),
        (["--top-k", "0"], "top_k=0 is not usable"),
        (["--docs", "nowhere"], "nowhere"),
        (["--model", "nowhere/at-all"], "model 'nowhere/at-all' could not be loaded"),
        (["--size-limit", "lots"], "size_limit='lots' is not usable"),
        (["--max-new-tokens", "0"], "max_new_tokens=0 is not usable"),
    ],
)
def test_bad_values_are_named(
    arguments: list[str], message: str, model_path: Path, docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(model_path, docs, tmp_path / "data", *arguments) == 2
    assert message in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from cacheblend_rag.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'faiss', 'sentence_transformers', 'langchain_core', 'diskcache'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ask" in done.stdout
