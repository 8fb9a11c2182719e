"""Both models in every mode: they stop, time out, end when they are left, and report."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from cacheblend_rag.errors import GenerationTimeoutError
from cacheblend_rag.langchain import CacheBlendLLM, ChatCacheBlend, known_chunks
from tests.integrations.langchain.models import answers_in, plain_answer, tiny_engine
from tests.probes import Broken, Slow

KINDS = [CacheBlendLLM, ChatCacheBlend]
MODES = ("invoke", "ainvoke", "batch", "abatch", "stream", "astream")


@pytest.fixture
def engine() -> Iterator[Any]:
    known_chunks.clear()
    with tiny_engine(recompute_ratio=1.0) as made:
        yield made


async def say(model: Any, mode: str, asked: str) -> str:
    """An answer's text, in a mode."""
    answers = await answers_in(mode, model, asked, beside=["another"])
    return "".join(str(getattr(piece, "content", piece)) for piece in (answers[:1] if "batch" in mode else answers))


# Answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "kind"), list(zip(MODES, KINDS * 3, strict=False)))
async def test_every_mode_says_the_same_without_the_prompt_and_stops(engine: Any, kind: Any, mode: str) -> None:
    model = kind.from_engine(engine, max_new_tokens=12)
    whole = await say(model, mode, "What fell in the end?")
    assert whole == await say(model, "invoke", "What fell in the end?")
    assert "What fell" not in whole
    stopped = kind.from_engine(engine, max_new_tokens=12, stop=[whole[4:6]])
    assert await say(stopped, mode, "What fell in the end?") == whole[: whole.index(whole[4:6])]
    assert await say(model.bind(stop=[whole[4:6]]), mode, "What fell in the end?") == whole[: whole.index(whole[4:6])]


def test_the_plain_models_answer_is_transformers_own(engine: Any) -> None:
    llm = CacheBlendLLM.from_engine(engine, max_new_tokens=8, report_input_ids=True)
    result = llm.generate(["What fell?", "Who counted the leaves?"])
    made = 0
    for (one,) in result.generations:
        assert one.generation_info is not None
        assert one.text == plain_answer(one.generation_info["input_ids"], 8)
        made += one.generation_info["generated_tokens"]
    assert result.llm_output is not None
    assert result.llm_output["token_usage"]["completion_tokens"] == made > 2
    assert result.llm_output["model_name"] == llm.model_name


# Time, cancellation, errors -----------------------------------------------------------------


@pytest.mark.parametrize(("mode", "kind"), list(zip(MODES, KINDS * 3, strict=False)))
async def test_late_answer_is_given_up(engine: Any, kind: Any, mode: str) -> None:
    slow = Slow(ends=False)
    model = kind.from_engine(engine, max_new_tokens=2000, timeout=0.15, logits_processor=[slow])
    with pytest.raises(GenerationTimeoutError, match=r"0\.15 s"):
        await say(model, mode, "What fell?")
    quick = kind.from_engine(engine, max_new_tokens=2)
    assert await asyncio.wait_for(quick.ainvoke("And now?"), 20)
    assert slow.made < 500


async def test_cancelled_call_stops_generating(engine: Any) -> None:
    slow = Slow(ends=False)
    model = ChatCacheBlend.from_engine(engine, max_new_tokens=2000, logits_processor=[slow])
    for calls in (model.ainvoke("What fell?"), model.abatch(["One?", "Two?"])):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(calls, 0.2)
    quick = ChatCacheBlend.from_engine(engine, max_new_tokens=2)
    assert await asyncio.wait_for(quick.ainvoke("And now?"), 20)
    assert slow.made < 500


@pytest.mark.parametrize(("mode", "kind"), list(zip(MODES, KINDS * 3, strict=False)))
async def test_errors_while_generating_reach_the_caller(engine: Any, kind: Any, mode: str) -> None:
    model = kind.from_engine(engine, max_new_tokens=9, logits_processor=[Broken(2)])
    with pytest.raises(ZeroDivisionError, match="user's failed"):
        await say(model, mode, "What fell?")
    assert kind.from_engine(engine, max_new_tokens=2).invoke("And now?")


# Pipelines ----------------------------------------------------------------------------------
