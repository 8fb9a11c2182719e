"""Unmodified chains in every mode: the model reads what the plain chain writes, and every retrieved chunk hits.

Retrieval, chunk matching, prefill and blending are real. Where a step needs output that random weights
cannot write (a tool call, a list of queries), a logits processor forces it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, dynamic_prompt
from langchain_classic.chains import (
    ConversationalRetrievalChain,
    RetrievalQA,
    create_history_aware_retriever,
    create_retrieval_chain,
)
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import ContextualCompressionRetriever, EnsembleRetriever, MultiQueryRetriever
from langchain_classic.retrievers.document_compressors import CrossEncoderReranker
from langchain_classic.retrievers.document_compressors.cross_encoder import BaseCrossEncoder
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langgraph.graph import START, StateGraph
from transformers.generation import SuppressTokensLogitsProcessor
from typing_extensions import TypedDict

from cacheblend_rag.langchain import CacheBlendLLM, CacheBlendMiddleware, ChatCacheBlend, known_chunks, track
from cacheblend_rag.retrieval.vectorstore import FaissVectorStore
from tests.integrations.langchain.models import (
    Ended,
    FixedRetriever,
    Plain,
    PlainChat,
    PlainLLM,
    Script,
    answers_in,
    passages,
    tiny_engine,
    tiny_parts,
)
from tests.tokenizer_kinds import MAKERS as TOKENIZERS

pytestmark = pytest.mark.usefixtures("nothing_known")

DOCUMENTS = passages(4, seed=3)
QUESTION = "What fell?"
HISTORY = [HumanMessage("Who counted?"), AIMessage("An owl.")]
PROMPT = ChatPromptTemplate.from_messages([("system", "Use this.\n\n{context}"), ("human", "{input}")])
MODES = ("invoke", "ainvoke", "batch", "abatch", "stream", "astream", "astream_events")
EMBEDDING = DeterministicFakeEmbedding(size=8)


def script(prompt: str) -> str | None:
    """The text that a larger model would write at the steps between."""
    if "different versions of the given user question" in prompt:
        return "What fell?\nWhich thing fell?"
    if '"look_up"' in prompt and "[tool]" not in prompt:
        return '<tool_call>{"name": "look_up", "arguments": {"query": "leaf"}}</tool_call>'
    return None


def processors_of(tokens: str) -> list[Any]:
    """The script, for a tokenizer of a kind; single bytes, which need not be text, are not written freely."""
    tokenizer = tiny_parts(tokens)[1]
    single = [number for piece, number in tokenizer.get_vocab().items() if piece.startswith("<0x")]
    return [*([SuppressTokensLogitsProcessor(single)] if single else []), Script(tokenizer, script, free=3)]


@cache
def model_of(kind: type[Any], ratio: float) -> Any:
    """A model with all documents warmed; what it learned while warming is forgotten."""
    engine = tiny_engine(recompute_ratio=ratio)
    processor = Script(tiny_parts()[1], script, free=3)
    model = kind.from_engine(engine, max_new_tokens=100, report_input_ids=True, logits_processor=[processor])
    model.warm(DOCUMENTS, progress=False)
    return model


@cache
def store() -> FaissVectorStore:
    """All documents, in our vector store."""
    return FaissVectorStore.from_texts([one.page_content for one in DOCUMENTS], EMBEDDING)


@cache
def foreign_store() -> InMemoryVectorStore:
    """All documents, in another vector store."""
    return InMemoryVectorStore.from_texts([one.page_content for one in DOCUMENTS], EMBEDDING)


def retriever() -> Any:
    return store().as_retriever(search_kwargs={"k": 4})


def join(documents: list[Document]) -> str:
    return "\n\n".join(one.page_content for one in documents)


# The chains ---------------------------------------------------------------------------------


class State(TypedDict, total=False):
    """State of a graph."""

    input: str
    found: list[Document]
    context: str
    answer: str


def graph_of(retrieve: Callable[[State], State], model: Any) -> Any:
    """A LangGraph of two nodes, as tutorials show it."""

    def generate(state: State) -> State:
        context = state.get("context") or join(state["found"])
        written = (PROMPT | model | StrOutputParser()).invoke({"context": context, "input": state["input"]})
        return {"answer": written}

    graph = StateGraph(State)
    graph.add_node("retrieve", retrieve)
    graph.add_node("generate", generate)
    graph.add_edge(START, "retrieve")
    graph.add_edge("retrieve", "generate")
    return graph.compile()


def graph(model: Any) -> Any:
    """A node that hands documents on: seen without `track`."""
    return graph_of(lambda state: {"found": foreign_store().similarity_search(state["input"], k=4)}, model)


def graph_with_text(model: Any) -> Any:
    """A node that hands on their text alone."""
    found = track(foreign_store())
    return graph_of(lambda state: {"context": join(found.similarity_search(state["input"], k=4))}, model)


def direct(model: Any) -> Any:
    """A lambda that returns documents: seen without `track`."""
    search = RunnableLambda(lambda given: foreign_store().similarity_search(given["input"], k=4))
    return {"context": search | join, "input": lambda given: given["input"]} | PROMPT | model | StrOutputParser()


def direct_with_text(model: Any) -> Any:
    """A lambda that returns the documents' text, synchronous and asynchronous."""
    found = track(foreign_store())

    async def asearch(given: dict[str, Any]) -> str:
        return join(await found.asimilarity_search(given["input"], k=4))

    search = RunnableLambda(lambda given: join(found.similarity_search(given["input"], k=4)), asearch)
    return {"context": search, "input": lambda given: given["input"]} | PROMPT | model | StrOutputParser()


