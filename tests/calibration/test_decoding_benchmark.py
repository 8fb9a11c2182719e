"""The benchmark of decoding: what it times, not how fast this machine is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.cpu import float16_copies, int4_linear, weight_prepacking
from docs.benchmarks.scripts import decode_codes, decode_step, prompt_lookup
from docs.benchmarks.scripts.decode import PLAIN, DecodingOptions, main
from tests.parity.test_int4_products import needs_codes, written
from tests.parity.test_weight_prepacking import needs_bfloat16

needs_halves = pytest.mark.skipif(not float16_copies.are_there(), reason="PyTorch has no products by float16 here")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # libraries of quantisation warn when they are imported
@pytest.mark.parametrize("weights", ["plain", "int8"])
def test_every_way_is_timed_for_as_many_tokens(
    weights: str, tiny_shape: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    drawn = tmp_path / "decode.svg"
    arguments = ["--shape", "tiny", "--chunks", "2", "--chunk-tokens", "40", "--rounds", "2"]
    arguments += ["--weights", weights, "--dtype", "bfloat16" if weights == "int8" else "float32"]
    assert main([*arguments, "--new-tokens", "4", "--threads", "1", "--plot", str(drawn)]) == 0
    assert drawn.read_text().lstrip().startswith("<?xml")
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    ways = [PLAIN, "blended", "transformers on a thread", "blended, streamed", "cold, nothing kept", "cold, kept"]
    assert list(result["seconds_a_token"]) == ways
    assert len(table) == 3 + 1 + 2 + len(ways)
    assert result["kept_to_not_kept"] > 0
    assert 0 < result["reading_weights"] == pytest.approx(result["of_bound"][PLAIN] * result["seconds_a_token"][PLAIN])
    assert result["storing_seconds"] > 0, "chunks were forgotten before each cold request, and stored after one of them"
    assert result["hits"] == 2
    assert result["to_transformers"][PLAIN] == 1.0
    for name, (low, high) in result["spread"].items():
        assert 0 < low <= result["seconds_a_token"][name] <= high


@pytest.mark.parametrize("changes", [{"new_tokens": 1}, {"rounds": 0}])
def test_options_that_time_nothing_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        DecodingOptions(**changes)  # type: ignore[arg-type]


def test_answers_are_timed_with_and_without_tried_tokens(
    model_folder: Path, questions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(model_folder), "--data", str(questions), "--dtype", "float32"]
    assert prompt_lookup.main([*arguments, "--count", "3", "--new-tokens", "12", "--threads", "1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["answers"], result["same_answers"]) == (3, 3)
    assert result["options"]["data"] == questions.name
    assert all(seconds > 0 for seconds in result["seconds_a_token"].values())
    assert 0 < result["times_faster"]["low"] <= result["times_faster"]["high"]
    assert prompt_lookup.main(["--data", str(questions), "--most", "0"]) == 2
    assert "most" in capsys.readouterr().err


def test_tokens_of_one_answer_take_turns(tiny_shape: None, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shape", "tiny", "--dtype", "float32", "--chunks", "1", "--chunk-tokens", "30", "--threads", "1"]
    assert decode_step.main([*arguments, "--tokens", "3", "--rounds", "2"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert tuple(result["seconds_a_token"]) == decode_step.WAYS
    assert all(0 < result["least"][way] <= result["seconds_a_token"][way] for way in decode_step.WAYS)
    assert result["to_transformers_layers"][decode_step.WAYS[0]] == 1.0
    assert decode_step.main([*arguments, "--tokens", "0"]) == 2


@pytest.mark.parametrize(
    "dtype",
    [pytest.param("bfloat16", marks=[needs_codes, needs_bfloat16]), pytest.param("float32", marks=needs_halves)],
)
def test_tokens_by_copies_and_without_take_turns(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module in (weight_prepacking, float16_copies):
        monkeypatch.setattr(module, "_LEAST", 0)
    out = tmp_path / "codes.json"
    arguments = ["--model", str(written(tmp_path)), "--prompt-tokens", "40", "--tokens", "3", "--texts", "1"]
    assert decode_codes.main([*arguments, "--dtype", dtype, "--threads", "1", "--out", str(out)]) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    assert tuple(result["ms_a_token"]) == decode_codes.WAYS
    assert all(one > 0 for one in result["ms_a_token"].values())
    assert result["scores"]["tokens"] == 3
    assert ("of_bound" in result) == (dtype == "float32")
    assert all(one > 0 for one in result.get("of_bound", {}).values())
    assert len(set(result["scores"]["divergence"].values())) == 2, "both ways were gone"
    assert weight_prepacking.are_few is int4_linear.are_few
