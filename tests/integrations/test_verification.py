"""Verified answers through the models of both frameworks: the text at the end, and where a correction is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer

from cacheblend_rag import BlendEngine
from cacheblend_rag.langchain import CacheBlendLLM, ChatCacheBlend
from cacheblend_rag.llama_index import CacheBlendLLM as LlamaLLM
from tests import tiny
from tests.probes import CHUNKS, engine_of

pytestmark = pytest.mark.usefixtures("no_variants")

TEXT = "Read this:\n\n" + "\n\n".join(CHUNKS) + "\n\nWhat fell in the end?"
MOST = {"max_tokens": 12}


@pytest.fixture(scope="module")
def engine() -> Iterator[BlendEngine]:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}"
    with engine_of(tokenizer=tokenizer, selection="none") as made:
        yield made


def texts_of(kind: Any, engine: BlendEngine, text: Any) -> tuple[str, str]:
    """What a model says without blending, and by reuse alone; both differ in tiny random models."""

    def said(of: BlendEngine) -> str:
        answer = kind(engine=of).invoke(text, **MOST)
        return str(getattr(answer, "content", answer))

    kind(engine=engine).warm(CHUNKS)
    full, draft = said(engine.with_config(selection="all")), said(engine)
    assert full != draft
    return full, draft


def assert_told(found: dict[str, Any], full: str, draft: str) -> None:
    assert found["status"] == "corrected"
    assert draft == draft[: found["position"]] + found["before"]
    assert full == draft[: found["position"]] + found["after"]


def test_langchain_chat(engine: BlendEngine) -> None:
    full, draft = texts_of(ChatCacheBlend, engine, TEXT)
    llm = ChatCacheBlend(engine=engine, verify="always")

    async def events() -> list[Any]:
        return [one async for one in llm.astream_events(TEXT, version="v2", **MOST)]

    for ask in (llm, ChatCacheBlend(engine=engine).bind(verify="always")):
        for message in (ask.invoke(TEXT, **MOST), asyncio.run(ask.ainvoke(TEXT, **MOST)), *ask.batch([TEXT], **MOST)):
            assert message.content == full
            assert_told(message.response_metadata["verification"], full, draft)
        chunks = list(ask.stream(TEXT, **MOST))
        assert "".join(str(chunk.content) for chunk in chunks) == draft, "words that were said are not said again"
        assert [one for one in chunks if "verification" in one.response_metadata] == [chunks[-1]]
        assert_told(chunks[-1].response_metadata["verification"], full, draft)
    (end,) = [one for one in asyncio.run(events()) if one["event"] == "on_chat_model_end"]
    assert_told(end["data"]["output"].response_metadata["verification"], full, draft)
    assert ChatCacheBlend(engine=engine).invoke(TEXT, **MOST).response_metadata["verification"]["status"] == "off"
    assert llm.stats().corrected == 5
    assert llm.invoke("What fell?", **MOST).response_metadata["verification"]["status"] == "verified"
    assert llm.stats().verified == 1


def test_programs_that_put_streams_together_have_the_verified_answer(engine: BlendEngine) -> None:
    full, _ = texts_of(ChatCacheBlend, engine, TEXT)
    llm = ChatCacheBlend(engine=engine, verify="held")

    async def events() -> list[Any]:
        return [one async for one in llm.astream_events(TEXT, version="v2", **MOST)]

    (end,) = [one for one in asyncio.run(events()) if one["event"] == "on_chat_model_end"]
    assert end["data"]["output"].content == full
    assert "".join(str(chunk.content) for chunk in llm.stream(TEXT, **MOST)) == full
    chat = SimpleChatEngine.from_defaults(
        llm=LlamaLLM(engine=engine, verify="held", **MOST), memory=ChatMemoryBuffer.from_defaults()
    )
    assert "".join(chat.stream_chat(TEXT).response_gen) == full
    assert chat.chat_history[-1].content == full


def test_result_of_a_later_check_is_asked_for_by_its_id(engine: BlendEngine) -> None:
    full, draft = texts_of(ChatCacheBlend, engine, TEXT)
    llm = LlamaLLM(engine=engine, verify="idle", **MOST)
    response = llm.chat([ChatMessage(content=TEXT, role="user")])
    text, told = response.message.content, response.raw["verification"]
    assert list(llm.stream_complete(TEXT))[-1].raw["verification"]["status"] == "waiting"
    assert (text, told["status"]) == (draft, "waiting")
    found = llm.engine.verifications.result(told["id"], wait=30)
    assert_told(found.asdict(), full, draft)
    engine.flush()
    assert (llm.stats().requests, llm.stats().corrected) == (2, 2), "counted when it is known"


def test_llama_index(engine: BlendEngine) -> None:
    full, draft = texts_of(CacheBlendLLM, engine, TEXT)
    llm = LlamaLLM(engine=engine, verify="always", **MOST)
    for response in (llm.complete(TEXT), asyncio.run(llm.acomplete(TEXT))):
        assert response.text == full
        assert_told(response.raw["verification"], full, draft)
    pieces = list(llm.stream_complete(TEXT))
    assert "".join(one.delta or "" for one in pieces) == draft
    assert pieces[-1].text == full, "the last response has the answer as it is now"
    assert_told(pieces[-1].raw["verification"], full, draft)


def test_every_answer_has_the_word_for_how_near_it_is_to_full_prefill(engine: BlendEngine) -> None:
    texts_of(ChatCacheBlend, engine, TEXT)
    same = engine.with_config(selection="hkvd", recompute_ratio=1.0)
    for of, text, options, word in (
        (engine, TEXT, {}, "approximate"),
        (engine, TEXT, {"verify": "always"}, "corrected"),
        (same, TEXT, {"verify": "always"}, "checked"),
        (engine, TEXT, {"verify": "held"}, "exact"),
        (engine, "What fell?", {}, "exact"),
    ):
        of = of.with_config(prompt_cache=0)
        chat, plain, llama = ChatCacheBlend(engine=of), CacheBlendLLM(engine=of), LlamaLLM(engine=of)
        message = chat.invoke(text, **MOST, **options)
        chunk = list(chat.stream(text, **MOST, **options))[-1]
        assert (message.response_metadata["fidelity"], chunk.response_metadata["fidelity"]) == (word, word)
        (made,) = plain.generate([text], **MOST, **options).generations
        assert (made[0].generation_info or {})["fidelity"] == word
        for answer in (
            llama.complete(text, **MOST, **options),
            llama.chat([ChatMessage(content=text)], **MOST, **options),
        ):
            assert answer.raw is not None
            assert answer.raw["fidelity"] == answer.raw["verification"]["fidelity"] == word
