"""``cacheblend-rag cache`` and ``profile`` over a tiny model and documents of the user's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from transformers import MistralConfig

from cacheblend_rag.app.cli import main
from cacheblend_rag.store import DiskStore
from tests import tiny
from tests.app.server.common import write_documents
from tests.contract.test_store import files
from tests.toy import EMBEDDER_PATH


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("docs"), 3)


@pytest.fixture
def data(model: Path, docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A store warmed by the command itself."""
    folder = tmp_path / "data"
    known = ["--docs", str(docs), "--model", str(model), "--embedder", str(EMBEDDER_PATH), "--device", "cpu"]
    assert main(["cache", "warm", *known, "--data-dir", str(folder)]) == 0
    assert "3 computed" in capsys.readouterr().err
    return folder


def used_at(data: Path) -> list[tuple[str, float]]:
    store = DiskStore(data / "kv")
    found = [(entry.key, entry.used_at) for entry in store.entries()]
    store.close()
    return found


def test_stats_and_clear(data: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--data-dir", str(data)]
    before = used_at(data)
    assert main(["cache", "stats", *where]) == 0
    assert used_at(data) == before, "looking is no use"
    seen = capsys.readouterr().out
    assert re.search(r"^3 records, 0\.\d MB; 0\.\d MB taken", seen)
    assert re.search(r"^\d+ hits, \d+ misses, 0 evictions$", seen, re.MULTILINE)
    assert f"{model}: 3 records" in seen

    files(data / "kv")[0].write_bytes(b"nothing")
    assert main(["cache", "stats", *where]) == 0
    assert "cannot be read: 1 records" in capsys.readouterr().out

    assert main(["cache", "clear", *where]) == 0
    assert capsys.readouterr().out == "3 records erased\n"
    assert files(data / "kv") == []


def test_folder_without_a_store_is_named_and_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("stats", "clear"):
        assert main(["cache", command, "--data-dir", str(tmp_path / "typo")]) == 2
        assert "typo" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []


def test_estimate_needs_no_weights(docs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The shape of Mistral-7B, of which there is no more than a config here."""
    config = MistralConfig(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=400
    )
    config.dtype = "bfloat16"
    config.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    assert main(["cache", "estimate", "--model", str(tmp_path)]) == 0  # also where memory is too small for the model
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["cache", "estimate", "--model", str(tmp_path), "--dtype", "bfloat16"]) == 0
    seen = capsys.readouterr().out
    assert re.search(r"^raw +131\.1 kB a token, +67\.1 MB per 512 tokens$", seen, re.MULTILINE)
    assert len(seen.splitlines()) == 3
    assert main(["cache", "estimate", "--model", str(tmp_path), "--codec", "int8", "--docs", str(docs)]) == 0
    seen = capsys.readouterr().out
    assert re.search(r"^3 chunks, \d+ tokens$", seen, re.MULTILINE)
    assert re.search(r"^int8 +\d+\.\d MB$", seen, re.MULTILINE)
    assert main(["cache", "estimate", "--model", str(tmp_path / "none")]) == 2
    assert main(["cache", "estimate", "--model", str(tmp_path), "--codec", "int5"]) == 2
    assert "codec='int5'" in capsys.readouterr().err


def test_estimate_equals_the_bytes_on_disk(
    data: Path, model: Path, docs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "estimate", "--model", str(model), "--docs", str(docs), "--codec", "int8"]) == 0
    estimated = capsys.readouterr().out.splitlines()[-1].split()[1]
    assert f"{sum(path.stat().st_size for path in files(data / 'kv')) / 1e6:.1f}" == estimated


def test_profile_is_kept_beside_the_store(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["profile", "--model", str(model), "--data-dir", str(tmp_path), "--device", "cpu"]
    assert main([*arguments, "--lengths", "16", "32", "48", "--file-size", "2MB"]) == 0
    seen = capsys.readouterr().out
    line = r"^prefill of +\d+ tokens +\d+\.\d+ s$"
    assert len(re.findall(line, seen, re.MULTILINE)) == 3
    assert re.search(r"^disk +[\d,]+ MB/s +[\d,.]+ µs a read$", seen, re.MULTILINE)
    assert set(json.loads((tmp_path / "kv" / "profile.json").read_text())) == {"prefill", "devices"}
    assert main([*arguments, "--lengths", "0"]) == 2
    assert main([*arguments, "--file-size", "much"]) == 2
