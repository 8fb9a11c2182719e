"""Documents that a chain escapes, normalises, wraps or cuts: each is found as it stands, or said to be missing."""

from __future__ import annotations

import html
import json
import logging
import textwrap
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda

from cacheblend_rag.langchain import CacheBlendLLM, ChatCacheBlend, known_chunks
from cacheblend_rag.report import DocumentUse
from tests import tiny
from tests.integrations.langchain.models import Ended, FixedRetriever, Plain, PlainChat, PlainLLM, tiny_engine
from tests.integrations.langchain.test_matrix import QUESTION
from tests.probes import Hooked

pytestmark = pytest.mark.usefixtures("nothing_known")

PROMPT = ChatPromptTemplate.from_messages([("system", "Use this.\n\n{context}"), ("human", "{input}")])
END = 'It\'s a "caf\u00e9" & a <b>well-known, far-off, hard-won</b> \ufb01gure.'
DOCUMENTS = [
    Document(page_content=f"Passage {n}.\n\nCaf\u00e9 & <i>bar</i>: {tiny.text(30, 700 + n)} {END}") for n in range(3)
]
TEXTS = [one.page_content for one in DOCUMENTS]


def each(write: Callable[[str], str]) -> Callable[[list[Document]], str]:
    return lambda documents: "\n\n".join(write(one.page_content) for one in documents)


REWRITES: dict[str, tuple[Callable[[list[Document]], str], str]] = {
    "a list in JSON": (lambda found: json.dumps([one.page_content for one in found]), "json-escaped"),
    "HTML": (each(html.escape), "html-escaped"),
    "Python's own writing": (str, "python-escaped"),
    "cut at the end": (each(lambda text: text[:120]), "truncated at the end"),
    "cut at the start": (each(lambda text: text[-120:]), "truncated at the start"),
    "NFKC in HTML": (
        each(lambda text: html.escape(unicodedata.normalize("NFKC", text))),
        "unicode normal form NFKC, html-escaped",
    ),
    "wrapped": (each(lambda text: textwrap.fill(text, 33)), "line-wrapped"),
    "unchanged": (each(str), ""),
}


def chain_of(model: Any, write: Any, documents: list[Document] = DOCUMENTS) -> Any:
    found = FixedRetriever(documents=documents)
    context = (lambda given: given["input"]) | found | (write if isinstance(write, Runnable) else RunnableLambda(write))
    return {"context": context, "input": lambda given: given["input"]} | PROMPT | model | StrOutputParser()


def asked(chain: Runnable[Any, Any], question: str = QUESTION) -> dict[str, Any]:
    """The model's report of its only answer."""
    ended = Ended()
    chain.invoke({"input": question}, {"callbacks": [ended]})
    (info,) = ended.infos
    return info


def outcomes(info: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one["outcome"], one["change"]) for one in info["documents"]]


@pytest.mark.parametrize(("name", "kind"), list(zip(REWRITES, [CacheBlendLLM, ChatCacheBlend] * 4, strict=False)))
def test_rewritten_documents_hit_from_the_second_request_on(
    name: str, kind: type[Any], caplog: pytest.LogCaptureFixture
) -> None:
    write, change = REWRITES[name]
    plain, expected = Plain("byte-level BPE", 4), Ended()
    stand_in = PlainLLM(plain=plain) if kind is CacheBlendLLM else PlainChat(plain=plain)
    chain_of(stand_in, write).invoke({"input": QUESTION}, {"callbacks": [expected]})
    known_chunks.clear()
    with tiny_engine(recompute_ratio=1.0) as engine:
        model = kind.from_engine(engine, max_new_tokens=4, report_input_ids=True)
        for outcome in ("miss", "hit"):
            ended = Ended()
            chain_of(model, write).invoke({"input": QUESTION}, {"callbacks": [ended]})
            (info,) = ended.infos
            assert ([info["input_ids"]], ended.texts) == (plain.fed, expected.texts)
            assert outcomes(info) == [(outcome, change)] * 3
            assert (info["hits"], info["misses"]) == ((3, 0) if outcome == "hit" else (0, 3))
        stats, report = model.stats(), model.last_report
        assert report is not None
        assert (stats.documents_hit, stats.documents_missed, stats.documents_not_found) == (3, 3, 0)
        assert stats.documents_changed == (6 if change else 0)
        assert report.documents == tuple(DocumentUse(" ".join(text.split())[:80], "hit", change) for text in TEXTS)
    assert caplog.text == ""


