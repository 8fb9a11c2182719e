"""Decoding: transformers' own generation, begun at the fused logits, told when to stop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig
from transformers.generation import LogitsProcessor

from cacheblend_rag import Prompt
from cacheblend_rag.engine.decode import DecodeOptions, Thinking, _TextAssembler
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.report import Generation
from tests import tiny
from tests.probes import engine_of

PROMPT = Prompt("Read this:", [tiny.text(23, 1), tiny.text(31, 2), tiny.text(17, 3)], "What fell in the end?")
PLAIN = "What fell in the end?"


def readable() -> Any:
    """A random model that never says a piece of a character."""
    model, tokenizer = tiny.model(), tiny.tokenizer()
    pieces = [token for token in range(400) if "\N{REPLACEMENT CHARACTER}" in tokenizer.decode([token])]
    model.lm_head.weight.data[pieces] = 0.0
    return model


@pytest.fixture(scope="module")
def engine() -> Any:
    with engine_of(readable(), recompute_ratio=0.4) as made:
        made.warm(PROMPT.chunks)
        made.fuse(PROMPT)
        yield made


@pytest.fixture(scope="module")
def greedy(engine: Any) -> Generation:
    return engine.generate(PROMPT, max_new_tokens=24)


# Greedy -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_equals_the_models_own_generate(family: str) -> None:
    model = tiny.model(family)
    with engine_of(model, recompute_ratio=1.0) as engine:
        answer = engine.generate(PROMPT, max_new_tokens=8)
    ids = torch.tensor([answer.report.input_ids])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0
    )
    assert answer.token_ids == expected[0, ids.shape[1] :].tolist()
    assert answer.text == engine.tokenizer.decode(answer.token_ids, skip_special_tokens=True)


def test_eos_ends_the_answer_and_is_no_text(engine: Any, greedy: Generation) -> None:
    end = greedy.token_ids[5]
    assert end not in greedy.token_ids[:5]
    for eos in (end, [2, end]):
        config = GenerationConfig(eos_token_id=eos, pad_token_id=0, max_new_tokens=20)
        answer = engine.generate(PROMPT, generation_config=config)
        assert answer.token_ids == greedy.token_ids[:6]
        assert answer.report.finish_reason == "stop"


# Stop strings -------------------------------------------------------------------------------


def cut(text: str, *stops: str) -> str:
    found = [text.find(stop) for stop in stops if stop in text]
    return text[: min(found)] if found else text


@pytest.mark.parametrize(("start", "length"), [(0, 1), (7, 5), (15, 9)])
def test_stop_string_anywhere_ends_the_answer_there(engine: Any, greedy: Generation, start: int, length: int) -> None:
    stop = greedy.text[start : start + length]
    answer = engine.generate(PROMPT, max_new_tokens=24, stop=[stop])
    assert answer.text == cut(greedy.text, stop)
    assert answer.report.finish_reason == "stop"
    assert answer.token_ids == greedy.token_ids[: len(answer.token_ids)]
    before = engine.tokenizer.decode(answer.token_ids[:-1], skip_special_tokens=True)
    assert stop not in before, "generation goes on only until the stop string is complete"


class _Feed:
    """Runs ids through the assembler as generation would."""

    def __init__(self, tokenizer: Any, ids: list[int], stops: tuple[str, ...]) -> None:
        self.pieces: list[str] = []
        options = DecodeOptions(stop=stops)
        thinking = Thinking(tokenizer, [1])
        assembler = _TextAssembler(
            thinking, options, frozenset({2}), 1, None, self.pieces.append, cancelled=lambda: False
        )
        self.taken = 0
        for count in range(1, len(ids) + 1):
            self.taken = count
            if bool(assembler(torch.tensor([[1, *ids[:count]]]), None)[0]):
                break
        self.result = assembler.result()


@settings(max_examples=30, deadline=None)
@given(
    ids=st.lists(st.integers(3, 399), min_size=1, max_size=30),
    stops=st.lists(st.text("abet he#o", min_size=1, max_size=4), max_size=3),
)
@pytest.mark.parametrize("style", ["byte", "metaspace"])
def test_pieces_join_to_the_text_and_never_show_a_stop(style: str, ids: list[int], stops: list[str]) -> None:
    tokenizer = TOKENIZERS[style]
    feed = _Feed(tokenizer, ids, tuple(stops))
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    text = "".join(feed.pieces)
    assert text == feed.result.text
    assert all(feed.pieces)
    assert not any(stop in text for stop in stops)
    if not any(stop in whole for stop in stops):
        assert text == whole
        assert feed.result.finish_reason == "length"
    else:
        assert feed.result.finish_reason == "stop"
        assert whole.startswith(text)
        assert any(whole[len(text) :].startswith(stop) for stop in stops)


TOKENIZERS = {"byte": tiny.tokenizer(), "metaspace": tiny.tokenizer(style="metaspace")}


def test_character_of_several_tokens_is_handed_out_whole() -> None:
    ids = TOKENIZERS["byte"].encode("né à Zürich – 東京 🦉 done", add_special_tokens=False)
    assert len(ids) > len("né à Zürich – 東京 🦉 done")
    feed = _Feed(TOKENIZERS["byte"], ids, ())
    assert "".join(feed.pieces) == feed.result.text == "né à Zürich – 東京 🦉 done"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in feed.pieces)
    stopped = _Feed(TOKENIZERS["byte"], ids, ("né à Zürich – 東京 🦉 done"[-1],))
    assert stopped.result.text == cut("né à Zürich – 東京 🦉 done", "né à Zürich – 東京 🦉 done"[-1])


def test_text_is_handed_out_as_soon_as_no_stop_can_take_it_back() -> None:
    tokenizer = TOKENIZERS["byte"]
    ids = [token for letter in "xab xabq" for token in tokenizer.encode(letter, add_special_tokens=False)]
    assert len(ids) == 8
    assert _Feed(tokenizer, ids, ("abc",)).pieces == ["x", "ab ", "x", "abq"]
    assert _Feed(tokenizer, ids, ("abq",)).pieces == ["x", "ab ", "x"]
    assert _Feed(tokenizer, ids, ()).pieces == list("xab xabq")


# Sampling -----------------------------------------------------------------------------------


def test_seed_makes_sampling_repeatable_and_leaves_the_global_generator_alone(engine: Any, greedy: Generation) -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    answers = [engine.generate(PROMPT, max_new_tokens=16, temperature=1.5, seed=seed).token_ids for seed in (3, 3, 4)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]
    assert answers[0] != greedy.token_ids[:16]


def test_sampling_equals_the_models_own_with_the_same_seed() -> None:
    model = tiny.model()
    with engine_of(model) as engine:
        answer = engine.generate(PLAIN, max_new_tokens=12, temperature=1.3, top_p=0.9, seed=8)
    ids = torch.tensor([answer.report.input_ids])
    with torch.random.fork_rng():
        torch.manual_seed(8)
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=True, temperature=1.3,
            top_p=0.9, pad_token_id=0,
        )  # fmt: skip
    assert answer.token_ids == expected[0, ids.shape[1] :].tolist()


# Generation configs and processors ----------------------------------------------------------


def test_generation_config_is_taken_and_options_win_over_it(engine: Any, greedy: Generation) -> None:
    config = GenerationConfig(max_new_tokens=5, do_sample=True, temperature=40.0, pad_token_id=0)
    assert len(engine.generate(PROMPT, generation_config=config).token_ids) == 5
    seeded = [engine.generate(PROMPT, generation_config=config, seed=2, max_new_tokens=9) for _ in range(2)]
    assert seeded[0].token_ids == seeded[1].token_ids != greedy.token_ids[:9]
    assert len(seeded[0].token_ids) == 9
    calm = engine.generate(PROMPT, generation_config=config, temperature=0.0)
    assert calm.token_ids == greedy.token_ids[:5]
    assert (config.max_new_tokens, config.do_sample, config.temperature) == (5, True, 40.0)


@pytest.mark.parametrize("changes", [{"use_cache": False}, {"cache_implementation": "static"}], ids=str)
def test_config_cannot_take_the_fused_cache_away(engine: Any, greedy: Generation, changes: dict[str, Any]) -> None:
    config = GenerationConfig(max_new_tokens=8, pad_token_id=0, **changes)
    assert engine.generate(PROMPT, generation_config=config).token_ids == greedy.token_ids[:8]


def test_end_that_would_be_forced_is_refused_by_name() -> None:
    forced = {"forced_eos_token_id": 2}
    for options in ({"additional_kwargs": forced}, {"generation_config": GenerationConfig(**forced)}):
        with pytest.raises(ConfigError, match="forced_eos_token_id"):
            DecodeOptions(**options)


def test_logits_processor_is_applied_to_the_first_token_too(engine: Any, greedy: Generation) -> None:
    seen: list[int] = []

    class Ban(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(input_ids.shape[1])
            scores = scores.clone()
            scores[:, greedy.token_ids[0]] = -float("inf")
            return scores

    answer = engine.generate(PROMPT, max_new_tokens=4, logits_processor=[Ban()])
    tokens = len(answer.report.input_ids)
    assert seen == [tokens, tokens + 1, tokens + 2, tokens + 3]
    assert greedy.token_ids[0] not in answer.token_ids


# Bad values ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", float("nan")),
        ("top_p", 1.1),
        ("do_sample", "yes"),
        ("top_k", 5),
        ("repetition_penalty", 8.7e-167),  # scores divided by it are not finite
        ("stop", ["a", ""]),
        ("seed", 1.5),
    ],
)
def test_bad_options_name_field_value_and_remedy(engine: Any, name: str, value: object) -> None:
    for call in (engine.generate, engine.stream):
        with pytest.raises(ConfigError) as caught:
            call(PROMPT, **{name: value})
        assert caught.value.field == name
        assert f"{name}=" in str(caught.value)
        assert "use " in str(caught.value)
