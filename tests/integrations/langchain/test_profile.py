"""The profile of a chat model, as agents and middleware read it, and answers that are a call or have a format."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from pydantic import BaseModel

from cacheblend_rag import BlendEngine
from cacheblend_rag.langchain import ChatCacheBlend
from tests.integrations.langchain.models import Script, tiny_parts

CALL = '<tool_call>\n{"name": "find", "arguments": {"what": "oak"}}\n</tool_call>'
LEAF = '{"kind": "oak", "count": 3}'


class Leaf(BaseModel):
    """A leaf."""

    kind: str
    count: int


def find(what: str) -> str:
    """Find something."""
    return f"There is one {what}."


def chat(engine: BlendEngine, *said: str, **fields: Any) -> ChatCacheBlend:
    """A model that says these texts, one a call, then the last one again."""
    left = list(said)

    def answer(prompt: str) -> str | None:
        return left.pop(0) if len(left) > 1 else left[0]

    scripts = [Script(tiny_parts()[1], answer)] if said else []
    return ChatCacheBlend.from_engine(engine, **{"max_new_tokens": 200, "logits_processor": scripts, **fields})


def test_profile_says_what_the_model_can_do(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = chat(engine, max_new_tokens=None).profile
    assert profile is not None
    assert profile["max_input_tokens"] == profile["max_output_tokens"] == engine.context_window
    able = ["tool_calling", "tool_choice", "tool_call_streaming", "structured_output"]
    able += ["text_inputs", "text_outputs", "temperature"]
    assert [profile[name] for name in able] == [True] * len(able)  # type: ignore[literal-required]
    unable = ("image_inputs", "image_url_inputs", "audio_inputs", "pdf_inputs", "attachment", "pdf_tool_message")
    assert [profile[name] for name in unable] == [False] * len(unable)  # type: ignore[literal-required]
    limited = chat(engine, max_new_tokens=100).profile
    assert limited is not None
    assert (limited["max_input_tokens"], limited["max_output_tokens"]) == (8192 - 100, 100)
    assert chat(engine, profile={"max_input_tokens": 7}).profile == {"max_input_tokens": 7}
    monkeypatch.setattr(engine.tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("cacheblend_rag.engine.grammar.find_spec", lambda name: None)
    less = chat(engine).profile
    assert less is not None
    assert not any((less["tool_calling"], less["tool_choice"], less["structured_output"]))
    assert "reasoning_effort_levels" not in less
    monkeypatch.setattr(engine.tokenizer, "chat_template", "{{ messages }}<think>")
    thinking = chat(engine).profile
    assert thinking is not None
    assert (thinking["reasoning_output"], thinking["reasoning_effort_levels"]) == (True, ["low", "medium", "high"])


async def test_agent_takes_its_object_from_the_answer_itself(engine: BlendEngine) -> None:
    asked: dict[str, Any] = {"messages": [HumanMessage("What fell?")]}
    kinds = [HumanMessage, AIMessage, ToolMessage, AIMessage]
    whole = await create_agent(chat(engine, CALL, LEAF), [find], response_format=Leaf).ainvoke(asked)
    agent = create_agent(chat(engine, CALL, LEAF), [find], response_format=Leaf)
    for out in (whole, list(agent.stream(asked, stream_mode="values"))[-1]):
        assert out["structured_response"] == Leaf(kind="oak", count=3)
        assert [type(one) for one in out["messages"]] == kinds, "no call stands for the object"
        assert json.loads(out["messages"][-1].content) == {"kind": "oak", "count": 3}
