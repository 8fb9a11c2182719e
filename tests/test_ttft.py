"""The benchmark of times to first token, on a tiny model."""

from __future__ import annotations

import json

import pytest

from cacheblend_rag.cli import main
from cacheblend_rag.evaluation.baselines import METHODS


def test_every_method_is_measured_on_a_warm_store(tiny_shape: None, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "ttft", "--shape", "tiny", "--chunks", "2", "--chunk-tokens", "40", "--rounds", "2"]
    assert main([*arguments, "--threads", "1"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert result["hits"] == 2
    assert list(result["ttft_seconds"]) == [*METHODS[:3], "blended 15%", "blended 5%"]
    assert len(table) == 1 + 2 + 5
    assert len({len(line) for line in table[1:]}) == 1, "columns stand under one another"
    assert result["times_faster"]["full recompute"] == 1.0
    assert all(low <= result["ttft_seconds"][name] <= high for name, (low, high) in result["spread"].items())
    assert 60 < result["prompt_tokens"] - 40 <= 2 * 40 + 60
