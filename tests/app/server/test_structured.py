"""Answers by a JSON schema over HTTP, and schemas that are made to stop the server."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest

from cacheblend_rag.app.server.security import grammars
from cacheblend_rag.app.server.security.grammars import SchemaCheck
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.engine.grammar import Form
from cacheblend_rag.errors import ConfigError
from tests.app.server.common import Running, put_together

KEY = "sk-none-needed-here"
LEAF = {
    "type": "object",
    "properties": {"kind": {"enum": ["oak", "ash"]}, "length": {"type": "integer", "minimum": 3, "maximum": 9}},
    "required": ["kind", "length"],
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": LEAF}} for name in ("look_up", "measure")]
# Hours or all memory, if nothing stops it.
ENDLESS = {"allOf": [{"type": "string", "pattern": f"a{{{n}}}.*"} for n in range(1, 60)]}


@pytest.fixture
def client(chatty: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=chatty.url + "/v1", api_key=KEY, max_retries=0, timeout=120) as made:
        yield made


def asked(client: openai.OpenAI, schema: Any = LEAF, **more: Any) -> dict[str, Any]:
    told = {"type": "json_schema", "json_schema": {"name": "leaf", "schema": schema, "strict": True}}
    messages = [{"role": "user", "content": "Which leaf fell?"}]
    name = client.models.list().data[0].id
    return {"model": name, "messages": messages, "response_format": told, "max_tokens": 90, "seed": 4, **more}


def test_answers_follow_their_schema(client: openai.OpenAI) -> None:
    how: dict[str, Any] = {"temperature": 1.7, "logprobs": True, "top_logprobs": 2, "logit_bias": {2: 100}}
    whole = client.chat.completions.create(**asked(client, n=2, **how)).choices
    pieces = {0: "", 1: ""}
    reasons = {}
    for chunk in client.chat.completions.create(**asked(client, n=2, stream=True, **how)):
        (choice,) = chunk.choices
        pieces[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason
    for choice in whole:
        assert jsonschema_rs.is_valid(LEAF, json.loads(choice.message.content)), choice.message.content
        assert len(json.loads(choice.message.content)) == 2, "nothing but what the schema names"
        assert choice.finish_reason == "stop"
    assert pieces == {choice.index: choice.message.content for choice in whole}
    assert reasons == {0: "stop", 1: "stop"}


def test_answers_that_are_cut_say_so(client: openai.OpenAI) -> None:
    cut = client.chat.completions.create(**asked(client, max_tokens=5)).choices[0]
    assert (cut.finish_reason, cut.message.content[0]) == ("length", "{")
    stopped = client.chat.completions.create(**asked(client, {"const": "oak and ash"}, stop=" and")).choices[0]
    assert (stopped.finish_reason, stopped.message.content) == ("stop", '"oak')
    free = client.chat.completions.create(**asked(client, response_format={"type": "json_object"}, max_tokens=30))
    assert free.choices[0].message.content.startswith("{")


def test_forced_call_follows_the_schema_of_its_tool(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "measure"}}
    request = asked(client, tools=TOOLS, tool_choice=choice, temperature=1.5)
    del request["response_format"]
    for stream in (False, True):
        made = client.chat.completions.create(**request, stream=stream)
        if stream:
            call = put_together([c for one in made for c in one.choices[0].delta.tool_calls or []])
        else:
            (call,) = made.choices[0].message.tool_calls
        assert jsonschema_rs.is_valid(LEAF, json.loads(call.function.arguments)), call.function.arguments
        assert call.function.name == "measure"


def test_impossible_schema_is_refused(client: openai.OpenAI) -> None:
    schemas: list[tuple[Any, str]] = [
        ({"$ref": "http://127.0.0.1:9/x.json"}, "retriev"),
        ({"type": "object", "x-guidance": {"lenient": True}, "not": {}}, "not"),
        ({"enum": ["x" * 100 + str(n) for n in range(1000)]}, "64,000 characters"),
        ({"$ref": "#"}, "can be enforced"),
    ]
    for schema, told in schemas:
        with pytest.raises(openai.BadRequestError, match=told) as caught:
            client.chat.completions.create(**asked(client, schema), stream=True)
        assert caught.value.param == "response_format.json_schema.schema"
        assert "start:" not in caught.value.body["message"], "the schema is not repeated"
    with pytest.raises(openai.BadRequestError, match="tool_choice='auto'"):
        client.chat.completions.create(**asked(client), tools=TOOLS, tool_choice="required")


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def test_check_ends_and_remembers_what_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    check = SchemaCheck(Limits(schema_seconds=1.0))
    with pytest.raises(ConfigError, match="64 levels"):
        check.check([Form(deep(400))], "schema")
    with pytest.raises(ConfigError, match=r"simpler schema.*1 s"):
        check.check([Form(ENDLESS)], "schema")
    check = SchemaCheck(Limits(schema_seconds=15.0))  # enough for what passes, on a busy machine, too
    check.check([Form(deep(20))], "schema")
    monkeypatch.setattr(grammars.subprocess, "run", lambda *given, **more: pytest.fail("it is known"))
    check.check([Form(deep(20))], "schema")


def test_server_without_the_extra_says_so(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return real(name, *arguments, **more)

    request = asked(client, {"const": "never asked before"})
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(openai.BadRequestError, match=r"cacheblend-rag\[structured\]"):
        client.chat.completions.create(**request)
