"""The benchmark of whole answers: every way answers by as many tokens as are asked for, and the table says when."""

from __future__ import annotations

from pathlib import Path

import pytest

from cacheblend_rag.models.cpu import float16_copies, int8_prefill
from cacheblend_rag.models.starters import STARTERS
from docs.benchmarks.scripts import whole_answer
from docs.benchmarks.scripts.whole_answer import WAYS, Case, markdown


@pytest.fixture
def case(deep_shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(whole_answer, "CHUNK_TOKENS", 160)
    monkeypatch.setattr(int8_prefill, "_LEAST_SIDE", 8)
    monkeypatch.setattr(float16_copies, "_LEAST", 8)
    return Case(deep_shape, "float32", 2, str(tmp_path))


@pytest.mark.parametrize("way", [name for name, way in WAYS.items() if way.package is None])
def test_each_way_notes_every_token(way: str, case: Case) -> None:
    if way in ("int8-prefill", "full-int8") and not int8_prefill.gives_int8():
        pytest.skip("PyTorch has no products of 8 bits here")
    times = WAYS[way].answer(case)(3)
    assert len(times) == 3
    assert times == sorted(times)


def test_llama_cpp_answers_from_weights_of_its_own_quantiser(case: Case) -> None:
    pytest.importorskip("llama_cpp")
    assert whole_answer.write_for_llama(case, ["transformers", "llama-8"]) == {"llama-8": "Q8_0"}
    times = WAYS["llama-8"].answer(case)(3)
    assert len(times) == 3
    assert times == sorted(times)


@pytest.mark.pretrained
def test_starter_reads_a_chat_about_articles(smollm2_folder: Path, tmp_path: Path) -> None:
    case = Case(next(iter(STARTERS)), "float32", 3, str(tmp_path))
    prompt = case.prompt(case.tokenizer())
    assert len(prompt.chunks) == 3
    assert "Surtsey" in prompt.chunks[1]
    assert 3 * 500 < len(case.ids()) < 3 * 512 + 100


def test_the_table_compares_with_the_first_way() -> None:
    rows = [
        {"way": way, "weights": "float32", "prompt_tokens": 900, "seconds": [first, 2.0, 3.0, 8.0], "peak_bytes": 10**9}
        for way, first in (("transformers", 1.5), ("default", 0.5))
    ]
    lines = markdown({"model": "smollm2", "rows": rows}).splitlines()
    assert lines[0] == "smollm2, 900 prompt tokens"
    assert "| 0.50 s | 3.0× | 2.00 s | 3.00 s | 8.00 s | 29 ms | 1.00 GB |" in lines[-1]
