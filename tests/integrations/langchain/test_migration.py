"""The measurement before and after a move from the Hugging Face wrapper."""

from __future__ import annotations

import json

import pytest

from docs.benchmarks.scripts.migration import main


@pytest.mark.usefixtures("tiny_shape")
def test_both_models_answer_through_the_same_chain(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--shape", "tiny", "--chunks", "2", "--chunk-tokens", "16", "--new-tokens", "2", "--rounds", "1"]
    assert main([*small, "--threads", "1"]) == 0
    *table, result = capsys.readouterr().out.strip().splitlines()
    assert [line.split()[1] for line in table[2:]] == ["PipelineLLM", "CacheBlendLLM"]
    for times in json.loads(result)["seconds"].values():
        assert [len(times["first"]), len(times["all"])] == [1, 1]
        assert 0 < times["first"][0] <= times["all"][0]
