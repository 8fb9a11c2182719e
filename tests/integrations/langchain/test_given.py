"""Documents that no retriever returned within the chain: they are given to it, and found all the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.question_answering import load_qa_chain
from langchain_classic.chains.summarize import load_summarize_chain
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore

from cacheblend_rag.langchain import CacheBlendLLM, ChatCacheBlend
from tests import tiny
from tests.integrations.langchain.models import Ended, answers_in, passages, tiny_engine
from tests.integrations.langchain.test_matrix import EMBEDDING, QUESTION

pytestmark = pytest.mark.usefixtures("nothing_known")

PROMPT = ChatPromptTemplate.from_messages([("system", "Use this.\n\n{context}"), ("human", "{input}")])
KINDS = [CacheBlendLLM, ChatCacheBlend]
MODES = ["invoke", "ainvoke", "batch", "abatch", "stream", "astream"]


def searched(seed: int, count: int = 3) -> list[Document]:
    """Documents that a vector store's own search has found, which is no run."""
    store = InMemoryVectorStore(EMBEDDING)
    store.add_documents(passages(count, seed=seed))
    return store.similarity_search(QUESTION, k=count)


async def asked(chain: Any, mode: str, given: Any) -> list[dict[str, Any]]:
    """What the model said of its answers."""
    ended = Ended()
    await answers_in(mode, chain, given, {"callbacks": [ended]})
    return ended.infos


def outcomes(infos: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(use["outcome"], use["change"]) for info in infos for use in info["documents"]}


def stuff(model: Any) -> Any:
    return create_stuff_documents_chain(model, PROMPT)


def qa(model: Any) -> Any:
    return load_qa_chain(model, chain_type="stuff")


def summarise(kind: str) -> Callable[[Any], Any]:
    return lambda model: load_summarize_chain(model, chain_type=kind)


CHAINS: dict[str, tuple[Callable[[Any], Any], Callable[[list[Document]], Any]]] = {
    "stuff documents chain": (stuff, lambda found: {"context": found, "input": QUESTION}),
    "question answering": (qa, lambda found: {"input_documents": found, "question": QUESTION}),
    "summarise, stuff": (summarise("stuff"), lambda found: {"input_documents": found}),
    "summarise, a list": (summarise("stuff"), lambda found: found),
}


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning")
@pytest.mark.parametrize(
    ("name", "mode", "kind"),
    [
        *((name, "invoke", KINDS[number % 2]) for number, name in enumerate(CHAINS)),
        *(("stuff documents chain", mode, ChatCacheBlend) for mode in MODES),
    ],
)
async def test_documents_given_to_a_chain_hit_from_the_second_request_on(name: str, mode: str, kind: Any) -> None:
    make, given = CHAINS[name]
    with tiny_engine() as engine:
        chain = make(kind.from_engine(engine, max_new_tokens=1))
        for outcome in ("miss", "hit"):
            (info,) = await asked(chain, mode, given(searched(seed=90)))
            assert (info["hits"], info["misses"]) == ((3, 0) if outcome == "hit" else (0, 3))
            assert outcomes([info]) == {(outcome, "")}


# The hint --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "mode"), [(CacheBlendLLM, "ainvoke"), (ChatCacheBlend, "stream")])
async def test_long_prompt_without_a_known_document_is_hinted_at_once(
    kind: Any, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    long = f"{tiny.text(1200, 96)}\n\n{QUESTION}"
    with tiny_engine() as engine:
        untracked = kind.from_engine(engine, max_new_tokens=1, track=False)
        await asked(untracked, mode, f"{tiny.text(1200, 97)}\n\n{QUESTION}")
        llm = kind.from_engine(engine, max_new_tokens=1)
        await asked(llm, mode, QUESTION)
        assert caplog.text == ""
        for _ in range(2):
            await asked(llm, mode, long)
        (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
        assert "held no known document" in record.getMessage()
        assert "#where-did-my-document-go" in record.getMessage()
        assert f"{llm.last_report.prompt_tokens:,} tokens" in record.getMessage()
