"""Every engine, in every mode it has: the model reads what LlamaIndex writes, nodes hit, ratio 1.0 is plain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
    SimpleChatEngine,
)
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import CitationQueryEngine, RouterQueryEngine, SubQuestionQueryEngine
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import MetadataMode
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.tools import QueryEngineTool, RetrieverTool
from transformers.generation import SuppressTokensLogitsProcessor

from cacheblend_rag.llama_index import CacheBlendLLM, index_nodes, warm_index
from tests.integrations.langchain.models import Plain, Script, plain_answer, tiny_parts
from tests.integrations.llama_index.common import (
    QUESTION,
    Answers,
    PlainLLM,
    listening,
    make_index,
    make_llm,
    make_nodes,
    unknow,
)
from tests.tokenizer_kinds import MAKERS as TOKENIZERS

# Workflows look at every attribute of an agent, pydantic's old ones included.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:is_running called from within a step:DeprecationWarning"),
]
MODES = ("sync", "async", "stream", "astream")
WHOLE = ("sync", "async")
FREE = 4  # tokens of an answer that is not forced
FORCED = {
    "question list": '{"items": [{"sub_question": "Where was Anna born?", "tool_name": "docs"}]}',
    "choice": '[{"choice": 1, "reason": "Only one."}]',
    "question": "Who lives in Oslo?",
}


def force(prompt: str) -> str | None:
    """Text that the tiny model cannot write: JSON, and a question of known words."""
    if "sub-questions in json" in prompt:
        return FORCED["question list"]
    if "Some choices are given below" in prompt:
        return FORCED["choice"]
    return FORCED["question"] if "tandalone question" in prompt else None


@dataclass
class Bench:
    """An index whose nodes are warmed, and the model that answers."""

    index: VectorStoreIndex
    llm: CacheBlendLLM

    def tool(self, **options: Any) -> QueryEngineTool:
        engine = self.index.as_query_engine(llm=self.llm, similarity_top_k=4, **options)
        return QueryEngineTool.from_defaults(engine, name="docs", description="All documents.")


def by_mode(name: str) -> Callable[[Bench, bool], Any]:
    def make(bench: Bench, streaming: bool) -> Any:
        return bench.index.as_query_engine(llm=bench.llm, similarity_top_k=4, response_mode=name, streaming=streaming)

    return make


def citation(bench: Bench, streaming: bool) -> Any:
    return CitationQueryEngine.from_args(bench.index, llm=bench.llm, similarity_top_k=4, streaming=streaming)


def router(bench: Bench, streaming: bool) -> Any:
    selector = LLMSingleSelector.from_defaults(llm=bench.llm)
    return RouterQueryEngine(selector, [bench.tool(streaming=streaming)], llm=bench.llm)


def sub_question(bench: Bench, streaming: bool) -> Any:
    return SubQuestionQueryEngine.from_defaults(
        [bench.tool()],
        llm=bench.llm,
        question_gen=LLMQuestionGenerator.from_defaults(llm=bench.llm),
        response_synthesizer=get_response_synthesizer(llm=bench.llm, streaming=streaming),
        verbose=False,
    )


def memory() -> ChatMemoryBuffer:
    """A memory of the conversation; the default one leaves a database connection open."""
    return ChatMemoryBuffer.from_defaults(token_limit=4000)


def context_chat(bench: Bench) -> Any:
    retriever = bench.index.as_retriever(similarity_top_k=4)
    return ContextChatEngine.from_defaults(retriever, llm=bench.llm, memory=memory())


def condense_plus_context(bench: Bench) -> Any:
    retriever = bench.index.as_retriever(similarity_top_k=4)
    return CondensePlusContextChatEngine.from_defaults(retriever, llm=bench.llm, memory=memory())


def condense_question(bench: Bench) -> Any:
    return CondenseQuestionChatEngine.from_defaults(bench.tool().query_engine, llm=bench.llm, memory=memory())


def condense_question_streaming(bench: Bench) -> Any:
    engine = bench.tool(streaming=True).query_engine
    return CondenseQuestionChatEngine.from_defaults(engine, llm=bench.llm, memory=memory())


def simple_chat(bench: Bench) -> Any:
    bench.index.as_retriever(similarity_top_k=4).retrieve(QUESTION)
    texts = [node.get_content(metadata_mode=MetadataMode.LLM) for node in index_nodes(bench.index)]
    prompt = "Use:\n\n" + "\n\n".join(texts)
    return SimpleChatEngine.from_defaults(llm=bench.llm, memory=memory(), system_prompt=prompt)


QUERY_ENGINES: dict[str, tuple[Callable[[Bench, bool], Any], tuple[str, ...]]] = {
    "compact": (by_mode("compact"), MODES),
    "refine": (by_mode("refine"), MODES),
    "simple_summarize": (by_mode("simple_summarize"), MODES),
    "tree_summarize": (by_mode("tree_summarize"), MODES),
    "accumulate": (by_mode("accumulate"), WHOLE),
    "compact_accumulate": (by_mode("compact_accumulate"), WHOLE),
    "citation": (citation, MODES),
    "router": (router, MODES),
    "sub_question": (sub_question, MODES),
}
CHAT_ENGINES: dict[str, tuple[Callable[[Bench], Any], tuple[str, ...]]] = {
    "context": (context_chat, MODES),
    "condense_plus_context": (condense_plus_context, MODES),
    "condense_question": (condense_question, WHOLE),
    "condense_question, streaming": (condense_question_streaming, ("stream", "astream")),
    "simple": (simple_chat, MODES),
}


@pytest.fixture(scope="module", params=["chat"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    llm = make_llm(
        request.param == "chat",
        # A chunk that misses keeps missing, so that no test covers up for another.
        {"recompute_ratio": 1.0, "write_back": "off"},
        logits_processor=[Script(tiny_parts()[1], force, free=FREE)],
        max_new_tokens=100,
        stop=["the"],
        normalise_lists=True,
    )
    nodes = make_nodes(seed=1 if llm.metadata.is_chat_model else 2)
    index = make_index(nodes)
    modes = (MetadataMode.LLM, MetadataMode.NONE)
    warm_index(index, llm, metadata_modes=modes, progress=False, say=lambda message: None)
    with llm.engine:
        yield Bench(index, llm)


@pytest.fixture
def answers(bench: Bench) -> Iterator[Answers]:
    unknow(index_nodes(bench.index))
    with listening() as heard:
        yield heard


async def ask(engine: Any, mode: str) -> str:
    """Ask a query engine; the whole answer."""
    match mode:
        case "sync":
            return str(engine.query(QUESTION))
        case "async":
            return str(await engine.aquery(QUESTION))
        case "stream":
            return "".join(engine.query(QUESTION).response_gen)
        case _:
            response = await engine.aquery(QUESTION)
            return "".join([piece async for piece in response.async_response_gen()])


async def say(engine: Any, mode: str, message: str) -> str:
    """Say something to a chat engine; the whole answer."""
    match mode:
        case "sync":
            return str(engine.chat(message))
        case "async":
            return str(await engine.achat(message))
        case "stream":
            response = engine.stream_chat(message)
            text = "".join(response.response_gen)
            if response.write_response_to_history_thread is not None:
                response.write_response_to_history_thread.join()
            return text
        case _:
            response = await engine.astream_chat(message)
            text = "".join([piece async for piece in response.async_response_gen()])
            return text


def check_plain(answers: Answers) -> None:
    """The ids are those of what LlamaIndex wrote; answers not forced are the plain model's, up to the stop string."""
    fed = [info["input_ids"] for info in answers.infos]
    assert sorted(fed) == sorted(answers.plain_ids(tiny_parts()[1]))
    free = [(text, info) for text, info in zip(answers.texts, answers.infos, strict=True)]
    free = [(text, info) for text, info in free if text not in FORCED.values()]
    assert free
    for text, info in free:
        assert plain_answer(info["input_ids"], FREE).split("the")[0] == text


