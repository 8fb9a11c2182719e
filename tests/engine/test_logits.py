"""Logits processors for OpenAI's options, each against what its definition says."""

from __future__ import annotations

import pytest
import torch

from cacheblend_rag.engine.logits import LogProbs, Penalties, logit_bias
from tests.tokenizer_kinds import tokenizer_of

VOCAB = 12


def test_penalties_count_the_answer_and_not_the_prompt() -> None:
    penalties = Penalties(presence=0.5, frequency=0.25)
    scores = torch.zeros(1, VOCAB)
    assert torch.equal(penalties(torch.tensor([[3, 3, 4]]), scores), scores)
    after = penalties(torch.tensor([[3, 3, 4, 5, 5, 3]]), scores)
    expected = torch.zeros(VOCAB)
    expected[5], expected[3] = -0.5 - 2 * 0.25, -0.5 - 0.25
    assert torch.equal(after[0], expected)
    assert torch.equal(scores, torch.zeros(1, VOCAB)), "what it was given is left as it is"


def test_bias_is_added_to_single_tokens() -> None:
    biased = logit_bias({2: 1.5, 7: -100}, VOCAB)(torch.tensor([[1, 2]]), torch.ones(1, VOCAB))
    assert biased[0, 2] == 2.5
    assert biased[0, 7] == -99
    assert biased.sum() == VOCAB + 1.5 - 100


@pytest.mark.parametrize("kind", ["byte-level BPE", "converted BPE", "WordPiece"])
@pytest.mark.parametrize("text", [" an old oak", " é café 🦊 ende", "🦊"])
def test_texts_of_tokens_make_up_the_answer(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    prompt, ids = [5, 6], tokenizer.encode(text, add_special_tokens=False)
    noted = note(tokenizer, prompt, ids)
    shown = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    told = noted.up_to(3)
    assert all(one.offset + len(one.text) <= 3 for one in told)
    told += noted.rest(ids, shown)
    assert "".join(one.text for one in told) == shown
    assert [one.offset for one in told] == sorted(one.offset for one in told)
    assert len(told) == len(ids) or not shown
    assert noted.rest(ids, shown) == []


def test_tokens_of_an_answer_cut_within_a_character_join_to_its_text() -> None:
    tokenizer = tokenizer_of("byte-level BPE")
    ids = tokenizer.encode(" oak 🦊", add_special_tokens=False)[:-1]
    shown = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert shown.endswith("\N{REPLACEMENT CHARACTER}")
    noted = note(tokenizer, [5], ids)
    begun = noted.up_to(1_000)
    told = [*begun, *noted.rest(ids, shown)]
    assert "".join(one.text for one in told) == shown


def note(tokenizer: object, prompt: list[int], ids: list[int]) -> LogProbs:
    """The notes taken while these ids are generated, one step past the end included, as a GPU may run it."""
    noted = LogProbs(tokenizer, 2)
    torch.manual_seed(0)
    for made in range(len(ids) + 1):
        noted(torch.tensor([[*prompt, *ids[:made]]]), torch.randn(1, 2_000))
    return noted