def agent_with_direct_prompt(model: Any) -> Any:
    """The prompt of LangChain's own RAG tutorial."""
    found = track(foreign_store())

    @dynamic_prompt
    def prompt(request: ModelRequest) -> str:
        return f"Use this.\n\n{join(found.similarity_search(str(request.messages[-1].content), k=4))}"

    return create_agent(model, [], middleware=[prompt])


def agent_with_text_tool(model: Any) -> Any:
    """A tool that returns text."""
    found = track(foreign_store())

    @tool
    def look_up(query: str) -> str:
        """Look something up."""
        return "\n\n".join(f"Content: {one.page_content}" for one, _ in found.similarity_search_with_score(query, k=4))

    return create_agent(model, [look_up])


def retrieval_qa(model: Any) -> Any:
    return RetrievalQA.from_chain_type(model, retriever=retriever())


def retrieval_qa_from_llm(model: Any) -> Any:
    """Writes ``Context:`` before each document."""
    return RetrievalQA.from_llm(model, retriever=retriever())


def conversational(model: Any) -> Any:
    return ConversationalRetrievalChain.from_llm(model, retriever=retriever())


def retrieval_chain(model: Any) -> Any:
    return create_retrieval_chain(retriever(), create_stuff_documents_chain(model, PROMPT))


def with_titles(model: Any) -> Any:
    """A document prompt that adds metadata."""
    one = PromptTemplate.from_template("Title: {title}\n{page_content}")
    found = FixedRetriever(documents=DOCUMENTS)
    return create_retrieval_chain(found, create_stuff_documents_chain(model, PROMPT, document_prompt=one))


def with_rules(model: Any) -> Any:
    """Another text between documents."""
    joined = create_stuff_documents_chain(model, PROMPT, document_separator="\n-----\n")
    return create_retrieval_chain(retriever(), joined)


def history_aware(model: Any) -> Any:
    rephrase = ChatPromptTemplate.from_messages([MessagesPlaceholder("chat_history"), ("human", "{input}")])
    asked = create_history_aware_retriever(model, retriever(), rephrase)
    return create_retrieval_chain(asked, create_stuff_documents_chain(model, PROMPT))


def pipe(model: Any) -> Any:
    asked = {"context": (lambda given: given["input"]) | retriever() | join, "input": lambda given: given["input"]}
    return asked | PROMPT | model | StrOutputParser()


def parallel(model: Any) -> Any:
    found = RunnableParallel(found=(lambda given: given["input"]) | retriever(), input=lambda given: given["input"])
    context = RunnablePassthrough.assign(context=lambda given: join(given["found"]))
    return found | context | PROMPT | model | StrOutputParser()


def multi_query(model: Any) -> Any:
    found = MultiQueryRetriever.from_llm(retriever(), model)
    return create_retrieval_chain(found, create_stuff_documents_chain(model, PROMPT))


def ensemble(model: Any) -> Any:
    halves = [FixedRetriever(documents=DOCUMENTS[:2]), FixedRetriever(documents=DOCUMENTS[2:])]
    found = EnsembleRetriever(retrievers=halves, weights=[0.5, 0.5])
    return create_retrieval_chain(found, create_stuff_documents_chain(model, PROMPT))


class ByLength(BaseCrossEncoder):
    """Ranks long texts first."""

    def score(self, text_pairs: list[tuple[str, str]]) -> list[float]:
        return [float(len(text)) for _, text in text_pairs]


def compression(model: Any) -> Any:
    ranked = CrossEncoderReranker(model=ByLength(), top_n=4)
    found = ContextualCompressionRetriever(base_compressor=ranked, base_retriever=retriever())
    return create_retrieval_chain(found, create_stuff_documents_chain(model, PROMPT))


def agent_with_tool(model: Any) -> Any:
    @tool(response_format="content_and_artifact")
    def look_up(query: str) -> tuple[str, list[Document]]:
        """Look something up."""
        found = store().similarity_search(query, k=4)
        return "\n\n".join(f"Source: {one.metadata}\nContent: {one.page_content}" for one in found), found

    return create_agent(model, [look_up])


def agent_with_prompt(model: Any) -> Any:
    @dynamic_prompt
    def prompt(request: ModelRequest) -> str:
        return f"Use this.\n\n{join(retriever().invoke(str(request.messages[-1].content)))}"

    return create_agent(model, [], middleware=[prompt])


def agent_with_middleware(model: Any) -> Any:
    return create_agent(model, [], middleware=[CacheBlendMiddleware(retriever())])