@pytest.mark.parametrize("bench", ["completion", "chat"], indirect=True)
@pytest.mark.parametrize(("name", "mode"), [*(("compact", mode) for mode in MODES), ("refine", "async")])
async def test_query_engines(bench: Bench, answers: Answers, name: str, mode: str) -> None:
    make, _ = QUERY_ENGINES[name]
    text = await ask(make(bench, "stream" in mode), mode)
    assert answers.counts == ([(1, 0)] * 4 if name == "refine" else [(4, 0)])
    check_plain(answers)
    assert len(answers.events) == len(answers.infos)
    said = answers.texts[-1]
    if name == "refine":  # an answer without any text leaves the one before
        said = next((one for one in reversed(answers.texts) if one), "")
    assert text == (said or ("Empty Response" if mode in WHOLE else ""))


@pytest.mark.parametrize("mode", MODES)
async def test_chat_engines(bench: Bench, answers: Answers, mode: str) -> None:
    engine = context_chat(bench)
    for message in (QUESTION, "What opened in Oslo?"):
        await say(engine, mode, message)
    assert answers.counts == [(4, 0), (4, 0)]
    check_plain(answers)


@pytest.fixture(scope="module")
def index() -> VectorStoreIndex:
    return make_index(make_nodes(seed=3))


def processors_of(tokens: str) -> list[Any]:
    """The script, for a tokenizer of a kind; single bytes, which need not be text, are not written freely."""
    tokenizer = tiny_parts(tokens)[1]
    single = [number for piece, number in tokenizer.get_vocab().items() if piece.startswith("<0x")]
    return [*([SuppressTokensLogitsProcessor(single)] if single else []), Script(tokenizer, force, free=FREE)]


