"""Long conversations about the same documents: nothing stored is computed in full again."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, CitableBlock, CitationBlock, TextBlock, ThinkingBlock
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.memory import ChatMemoryBuffer

from cacheblend_rag.errors import PromptError
from tests.integrations.langchain.models import Script, tiny_parts
from tests.integrations.llama_index.common import QUESTION, listening, make_index, make_llm, make_nodes
from tests.integrations.llama_index.test_matrix import force, say

TURNS = 10
RATIO = 0.15


@pytest.mark.parametrize(
    ("engine", "mode"),  # all pairs run in the matrix
    [
        (ContextChatEngine, "sync"),
        (ContextChatEngine, "astream"),
        (CondensePlusContextChatEngine, "async"),
        (CondensePlusContextChatEngine, "stream"),
    ],
)
async def test_ten_turns_reuse_the_documents(engine: Any, mode: str) -> None:
    llm = make_llm(
        True,
        {"recompute_ratio": RATIO},
        logits_processor=[Script(tiny_parts()[1], force)],
        max_new_tokens=20,
    )
    retriever = make_index(make_nodes(seed=80, words=40)).as_retriever(similarity_top_k=4)
    chat = engine.from_defaults(retriever, llm=llm, memory=ChatMemoryBuffer.from_defaults(token_limit=6000))
    with llm.engine, listening() as answers:
        for turn in range(TURNS):
            await say(chat, mode, f"{QUESTION} Turn {turn}.")
    turns = [info for info in answers.infos if info["hits"] or info["misses"]]
    assert [(info["hits"], info["misses"]) for info in turns] == [(0, 4)] + [(4, 0)] * (TURNS - 1)
    for info in turns[1:]:
        # All reused tokens pass layer 0, where deviation begins; from the check layer on, a share of them.
        assert max(info["recomputed_tokens"][1:]) <= RATIO * info["reused_tokens"]
        assert info["reused_tokens"] > 300
    fed = [info["prompt_tokens"] for info in turns]
    assert fed == sorted(fed)
    assert fed[-1] > fed[0] + 200  # the conversation grew


@pytest.mark.parametrize("mode", ["sync", "astream"])
async def test_each_turn_goes_on_from_the_one_before(mode: str) -> None:
    script = Script(tiny_parts()[1], lambda prompt: "Anna was born there.")
    llm = make_llm(True, {"recompute_ratio": RATIO}, logits_processor=[script], max_new_tokens=40)
    retriever = make_index(make_nodes(seed=81, words=40)).as_retriever(similarity_top_k=4)
    memory = ChatMemoryBuffer.from_defaults(token_limit=6000)
    chat = ContextChatEngine.from_defaults(retriever, llm=llm, memory=memory)
    with llm.engine, listening() as answers:
        for turn in range(TURNS):
            await say(chat, mode, f"{QUESTION} Turn {turn}.")
    first, *later = answers.infos
    assert (first["hits"], first["misses"], first["resumed_tokens"]) == (0, 4, 0)
    for before, info, event in zip(answers.infos, later, answers.events[1:], strict=False):
        assert (info["hits"], info["misses"]) == (4, 0)
        assert max(info["recomputed_tokens"]) == 0  # documents, earlier questions and answers: all of it is there
        # But for what merges at the seam between prompt and answer.
        assert before["prompt_tokens"] - 3 <= info["resumed_tokens"] < info["prompt_tokens"]
        assert event.resumed_tokens == info["resumed_tokens"]


async def test_conversation_without_documents_goes_on_from_the_turn_before() -> None:
    script = Script(tiny_parts()[1], lambda prompt: "Anna was born there.")
    llm = make_llm(True, logits_processor=[script], max_new_tokens=40)
    messages = [ChatMessage(role="system", content="Answer briefly, in one sentence, and name the place.")]
    with llm.engine, listening() as answers:
        for turn in range(3):
            messages.append(ChatMessage(role="user", content=f"{QUESTION} Turn {turn}."))
            asked = llm.chat(messages) if turn % 2 else await llm.achat(messages)
            messages.append(asked.message)
        assert llm.stats().resumed_tokens == sum(info["resumed_tokens"] for info in answers.infos)
    for before, info in pairwise(answers.infos):
        # Prompt and answer, but for what merges at the seam.
        assert info["resumed_tokens"] >= before["prompt_tokens"] + before["generated_tokens"] - 4
        assert info["plain"]


@pytest.mark.parametrize("mode", ["chat", "achat", "stream_chat", "astream_chat"])
async def test_thoughts_and_citations_of_another_model_are_passed_over(mode: str) -> None:
    llm = make_llm(True)
    cited = CitationBlock(cited_content="Leaves fall.", source="a", title="A", additional_location_info={})
    answer = TextBlock(text="A leaf fell.")
    fed = []
    for blocks in ([answer], [ThinkingBlock(content="Hm."), answer, cited]):
        turns = [
            ChatMessage("What fell?"),
            ChatMessage(role="assistant", blocks=blocks),
            ChatMessage("And then?"),
        ]
        with listening() as answers:
            asked = getattr(llm, mode)(turns)
            said = await asked if mode.startswith("a") else asked
            if "stream" in mode:
                _ = [one async for one in said] if mode.startswith("a") else list(said)
        fed.append(answers.infos[0]["input_ids"])
    assert fed[0] == fed[1]


def test_content_to_cite_is_to_be_read_and_is_not_passed_over() -> None:
    block = CitableBlock(title="A", source="a", content="Leaves fall.")
    with pytest.raises(PromptError, match="a block of type 'citable', which is not read here: leave the block out"):
        make_llm(True).chat([ChatMessage(role="user", blocks=[block, TextBlock(text="What falls?")])])
