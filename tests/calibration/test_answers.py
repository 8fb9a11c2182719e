"""Answers read off a pass over known ones are those that decoding token by token gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cacheblend_rag.calibration.comparison import shared_cache
from cacheblend_rag.engine.decode import DecodeOptions, decode
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.fusor.teacher_forcing import answer_log_probs
from docs.benchmarks.evaluation import runner
from docs.benchmarks.evaluation.runner import GreedyAnswers
from tests import tiny
from tests.probes import engine_of

MOST = 12


class Asked:
    """A prompt's KV, what decoding writes behind it, and how often tokens were generated one by one."""

    def __init__(self, engine: BlendEngine, text: str, patch: pytest.MonkeyPatch) -> None:
        self.engine, self.ids = engine, engine.tokenize(text).input_ids
        made = engine.adapter.prefill(self.ids)
        self.cache, self.logits = made.cache, made.logits
        self.found = self.decoded(MOST)
        self.generated: list[int] = []

        def counted(*given: Any, **more: Any) -> Any:
            result = decode(*given, **more)
            self.generated.append(len(result.token_ids))
            return result

        patch.setattr(runner, "decode", counted)

    def decoded(self, most: int) -> Any:
        options = DecodeOptions(max_new_tokens=most, temperature=0.0)
        cache = shared_cache(self.cache)
        engine = self.engine
        return decode(
            engine.model, engine.tokenizer, input_ids=self.ids, cache=cache, logits=self.logits, options=options
        )

    def text(self, known: GreedyAnswers, guess: list[int]) -> str:
        says = answer_log_probs(self.engine.adapter, shared_cache(self.cache), self.logits, guess).argmax(dim=-1)
        return known.text(shared_cache(self.cache), self.logits, guess, says.tolist())


@pytest.fixture
def engine() -> Iterator[BlendEngine]:
    with engine_of(tiny.model(num_hidden_layers=3, initializer_range=0.3)) as made:
        yield made


@pytest.fixture
def asked(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(engine, tiny.text(30, 4), monkeypatch)


def test_right_guess_needs_no_generation(asked: Asked) -> None:
    ids = asked.found.token_ids
    assert len(ids) == MOST
    known = GreedyAnswers(asked.engine, asked.ids, MOST)
    assert asked.text(known, ids) == asked.found.text
    assert asked.text(known, [*ids, 5, 6]) == asked.found.text, "an answer has no more tokens than it may have"
    assert asked.generated == []


@pytest.mark.parametrize("right", [0, 1, 5, MOST - 1])
def test_wrong_guess_is_left_where_it_goes_wrong(asked: Asked, right: int) -> None:
    ids = asked.found.token_ids
    wrong = [*ids[:right], (ids[right] + 1) % 50, *reversed(ids)][: MOST + 2]
    known = GreedyAnswers(asked.engine, asked.ids, MOST)
    assert asked.text(known, wrong) == asked.found.text
    assert asked.generated == ([] if right == MOST - 1 else [MOST - right - 1])
    before = list(asked.generated)
    assert asked.text(known, wrong) == asked.found.text, "what was written once is a guess from then on"
    assert asked.generated == before


def test_short_guess_is_continued(asked: Asked) -> None:
    known = GreedyAnswers(asked.engine, asked.ids, MOST)
    assert asked.text(known, asked.found.token_ids[:4]) == asked.found.text
    assert asked.generated == [MOST - 4]


def test_answer_ends_where_the_model_ends_it(asked: Asked) -> None:
    ids, end = asked.found.token_ids, asked.found.token_ids[6]
    first = ids.index(end)
    asked.engine.model.generation_config.eos_token_id = [end]
    short = asked.decoded(MOST)
    assert short.token_ids == ids[: first + 1]
    known = GreedyAnswers(asked.engine, asked.ids, MOST)
    assert asked.text(known, ids) == short.text
    assert asked.text(known, [*ids[:first], (end + 1) % 50, 7]) == short.text
    assert asked.generated == []


def test_answers_are_generated_where_decoding_is_not_plain_greedy(asked: Asked) -> None:
    asked.engine.model.generation_config.repetition_penalty = 5.0
    expected = asked.decoded(MOST)
    assert expected.token_ids != asked.found.token_ids
    known = GreedyAnswers(asked.engine, asked.ids, MOST)
    assert asked.text(known, asked.found.token_ids) == expected.text
    assert asked.generated == [len(expected.token_ids)]


def test_shared_cache_keeps_its_own_rows(asked: Asked) -> None:
    before = [layer.keys.clone() for layer in asked.cache.layers]
    answer_log_probs(asked.engine.adapter, shared_cache(asked.cache), asked.logits, [3, 4, 5])
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(asked.cache.layers, before, strict=True))
