"""Many threads and several event loops at once: everyone gets his own documents and his own answer."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document

from cacheblend_rag.langchain import CacheBlendLLM, ChatCacheBlend, known_chunks
from tests.integrations.langchain.models import Ended, FixedRetriever, passages, tiny_engine
from tests.integrations.langchain.test_matrix import PROMPT

WORKERS = 4


def chain_over(model: Any, documents: list[Document]) -> Any:
    return create_retrieval_chain(FixedRetriever(documents=documents), create_stuff_documents_chain(model, PROMPT))


@pytest.mark.parametrize("kind", [CacheBlendLLM, ChatCacheBlend])
def test_threads_and_event_loops_do_not_cross(kind: Any) -> None:
    sets = [passages(3, seed=20 + number) for number in range(WORKERS)]
    with tiny_engine(recompute_ratio=1.0) as engine:
        model = kind.from_engine(engine, max_new_tokens=4, report_input_ids=True)
        for documents in sets:
            model.warm(documents, progress=False)
        known_chunks.clear()
        alone = [chain_over(model, documents).invoke({"input": "What fell?"})["answer"] for documents in sets]
        known_chunks.clear()
        start = threading.Barrier(WORKERS)

        def work(number: int) -> tuple[list[str], list[dict[str, Any]]]:
            ended, chain = Ended(), chain_over(model, sets[number])
            config, asked = {"callbacks": [ended]}, {"input": "What fell?"}

            async def several() -> list[str]:
                first = asyncio.gather(chain.ainvoke(asked, config), chain.ainvoke(asked, config))
                streamed = [piece async for piece in chain.astream(asked, config)]
                return [
                    *(one["answer"] for one in await first),
                    "".join(str(piece["answer"]) for piece in streamed if "answer" in piece),
                ]

            start.wait(20)
            said = asyncio.run(several())
            said += [one["answer"] for one in chain.batch([asked, asked], config)]
            return said, ended.infos

        with ThreadPoolExecutor(WORKERS) as pool:
            results = list(pool.map(work, range(WORKERS)))
        for number, (said, infos) in enumerate(results):
            assert said == [alone[number]] * 5
            assert len(infos) == 5
            for info in infos:
                assert (info["hits"], info["misses"]) == (3, 0)
                text = engine.tokenizer.decode(info["input_ids"])
                assert all(one.page_content in text for one in sets[number])
