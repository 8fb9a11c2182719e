"""Prompts and chunks beyond a model's context window: refused by name, or cut as the user says."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from transformers import GenerationConfig
from transformers.generation import SuppressTokensLogitsProcessor

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.errors import CacheBlendError, ContextLengthError, PromptError
from cacheblend_rag.models.shape import context_window
from cacheblend_rag.prompt import Prompt
from tests import tiny

WINDOW = 200
PREFIX, QUESTION = "answer briefly", "who fell into the river"
CHUNKS = [tiny.text(20, seed) for seed in range(1, 9)]


def engine_of(window: int = WINDOW, **config: Any) -> BlendEngine:
    options = {"min_tokens": 0, "write_back": "inline", "recompute_ratio": 1.0} | config
    made = tiny.model(num_hidden_layers=2, max_position_embeddings=window)
    return BlendEngine(made, tiny.tokenizer(), config=BlendConfig(**options))


def prompt_of(chunks: int) -> Prompt:
    return Prompt(PREFIX, CHUNKS[:chunks], QUESTION)


# The window -------------------------------------------------------------------------------


def config_of(rope: str, family: str = "llama", window: int = 2048) -> Any:
    return tiny.model(family, rope, max_position_embeddings=window).config


@pytest.mark.parametrize(
    ("family", "rope", "window", "expected"),
    [
        ("llama", "linear", 2048, 2048),
        ("llama", "dynamic", 2048, 4096),  # the config keeps the trained length
        ("llama", "yarn", 64, 256),  # by custom it may, as in Qwen's model cards
        ("phi3", "longrope", 2048, 2048),
        ("gemma3_text", "default", 2048, 2048),  # sliding layers see less and stand as far
        ("olmo3", "yarn", 64, 256),  # RoPE parameters by layer type
    ],
)
def test_window_is_read_from_the_config(family: str, rope: str, window: int, expected: int) -> None:
    assert context_window(config_of(rope, family, window)) == expected


# Refusing ---------------------------------------------------------------------------------


def test_prompt_beyond_the_window_is_refused_with_remedies() -> None:
    with engine_of() as engine:
        tokens = len(engine.tokenize(prompt_of(8)).input_ids)
        assert tokens > WINDOW
        with pytest.raises(ContextLengthError) as caught:
            engine.generate(prompt_of(8), max_new_tokens=16)
        error = caught.value
        assert isinstance(error, PromptError)
        assert isinstance(error, CacheBlendError)
        assert (error.tokens, error.new_tokens, error.window) == (tokens, 16, WINDOW)
        for said in (f"{tokens:,} tokens", "16 more", f"window is {WINDOW:,}", "fewer", "overflow='drop_chunks'"):
            assert said in str(error)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        assert not [*engine.store.infos("")]  # nothing was computed
        with pytest.raises(ContextLengthError):
            list(engine.stream(prompt_of(8)))
        with pytest.raises(ContextLengthError):
            engine.generate("word " * 500)  # a text without chunks is no exception


def test_tokens_that_are_asked_for_must_fit_and_others_are_as_many_as_fit() -> None:
    with engine_of() as engine:
        tokens = len(engine.tokenize(prompt_of(4)).input_ids)
        room = WINDOW - tokens
        assert 0 < room < 256
        never_ends: Any = {"logits_processor": [SuppressTokensLogitsProcessor([2], device="cpu")]}
        answer = engine.generate(prompt_of(4), **never_ends)
        assert len(answer.token_ids) == room
        assert answer.report.finish_reason == "length"
        longest = GenerationConfig(max_length=10_000)
        assert len(engine.generate(prompt_of(4), generation_config=longest, **never_ends).token_ids) == room
        assert len(engine.generate(prompt_of(4), max_new_tokens=room).token_ids) <= room
        with pytest.raises(ContextLengthError, match="ask for fewer new tokens"):
            engine.generate(prompt_of(4), max_new_tokens=room + 1)
        with pytest.raises(ContextLengthError):
            engine.generate(prompt_of(4), generation_config=GenerationConfig(max_new_tokens=room + 1))


def test_too_long_prompt_stops_its_whole_batch() -> None:
    with engine_of() as engine:
        with pytest.raises(ContextLengthError, match="prompt 2 of 3 has"):
            engine.generate_batch([prompt_of(2), prompt_of(8), prompt_of(1)], max_new_tokens=2)
        assert not [*engine.store.infos("")]
        assert len(engine.generate_batch([prompt_of(2), prompt_of(1)], max_new_tokens=2)) == 2


# Leaving chunks out -----------------------------------------------------------------------


def test_chunks_are_left_out_from_the_end_until_the_prompt_fits() -> None:
    with engine_of(overflow="drop_chunks") as engine, engine_of(4096) as roomy:
        engine.warm(CHUNKS)
        answer = engine.generate(prompt_of(8), max_new_tokens=8)
        kept = 8 - len(answer.report.left_out)
        assert 0 < kept < 8
        assert answer.report.left_out == tuple(range(kept, 8))
        assert (answer.report.hits, len(answer.report.chunk_tiers)) == (kept, kept)
        assert answer.report.prompt_tokens + 8 <= WINDOW
        assert len(engine.tokenize(prompt_of(kept + 1)).input_ids) + 8 > WINDOW  # as many as fit
        # It is the prompt of those chunks, with its prefix and its question.
        assert answer.report.input_ids == roomy.tokenize(prompt_of(kept)).input_ids
        assert answer.token_ids == roomy.generate(prompt_of(kept), max_new_tokens=8).token_ids
        assert engine.fitted(prompt_of(8), 8).left_out == answer.report.left_out
        assert engine.fuse(prompt_of(2)).report.left_out == ()


@pytest.mark.parametrize(("chunks", "remedy"), [(0, "shorten the prompt"), (3, "not even the first")])
def test_prefix_question_and_one_chunk_are_never_left_out(chunks: int, remedy: str) -> None:
    question = "word " * (150 if chunks else 500)
    with engine_of(overflow="drop_chunks") as engine, pytest.raises(ContextLengthError, match=remedy):
        engine.generate(Prompt(PREFIX, CHUNKS[:chunks], question), max_new_tokens=4)


# Warming ----------------------------------------------------------------------------------


def test_chunk_beyond_the_window_is_refused_by_name_before_any_is_computed() -> None:
    with engine_of() as engine:
        engine.warm(CHUNKS[:1])
        before = engine.store.stats().records  # type: ignore[attr-defined]
        long = "These are the first words of it, " + tiny.text(400, 99)
        with pytest.raises(
            ContextLengthError, match=r"the chunk that begins 'These are the first words of it"
        ) as caught:
            engine.warm([CHUNKS[1], long, CHUNKS[2]])
        assert caught.value.tokens > WINDOW == caught.value.window
        assert "smaller chunks" in str(caught.value)
        assert engine.store.stats().records == before  # type: ignore[attr-defined]
        assert engine.warm(CHUNKS[:3]).present == 1
