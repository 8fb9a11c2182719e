"""Fingerprints of models on disk are kept, and only while not a byte of their files has changed."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.models import identity, loading
from cacheblend_rag.models.identity import fingerprint
from tests import tiny

CHUNKS = [tiny.text(23, 1), tiny.text(31, 2)]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny.model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Fingerprints that were made from weights; starts with none known."""
    seen: list[str] = []

    def noting(model: Any) -> str:
        seen.append(fingerprint(model))
        return seen[-1]

    monkeypatch.setattr(loading, "fingerprint", noting)
    monkeypatch.setattr(identity, "cache_file", lambda: tmp_path / "cache" / "fingerprints.json")
    return seen


def load(folder: Path, **options: Any) -> str:
    return loading.load_model(folder, device="cpu", **options).fingerprint()


def test_weights_are_read_through_once(saved: Path, hashed: list[str]) -> None:
    first = load(saved)
    assert first == fingerprint(tiny.model())
    assert load(saved) == load(saved) == first
    assert hashed == [first]
    assert identity.known_names() == {first: str(saved)}
    assert stat.S_IMODE((saved.parent / "cache" / "fingerprints.json").stat().st_mode) == 0o600


def test_fine_tune_under_the_same_name_is_another_model(saved: Path, hashed: list[str]) -> None:
    first = load(saved)
    model = tiny.model()
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-3
    weights = saved / "model.safetensors"
    before = weights.stat()
    model.save_pretrained(saved)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    second = load(saved)
    assert second == fingerprint(model) != first
    assert hashed == [first, second]


def test_touched_file_is_looked_at_again(saved: Path, hashed: list[str]) -> None:
    load(saved)
    for number, name in enumerate(("config.json", "model.safetensors", "tokenizer.json", "generation_config.json"), 2):
        os.utime(saved / name)
        load(saved)
        assert len(hashed) == number, name


def test_element_type_is_part_of_the_identity(saved: Path, hashed: list[str]) -> None:
    assert len({load(saved), load(saved, dtype="bfloat16"), load(saved, dtype="bfloat16")}) == len(hashed) == 2


def test_model_with_more_than_its_files_is_always_read_through(saved: Path, hashed: list[str]) -> None:
    first = load(saved, attn_implementation="eager")
    assert load(saved, attn_implementation="eager") == first
    assert len(hashed) == 2
    (saved / "adapter_config.json").write_text("{}")
    assert identity.files_identity(str(saved), "auto") is None


def test_files_that_change_during_the_load_are_not_known_by(
    saved: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["one", "another"])
    monkeypatch.setattr(loading, "files_identity", lambda *args: next(answers))
    assert loading.load_model(saved, device="cpu").identity is None


def test_damaged_file_of_fingerprints_does_no_harm(saved: Path, hashed: list[str]) -> None:
    first = load(saved)
    path = saved.parent / "cache" / "fingerprints.json"
    damaged = ("", "[]", "null", "{", '{"x": 5}', '{"x": ["short", "name"]}', "[" * 100_000)
    for number, text in enumerate(damaged, 2):
        path.write_text(text.replace('"x"', f'"{identity.files_identity(str(saved), "auto")}"'))
        assert load(saved) == load(saved) == first
        assert len(hashed) == number, text[:30]


def test_engines_of_both_kinds_share_records(saved: Path, hashed: list[str], tmp_path: Path) -> None:
    config = BlendConfig(min_tokens=0)
    for _ in range(2):
        with BlendEngine.from_pretrained(saved, config=config, store=tmp_path / "kv", device="cpu") as engine:
            engine.warm(CHUNKS)
    with BlendEngine(tiny.model(), tiny.tokenizer(), config=config, store=tmp_path / "kv") as engine:
        assert engine.warm(CHUNKS).present == 2
    assert len(hashed) == 1
