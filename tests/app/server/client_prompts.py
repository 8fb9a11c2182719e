"""Prompts as real clients send them: one function a client, from a question and the passages that were retrieved.

Marks and their order are those of each client's default template. Instructions are shortened: they are the same in
every prompt, so they belong to the common beginning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.prompts import ChatPromptTemplate
from llama_index.core.prompts.chat_prompts import CHAT_TEXT_QA_PROMPT
from llama_index.core.schema import MetadataMode, TextNode

__all__ = ["CLIENTS", "Client", "Messages", "Passage", "Turn"]

Messages = list[dict[str, Any]]
_ASSISTANT = "You are an assistant for question-answering tasks. Use the retrieved context to answer the question."


@dataclass(frozen=True)
class Passage:
    """A passage, and the file that it is from."""

    name: str
    text: str


@dataclass(frozen=True)
class Turn:
    """A question of a conversation.

    Parameters
    ----------
    question : str
    passages : tuple of Passage
        In the order of their ranks.
    before : tuple of (str, str)
        Earlier questions of the conversation with their answers.
    """

    question: str
    passages: tuple[Passage, ...]
    before: tuple[tuple[str, str], ...] = ()

    def history(self) -> Messages:
        """Earlier turns as clients keep them: without what was retrieved for them."""
        pairs = ((("user", asked), ("assistant", said)) for asked, said in self.before)
        return [{"role": role, "content": text} for pair in pairs for role, text in pair]

    def asked(self, system: str, user: str | None = None) -> Messages:
        """The conversation with a system message, and the user's text; by default the question."""
        first = [{"role": "system", "content": system}] if system else []
        return [*first, *self.history(), {"role": "user", "content": self.question if user is None else user}]


@dataclass(frozen=True)
class Client:
    """How a client writes its prompts.

    Parameters
    ----------
    messages : callable
        Makes the messages of a turn.
    written : callable
        A passage's text as it stands in them.
    """

    messages: Callable[[Turn], Messages]
    written: Callable[[str], str] = str


def _open_webui(turn: Turn) -> str:
    numbers = {name: at for at, name in enumerate(dict.fromkeys(one.name for one in turn.passages), 1)}
    sources = "\n".join(
        f'<source id="{numbers[one.name]}" name="{one.name}">{one.text}</source>' for one in turn.passages
    )
    guide = "### Task:\nRespond to the user query using the provided context, with inline citations in the format [id]."
    return f"{guide}\n\n<context>\n{sources}\n</context>\n"


def _open_webui_user(turn: Turn) -> Messages:
    return turn.asked("", f"{_open_webui(turn)}\n{turn.question}")


def _open_webui_system(turn: Turn) -> Messages:
    return turn.asked(_open_webui(turn))


def _anything_llm(turn: Turn) -> Messages:
    blocks = (f"[CONTEXT {at}]:\n{one.text}\n[END CONTEXT {at}]\n\n" for at, one in enumerate(turn.passages))
    return turn.asked("Given the conversation and context, answer the user.\nContext:\n" + "".join(blocks))


def _librechat(turn: Turn) -> Messages:
    files = dict.fromkeys(one.name for one in turn.passages)
    parts = []
    for name in files:
        items = "".join(
            f"\n            <contextItem>\n              <![CDATA[{one.text}]]>\n            </contextItem>"
            for one in turn.passages
            if one.name == name
        )
        parts.append(
            f"\n          <file>\n            <filename>{name}</filename>\n            <context>{items}\n"
            "            </context>\n          </file>"
        )
    head = f"The user has attached {len(files)} files to the conversation:\n\n"
    foot = "\n        </context>\n\n        Use the context as your learned knowledge to better answer the user.\n"
    return turn.asked(f"{head}        <context>{''.join(parts)}{foot}")


def _continue(turn: Turn) -> Messages:
    blocks = [f"```{one.name} (0-{len(one.text) // 40})\n{one.text}\n```" for one in _by_file(turn.passages)]
    guide = "Use the above code to answer the following question."
    return turn.asked("", "\n\n".join([guide, *blocks, turn.question]))


def _by_file(passages: Sequence[Passage]) -> list[Passage]:
    return sorted(passages, key=lambda one: one.name)


def _dify(turn: Turn) -> Messages:
    context = "\n".join(one.text for one in turn.passages)
    guide = "Use the following context as your learned knowledge, inside <context></context> XML tags."
    behind = "When answer to user:\n- If you don't know, just say that you don't know."
    return turn.asked(f"{guide}\n\n<context>\n{context}\n</context>\n\n{behind}")


def _n8n(turn: Turn) -> Messages:
    found = [
        {
            "type": "text",
            "text": json.dumps(
                {"pageContent": one.text, "metadata": {"source": one.name}}, ensure_ascii=False, separators=(",", ":")
            ),
        }
        for one in turn.passages
    ]
    number = f"call_{len(turn.before)}_{len(turn.question)}"
    name, wanted = "documents", json.dumps({"input": turn.question})
    call = {"id": number, "type": "function", "function": {"name": name, "arguments": wanted}}
    result = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    return [
        *turn.asked("You are a helpful assistant"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": number, "content": result},
    ]


def _twice_in_json(text: str) -> str:
    for _ in range(2):
        text = json.dumps(text, ensure_ascii=False)[1:-1]
    return text


_IN_SYSTEM = ChatPromptTemplate.from_messages(
    [("system", _ASSISTANT + "\n\n{context}"), ("placeholder", "{history}"), ("human", "{input}")]
)


def _langchain(turn: Turn) -> Messages:
    context = "\n\n".join(one.text for one in turn.passages)
    told = _IN_SYSTEM.invoke({"context": context, "history": [], "input": turn.question}).to_messages()
    return turn.asked(str(told[0].content), str(told[-1].content))


def _langchain_prompt(turn: Turn) -> Messages:
    context = "\n\n".join(one.text for one in turn.passages)
    return [{"role": "user", "content": f"{_ASSISTANT}\nQuestion: {turn.question} \nContext: {context} \nAnswer:"}]


def _llama_index(turn: Turn) -> Messages:
    nodes = [TextNode(text=one.text, metadata={"file_name": one.name}) for one in turn.passages]
    context = "\n\n".join(node.get_content(metadata_mode=MetadataMode.LLM).strip() for node in nodes)
    told = CHAT_TEXT_QA_PROMPT.format_messages(context_str=context, query_str=turn.question)
    return [{"role": one.role.value, "content": one.content} for one in told]


CLIENTS = {
    "Open WebUI": Client(_open_webui_user),
    "Open WebUI, system context": Client(_open_webui_system),
    "AnythingLLM": Client(_anything_llm),
    "LibreChat": Client(_librechat),
    "Continue": Client(_continue),
    "Dify": Client(_dify),
    "n8n": Client(_n8n, _twice_in_json),
    "LangChain, retrieval chain": Client(_langchain),
    "LangChain, rlm/rag-prompt": Client(_langchain_prompt),
    "LlamaIndex": Client(_llama_index),
}
"""By name."""