async def check_against_plain(index: VectorStoreIndex, name: str, chat: bool, tokens: str) -> None:
    """The same ids and answers as without this package; on the second request all retrieved nodes hit."""

    async def asked(llm: Any) -> Answers:
        with listening() as heard:
            bench = Bench(index, llm)
            if name in QUERY_ENGINES:
                await ask(QUERY_ENGINES[name][0](bench, False), "sync")
            else:
                await say(CHAT_ENGINES[name][0](bench), "sync", QUESTION)
        return heard

    fields: dict[str, Any] = {"max_new_tokens": 100, "logits_processor": processors_of(tokens)}
    llm = make_llm(chat, {"tokens": tokens, "recompute_ratio": 1.0}, **fields)
    plain = Plain(tokens, 100, processors_of(tokens))
    await asked(PlainLLM(plain=plain, planned=llm.metadata))
    assert plain.fed
    unknow(index_nodes(index))
    nodes = [1] * 4 if name in ("refine", "accumulate") else [4]
    with llm.engine:
        for number in range(2):
            heard = await asked(llm)
            assert [info["input_ids"] for info in heard.infos] == plain.fed
            assert heard.texts == plain.texts
            assert heard.counts == [((0, count), (count, 0))[number] for count in nodes]


@pytest.mark.parametrize(
    "name", [*QUERY_ENGINES, *(name for name, (_, modes) in CHAT_ENGINES.items() if "sync" in modes)]
)
async def test_the_model_reads_what_the_plain_one_would(index: VectorStoreIndex, name: str) -> None:
    await check_against_plain(index, name, name in CHAT_ENGINES or name == "sub_question", "byte-level BPE")


@pytest.mark.parametrize("tokens", list(TOKENIZERS)[1:])
async def test_engines_equal_plain_ones_with_every_tokenizer(index: VectorStoreIndex, tokens: str) -> None:
    await check_against_plain(index, "compact", True, tokens)


@pytest.mark.parametrize(
    ("agent", "tool", "streaming"),
    [(FunctionAgent, "query engine", True), (FunctionAgent, "retriever", False), (ReActAgent, "retriever", True)],
)
async def test_agents(bench: Bench, answers: Answers, agent: Any, tool: str, streaming: bool) -> None:
    script = _react_steps() if agent is ReActAgent else _function_steps()
    llm = CacheBlendLLM.from_engine(
        bench.llm.engine,
        logits_processor=[Script(tiny_parts()[1], lambda prompt: script.pop(0))],
        is_chat_model=True,
        max_new_tokens=200,
        report_input_ids=True,
    )
    retriever = bench.index.as_retriever(similarity_top_k=4)
    found = RetrieverTool.from_defaults(retriever, name="docs", description="All documents.")
    one = agent(tools=[bench.tool() if tool == "query engine" else found], llm=llm, streaming=streaming)
    result = await one.run(QUESTION, memory=memory())
    assert str(result) == "Anna was."
    assert answers.counts == [(4, 0)]  # the query engine's prompt, or the agent's own second one
    fed = [info["input_ids"] for info in answers.infos]
    assert fed == answers.plain_ids(tiny_parts()[1])


def _function_steps() -> list[str]:
    call = '<tool_call>\n{"name": "docs", "arguments": {"input": "Who was born?"}}\n</tool_call>'
    return [call, "Anna was."]


def _react_steps() -> list[str]:
    call = 'Thought: I need a tool.\nAction: docs\nAction Input: {"input": "Who was born?"}'
    return [call, "Thought: I can answer.\nAnswer: Anna was."]
