"""Which passages stand in a prompt, how long they are, in which order, and what is asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cacheblend_rag.calibration.prompts import ChatFrame, WordRanker
from cacheblend_rag.errors import ConfigError
from docs.benchmarks.evaluation.datasets import EvalCase, Passage
from docs.benchmarks.evaluation.passages import build_prompt, choose
from docs.benchmarks.evaluation.runner import repacked
from tests import tiny
from tests.integrations.langchain.models import TEMPLATE

TEXTS = ("the river froze", "an owl saw the river", "a fox ran", "the owl slept", "leaves fell", "an oak stood")
CASE = EvalCase(
    "c", "Where did the owl go?", ("away",), tuple(Passage(f"T{n}", text, n == 4) for n, text in enumerate(TEXTS))
)
RANKER = WordRanker(passage.chunk for passage in CASE.passages)


def titles(case: EvalCase) -> list[str]:
    return [passage.title for passage in case.passages]


def test_choosing_prefers_rare_words_and_keeps_support() -> None:
    assert titles(choose(CASE, 2, ranker=RANKER, keep_support=False)) == ["T1", "T3"]
    assert titles(choose(CASE, 3, ranker=RANKER)) == ["T1", "T3", "T4"]
    assert titles(choose(CASE, 1, ranker=RANKER)) == ["T4"]
    assert titles(choose(CASE, 9, ranker=RANKER)) != titles(choose(CASE, 9))
    assert titles(choose(CASE, 9)) == [f"T{n}" for n in range(6)]


def test_passages_are_cut_and_joined_to_a_length() -> None:
    tokenizer, tokens = tiny.tokenizer(), 40
    long = replace(CASE, passages=(*CASE.passages, Passage("", tiny.text(60, 1))))
    packed = repacked(long, tokenizer, tokens)
    sizes = [len(tokenizer.encode(passage.text, add_special_tokens=False)) for passage in packed.passages]
    assert max(sizes) <= tokens
    words = " ".join(passage.chunk for passage in long.passages).split()
    assert " ".join(passage.text for passage in packed.passages).split() == words
    assert any(passage.support for passage in packed.passages)


def test_prompts_ask_for_what_the_measure_measures() -> None:
    short = build_prompt(CASE)
    assert "within 5 words" in short.prefix
    assert short.suffix.endswith("Question: Where did the owl go?\nAnswer:")
    assert short.chunks[0] == "T0\nthe river froze"
    assert build_prompt(CASE, "stuff").suffix == "\n\nQuestion: Where did the owl go?\nHelpful Answer:"
    assert build_prompt(replace(CASE, question="{braces} {q}"), "stuff").suffix.count("{braces} {q}") == 1
    summary = build_prompt(replace(CASE, task="summary", question=""), "stuff")
    assert "summary of all news" in summary.prefix
    shots = build_prompt(replace(CASE, task="examples", question="Dialogue: so\nSummary:"))
    assert shots.suffix == "\n\nDialogue: so\nSummary:"
    with pytest.raises(ConfigError, match="prompt"):
        build_prompt(CASE, "haiku")


def test_chat_template_goes_around_the_prompt() -> None:
    tokenizer = tiny.tokenizer()
    with pytest.raises(ConfigError, match="no chat template"):
        ChatFrame(tokenizer)
    tokenizer.chat_template = TEMPLATE
    prompt = build_prompt(CASE, "stuff", ChatFrame(tokenizer))
    assert prompt.prefix.startswith("<s>[user] Use the following")
    assert prompt.suffix.endswith("Helpful Answer:\n[assistant] ")
