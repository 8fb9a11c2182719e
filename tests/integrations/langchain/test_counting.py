"""Counting tokens: LangChain trims conversations by the model's count, which no part of a conversation makes fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_core.messages.tool import tool_call

from cacheblend_rag.langchain import ChatCacheBlend
from tests.integrations.langchain.models import tiny_engine

# As Mistral's and Gemma's: roles alternate, a system message belongs into the first question.
ALTERNATING = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}"
    "{% endif %}<turn>{{ m.role }}\n{{ m.content | trim }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
# As Qwen's: a system message of its own, and a question must be there.
STRICT = (
    "{{ bos_token }}{% if messages[0].role != 'system' %}<|system|>You are a helpful assistant.<|end|>\n{% endif %}"
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALK: list[BaseMessage] = [
    message
    for n in range(8)
    for message in (HumanMessage(f"What fell {n} times in the {n}th year?"), AIMessage(f"It was leaf {n}, I think."))
] + [HumanMessage("And in the end?")]


@pytest.fixture(params=[ALTERNATING, STRICT, "usual"])
def chat(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatCacheBlend]:
    with tiny_engine() as engine:
        if request.param != "usual":
            monkeypatch.setattr(engine.tokenizer, "chat_template", request.param)
        yield ChatCacheBlend.from_engine(engine, max_new_tokens=3)


def written(chat: ChatCacheBlend, messages: list[BaseMessage]) -> int:
    """Tokens that the model is fed with a conversation."""
    return len(chat.engine.tokenize(chat.segments(messages)).input_ids)


@pytest.mark.parametrize(("strategy", "room"), [("last", 30), ("first", 80), ("last", 200), ("first", 10_000)])
def test_conversations_are_trimmed_by_the_models_count(chat: ChatCacheBlend, strategy: Any, room: int) -> None:
    ends: Any = {"start_on": "human"} if strategy == "last" else {"end_on": "human"}
    kept = trim_messages(TALK, max_tokens=room, token_counter=chat, strategy=strategy, **ends)
    assert len(kept) == len(TALK) if room == 10_000 else len(kept) < len(TALK)
    if kept:
        assert written(chat, kept) <= room
        rest = TALK[len(TALK) - len(kept) - 2 :] if strategy == "last" else TALK[: len(kept) + 2]
        assert room == 10_000 or written(chat, rest) > 0.8 * room, "most of the room is used"


@pytest.mark.parametrize(
    "messages",
    [
        [AIMessage("", tool_calls=[tool_call(name="find", args={"what": "leaf " * 20}, id="1")])],
        [ToolMessage("leaf " * 20, tool_call_id="1")],
        [SystemMessage("leaf " * 20)],
        [AIMessage([{"type": "audio", "base64": "UklG"}, {"type": "text", "text": "leaf " * 20}])],
        [HumanMessage([{"type": "image", "base64": "AAAA"}, {"type": "text", "text": "leaf " * 20}])],
    ],
)
def test_every_kind_of_message_content_is_counted(chat: ChatCacheBlend, messages: list[BaseMessage]) -> None:
    assert 20 <= chat.get_num_tokens_from_messages(messages) <= 200
    assert chat.get_num_tokens_from_messages([*TALK, *messages]) > chat.get_num_tokens_from_messages(TALK)
