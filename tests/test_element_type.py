"""Without a word on it, a model is loaded in a type that this processor multiplies."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from cacheblend_rag.models import element_type
from cacheblend_rag.models.element_type import type_to_load
from cacheblend_rag.models.loading import load_geometry, load_model
from tests import tiny

CPU = torch.device("cpu")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny.model().to(torch.bfloat16).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def in_software(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(element_type, "in_hardware", lambda dtype: False)
    monkeypatch.setattr(element_type, "free_memory", lambda: 10**9)


@pytest.fixture
def with_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(element_type, "in_hardware", lambda dtype: True)


def loaded(folder: Path, **options: Any) -> torch.dtype:
    dtype: torch.dtype = load_model(folder, device="cpu", **options).model.dtype
    return dtype


def test_a_type_without_arithmetic_of_its_own_is_widened(saved: Path, in_software: None) -> None:
    assert loaded(saved) == torch.float32
    assert load_geometry(saved)[0].dtype == "float32"


def test_what_is_asked_for_holds(saved: Path, in_software: None) -> None:
    assert loaded(saved, dtype="bfloat16") == torch.bfloat16
    assert load_geometry(saved, "bfloat16")[0].dtype == "bfloat16"
    assert loaded(saved, attn_implementation="sdpa") == torch.bfloat16


def test_a_type_that_the_processor_multiplies_stays(saved: Path, with_hardware: None) -> None:
    assert loaded(saved) == torch.bfloat16
    assert load_geometry(saved)[0].dtype == "bfloat16"


@pytest.mark.parametrize(("free", "said"), [(1000, "1000 are free"), (None, "how many are free is not known")])
def test_where_memory_is_short_it_stays_and_the_remedy_is_told(
    saved: Path,
    in_software: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free: Any,
    said: str,
) -> None:
    monkeypatch.setattr(element_type, "free_memory", lambda: free)
    with caplog.at_level(logging.WARNING):
        assert loaded(saved) == torch.bfloat16
    assert "has no bfloat16 arithmetic" in caplog.text
    assert "dtype='float32'" in caplog.text
    assert said in caplog.text


def test_room_is_reckoned_for_all_weights(saved: Path, in_software: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.from_pretrained(saved)
    needed = sum(4 * parameter.numel() for parameter in tiny.model().parameters())
    for free, expected in ((2 * needed, "float32"), (2 * needed - 1, "auto")):
        monkeypatch.setattr(element_type, "free_memory", lambda free=free: free)
        assert type_to_load(config, CPU) == expected


def test_float32_gpus_and_quantised_weights_are_left_alone(saved: Path, in_software: None) -> None:
    config = AutoConfig.from_pretrained(saved)
    assert type_to_load(config, torch.device("cuda")) == "auto"
    config.quantization_config = {"quant_method": "torchao"}
    assert type_to_load(config, CPU) == "auto"
    assert type_to_load(tiny.model().config, CPU) == "auto"


def test_where_pytorch_does_not_say_the_type_stays(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(element_type._IN_HARDWARE, torch.bfloat16, "_is_no_such_thing")
    assert element_type.in_hardware(torch.bfloat16) is None
    assert type_to_load(AutoConfig.from_pretrained(saved), CPU) == "auto"
