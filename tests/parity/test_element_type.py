"""Without a word on it, a model is loaded in a type that this processor multiplies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models import loading as element_type
from cacheblend_rag.models import memory
from cacheblend_rag.models.loading import load_geometry, load_model, type_to_load
from tests import tiny
from tests.probes import PROMPT

CPU = torch.device("cpu")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny.model().to(torch.bfloat16).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def in_software(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(element_type, "in_hardware", lambda dtype: False)
    monkeypatch.setattr(element_type, "total_memory", lambda: 10**9)


def loaded(folder: Path, **options: Any) -> torch.dtype:
    dtype: torch.dtype = load_model(folder, device="cpu", **options).model.dtype
    return dtype


def test_type_without_arithmetic_of_its_own_is_widened_unless_it_was_asked_for(saved: Path, in_software: None) -> None:
    assert loaded(saved) == torch.float32
    assert load_geometry(saved)[0].dtype == "float32"
    assert loaded(saved, dtype="bfloat16") == torch.bfloat16
    assert load_geometry(saved, "bfloat16")[0].dtype == "bfloat16"
    assert loaded(saved, attn_implementation="sdpa") == torch.bfloat16


def test_type_that_the_processor_multiplies_stays(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(element_type, "in_hardware", lambda dtype: True)
    assert loaded(saved) == torch.bfloat16
    assert load_geometry(saved)[0].dtype == "bfloat16"


def test_too_little_memory_is_named_with_the_remedy(
    saved: Path, in_software: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.from_pretrained(saved)
    needed = sum(4 * parameter.numel() for parameter in tiny.model().parameters())
    for total in (-(-needed * 4 // 3), None):
        monkeypatch.setattr(element_type, "total_memory", lambda total=total: total)
        assert type_to_load(config, CPU) == "float32"
    monkeypatch.setattr(element_type, "total_memory", lambda: needed * 4 // 3 - 1)
    with pytest.raises(ConfigError, match=r"dtype='auto' .* use dtype='bfloat16', .* a memory of "):
        load_model(saved)
    assert load_geometry(saved)[0].dtype == "bfloat16"  # what loading asks for
    assert loaded(saved, dtype="bfloat16") == torch.bfloat16
    assert loaded(saved, dtype="float32") == torch.float32


def test_store_of_one_day_is_found_on_the_next(
    saved: Path, in_software: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else takes memory meanwhile."""
    config = BlendConfig(min_tokens=0, write_back="inline")
    for free, hits in ((2**40, 0), (1, 3)):
        monkeypatch.setattr(memory, "free_memory", lambda *given, free=free: free)
        with BlendEngine.from_pretrained(saved, store=tmp_path / "kv", config=config) as engine:
            assert engine.adapter.dtype == torch.float32
            assert engine.fuse(PROMPT).report.hits == hits


def test_float32_gpus_and_quantised_weights_are_left_alone(saved: Path, in_software: None) -> None:
    config = AutoConfig.from_pretrained(saved)
    assert type_to_load(config, torch.device("cuda")) == "auto"
    config.quantization_config = {"quant_method": "torchao"}
    assert type_to_load(config, CPU) == "auto"
    assert type_to_load(tiny.model().config, CPU) == "auto"