def test_missing_document_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def write(found: list[Document]) -> str:
        return "\n\n".join([found[0].page_content, found[1].page_content.upper(), found[2].page_content])

    with tiny_engine() as engine:
        model = ChatCacheBlend.from_engine(engine, max_new_tokens=1)
        infos = [asked(chain_of(model, write)) for _ in range(2)]
        assert [outcomes(info) for info in infos] == [
            [("miss", ""), ("not found", ""), ("miss", "")],
            [("hit", ""), ("not found", ""), ("hit", "")],
        ]
        assert infos[0]["documents"][1]["document"].startswith("Passage 1. Caf\u00e9")
        assert model.stats().documents_not_found == 2
    (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert "1 of 3 retrieved documents were not found in the prompt: the chain rewrote" in record.getMessage()
    assert "docs/how-to/troubleshooting.md" in record.getMessage()


def test_document_left_out_by_a_later_step_is_not_missing(caplog: pytest.LogCaptureFixture) -> None:
    with tiny_engine() as engine:
        model = CacheBlendLLM.from_engine(engine, max_new_tokens=1)
        best = RunnableLambda(lambda found: found[1:])
        info = asked(chain_of(model, best | RunnableLambda(each(str))))
        assert outcomes(info) == [("left out", ""), ("miss", ""), ("miss", "")]
        inner = FixedRetriever(documents=DOCUMENTS)

        class Outer(FixedRetriever):
            def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
                return inner.invoke(query, {"callbacks": run_manager.get_child()})[:2]

        ended = Ended()
        chain = Outer(documents=[]) | each(str) | model
        chain.invoke(QUESTION, {"callbacks": [ended]})
        assert outcomes(ended.infos[0]) == [("hit", "") if n else ("miss", "") for n in range(2)] + [("left out", "")]
        assert model.stats().documents_left_out == 2
    assert caplog.text == ""


@pytest.mark.parametrize("name", ["a list in JSON", "cut at the end", "NFKC in HTML"])
def test_erasing_a_document_erases_its_rewritten_forms(name: str) -> None:
    store = Hooked()
    with tiny_engine(store=store, condition="sink") as engine:  # no chunk is computed behind another
        model = ChatCacheBlend.from_engine(engine, max_new_tokens=1)
        chain = chain_of(model, REWRITES[name][0])
        assert asked(chain)["misses"] == 3
        assert model.forget(DOCUMENTS[:1]) == 1
        assert [one for one, _ in outcomes(asked(chain))] == ["miss", "hit", "hit"]


def test_nothing_before_a_part_of_a_document_is_stored_by_a_plain_model() -> None:
    """It may be a quotation within a question."""
    store = Hooked()
    with tiny_engine(store=store) as engine:
        model = CacheBlendLLM.from_engine(engine, max_new_tokens=1)
        retriever = FixedRetriever(documents=DOCUMENTS[:1])
        question = f"Secret question: who said {TEXTS[0][:90]}"
        chain = retriever | RunnableLambda(lambda found: f"Facts: {len(found)}. {question} and why?") | model
        ended = Ended()
        chain.invoke(QUESTION, {"callbacks": [ended]})
        assert outcomes(ended.infos[0]) == [("miss", "truncated at the end")]
        stored = [engine.tokenizer.decode(ids) for ids in store.stored_ids()]
    assert stored
    assert all(" ".join(text.split()) in " ".join(TEXTS[0].split()) for text in stored)
