"""ChatCacheBlend: rendering, noticing inside messages, tool calls, usage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, SystemMessage, ToolMessage
from langchain_core.messages.tool import tool_call

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.langchain import ChatCacheBlend, known_chunks
from cacheblend_rag.langchain.messages import parse_answer, render
from tests import tiny
from tests.langchain.test_chat_standard import TEMPLATE

DOCUMENTS = [Document(page_content=f"Passage {n}. {tiny.text(24, n)}") for n in range(3)]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


@pytest.fixture
def chat() -> Iterator[ChatCacheBlend]:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    config = BlendConfig(min_tokens=0, write_back="inline", recompute_ratio=1.0)
    known_chunks.discard(one.page_content for one in DOCUMENTS)
    with BlendEngine(tiny.model(num_hidden_layers=2), tokenizer, config=config) as engine:
        yield ChatCacheBlend.from_engine(engine, max_new_tokens=6)


def stuffed() -> str:
    return "\n\n".join(one.page_content for one in DOCUMENTS)


def test_chunks_inside_a_message_hit_and_bos_stands_once(chat: ChatCacheBlend) -> None:
    chat.warm(DOCUMENTS, progress=False)
    answer = chat.invoke([SystemMessage(f"Use this:\n{stuffed()}"), HumanMessage("What fell?")])
    assert (answer.response_metadata["hits"], answer.response_metadata["misses"]) == (3, 0)
    assert answer.response_metadata["input_ids"].count(chat.engine.tokenizer.bos_token_id) == 1
    assert answer.usage_metadata is not None
    stored = sum(len(span) for span in chat.engine.tokenize(chat.notice(rendered(chat))).chunks)
    assert answer.usage_metadata["input_token_details"] == {"cache_read": stored}


def rendered(chat: ChatCacheBlend) -> str:
    messages = [SystemMessage(f"Use this:\n{stuffed()}"), HumanMessage("What fell?")]
    return render(chat.engine.tokenizer, messages)


def test_documents_of_earlier_turns_hit_again(chat: ChatCacheBlend) -> None:
    turns: list[Any] = [HumanMessage(f"{stuffed()}\n\nWhat fell?")]
    chat.warm(DOCUMENTS, progress=False)
    for question in ("And then?", "And now?"):
        answer = chat.invoke(turns)
        assert (answer.response_metadata["hits"], answer.response_metadata["misses"]) == (3, 0)
        turns += [answer, HumanMessage(question)]


def test_documents_that_a_tool_attached_are_noticed(chat: ChatCacheBlend) -> None:
    call = tool_call(name="find", args={"what": "leaf"}, id="1")
    turns = [
        HumanMessage("What fell?"),
        AIMessage(content="", tool_calls=[call]),
        ToolMessage(content=stuffed(), tool_call_id="1", artifact=DOCUMENTS),
    ]
    assert chat.invoke(turns).response_metadata["misses"] == 3
    assert chat.invoke(turns).response_metadata["hits"] == 3


async def test_exactly_one_streamed_chunk_carries_usage(chat: ChatCacheBlend) -> None:
    whole = chat.invoke("What fell?")
    for chunks in ([*chat.stream("What fell?")], [chunk async for chunk in chat.astream("What fell?")]):
        assert "".join(str(chunk.content) for chunk in chunks) == whole.content
        usages = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
        assert usages == [whole.usage_metadata]
        assert chunks[-1].response_metadata["finish_reason"] == "length"


def test_tool_calls_are_read() -> None:
    good = '<tool_call>\n{"name": "find", "arguments": {"what": "leaf"}}\n</tool_call>'
    text = f'Let me look.\n{good}<tool_call>{{"name": </tool_call>'
    message = parse_answer(text, [TOOL])
    assert message.content == "Let me look."
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [("find", {"what": "leaf"})]
    assert [call["args"] for call in message.invalid_tool_calls] == ['{"name":']
    assert parse_answer(text, None).content == text


def test_tools_are_offered_to_the_template(chat: ChatCacheBlend) -> None:
    def find(what: str) -> str:
        """Find something."""
        return what

    answer = chat.bind_tools([find]).invoke("What fell?")
    text = chat.engine.tokenizer.decode(answer.response_metadata["input_ids"])
    assert '"name": "find"' in text
    chunks = [*chat.bind_tools([find]).stream("What fell?")]
    assert "".join(str(chunk.content) for chunk in chunks) == answer.content


def test_what_cannot_be_done_is_refused(chat: ChatCacheBlend) -> None:
    with pytest.raises(ConfigError, match="tool_choice='find'"):
        chat.bind_tools([TOOL], tool_choice="find")
    with pytest.raises(PromptError, match="image_url"):
        chat.invoke([HumanMessage([{"type": "image_url", "image_url": {"url": "x"}}])])
    with pytest.raises(PromptError, match="RemoveMessage"):
        render(chat.engine.tokenizer, [RemoveMessage(id="1")])
    with pytest.raises(PromptError, match="empty"):
        render(chat.engine.tokenizer, [])
    chat.engine.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="tools"):
        chat.bind_tools([TOOL]).invoke("What fell?")
    chat.engine.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="chat_template"):
        chat.invoke("What fell?")
