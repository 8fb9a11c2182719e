"""The bundled tokenizer: any text comes back, BOS opens a text, names of unseen splits stay short."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.toy import MODEL_PATH
from tests.toy.archive import build_town
from tests.toy.names import pool

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_PATH)


def _ids(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


@given(text=st.text(max_size=200))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_comes_back(tokenizer: Any, text: str) -> None:
    if "<s>" in text or "</s>" in text:
        return
    assert tokenizer.decode(_ids(tokenizer, text)) == text.encode("utf-8", "ignore").decode()


@pytest.mark.parametrize("text", ["", "日本語 and ελληνικά", "  two  spaces ", "\n\n", "a\tb\r\nc", "12,345.67"])
def test_texts_of_other_kinds_come_back(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(_ids(tokenizer, text)) == text


def test_bos_opens_a_text_only_when_asked_for(tokenizer: Any) -> None:
    plain, opened = _ids(tokenizer, "A text"), _ids(tokenizer, "A text", special=True)
    assert opened == [tokenizer.bos_token_id, *plain]
    assert tokenizer.bos_token == "<s>"
    assert tokenizer.eos_token == "</s>"


def test_digits_stand_alone(tokenizer: Any) -> None:
    assert len(_ids(tokenizer, "1984")) == 4


def test_unseen_names_stay_short(tokenizer: Any) -> None:
    def tokens_a_word(split: Any) -> float:
        chunks = [passage.chunk for passage in build_town(11, split).passages]
        return sum(len(_ids(tokenizer, chunk)) for chunk in chunks) / sum(len(chunk.split()) for chunk in chunks)

    assert tokens_a_word("test") < 1.1 * tokens_a_word("train")


def test_names_are_cut_into_their_parts(tokenizer: Any) -> None:
    for split in ("train", "test"):
        for kind in ("surname", "place", "company", "event", "river"):
            for name in pool(kind, split):
                assert len(_ids(tokenizer, f" {name}")) == 2, name
