"""Nothing of a question is stored, whatever it holds: separators, whole documents, parts of them, earlier turns."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableLambda

from cacheblend_rag.langchain import ChatCacheBlend, known_chunks
from cacheblend_rag.langchain.messages import turns_of
from cacheblend_rag.prompt.chat import render_turns
from cacheblend_rag.prompt.control import OWN
from tests import tiny
from tests.integrations.langchain.models import FixedRetriever, passages, tiny_engine, tiny_parts
from tests.probes import Hooked

FOUND = passages(3, seed=6)
for one in FOUND:
    one.page_content += " It's <b>far</b> & near."
DOCUMENTS = [one.page_content for one in FOUND]
# Forms of documents that chains write, and people may quote.
REWRITTEN = [write(one) for one in DOCUMENTS for write in (lambda text: json.dumps(text)[1:-1], html.escape)]
CUT = [*(one[:90] for one in (*DOCUMENTS, *REWRITTEN)), *(one[-90:] for one in (*DOCUMENTS, *REWRITTEN))]
# Parts of a question.
PARTS = [DOCUMENTS[0][:40], DOCUMENTS[1][30:], DOCUMENTS[2].replace("\n\n", " "), tiny.text(20, 77)]
MARKS = ["\n\n", " # # ", "\n", " ", '"', "[system] ", "[assistant] ", "<s>"]
PIECES = st.sampled_from([*MARKS, "secret river", "What fell?", *DOCUMENTS, *PARTS])
SAID = st.lists(PIECES, min_size=1, max_size=6).map("".join).filter(str.strip)
QUOTED = st.lists(st.one_of(PIECES, st.sampled_from([*REWRITTEN, *CUT])), min_size=1, max_size=5).map("".join)
CONTEXT = st.lists(st.sampled_from(DOCUMENTS), max_size=2).map("\n\n".join)


def holds_only(stored: Iterable[tuple[int, ...]], allowed: Iterable[str], opening: str) -> None:
    """Each record is a stretch of an allowed text, or a beginning of the prompt in which no question has begun."""
    tokenizer = tiny_parts()[1]
    squeezed = [" ".join(text.split()) for text in allowed]
    for ids in stored:
        text = tokenizer.decode(ids)
        part = " ".join(text.split())
        assert opening.startswith(text) or any(part in one for one in squeezed), text


@settings(max_examples=10, deadline=None)
@given(
    system=CONTEXT,
    turns=st.lists(st.tuples(SAID, CONTEXT, SAID), max_size=2),
    last=SAID,
    found=CONTEXT,
    reuse=st.booleans(),
    tool=st.booleans(),
)
def test_chat_model_stores_documents_alone(
    system: str, turns: list[tuple[str, str, str]], last: str, found: str, reuse: bool, tool: bool
) -> None:
    known_chunks.clear()
    known_chunks.add(DOCUMENTS)
    store, messages = Hooked(), list[BaseMessage]([SystemMessage(f"Be short.\n\n{system}")])
    for question, context, answer in turns:
        messages += [HumanMessage(f"{question}\n\n{context}"), AIMessage(answer)]
    messages.append(HumanMessage(f"{last}\n\n{found}\n\nsecret end"))
    if tool:
        messages.append(ToolMessage(f"Found:\n\n{found}", tool_call_id="1"))
    with tiny_engine(store=store) as engine:
        chat = ChatCacheBlend.from_engine(engine, max_new_tokens=1, reuse_answers=reuse)
        for _ in range(2):
            chat.invoke(messages)
        text = render_turns(engine.tokenizer, turns_of(messages)).replace(OWN, "")
    answers = [str(one.content) for one in messages if isinstance(one, AIMessage)] if reuse else []
    holds_only(store.stored_ids(), [*DOCUMENTS, *answers], text[: text.index("[user] ") + len("[user] ")])


@settings(max_examples=10, deadline=None)
@given(system=QUOTED, turns=st.lists(QUOTED, max_size=2), last=QUOTED)
def test_so_it_does_where_documents_of_the_run_are_rewritten_and_quoted(
    system: str, turns: list[str], last: str
) -> None:
    store, messages = Hooked(), list[BaseMessage]([SystemMessage(f"Be short.\n\n{system}")])
    for question in turns:
        messages += [HumanMessage(f"secret start {question}"), AIMessage("An owl.")]
    messages.append(HumanMessage(f"secret start {last} secret end"))
    retriever = FixedRetriever(documents=FOUND)
    known_chunks.clear()

    def ask(_: str) -> list[BaseMessage]:
        retriever.invoke("?")
        return messages

    with tiny_engine(store=store) as engine:
        chat = ChatCacheBlend.from_engine(engine, max_new_tokens=1, reuse_answers=False)
        for _ in range(2):
            answer = (RunnableLambda(ask) | chat).invoke("?")
            assert len(answer.response_metadata["documents"]) == len(FOUND)
        text = render_turns(engine.tokenizer, turns_of(messages)).replace(OWN, "")
    holds_only(store.stored_ids(), [*DOCUMENTS, *REWRITTEN], text[: text.index("[user] ") + len("[user] ")])
