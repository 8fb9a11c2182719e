"""LlamaIndex over models that think: thinking blocks, their deltas, and agents."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.base.llms.types import TextBlock, ThinkingBlock
from llama_index.core.tools import FunctionTool

from cacheblend_rag.llama_index import CacheBlendLLM
from tests.integrations.langchain.models import find
from tests.integrations.llama_index.test_llm import HELLO, responses
from tests.pairwise import others_slow
from tests.thinking import KINDS, Writer, thinking_engine

THOUGHT, ANSWER = "Leaves fell, <b> I think.", "It fell. A <think> is text."
CALL = '<tool_call>\n{"name": "find", "arguments": {"what": "leaf"}}\n</tool_call>'


def model_of(kind: str, said: Any, **fields: Any) -> CacheBlendLLM:
    engine = thinking_engine(kind)
    options = {"max_new_tokens": 90, "reasoning": True} | fields
    return CacheBlendLLM.from_engine(engine, logits_processor=[Writer(engine.tokenizer, said)], **options)


@pytest.mark.parametrize("kind", others_slow([*KINDS], ("qwen3", "gpt-oss")))
async def test_thoughts_are_blocks_of_their_own_in_every_form(kind: str) -> None:
    llm = model_of(kind, KINDS[kind].thought.format(t=THOUGHT, a=ANSWER))
    for form in ("chat", "astream_chat"):
        got = await responses(llm, form, HELLO)
        last = got[-1]
        assert last.message.blocks == [ThinkingBlock(content=THOUGHT), TextBlock(text=ANSWER)]
        assert last.message.content == ANSWER
        assert last.raw["usage"]["completion_tokens_details"]["reasoning_tokens"] == last.raw["thought_tokens"] > 0
        if "stream" in form:
            assert "".join(one.delta for one in got) == ANSWER
            deltas = [one.additional_kwargs.get("thinking_delta", "") for one in got]
            assert "".join(deltas) == THOUGHT
            assert len(list(filter(None, deltas))) > 5


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")
@pytest.mark.filterwarnings("ignore:is_running called from within a step:DeprecationWarning")
@pytest.mark.parametrize("kind", others_slow(["qwen3", "deepseek", "mistral"], ("qwen3", "mistral")))
async def test_agents_call_tools_behind_a_thought_and_stream_it(kind: str) -> None:
    def said(prompt: str) -> str:
        thought, answer = (THOUGHT, ANSWER) if "is red" in prompt else (f"{THOUGHT} {CALL}", CALL)
        return KINDS[kind].thought.format(t=thought, a=answer)

    agent = FunctionAgent(tools=[FunctionTool.from_defaults(find)], llm=model_of(kind, said, max_new_tokens=120))
    handler = agent.run("What fell?")
    streamed = [event async for event in handler.stream_events() if isinstance(event, AgentStream)]
    answer = await handler
    assert [call.tool_name for call in answer.tool_calls] == ["find"]
    assert answer.response.content == ANSWER
    thoughts = "".join(event.thinking_delta or "" for event in streamed)
    assert thoughts == f"{THOUGHT} {CALL}{THOUGHT}"
    assert "".join(event.delta for event in streamed) == ANSWER
