"""The benchmark of times to first token, on a tiny model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cacheblend_rag.evaluation import ttft
from cacheblend_rag.evaluation.baselines import METHODS
from tests import tiny


def test_every_method_is_measured_on_a_warm_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(shape: str, *, dtype: str) -> Any:
        return tiny.model(vocab_size=3072, num_hidden_layers=2)

    monkeypatch.setattr(ttft, "random_model", model)
    options = ttft.TTFTOptions(chunks=2, chunk_tokens=40, rounds=2, threads=torch.get_num_threads())
    result = ttft.measure(options)
    assert result["hits"] == 2
    assert list(result["ttft_seconds"]) == [*METHODS[:3], "blended 15%", "blended 5%"]
    assert result["times_faster"]["full recompute"] == 1.0
    assert all(low <= result["ttft_seconds"][name] <= high for name, (low, high) in result["spread"].items())
    assert 60 < result["prompt_tokens"] - 40 <= 2 * 40 + 60
