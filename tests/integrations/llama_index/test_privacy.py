"""Nothing of a question or an earlier answer is stored, whatever it holds and wherever a template puts it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.prompts.default_prompts import DEFAULT_REFINE_PROMPT, DEFAULT_TEXT_QA_PROMPT
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, TextNode

from cacheblend_rag.engine.llm_base import known_chunks
from cacheblend_rag.llama_index import CacheBlendLLM
from cacheblend_rag.llama_index.tracking import shared_tracker
from tests.integrations.langchain.models import tiny_engine
from tests.integrations.langchain.test_privacy import CONTEXT, DOCUMENTS, QUOTED, REWRITTEN, SAID, holds_only
from tests.probes import Hooked

QUESTION_FIRST = PromptTemplate("Question: {query_str}\nFacts:\n{context_str}\nAgain: {query_str}")
TEMPLATES = st.sampled_from([DEFAULT_TEXT_QA_PROMPT, QUESTION_FIRST, DEFAULT_REFINE_PROMPT])


@settings(max_examples=10, deadline=None)
@given(template=TEMPLATES, question=SAID, answer=SAID, context=CONTEXT, chat=st.booleans())
def test_template_stores_documents_alone(
    template: PromptTemplate, question: str, answer: str, context: str, chat: bool
) -> None:
    known_chunks.clear()
    known_chunks.add(DOCUMENTS)
    store, question = Hooked(), f"secret start {question}"
    names = {"query_str": question, "context_str": context, "context_msg": context, "existing_answer": answer}
    values = {name: value for name, value in names.items() if name in template.template_vars}
    with tiny_engine(store=store) as engine:
        llm = CacheBlendLLM.from_engine(engine, max_new_tokens=1, is_chat_model=chat)
        for _ in range(2):
            llm.predict(template, **values)
    written = template.format(**values)
    opening = written[: min(written.index(values[name]) for name in ("query_str", "existing_answer") if name in values)]
    for begun in ("<s>", "<s>[user] "):
        if chat == (begun != "<s>"):
            holds_only(store.stored_ids(), DOCUMENTS, begun + opening)


@settings(max_examples=10, deadline=None)
@given(system=CONTEXT, question=SAID, answer=SAID, last=SAID, found=CONTEXT)
def test_conversation_stores_documents_alone(system: str, question: str, answer: str, last: str, found: str) -> None:
    known_chunks.clear()
    known_chunks.add(DOCUMENTS)
    store, opening = Hooked(), f"Be short.\n\n{system}"
    messages = [
        ChatMessage(role="system", content=opening),
        ChatMessage(role="user", content=question),
        ChatMessage(role="assistant", content=answer),
        ChatMessage(role="user", content=f"{last}\n\n{found}\n\nsecret end"),
    ]
    with tiny_engine(store=store) as engine:
        llm = CacheBlendLLM.from_engine(engine, max_new_tokens=1)
        for _ in range(2):
            llm.chat(messages)
    holds_only(store.stored_ids(), DOCUMENTS, f"<s>[system] {opening}\n[user] ")


@settings(max_examples=10, deadline=None)
@given(first=st.booleans(), question=QUOTED, context=QUOTED, chat=st.booleans())
def test_so_does_a_query_whose_template_rewrites_the_context(
    first: bool, question: str, context: str, chat: bool
) -> None:
    known_chunks.clear()
    store, question = Hooked(), f"secret start {question} secret end"
    before = "Question: {query_str}\n" if first else ""
    template = PromptTemplate(
        before + "Facts:\n{context_str}\nAgain: {query_str}",
        function_mappings={"context_str": lambda **values: context},
    )
    nodes = [NodeWithScore(node=TextNode(text=text, id_=f"private-{n}")) for n, text in enumerate(DOCUMENTS)]
    with tiny_engine(store=store) as engine:
        llm = CacheBlendLLM.from_engine(engine, max_new_tokens=1, is_chat_model=chat)
        shared_tracker.note([one.node for one in nodes])
        known_chunks.clear()
        for _ in range(2):
            response = get_response_synthesizer(llm=llm, text_qa_template=template).synthesize(question, nodes)
            assert len((response.metadata or {})["cacheblend"]["documents"]) == len(nodes)
    shared_tracker.forget(DOCUMENTS)
    written = template.format(query_str=question, context_str="")
    begun = "<s>[user] " if chat else "<s>"
    holds_only(store.stored_ids(), [*DOCUMENTS, *REWRITTEN], begun + written[: written.index(question)])
