"""Long conversations about the same documents: nothing stored is computed in full again."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.memory import ChatMemoryBuffer

from tests.integrations.langchain.models import Script, tiny_parts
from tests.integrations.llama_index.common import QUESTION, listening, make_index, make_llm, make_nodes
from tests.integrations.llama_index.test_matrix import force, say

TURNS = 4
RATIO = 0.15


@pytest.mark.parametrize(("engine", "mode"), [(ContextChatEngine, "astream"), (CondensePlusContextChatEngine, "async")])
async def test_later_turns_reuse_the_documents(engine: Any, mode: str) -> None:
    llm = make_llm(
        True, {"recompute_ratio": RATIO}, logits_processor=[Script(tiny_parts()[1], force, free=4)], max_new_tokens=20
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
    assert fed[-1] > fed[0] + 20 * (TURNS - 1)  # the conversation grew


async def test_each_turn_goes_on_from_the_one_before() -> None:
    script = Script(tiny_parts()[1], lambda prompt: "Anna was born there.")
    llm = make_llm(True, {"recompute_ratio": RATIO}, logits_processor=[script], max_new_tokens=40)
    retriever = make_index(make_nodes(seed=81, words=40)).as_retriever(similarity_top_k=4)
    memory = ChatMemoryBuffer.from_defaults(token_limit=6000)
    chat = ContextChatEngine.from_defaults(retriever, llm=llm, memory=memory)
    with llm.engine, listening() as answers:
        for turn in range(TURNS):
            await say(chat, "sync", f"{QUESTION} Turn {turn}.")
    first, *later = answers.infos
    assert (first["hits"], first["misses"], first["resumed_tokens"]) == (0, 4, 0)
    for before, info, event in zip(answers.infos, later, answers.events[1:], strict=False):
        assert (info["hits"], info["misses"]) == (4, 0)
        assert max(info["recomputed_tokens"]) == 0  # documents, earlier questions and answers: all of it is there
        # But for what merges at the seam between prompt and answer.
        assert before["prompt_tokens"] - 3 <= info["resumed_tokens"] < info["prompt_tokens"]
        assert event.resumed_tokens == info["resumed_tokens"]
