"""OpenAI's responses, asked for by its client and by LangChain's ChatOpenAI, unmodified."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema_rs
import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

from cacheblend_rag.app.server.settings import Limits
from tests.app.server.common import Running, drop_last_prompts, passage, process_logits, running, settings_for
from tests.integrations.langchain.models import Script

KEY = "sk-none-needed-here"
TOOL = {"type": "function", "name": "look_up", "description": "Look a leaf up.", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "look_up", "arguments": {"leaf": "red"}}</tool_call>'
EVENTS = TypeAdapter[Any](ResponseStreamEvent)


class Leaf(BaseModel):
    """A leaf."""

    kind: Literal["oak", "ash"]
    length: int = Field(ge=3, le=9)


@pytest.fixture
def client(chatty: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=chatty.url + "/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture
def asked(chatty: Running) -> dict[str, Any]:
    return {"model": chatty.service.model_name, "input": "Which leaf fell?"}


def chat_openai(server: Running, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=server.url + "/v1",
        api_key=KEY,
        model=server.service.model_name,
        use_responses_api=True,
        max_retries=0,
        default_headers={"Connection": "close"},  # LangChain keeps connections for all models of a process
        **{"max_tokens": 6, **more},
    )


def says(patch: pytest.MonkeyPatch, server: Running, first: str, then: str | None = None) -> None:
    """Let the model write one text, and another one once a tool has answered, instead of what it wrote before."""
    patch.undo()
    script = Script(server.service.engine.tokenizer, lambda prompt: then if "[tool]" in prompt else first)
    process_logits(patch, script)


def streamed(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, each of which is what OpenAI says it is."""
    events = []
    with httpx.stream("POST", f"{url}/v1/responses", json={**body, "stream": True}, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for block in "".join(answer.iter_text()).split("\n\n")[:-1]:
            name, data = block.split("\n")
            one = json.loads(data.removeprefix("data: "))
            assert name == f"event: {one['type']}"
            assert EVENTS.validate_python(one, strict=True).type == one["type"]
            events.append(one)
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    return events


def without_times(response: dict[str, Any]) -> dict[str, Any]:
    """The common part of two responses to one question."""
    plain = {k: v for k, v in response.items() if k not in ("id", "created_at", "completed_at", "cacheblend")}
    plain["output"] = [{k: v for k, v in one.items() if k not in ("id", "call_id")} for one in plain["output"]]
    return plain


def test_response_equals_the_answer_of_a_chat(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    answer = client.responses.create(**asked, instructions="Be brief.", max_output_tokens=6, metadata={"run": "7"})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which leaf fell?"}]
    same = client.chat.completions.create(model=asked["model"], messages=messages, max_tokens=6)
    assert Response.model_validate(answer.model_dump(), strict=True)
    assert answer.output_text == same.choices[0].message.content
    assert answer.usage.input_tokens == same.usage.prompt_tokens
    assert answer.usage.output_tokens == same.usage.completion_tokens
    assert answer.usage.total_tokens == same.usage.total_tokens
    assert answer.id.startswith("resp_")
    assert (answer.output[0].type, answer.output[0].role) == ("message", "assistant")
    cut = same.choices[0].finish_reason == "length"
    assert answer.status == answer.output[0].status == ("incomplete" if cut else "completed")
    assert (answer.instructions, answer.metadata, answer.max_output_tokens) == ("Be brief.", {"run": "7"}, 6)
    assert answer.model_extra["store"] is False
    assert answer._request_id.startswith("req_")


def test_answer_is_complete_or_says_why_not(
    client: openai.OpenAI, asked: dict[str, Any], chatty: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, chatty, "An oak leaf.")
    whole = client.responses.create(**asked, max_output_tokens=60)
    assert (whole.output_text, whole.status, whole.incomplete_details) == ("An oak leaf.", "completed", None)
    assert whole.completed_at >= whole.created_at
    cut = client.responses.create(**asked, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert "An oak leaf.".startswith(cut.output_text)
    says(monkeypatch, chatty, "")
    empty = client.responses.create(**asked)
    assert (empty.status, empty.output[0].content[0].text) == ("completed", "")


def test_the_events_of_a_text(chatty: Running, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, chatty, "An oak leaf.")
    events = streamed(chatty.url, {**asked, "max_output_tokens": 60})
    kinds = [one["type"].removeprefix("response.") for one in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 1
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    done, (last,) = events[-4], events[-1]["response"]["output"]
    written = "".join(one.get("delta", "") for one in events)
    assert written == done["text"] == last["content"][0]["text"] == "An oak leaf."
    assert {one["item_id"] for one in events if "item_id" in one} == {last["id"]}
    assert {one["response"]["id"] for one in events if "response" in one} == {events[0]["response"]["id"]}
    assert events[0]["response"]["status"] == "in_progress"
    whole = httpx.post(f"{chatty.url}/v1/responses", json={**asked, "max_output_tokens": 60}).json()
    assert without_times(events[-1]["response"]) == without_times(whole)
    assert streamed(chatty.url, {**asked, "max_output_tokens": 2})[-1]["type"] == "response.incomplete"


def test_the_events_of_calls(chatty: Running, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, chatty, f"Let me see.\n{CALL}\nSo it is.\n{CALL}")
    events = streamed(chatty.url, {**asked, "tools": [TOOL], "max_output_tokens": 230})
    text, first, between, second = events[-1]["response"]["output"]
    assert text["content"][0]["text"] == "Let me see."
    assert between["content"][0]["text"].strip() == "So it is."
    for index, item in ((1, first), (3, second)):
        own = [one for one in events if one.get("output_index") == index]
        pieces = own[1:-2]
        assert [one["type"].removeprefix("response.") for one in own] == [
            "output_item.added",
            *["function_call_arguments.delta"] * len(pieces),
            "function_call_arguments.done",
            "output_item.done",
        ]
        assert len(pieces) > 2, "as the model writes them"
        assert own[0]["item"] == {**item, "arguments": "", "status": "in_progress"}
        assert "".join(one["delta"] for one in pieces) == own[-2]["arguments"] == item["arguments"] == '{"leaf": "red"}'
        assert own[-1]["item"] == item
        assert (item["name"], item["status"]) == ("look_up", "completed")
    assert len({first["call_id"], second["call_id"], first["id"], second["id"]}) == 4
    one = streamed(chatty.url, {**asked, "tools": [TOOL], "max_output_tokens": 190, "parallel_tool_calls": False})
    assert [item["type"] for item in one[-1]["response"]["output"]] == ["message", "function_call", "message"]
    says(monkeypatch, chatty, CALL)
    alone = streamed(chatty.url, {**asked, "tools": [TOOL], "max_output_tokens": 90})
    assert [item["type"] for item in alone[-1]["response"]["output"]] == ["function_call"]
    cut = streamed(chatty.url, {**asked, "tools": [TOOL], "max_output_tokens": 30})
    assert cut[-1]["type"] == "response.incomplete"
    assert cut[-1]["response"]["output"][0]["status"] == "incomplete"


def test_turns_with_calls_go_on_from_what_came_back(
    client: openai.OpenAI, asked: dict[str, Any], chatty: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, chatty, "Let me see. " + CALL, "It is red.")
    turns: list[Any] = [{"role": "user", "content": "Which leaf fell?"}]
    options = {"model": asked["model"], "tools": [TOOL], "max_output_tokens": 120}
    first = client.responses.create(input=turns, top_logprobs=1, **options)
    turns += first.output  # as they came: with ids, states and log-probabilities
    called = [one for one in first.output if one.type == "function_call"]
    turns += [{"type": "function_call_output", "call_id": one.call_id, "output": "red"} for one in called]
    second = client.responses.create(input=turns, **options)
    assert len(called) == 1
    assert (second.output_text, second.status) == ("It is red.", "completed")
    call = called[0]
    function = {"name": "look_up", "arguments": call.arguments}
    messages = [
        turns[0],
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "red"},
    ]
    tools = [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}]
    same = client.chat.completions.create(model=asked["model"], messages=messages, tools=tools, max_tokens=120)
    assert second.usage.input_tokens == same.usage.prompt_tokens, "a message and its call are one turn"
    turns += [*second.output, {"role": "user", "content": "And then?"}]
    assert client.responses.create(input=turns, **options).output_text == "It is red."


def test_forced_call_follows_its_schema(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    schema = Leaf.model_json_schema()
    tools = [{**TOOL, "parameters": schema}]
    choice = {"type": "function", "name": "look_up"}
    made = client.responses.create(**asked, tools=tools, tool_choice=choice, temperature=1.5, max_output_tokens=90)
    (call,) = made.output
    assert call.name == "look_up"
    assert jsonschema_rs.is_valid(schema, json.loads(call.arguments)), call.arguments
    none = client.responses.create(**asked, tools=tools, tool_choice="none", max_output_tokens=6)
    assert [one.type for one in none.output] == ["message"]


def test_answers_follow_their_form(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    with client.responses.stream(**asked, text_format=Leaf, max_output_tokens=90) as stream:
        kinds = [one.type for one in stream]
        assert stream.get_final_response().output_parsed.kind in ("oak", "ash")
    assert kinds[-1] == "response.completed"
    told = client.responses.create(**asked, text={"format": {"type": "json_object"}}, max_output_tokens=6)
    assert told.output_text.startswith("{")
    assert told.text.format.type == "json_object"


def test_log_probabilities_are_a_conversations(client: openai.OpenAI, asked: dict[str, Any], chatty: Running) -> None:
    messages = [{"role": "user", "content": "Which leaf fell?"}]
    same = client.chat.completions.create(
        model=asked["model"], messages=messages, max_tokens=8, logprobs=True, top_logprobs=2
    )
    wanted = [one.model_dump() for one in same.choices[0].logprobs.content]
    body = {**asked, "max_output_tokens": 8, "top_logprobs": 2}
    events = streamed(chatty.url, body)
    assert [token for one in events if "delta" in one for token in one["logprobs"]] == wanted
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == wanted
    include = ["message.output_text.logprobs"]
    alone = client.responses.create(**asked, max_output_tokens=8, include=include).output[0].content[0].logprobs
    assert [one.logprob for one in alone] == [one["logprob"] for one in wanted]
    assert all(one.top_logprobs == [] for one in alone)


def test_unsupported_fields_are_refused(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    picture = [{"type": "input_image", "image_url": "http://localhost/x.png"}]
    for field, more in {
        "store": {"store": True},
        "previous_response_id": {"previous_response_id": "resp_1"},
        "conversation": {"conversation": "conv_1"},
        "background": {"background": True},
        "reasoning.effort": {"reasoning": {"effort": "low"}},
        "prompt": {"prompt": {"id": "pmpt_1"}},
        "text.format.schema": {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
        "text.format": {"text": {"format": {"type": "json_object"}}, "tools": [TOOL], "tool_choice": "required"},
        "max_output_tokens": {"max_output_tokens": 100_000},
        "tools.0.type": {"tools": [{"name": "look_up"}]},
        "tool_choice": {"tool_choice": "required"},
        "tool_choice.type": {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "input": {"input": []},
        "input.0": {"input": [{"type": "item_reference", "id": "msg_1"}]},
        "input.0.content.0.type": {"input": [{"role": "user", "content": picture}]},
        "stream_options": {"stream_options": {"include_obfuscation": False}},
        "n": {"extra_body": {"n": 2}},
    }.items():
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**{**asked, **more})
        assert (caught.value.param, caught.value.type) == (field, "invalid_request_error"), caught.value
        assert field in caught.value.body["message"]
    strict = client.responses.create(**asked, tools=[{**TOOL, "strict": True}], max_output_tokens=4)
    assert strict.tools[0].strict is True
    with pytest.raises(openai.BadRequestError, match=r"send earlier turns in input"):
        client.responses.create(**asked, store=True)
    with pytest.raises(openai.BadRequestError, match="send a text"):
        client.responses.create(**asked | {"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]})
    with pytest.raises(openai.BadRequestError, match="context window is 2,048"):
        client.responses.create(**asked, max_output_tokens=2048)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-9", input="Which?")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_fields_that_ask_for_nothing_are_accepted(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    nothing = {
        **{"store": False, "background": False, "include": [], "truncation": "disabled", "service_tier": "auto"},
        **{"tools": [], "tool_choice": "auto", "previous_response_id": None, "reasoning": None, "user": "ada"},
        **{"text": {"format": {"type": "text"}, "verbosity": "medium"}, "safety_identifier": "ada"},
        "prompt_cache_key": "leaves",
    }
    assert client.responses.create(**asked, **nothing, max_output_tokens=2).output


def test_request_as_codex_sends_it_is_answered(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    said = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Which leaf fell?"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        {"role": "assistant", "phase": "commentary", "content": [{"type": "output_text", "text": "Hm.", "parsed": {}}]},
        {"type": "function_call", "name": "look_up", "arguments": "", "call_id": "1", "caller": {"type": "direct"}},
        {"type": "function_call_output", "call_id": "1", "output": "It is red.", "namespace": "leaves"},
    ]
    others = [{"type": "web_search", "external_web_access": True}, {"type": "custom", "name": "patch", "format": {}}]
    body: dict[str, Any] = {
        "input": said,
        "instructions": "You are Codex.",
        "tools": [others[0], TOOL, others[1], {"type": "local_shell"}],
        **{"tool_choice": "auto", "parallel_tool_calls": False, "reasoning": {"summary": "auto"}, "store": False},
        **{"include": ["reasoning.encrypted_content"], "prompt_cache_key": "leaves", "service_tier": "priority"},
        "text": {"verbosity": "low"},
        "extra_body": {"client_metadata": {"x-codex-installation-id": "1"}, "prompt_cache_retention": "24h"},
    }
    answer = client.responses.create(**{**asked, **body}, max_output_tokens=4)
    assert [one.name for one in answer.tools] == [TOOL["name"]]
    assert answer.output
    last = list(client.responses.create(**{**asked, **body}, max_output_tokens=4, stream=True))[-1]
    assert last.response.usage.input_tokens == answer.usage.input_tokens


def test_failed_stream_says_so(model: Path, docs: Path, tmp_path: Path) -> None:
    settings = settings_for(model, docs, tmp_path, limits=Limits(answer_seconds=0.5))
    with running(settings) as server, pytest.MonkeyPatch.context() as patch:

        def slow(input_ids: Any, scores: Any) -> Any:
            time.sleep(0.1)  # the pace of a slow model: it is never in time
            scores[:, 2] = float("-inf")
            return scores

        process_logits(patch, slow)
        body = {"model": server.service.model_name, "input": "Which?", "max_output_tokens": 400}
        error, failed = streamed(server.url, body)[-2:]
        assert (error["type"], error["code"], error["param"]) == ("error", "timeout", None)
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        assert error["message"] == failed["response"]["error"]["message"]
        with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:
            with pytest.raises(openai.APIError, match=r"not complete after 0\.5 s"):
                list(client.responses.create(**body, stream=True))
            completion: dict[str, Any] = {"model": body["model"], "prompt": "the", "n": 8, "max_tokens": 2}
            with pytest.raises(openai.APIStatusError, match=r"not complete after 0\.5 s") as caught:
                client.completions.create(**completion)  # all answers share the time
            with pytest.raises(openai.APIError, match=r"not complete after 0\.5 s"):
                list(client.completions.create(**completion, stream=True))
        assert caught.value.status_code == 504


async def test_langchains_chat_openai(chatty: Running) -> None:
    llm = chat_openai(chatty)
    whole = llm.invoke("Which leaf fell?")
    assert whole.usage_metadata["output_tokens"] <= 6
    chunks = [one async for one in llm.astream("Which leaf fell?")]
    assert "".join(one.text for one in chunks) == whole.text
    assert [one.usage_metadata for one in chunks if one.usage_metadata] == [whole.usage_metadata]
    again = llm.invoke([HumanMessage("Which leaf fell?"), whole, HumanMessage("And then?")])
    assert again.usage_metadata["input_tokens"] > whole.usage_metadata["input_tokens"]


def test_corrected_response_has_the_answer_as_it_is_now(client: openai.OpenAI, chatty: Running) -> None:
    """By reuse alone a tiny random model says other words than by full prefill."""
    asked: dict[str, Any] = {"model": chatty.service.model_name, "input": "Which leaf fell?", "max_output_tokens": 12}
    asked["include"] = ["message.output_text.logprobs"]
    body: dict[str, Any] = {"documents": [passage(152), passage(153)], "selection": "none"}
    client.responses.create(**asked, extra_body=body)
    chatty.service.engine.flush()
    drop_last_prompts(chatty.service)
    draft = client.responses.create(**asked, extra_body=body)
    full = client.responses.create(**asked, extra_body={**body, "selection": "all"})
    assert draft.output_text != full.output_text
    always = {**body, "verify": "always"}
    found = client.responses.create(**asked, extra_body=always)
    drop_last_prompts(chatty.service)
    events = streamed(chatty.url, {**asked, **always})
    last = Response.model_validate(events[-1]["response"])
    for one in (found, last):
        assert one.output_text == full.output_text
        assert one.model_extra is not None
        assert one.model_extra["cacheblend"][0]["verification"]["status"] == "corrected"
        tokens, expected = (each.output[0].content[0].logprobs for each in (one, full))  # type: ignore[union-attr]
        assert [token.token for token in tokens] == [token.token for token in expected]
    said = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
    assert "".join(said) == draft.output_text, "a stream cannot take its words back"
    (done,) = [one for one in events if one["type"] == "response.output_text.done"]
    assert done["text"] == full.output_text