@dataclass(frozen=True)
class Chain:
    """A chain of the matrix: how it is made, what it is asked, and with which models it works."""

    make: Callable[[Any], Any]
    asked: dict[str, Any]
    kinds: tuple[type[Any], ...] = (CacheBlendLLM, ChatCacheBlend)


MESSAGES = {"messages": [HumanMessage(QUESTION)]}
CHAINS = [
    Chain(graph, {"input": QUESTION}),
    Chain(graph_with_text, {"input": QUESTION}),
    Chain(direct, {"input": QUESTION}),
    Chain(direct_with_text, {"input": QUESTION}),
    Chain(agent_with_direct_prompt, MESSAGES, (ChatCacheBlend,)),
    Chain(agent_with_text_tool, MESSAGES, (ChatCacheBlend,)),
    Chain(retrieval_qa, {"query": QUESTION}),
    Chain(retrieval_qa_from_llm, {"query": QUESTION}),
    Chain(conversational, {"question": QUESTION, "chat_history": HISTORY}),
    Chain(retrieval_chain, {"input": QUESTION}),
    Chain(with_titles, {"input": QUESTION}),
    Chain(with_rules, {"input": QUESTION}),
    Chain(history_aware, {"input": QUESTION, "chat_history": HISTORY}),
    Chain(pipe, {"input": QUESTION}),
    Chain(parallel, {"input": QUESTION}),
    Chain(multi_query, {"input": QUESTION}),
    Chain(ensemble, {"input": QUESTION}),
    Chain(compression, {"input": QUESTION}),
    Chain(agent_with_tool, MESSAGES, (ChatCacheBlend,)),
    Chain(agent_with_prompt, MESSAGES, (ChatCacheBlend,)),
    Chain(agent_with_middleware, MESSAGES, (ChatCacheBlend,)),
]
CASES = [
    pytest.param(chain, chain.kinds[number % len(chain.kinds)], id=chain.make.__name__)
    for number, chain in enumerate(CHAINS)
]


async def run(chain: Runnable[Any, Any], asked: Any, mode: str, config: Any) -> None:
    if mode == "astream_events":
        events = [event["event"] async for event in chain.astream_events(asked, config, version="v2")]
        assert any(event in ("on_llm_end", "on_chat_model_end") for event in events)
    else:
        assert await answers_in(mode, chain, asked, config, [asked])


def with_chunks(infos: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers that were given from documents."""
    return [info for info in infos if info["hits"] + info["misses"]]


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning")
@pytest.mark.parametrize("mode", MODES)
async def test_every_retrieved_chunk_hits_in_every_mode(mode: str) -> None:
    (chain,) = [one for one in CHAINS if one.make is retrieval_chain]
    model = model_of(ChatCacheBlend, 0.15)
    known_chunks.clear()  # tracking must find them
    ended = Ended()
    await run(chain.make(model), chain.asked, mode, {"callbacks": [ended]})
    answers = with_chunks(ended.infos)
    assert len(answers) == (2 if "batch" in mode else 1)
    assert [(info["hits"], info["misses"]) for info in answers] == [(4, 0)] * len(answers)


def check_against_the_plain_chain(chain: Chain, kind: type[Any], tokens: str) -> None:
    """The same ids and answers as without this package; on the second request all retrieved chunks hit."""
    plain = Plain(tokens, 100, processors_of(tokens))
    expected = Ended()
    stand_in = PlainLLM(plain=plain) if kind is CacheBlendLLM else PlainChat(plain=plain)
    chain.make(stand_in).invoke(chain.asked, {"callbacks": [expected]})
    assert plain.fed
    known_chunks.clear()
    with tiny_engine(tokens, recompute_ratio=1.0) as engine:
        settings = {"max_new_tokens": 100, "report_input_ids": True, "logits_processor": processors_of(tokens)}
        model = kind.from_engine(engine, **settings)
        for counts in ((0, 4), (4, 0)):
            ended = Ended()
            chain.make(model).invoke(chain.asked, {"callbacks": [ended]})
            assert [info["input_ids"] for info in ended.infos] == plain.fed
            assert ended.texts == expected.texts
            assert [(info["hits"], info["misses"]) for info in with_chunks(ended.infos)] == [counts]


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning")
@pytest.mark.parametrize(("chain", "kind"), CASES)
def test_the_model_reads_what_the_plain_chain_writes(chain: Chain, kind: type[Any]) -> None:
    check_against_the_plain_chain(chain, kind, "byte-level BPE")


@pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning")
@pytest.mark.parametrize("tokens", list(TOKENIZERS)[1:])
@pytest.mark.parametrize("make", [retrieval_qa_from_llm, with_titles])
def test_chains_equal_plain_ones_with_every_tokenizer(make: Callable[[Any], Any], tokens: str) -> None:
    (chain,) = [one for one in CHAINS if one.make is make]
    for kind in chain.kinds:
        known_chunks.clear()
        check_against_the_plain_chain(chain, kind, tokens)
