"""Thoughts of reasoning models: split from answers token by token, bounded, and never what an answer is held to."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from cacheblend_rag import BlendEngine, Prompt
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.prompt.chat import render_turns
from cacheblend_rag.prompt.thoughts import (
    FAMILIES,
    Thought,
    ThoughtMarks,
    has_switch,
    marks_of,
    splitter_of,
    switched,
    thinks,
)
from tests import tiny
from tests.pairwise import others_slow
from tests.probes import CHUNKS
from tests.thinking import KINDS, Writer, thinking_engine, thinking_tokenizer

THOUGHT = "Leaves fell. I must count them: one, two.\nSo two."
ANSWER = "It fell. A <think> in </think> an answer is text."
TURNS = [{"role": "user", "content": "What fell behind <think>?"}]


def written(kind: str, thought: str = THOUGHT, answer: str = ANSWER) -> str:
    return KINDS[kind].thought.format(t=thought, a=answer)


def begun(kind: str) -> str:
    """How a thought begins that never ends."""
    return KINDS[kind].thought.partition("{t}")[0]


def asked(engine: BlendEngine, reasoning: Any = True, **more: Any) -> str:
    return render_turns(engine.tokenizer, TURNS, reasoning=reasoning, **more)


# Splitting ----------------------------------------------------------------------------------


def split_thought(marks: ThoughtMarks, text: str, in_thought: bool = False) -> tuple[str, str]:
    """The thought and the answer of a whole text, its marks included."""
    splitter = splitter_of(marks, in_thought)
    pieces = [*splitter.feed(text), *splitter.end()]
    thought = "".join(piece for piece in pieces if isinstance(piece, Thought))
    return thought, "".join(piece for piece in pieces if not isinstance(piece, Thought))


def test_every_family_is_known_by_its_template_or_its_tokens() -> None:
    for kind in KINDS:
        tokenizer = thinking_tokenizer(kind)
        marks = marks_of(tokenizer)
        assert marks.known
        assert marks.channels is (kind == "gpt-oss")
        assert has_switch(tokenizer) is KINDS[kind].switch
        assert split_thought(marks, written(kind), marks.opened_by(render_turns(tokenizer, TURNS, reasoning=True))) == (
            THOUGHT,
            ANSWER,
        )


def test_however_an_answer_is_cut_its_pieces_are_the_same() -> None:
    """Marks in a row, cut anywhere: pieces join to what the whole text gives, and no mark is handed out early."""
    for marks in FAMILIES:
        chance = random.Random(len(marks.begin[0]))
        parts = [
            *marks.begin,
            *marks.end,
            *filter(None, marks.answer),
            marks.opening,
            marks.closing,
            " ",
            "\n",
            "leaf",
            "<",
        ]
        for _ in range(300):
            text = "".join(chance.choice(parts) for _ in range(chance.randint(1, 6)))
            in_thought = chance.random() < 0.3
            splitter, pieces, at = splitter_of(marks, in_thought), list[str](), 0
            while at < len(text):
                size = chance.choice((1, 1, 2, 5))
                pieces += splitter.feed(text[at : at + size])
                at += size
            pieces += splitter.end()
            joined = tuple("".join(one for one in pieces if isinstance(one, Thought) is kind) for kind in (True, False))
            assert joined == split_thought(marks, text, in_thought), text


def test_text_of_a_model_that_marks_no_thoughts_is_not_known_to_think() -> None:
    assert not marks_of(tiny.tokenizer()).known


def test_switches_say_what_each_template_takes() -> None:
    effort = "{{ reasoning_effort }}"
    listed = "{% if reasoning_effort not in ['none', 'high'] %}{% endif %}"
    assert switched("{{ enable_thinking }}", "low") == {"enable_thinking": True}
    assert switched("{{ thinking }} {{ messages }}", False) == {"thinking": False}
    assert [switched(effort, level) for level in (False, True, "high")] == [
        {"reasoning_effort": level} for level in ("low", "medium", "high")
    ]
    assert [switched(listed, level) for level in (False, True, "low")] == [
        {"reasoning_effort": level} for level in ("none", "high", "high")
    ]
    assert switched("{{ thinking_budget }}", False) == {"thinking_budget": 0}
    assert switched("{{ message.thinking }} a thinking model", True) == {}
    assert thinks(False, {"enable_thinking": True}) is True
    assert thinks("high", {"enable_thinking": False}) is False
    assert thinks(False, {"reasoning_effort": "high"}) == "high"


def test_template_that_reads_words_is_told_by_a_word() -> None:
    tokenizer = thinking_tokenizer("nemotron")
    assert "<think>? /no_think\n" in render_turns(tokenizer, TURNS)
    assert "<think>? /think\n" in render_turns(tokenizer, TURNS, reasoning=True)


def test_earlier_thoughts_are_shown_to_templates_that_read_them() -> None:
    tokenizer = thinking_tokenizer("qwen3")
    turns = [*TURNS, {"role": "assistant", "content": "It fell.", "reasoning_content": "Hm."}, *TURNS]
    assert "Hm." not in render_turns(tokenizer, turns)
    tokenizer.chat_template += "{% for m in messages %}{{ m.reasoning_content or '' }}{% endfor %}"
    assert render_turns(tokenizer, turns).endswith("Hm.")


# Answering ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_thoughts_are_apart_and_counted(kind: str) -> None:
    engine = thinking_engine(kind)
    options = {"logits_processor": [Writer(engine.tokenizer, written(kind))], "reasoning": True}
    stream = engine.stream(asked(engine), max_new_tokens=80, **options)
    stream.with_thoughts = True
    pieces = list(stream)
    whole = stream.result
    assert whole is not None
    assert (whole.thought, whole.text, whole.report.finish_reason) == (THOUGHT, ANSWER, "stop")
    answer = engine.tokenizer.encode(ANSWER, add_special_tokens=False)
    assert abs(whole.report.generated_tokens - whole.report.thought_tokens - len(answer) - 1) <= 12  # a mark behind it
    if kind == "qwen3":
        plain = engine.stream(asked(engine), max_new_tokens=80, **options)
        assert "".join(plain) == ANSWER, "who knows of no thoughts gets none"
    kinds = [isinstance(one, Thought) for one in pieces]
    assert kinds == sorted(kinds, reverse=True)
    assert "".join(one for one in pieces if isinstance(one, Thought)) == THOUGHT
    assert kinds.count(True) > 5, "it comes as it is thought"


@pytest.mark.parametrize("kind", others_slow([*KINDS], ("qwen3", "gpt-oss")))
def test_thought_that_never_ends_is_ended_and_the_answer_goes_on(kind: str) -> None:
    engine = thinking_engine(kind)
    writer = Writer(engine.tokenizer, begun(kind), forever=" old")
    answer = engine.generate(
        asked(engine), max_new_tokens=5, logits_processor=[writer], reasoning=True, reasoning_tokens=30
    )
    assert answer.thought.split() == ["old"] * answer.thought.count("old") != []
    assert (answer.text.split(), answer.report.finish_reason) == (["old"] * 5, "length")
    assert answer.report.generated_tokens == answer.report.thought_tokens + 5
    assert answer.report.thought_tokens <= 30 + len(engine.tokenizer.encode(marks_of(engine.tokenizer).closing))
    assert "old" in engine.generate(asked(engine), max_new_tokens=2, logits_processor=[writer]).thought, (
        "by default, too"
    )


def test_stop_strings_end_the_answer_alone() -> None:
    engine = thinking_engine("qwen3")
    writer = Writer(engine.tokenizer, written("qwen3", answer="It fell. So what?"))
    for stop, text in (
        ("fell", "It "),
        ("So", "It fell. "),
        ("\n", "It fell. So what?"),
        ("<think>", "It fell. So what?"),
    ):
        answer = engine.generate(asked(engine), max_new_tokens=60, stop=stop, logits_processor=[writer], reasoning=True)
        assert (answer.thought, answer.text) == (THOUGHT, text)


def test_window_leaves_the_answer_its_room() -> None:
    model = tiny.model(num_hidden_layers=2, max_position_embeddings=100, vocab_size=420)
    engine = BlendEngine(model, thinking_tokenizer("qwen3"))
    writer = Writer(engine.tokenizer, "<think>", forever=" old")
    prompt = asked(engine)
    answer = engine.generate(prompt, max_new_tokens=10, logits_processor=[writer], reasoning="high")
    assert answer.text.split() == ["old"] * 10
    assert answer.report.prompt_tokens + answer.report.generated_tokens <= 100
    assert answer.thought


@pytest.mark.parametrize(
    "kind", others_slow(["qwen3", "smollm3", "deepseek", "gpt-oss", "granite-3.3", "mistral"], ("qwen3", "gpt-oss"))
)
@pytest.mark.parametrize("reasoning", [True, False])
def test_schemas_hold_for_the_answer_and_not_for_the_thought(kind: str, reasoning: bool) -> None:
    pytest.importorskip("llguidance")
    engine = thinking_engine(kind)
    leaf = {"type": "object", "properties": {"leaf": {"enum": ["red"]}}, "required": ["leaf"]}
    grammar = engine.grammar({**leaf, "additionalProperties": False})
    answer = engine.generate(
        asked(engine, reasoning), max_new_tokens=60, grammar=grammar, reasoning=reasoning, reasoning_tokens=25
    )
    assert json.loads(answer.text) == {"leaf": "red"}
    assert (answer.report.thought_tokens > 0) is (reasoning or kind == "deepseek")
    writer = Writer(engine.tokenizer, begun(kind) + "Hm {", forever=" old")
    if reasoning and kind != "smollm3":
        stopped = engine.generate(
            asked(engine),
            max_new_tokens=60,
            grammar=grammar,
            reasoning=True,
            reasoning_tokens=40,
            logits_processor=[writer],
        )
        assert (json.loads(stopped.text), "old" in stopped.thought) == ({"leaf": "red"}, True)


def test_verification_compares_ids_and_shows_answers() -> None:
    engine = thinking_engine("qwen3", verify="always", recompute_ratio=0.0, selection="none")
    engine.warm(CHUNKS)
    writer = Writer(engine.tokenizer, written("qwen3"))
    prompt = Prompt("Read this:", CHUNKS, asked(engine))
    answer = engine.generate(prompt, max_new_tokens=60, logits_processor=[writer], reasoning=True)
    assert answer.verification.status == "verified"
    assert answer.verification.kept_tokens == answer.report.generated_tokens > answer.report.thought_tokens > 0
    free = engine.generate(prompt, max_new_tokens=6, reasoning=True, reasoning_tokens=8)
    full = engine.generate(prompt, max_new_tokens=6, reasoning=True, reasoning_tokens=8, verify="held")
    assert free.token_ids == full.token_ids


def test_bad_values_name_their_remedy() -> None:
    engine = thinking_engine("qwen3")
    for bad in ("loud", 3, "What fell?"):
        with pytest.raises(ConfigError, match="use True or 'on', False or 'off', 'low'"):
            engine.generate("x", reasoning=bad)
    with pytest.raises(ConfigError, match="reasoning_tokens"):
        engine.generate("x", reasoning_tokens=-1)
    plain = BlendEngine(tiny.model(num_hidden_layers=1), tiny.tokenizer())
    with pytest.raises(ConfigError, match="use a model that thinks"):
        plain.generate("x", reasoning=True)
