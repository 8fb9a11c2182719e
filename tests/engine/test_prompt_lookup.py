"""Several tokens of an answer in one pass: the same answer, in fewer passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from transformers.generation import LogitsProcessor

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.engine import turns
from cacheblend_rag.models.batched_decode import BatchedDecode
from cacheblend_rag.prompt import PromptTokenizer
from tests import tiny
from tests.probes import assert_same, engine_of

CHUNKS = [tiny.text(40, 1), tiny.text(40, 2)]
PROMPT = Prompt("Read this:", CHUNKS, "What fell in the end?")


class Reciting(LogitsProcessor):
    """Lets an answer be what it is told, and keeps what the model would have had to say."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids, self.scores = list(ids), []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        said = self.ids[len(self.scores)]
        self.scores.append(scores[0].clone())
        wanted = torch.full_like(scores, float("-inf"))
        wanted[0, said] = 0.0
        return wanted


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each pass had, of all answers together."""
    counts: list[int] = []
    take = BatchedDecode.__call__

    def counted(self: BatchedDecode, asked: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
        counts.append(sum(one["input_ids"].shape[1] for one in asked))
        return take(self, asked)

    monkeypatch.setattr(BatchedDecode, "__call__", counted)
    return counts


def recited(engine: BlendEngine) -> list[int]:
    """Part of a chunk, something else, and part of another."""
    segments = PromptTokenizer(engine.tokenizer, BlendConfig().separator)
    one, two = (list(segments.chunk(text).ids) for text in CHUNKS)
    return [*one[5:17], 7, 9, 7, *two[3:12], 11]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_token_is_taken_from_the_logits_it_has_one_by_one(
    family: str, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = tiny.model(family), {}
    for most in (0, 6):
        monkeypatch.setattr(turns, "TRIED_AT_ONCE", most)
        with engine_of(model, recompute_ratio=0.2) as engine:
            reciting = Reciting(recited(engine))
            passes.clear()
            answer = engine.generate(PROMPT, max_new_tokens=len(reciting.ids), logits_processor=[reciting])
            assert answer.token_ids == reciting.ids
            found[most] = torch.stack(reciting.scores), list(passes)
    torch.testing.assert_close(found[6][0], found[0][0], rtol=0, atol=2e-5)
    assert found[0][1] == [1] * (len(reciting.ids) - 1)
    assert len(found[6][1]) < len(found[0][1]) / 2
    assert max(found[6][1]) == 7


@pytest.mark.parametrize("how", [{}, {"do_sample": True, "temperature": 1.5, "seed": 3}, {"repetition_penalty": 1.5}])
def test_answers_stay_the_same(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, drawn and with a penalty; the cache then has prompt and answer, and no more."""
    model, found = tiny.model(), []
    for most in (0, 6):
        monkeypatch.setattr(turns, "TRIED_AT_ONCE", most)
        with engine_of(model, recompute_ratio=0.2) as engine:
            answer = engine.generate(PROMPT, max_new_tokens=32, **how)
            engine.flush()
            again = Prompt(PROMPT.prefix, PROMPT.chunks, PROMPT.suffix + answer.text + " And then?")
            found.append((answer.token_ids, engine.fuse(again)))
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1])


def test_answer_ends_where_the_context_window_does(passes: list[int]) -> None:
    model = tiny.model()
    with engine_of(model, recompute_ratio=0.2) as engine:
        used = len(engine.fuse(PROMPT).input_ids)
    model.config.max_position_embeddings = used + 6
    with engine_of(model, recompute_ratio=0.2) as engine:
        ids = recited(engine)
        answer = engine.generate(PROMPT, logits_processor=[Reciting(ids)])
    assert answer.token_ids == ids[:6]
    assert max(passes) > 1
    assert sum(passes) <= 6
