"""LangChain over models that think: thoughts apart in every mode, in agents, and before calls and objects."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage

from cacheblend_rag.langchain import CacheBlendLLM, ChatCacheBlend
from tests.integrations.langchain.models import find
from tests.pairwise import others_slow
from tests.thinking import KINDS, Writer, thinking_engine

THOUGHT, ANSWER = "Leaves fell, <b> I think.", "It fell. A <think> is text."
CALL = '<tool_call>\n{"name": "find", "arguments": {"what": "leaf"}}\n</tool_call>'


def model_of(kind: str, said: Any, **fields: Any) -> ChatCacheBlend:
    engine = thinking_engine(kind)
    writer = Writer(engine.tokenizer, said)
    options = {"max_new_tokens": 90, "reasoning": True} | fields
    return ChatCacheBlend.from_engine(engine, logits_processor=[writer], **options)


@pytest.mark.parametrize("kind", others_slow([*KINDS], ("qwen3", "gpt-oss")))
def test_thoughts_stand_where_langchain_looks_for_them(kind: str) -> None:
    model = model_of(kind, KINDS[kind].thought.format(t=THOUGHT, a=ANSWER))
    chunks = list(model.stream("What fell?"))
    for message in (model.invoke("What fell?"), reduce(add, chunks)):
        assert message.content == ANSWER
        assert message.additional_kwargs["reasoning_content"] == THOUGHT
        assert [block["type"] for block in message.content_blocks] == ["reasoning", "text"]
        assert message.content_blocks[0]["reasoning"] == THOUGHT
        usage = message.usage_metadata
        assert usage["output_token_details"]["reasoning"] == message.response_metadata["thought_tokens"] > 0
        assert usage["output_tokens"] > usage["output_token_details"]["reasoning"]
    thoughts = [one for one in chunks if "reasoning_content" in one.additional_kwargs]
    assert len(thoughts) > 5
    assert not any(one.content for one in thoughts)
    with_blocks = model.model_copy(update={"output_version": "v1"}).invoke("What fell?")
    assert [block["type"] for block in with_blocks.content] == ["reasoning", "text"]


def test_thoughts_are_off_by_default_and_a_call_turns_them_on() -> None:
    engine = thinking_engine("qwen3")
    writer = Writer(engine.tokenizer, ANSWER)
    model = ChatCacheBlend.from_engine(engine, max_new_tokens=60, logits_processor=[writer])
    for call, thinks in (
        ({}, False),
        ({"reasoning": True}, True),
        ({"reasoning": "low"}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"reasoning": True, "chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning": None}, False),
    ):
        model.invoke("What fell?", **call)
        assert writer.prompts[-1].endswith("[assistant] " if thinks else "</think>\n\n"), call


def test_thoughts_are_not_sent_back_with_later_turns() -> None:
    model = model_of("qwen3", KINDS["qwen3"].thought.format(t=THOUGHT, a=ANSWER))
    first = model.invoke("What fell?")
    blocks = AIMessage([{"type": "reasoning", "reasoning": THOUGHT}, {"type": "text", "text": ANSWER}])
    (writer,) = model.logits_processor
    for earlier in (first, blocks):
        model.invoke([HumanMessage("What fell?"), earlier, HumanMessage("And then?")])
        assert THOUGHT not in writer.prompts[-1]
        assert ANSWER in writer.prompts[-1]
    model.engine.tokenizer.chat_template += "{% for m in messages %}{{ m.reasoning_content or '' }}{% endfor %}"
    for earlier in (first, blocks):
        model.invoke([HumanMessage("What fell?"), earlier, HumanMessage("And then?")])
        assert writer.prompts[-1].endswith(THOUGHT)


@pytest.mark.parametrize("kind", others_slow(["qwen3", "deepseek", "gpt-oss", "mistral"], ("qwen3", "mistral")))
async def test_agents_call_tools_behind_a_thought(kind: str) -> None:
    """A call that a thought names is none."""
    call = CALL
    if kind == "gpt-oss":
        call = '<|start|>assistant<|channel|>commentary to=functions.find <|message|>{"what": "leaf"}<|call|>'

    def said(prompt: str) -> str:
        if "[tool]" in prompt or "is red" in prompt:
            return KINDS[kind].thought.format(t=THOUGHT, a=ANSWER)
        if kind == "gpt-oss":
            return f"<|channel|>analysis<|message|>{THOUGHT}<|end|>{call}"
        return KINDS[kind].thought.format(t=f"{THOUGHT} {CALL}", a=call)

    agent = create_agent(model_of(kind, said, max_new_tokens=120), [find])
    state = await agent.ainvoke({"messages": [HumanMessage("What fell?")]})
    _, asked, answered, final = state["messages"]
    assert [call["name"] for call in asked.tool_calls] == ["find"]
    assert asked.content == ""
    assert THOUGHT in asked.additional_kwargs["reasoning_content"]
    assert (answered.content, final.content) == ("The leaf is red.", ANSWER)


async def test_text_models_give_the_answer_and_keep_the_thought_in_its_info() -> None:
    engine = thinking_engine("qwen3")
    writer = Writer(engine.tokenizer, KINDS["qwen3"].thought.format(t=THOUGHT, a=ANSWER))
    llm = CacheBlendLLM.from_engine(engine, max_new_tokens=60, logits_processor=[writer])
    (told,) = llm.generate(["What fell?"]).generations[0]
    assert (told.text, told.generation_info["reasoning_content"]) == (ANSWER, THOUGHT)
    assert "".join(llm.stream("What fell?")) == "".join([one async for one in llm.astream("What fell?")]) == ANSWER


def test_documents_that_name_the_marks_are_chunks_and_no_thoughts() -> None:
    model = model_of("qwen3", ANSWER)
    text = "A model writes <think> and then </think> before it answers. The leaf fell from the old oak near the river."
    model.warm([Document(text)], progress=False)
    answer = model.invoke(f"Read this:\n{text}\n\nWhat fell?")
    assert answer.response_metadata["hits"] == 1
    assert "reasoning_content" not in answer.additional_kwargs
