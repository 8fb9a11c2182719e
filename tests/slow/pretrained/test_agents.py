"""LangChain's agents, unmodified, on a starter model whose chat template takes tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import BaseModel

from cacheblend_rag.langchain import ChatCacheBlend

pytestmark = [pytest.mark.pretrained, pytest.mark.slow]


class Person(BaseModel):
    """A person."""

    name: str
    age: int
    email: str


@pytest.fixture(scope="module")
def chat() -> Iterator[ChatCacheBlend]:
    model = ChatCacheBlend(model="qwen2.5-coder-0.5b", max_new_tokens=96)
    yield model
    model.engine.close()


def test_agent_takes_a_person_from_a_sentence(chat: ChatCacheBlend) -> None:
    asked = "Extract the person as JSON with name, age and email: Ada Lovelace, 36 years old, ada@example.org"
    out = create_agent(chat, [], response_format=Person).invoke({"messages": [HumanMessage(asked)]})
    assert out["structured_response"] == Person(name="Ada Lovelace", age=36, email="ada@example.org")
    assert len(out["messages"]) == 2


def test_history_is_summarised_and_goes_on(chat: ChatCacheBlend) -> None:
    middle = SummarizationMiddleware(chat, trigger=("fraction", 0.01), keep=("fraction", 0.004))
    agent = create_agent(chat, [], middleware=[middle], checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    walks = " ".join(f"On day {day} we walked {day + 2} kilometres along the river." for day in range(1, 30))
    agent.invoke({"messages": [HumanMessage(f"My dog is called Rex. {walks} Say OK.")]}, config)
    out = agent.invoke({"messages": [HumanMessage("What is the name of my dog?")]}, config)
    assert walks not in "".join(one.text for one in out["messages"])
    assert "summary" in out["messages"][0].text
    assert out["messages"][-1].text
