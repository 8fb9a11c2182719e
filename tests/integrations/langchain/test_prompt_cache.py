"""Agents and chats: each call goes on from the one before, whatever the way it is made."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from cacheblend_rag.langchain import ChatCacheBlend
from tests.integrations.langchain.models import Script, tiny_engine

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "find", "description": "Find leaves.", "parameters": {"type": "object"}},
}
CALL = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'


def test_each_step_of_an_agent_goes_on_from_the_one_before() -> None:
    with tiny_engine() as engine:
        script = Script(engine.tokenizer, lambda prompt: "A leaf." if prompt.count("[tool]") == 2 else CALL)
        chat = ChatCacheBlend.from_engine(engine, max_new_tokens=80, logits_processor=[script])
        model = chat.bind_tools([TOOL])
        messages: list[BaseMessage] = [SystemMessage("You look for leaves in the garden."), HumanMessage("What fell?")]
        told = []
        for step in range(3):
            answer = model.invoke(messages)
            told.append(answer.response_metadata)
            messages.append(answer)
            messages += [ToolMessage(f"leaf {step}", tool_call_id=str(one["id"])) for one in answer.tool_calls]
        assert [len(one.tool_calls) for one in messages if isinstance(one, AIMessage)] == [1, 1, 0]
        assert told[0]["resumed_tokens"] == 0
        for before, info in pairwise(told):
            # The template writes a call as the model did, but for what merges at the seam.
            assert info["resumed_tokens"] >= before["prompt_tokens"] - 3
        assert chat.stats().resumed_tokens == sum(info["resumed_tokens"] for info in told)
