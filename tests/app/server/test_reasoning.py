"""Thoughts over HTTP: in conversations, responses, completions and questions, streamed and whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests import tiny
from tests.app.server.common import Running, process_logits, read_events, running, settings_for
from tests.thinking import KINDS, Writer, thinking_tokenizer

THOUGHT, ANSWER = "Leaves fell, <b> I think.", "It fell. A <think> is text."
SAID = KINDS["qwen3"].thought.format(t=THOUGHT, a=ANSWER)
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"leaf": "red"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def thinker(docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server over a model that thinks."""
    folder = tmp_path_factory.mktemp("thinker")
    tiny.model(num_hidden_layers=2, max_position_embeddings=4096, vocab_size=420).save_pretrained(folder / "model")
    thinking_tokenizer("qwen3").save_pretrained(folder / "model")
    with running(settings_for(folder / "model", docs, folder / "data")) as made:
        yield made


@pytest.fixture
def client(thinker: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=thinker.url + "/v1", api_key="x", max_retries=0) as made:
        yield made


@pytest.fixture
def writer(thinker: Running, monkeypatch: pytest.MonkeyPatch) -> Writer:
    """Lets the model think, and say something."""
    made = Writer(thinker.service.engine.tokenizer, SAID)
    process_logits(monkeypatch, made)
    return made


@pytest.fixture
def asked(client: openai.OpenAI) -> dict[str, Any]:
    name = client.models.list().data[0].id
    return {"model": name, "messages": [{"role": "user", "content": "Which leaf?"}], "max_tokens": 60}


def test_conversation_has_thought_beside_answer(client: openai.OpenAI, asked: dict[str, Any], writer: Writer) -> None:
    field: dict[str, Any] = {"reasoning_effort": "low"}
    whole = client.chat.completions.create(**asked, **field)
    message = whole.choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == (ANSWER, THOUGHT, THOUGHT)
    thought = whole.usage.completion_tokens_details.reasoning_tokens
    assert 0 < thought < whole.usage.completion_tokens
    deltas = [
        one.choices[0].delta.model_extra | {"content": one.choices[0].delta.content}
        for one in client.chat.completions.create(**asked, **field, stream=True)
        if one.choices
    ]
    assert "".join(one.get("reasoning_content", "") for one in deltas) == THOUGHT
    assert "".join(one["content"] or "" for one in deltas) == ANSWER
    assert writer.prompts[-1].endswith("[assistant] ")


def test_thoughts_are_off_unless_asked_for(client: openai.OpenAI, asked: dict[str, Any], writer: Writer) -> None:
    for more in ({}, {"reasoning_effort": "none"}, {"extra_body": {"reasoning": {"enabled": False}}}):
        client.chat.completions.create(**asked, **more)
        assert writer.prompts[-1].endswith("</think>\n\n")
    client.chat.completions.create(**asked, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    assert writer.prompts[-1].endswith("[assistant] ")


def test_calls_stand_behind_the_thought_and_never_in_it(
    client: openai.OpenAI, asked: dict[str, Any], thinker: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = KINDS["qwen3"].thought.format(t=f"{THOUGHT} {CALL}", a=CALL)
    process_logits(monkeypatch, Writer(thinker.service.engine.tokenizer, said))
    options = {**asked, "max_tokens": 120, "tools": [TOOL], "reasoning_effort": "medium"}
    made = client.chat.completions.create(**options).choices[0]
    assert [call.function.name for call in made.message.tool_calls] == ["look_up"]
    assert (made.message.content, made.message.reasoning) == (None, f"{THOUGHT} {CALL}")
    assert made.finish_reason == "tool_calls"


def test_response_has_its_thought_as_an_item(
    client: openai.OpenAI, asked: dict[str, Any], writer: Writer, thinker: Running
) -> None:
    options: dict[str, Any] = {"model": asked["model"], "input": "Which leaf?", "max_output_tokens": 60}
    whole = client.responses.create(**options, reasoning={"effort": "high"})
    thought, message = whole.output
    assert (thought.type, thought.content[0].type, thought.content[0].text) == ("reasoning", "reasoning_text", THOUGHT)
    assert (message.type, whole.output_text) == ("message", ANSWER)
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert whole.reasoning.effort == "high"
    events = list(client.responses.create(**options, reasoning={"effort": "low"}, stream=True))
    texts = {
        kind: "".join(one.delta for one in events if one.type == f"response.{kind}.delta")
        for kind in ("reasoning_text", "output_text")
    }
    assert texts == {"reasoning_text": THOUGHT, "output_text": ANSWER}
    added = [(one.output_index, one.item.type) for one in events if one.type == "response.output_item.added"]
    done = [(one.output_index, one.item.type) for one in events if one.type == "response.output_item.done"]
    assert added == done == [(0, "reasoning"), (1, "message")]
    kinds = [one.type for one in events]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert [one.sequence_number for one in events] == list(range(len(events)))
    turns = [{"role": "user", "content": "Which leaf?"}, *whole.output, {"role": "user", "content": "And then?"}]
    client.responses.create(**{**options, "input": turns})
    assert THOUGHT not in writer.prompts[-1]
    assert ANSWER in writer.prompts[-1]


def test_thought_that_is_cut_leaves_an_answer_without_words(
    client: openai.OpenAI, asked: dict[str, Any], thinker: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    process_logits(monkeypatch, Writer(thinker.service.engine.tokenizer, "<think>Hm."))
    whole = client.responses.create(model=asked["model"], input="Which?", reasoning={"effort": "low"})
    assert ([one.type for one in whole.output], whole.output_text) == (["reasoning", "message"], "")


def test_completions_have_the_answer_as_text(client: openai.OpenAI, asked: dict[str, Any], writer: Writer) -> None:
    options = {"model": asked["model"], "prompt": "Which leaf?", "max_tokens": 60}
    whole = client.completions.create(**options).choices[0]
    assert (whole.text, whole.reasoning) == (ANSWER, THOUGHT)
    choices = [one.choices[0] for one in client.completions.create(**options, stream=True)]
    assert "".join(one.text for one in choices) == ANSWER
    assert "".join(one.model_extra.get("reasoning", "") for one in choices) == THOUGHT


def test_questions_have_the_thought_apart(thinker: Running, writer: Writer) -> None:
    with httpx.Client(base_url=thinker.url, timeout=60) as http:
        state = http.get("/api/state").json()
        assert (state["models"][0]["thinks"], state["settings"]["reasoning"]) == (True, False)
        address = "/api/ask"
        body = {"question": "Which leaf fell?", "max_tokens": 60}
        whole = http.post(address, json={**body, "stream": False, "reasoning": True}).json()
        assert (whole["answer"], whole["thought"]) == (ANSWER, THOUGHT)
        assert whole["report"]["thought_tokens"] > 0
        assert writer.prompts[-1].endswith("[assistant] ")
        events = read_events(http.post(address, json={**body, "reasoning": "low"}).text)
        for kind, text in (("thought", THOUGHT), ("token", ANSWER)):
            assert "".join(data["text"] for name, data in events if name == kind) == text
        http.post(address, json={**body, "stream": False})
        assert writer.prompts[-1].endswith("</think>\n\n")


def test_model_without_thoughts_refuses_to_think(chatty: Running) -> None:
    with httpx.Client(base_url=chatty.url, timeout=60) as http:
        state = http.get("/api/state").json()
        assert state["models"][0]["thinks"] is False
        address = "/api/ask"
        refused = http.post(address, json={"question": "Which?", "reasoning": True})
        assert refused.status_code == 400
        assert "use a model that thinks" in refused.text
