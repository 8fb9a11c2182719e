"""Models of LangChain and LlamaIndex for OpenAI's API, by the lines that the documentation names, against a server."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.chat_models import init_chat_model
from langchain_core.messages import HumanMessage
from pydantic import BaseModel

from tests.app.server.common import Running, process_logits
from tests.integrations.langchain.models import Script

CALL = '<tool_call>\n{"name": "find", "arguments": {"what": "oak"}}\n</tool_call>'
LEAF = '{"kind": "oak", "count": 3}'
# Of the clients, about themselves.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Pydantic serializer warnings:UserWarning")


class Leaf(BaseModel):
    """A leaf."""

    kind: str
    count: int


def find(what: str) -> str:
    """Find something."""
    return f"There is one {what}."


def script(server: Running, monkeypatch: pytest.MonkeyPatch, *said: str) -> None:
    """Let the server's model say these texts, one an answer, then the last one again."""
    left = list(said)
    process_logits(
        monkeypatch, Script(server.service.engine.tokenizer, lambda _: left.pop(0) if len(left) > 1 else left[0])
    )


def chat_model(server: Running, **more: Any) -> Any:
    return init_chat_model(
        server.service.model_name,
        model_provider="openai",
        base_url=server.url + "/v1",
        api_key="sk-none-needed-here",
        default_headers={"Connection": "close"},  # LangChain keeps connections for all models of a process
        **more,
    )


def test_agent_over_the_server_calls_and_ends_with_its_object(chatty: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    script(chatty, monkeypatch, CALL.split('"name": "')[1], f'Leaf", "arguments": {LEAF}}}')
    agent = create_agent(chat_model(chatty, max_tokens=200), [find], response_format=Leaf)
    out = agent.invoke({"messages": [HumanMessage("What fell?")]})
    assert out["structured_response"] == Leaf(kind="oak", count=3)
    assert "There is one oak." in [one.text for one in out["messages"]]


def llama_model(server: Running, **more: Any) -> Any:
    openai_like = pytest.importorskip("llama_index.llms.openai_like")
    return openai_like.OpenAILike(
        model=server.service.model_name,
        api_base=server.url + "/v1",
        api_key="sk-none-needed-here",
        context_window=2048,
        is_chat_model=True,
        is_function_calling_model=True,
        reuse_client=False,
        **more,
    )


async def test_llama_index_makes_a_model_of_the_server(chatty: Running) -> None:
    from llama_index.core.llms import ChatMessage

    model = llama_model(chatty, max_tokens=6, logprobs=True, top_logprobs=2, additional_kwargs={"seed": 3})
    messages = [ChatMessage(role="user", content="Which leaf fell?")]
    whole = model.chat(messages)
    assert whole.message.content
    assert len(whole.logprobs[0]) == 2
    assert "".join(one.delta for one in model.stream_chat(messages)) == whole.message.content
    assert (await model.achat(messages)).message.content == whole.message.content
    assert model.complete("Which leaf fell?").text == whole.message.content


async def test_llama_index_agent_over_the_server_calls_its_tool(
    chatty: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llama_index.core.agent.workflow import FunctionAgent

    model = llama_model(chatty, max_tokens=200)
    script(chatty, monkeypatch, CALL, "An oak fell.")
    answer = await FunctionAgent(tools=[find], llm=model).run("What fell?")
    assert [one.tool_name for one in answer.tool_calls] == ["find"]
    assert answer.response.content == "An oak fell."
