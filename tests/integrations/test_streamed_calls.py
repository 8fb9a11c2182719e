"""Tool calls that are streamed as they are written, through the models of both frameworks and their agents."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import add
from typing import Any

import pytest
import torch
from langchain_core.messages import AIMessageChunk
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage
from transformers.generation import LogitsProcessor

from cacheblend_rag import BlendEngine
from cacheblend_rag.langchain import ChatCacheBlend
from cacheblend_rag.llama_index import CacheBlendLLM
from tests import tiny
from tests.integrations.langchain.models import TEMPLATE, Script, tiny_engine, tiny_parts
from tests.probes import CHUNKS, engine_of

pytestmark = pytest.mark.usefixtures("no_variants")

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "find", "arguments": {"what": "leaf"}}\n</tool_call>'
CUT = '<tool_call>\n{"name": "find", "arguments": {"what": "le'
NAN = '<tool_call>\n{"name": "find", "arguments": {"what": NaN, "of": {"a": 1}}}\n</tool_call>'
# Text, and the calls and unread calls in it.
SAID = {
    "alone": (CALL, "", 1, 0),
    "text before and after": (f"Let me look.\n{CALL}\nSo it is.", "Let me look.\n\nSo it is.", 1, 0),
    "two": (f"{CALL}\n{CALL}", "", 2, 0),
    "arguments that never end": (CUT, "", 0, 1),
    "no JSON": (NAN, "", 0, 1),
    "one and one that never ends": (f"{CALL}\n{CUT}", "", 1, 1),
    "in a thought": (f"<think>{CALL}</think>No.", "No.", 0, 0),
}


def langchain(said: str, engine: BlendEngine | None = None, **fields: Any) -> ChatCacheBlend:
    script = Script(tiny_parts()[1], lambda prompt: "It is red." if "is red" in prompt else said)
    fields = {"max_new_tokens": 200, "logits_processor": [script], **fields}
    return ChatCacheBlend.from_engine(engine or tiny_engine(), **fields)


@pytest.mark.parametrize(("said", "content", "calls", "unread"), SAID.values(), ids=SAID)
async def test_langchain_streams_calls_as_they_are_written(said: str, content: str, calls: int, unread: int) -> None:
    model = langchain(said).bind_tools([TOOL])
    whole = model.invoke("What fell?")
    chunks = [one async for one in model.astream("What fell?")]
    merged = reduce(add, chunks)
    assert isinstance(merged, AIMessageChunk)
    for message in (whole, merged):
        assert message.content == content
        assert [(one["name"], one["args"]) for one in message.tool_calls] == [("find", {"what": "leaf"})] * calls
        assert [one["name"] for one in message.invalid_tool_calls] == ["find"] * unread
    early = [one for one in chunks[:-1] if one.tool_call_chunks]
    assert len(early) >= 3 * calls
    assert len({one["id"] for one in merged.tool_calls}) == calls


@pytest.mark.parametrize(
    ("said", "content", "calls", "unread"),
    [SAID[name] for name in ("text before and after", "arguments that never end", "one and one that never ends")],
)
async def test_llama_index_streams_calls_as_they_are_written(said: str, content: str, calls: int, unread: int) -> None:
    llm = CacheBlendLLM.from_engine(
        tiny_engine(), max_new_tokens=200, logits_processor=[Script(tiny_parts()[1], lambda prompt: said)]
    )
    asked: Any = {"messages": [ChatMessage("What fell?")], "tools": [TOOL]}
    whole = llm.chat(**asked)
    pieces = [one async for one in await llm.astream_chat(**asked)]
    for last in (whole, pieces[-1]):
        made = llm.get_tool_calls_from_response(last, error_on_no_tool_call=False)
        assert [(one.tool_name, one.tool_kwargs) for one in made] == [("find", {"what": "leaf"})] * calls
        text = last.message.content or ""
        assert text.startswith(content) if unread else text == content
        assert not unread or said.endswith(text.removeprefix(content).lstrip()), "a call that is not made is text"
    grown = [one.message for one in pieces[:-1] if one.message.additional_kwargs.get("tool_calls")]
    assert len(grown) >= 3 * calls
    if calls:
        names = {block.tool_call_id for block in grown[-1].blocks if isinstance(block, ToolCallBlock)}
        ends = {block.tool_call_id for block in pieces[-1].message.blocks if isinstance(block, ToolCallBlock)}
        assert ends <= names


class ChangesItsMind(LogitsProcessor):
    """Makes a model write one text, and another one when it is asked again, as a check of the answer does."""

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        self._texts = [[*tokenizer.encode(text, add_special_tokens=False), 2] for text in texts]
        self._prompt = self._times = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids = input_ids[0].tolist()
        if not self._prompt or len(ids) <= self._prompt:
            self._prompt, self._times = len(ids), self._times + 1
        wanted = self._texts[min(self._times, len(self._texts)) - 1]
        forced = torch.full_like(scores, float("-inf"))
        forced[:, wanted[min(len(ids) - self._prompt, len(wanted) - 1)]] = 0.0
        return forced


@pytest.fixture(scope="module")
def reusing() -> Iterator[BlendEngine]:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    with engine_of(tokenizer=tokenizer, selection="none", prompt_cache=0) as engine:
        ChatCacheBlend.from_engine(engine).warm(CHUNKS)
        yield engine


def test_corrected_call_is_the_only_one(reusing: BlendEngine) -> None:
    """What an answer says may be taken back in its report; a call that was made may not."""
    other = CALL.replace("leaf", "lead")
    question = "Read this:\n\n" + "\n\n".join(CHUNKS) + "\n\nWhat fell?"

    def fields() -> dict[str, Any]:
        minds = ChangesItsMind(reusing.tokenizer, [f"So.\n{CALL}", f"So.\n{other}"])
        return {"verify": "always", "max_new_tokens": 200, "logits_processor": [minds]}

    chunks = list(ChatCacheBlend.from_engine(reusing, **fields()).bind_tools([TOOL]).stream(question))
    merged = reduce(add, chunks)
    assert merged.response_metadata["verification"]["status"] == "corrected"
    assert [one["args"] for one in merged.tool_calls] == [{"what": "lead"}]
    assert (merged.content, merged.invalid_tool_calls) == ("So.", [])
    assert [one for one in chunks if one.tool_call_chunks] == [chunks[-1]]

    llm = CacheBlendLLM.from_engine(reusing, **fields())
    pieces = list(llm.stream_chat([ChatMessage(question)], tools=[TOOL]))
    assert [one.tool_kwargs for one in llm.get_tool_calls_from_response(pieces[-1])] == [{"what": "lead"}]
    assert all(not one.message.additional_kwargs for one in pieces[:-1])
