"""Tiny models for LangChain tests: one engine for all, scripted answers, what models said of their work."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.llms import LLM
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult, LLMResult
from langchain_core.retrievers import BaseRetriever
from langchain_core.utils.function_calling import convert_to_openai_tool
from transformers.generation import LogitsProcessor, LogitsProcessorList

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.langchain.messages import read_message
from cacheblend_rag.prompt.calls import parse_calls
from tests import tiny
from tests.tokenizer_kinds import tokenizer_of

TEMPLATE = (
    "{{ bos_token }}{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


# Knowledge that the model would need to call each tool of LangChain's suites.
CALLS: dict[str, dict[str, Any]] = {
    "magic_function": {"input": 3},
    "magic_function_no_args": {},
    "greeting_generator": {"answer_style": "pirate"},
    "my_adder_tool": {"a": 3, "b": 4},
    "unicode_customer": {"customer_name": "你好啊集团", "description": "."},
    "Joke": {"setup": "Why?", "punchline": "So."},
    "JokeDict": {"setup": "Why?", "punchline": "So."},
}


@cache
def tiny_parts(tokens: str = "byte-level BPE") -> tuple[Any, Any]:
    """A model and a tokenizer that wears a chat template; never changed by tests."""
    tokenizer = tokenizer_of(tokens)
    tokenizer.chat_template = TEMPLATE
    return tiny.model(num_hidden_layers=2, max_position_embeddings=8192), tokenizer


def tiny_engine(tokens: str = "byte-level BPE", store: Any = None, **config: Any) -> BlendEngine:
    """An engine over the tiny model; without a store, with one of its own in memory."""
    options = {"min_tokens": 0, "write_back": "inline"} | config
    return BlendEngine(*tiny_parts(tokens), config=BlendConfig(**options), store=store)


def passages(count: int, seed: int = 0, words: int = 24) -> list[Document]:
    """Documents that no other seed gives."""
    return [
        Document(page_content=f"Passage {seed}.{n}.\n\n{tiny.text(words, 100 * seed + n)}", metadata={"title": f"T{n}"})
        for n in range(count)
    ]


class FixedRetriever(BaseRetriever):
    """Returns the same documents for every question."""

    documents: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return self.documents


class Ended(BaseCallbackHandler):
    """Keeps the text of each answer, and what models said of it."""

    def __init__(self) -> None:
        self.infos: list[dict[str, Any]] = []
        self.texts: list[str] = []

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        for batch in response.generations:
            for generation in batch:
                message = getattr(generation, "message", None)
                self.infos.append(dict(message.response_metadata if message else generation.generation_info or {}))
                self.texts.append(generation.text)


async def answers_in(mode: str, chain: Any, given: Any, config: Any = None, beside: Sequence[Any] = ()) -> list[Any]:
    """What a model or a chain says in one of LangChain's modes, in a batch beside others: answers, or pieces of one."""
    if mode == "astream":
        return [piece async for piece in chain.astream(given, config)]
    if mode == "stream":
        return list(chain.stream(given, config))
    answer = getattr(chain, mode)([given, *beside] if "batch" in mode else given, config)
    answer = await answer if mode.startswith("a") else answer
    return list(answer) if "batch" in mode else [answer]


class Script(LogitsProcessor):
    """Makes a model write what a test wants, by what it was asked.

    Parameters
    ----------
    answer : callable
        Takes the prompt's text; the answer's, or None to let the model write.
    free : int
        Tokens after which an answer that the model writes is ended.
    """

    def __init__(self, tokenizer: Any, answer: Callable[[str], str | None], free: int = 1000) -> None:
        self._tokenizer, self._answer, self._free = tokenizer, answer, free
        self._last: list[int] = []
        self._wanted: list[int] | None = None
        self._begun = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids = input_ids[0].tolist()
        if ids[:-1] != self._last:  # a new prompt, not one more token
            text = self._answer(self._tokenizer.decode(ids))
            encode = self._tokenizer.encode
            self._wanted = None if text is None else [*encode(text, add_special_tokens=False), 2]
            self._begun = len(ids)
        self._last = ids
        if self._wanted is None and len(ids) - self._begun >= self._free:
            self._wanted = [2]
        if self._wanted:
            forced = torch.full_like(scores, float("-inf"))
            forced[:, self._wanted.pop(0)] = 0.0
            return forced
        return scores


def standard_call(prompt: str) -> str | None:
    """A model for LangChain's suites: it writes the rest of a call that was begun for it, and freely otherwise."""
    *_, begun = prompt.split("[assistant] ")
    if begun.endswith('"name": "'):
        return f'magic_function", "arguments": {json.dumps(CALLS["magic_function"])}}}'
    if begun.endswith('"unicode_customer", "arguments": ') and "株式会社" in prompt:
        return '{"customer_name": "こんにちは株式会社", "description": "."}}'
    for name, arguments in CALLS.items():
        if begun.endswith(f'"{name}", "arguments": '):
            return json.dumps(arguments, ensure_ascii=False) + "}"
    if "joke about cats" in prompt and not begun:
        return json.dumps(CALLS["Joke"])
    if "What is the weather" in prompt and "[tool]" not in prompt:
        return '<tool_call>{"name": "get_weather", "arguments": {"location": "SF"}}</tool_call>'
    return None


def plain_answer(
    ids: list[int], count: int, tokens: str = "byte-level BPE", processors: Sequence[LogitsProcessor] = ()
) -> str:
    """Transformers' own greedy generation behind these ids."""
    model, tokenizer = tiny_parts(tokens)
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        logits_processor=LogitsProcessorList(processors),
    )
    return str(tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))


class Plain:
    """transformers alone: what a chain without this package feeds its model.

    Parameters
    ----------
    tokens : str
        Kind of the tokenizer.
    count : int
        Most tokens of an answer.
    processors : sequence of LogitsProcessor
    """

    def __init__(self, tokens: str, count: int, processors: Sequence[LogitsProcessor] = ()) -> None:
        self._tokens, self._count, self._processors = tokens, count, processors
        self.tokenizer = tiny_parts(tokens)[1]
        self.fed: list[list[int]] = []
        self.texts: list[str] = []

    def answer(self, ids: list[int]) -> str:
        """Answer a prompt, and note its ids and the answer."""
        self.fed.append(ids)
        self.texts.append(plain_answer(ids, self._count, self._tokens, self._processors))
        return self.texts[-1]


class PlainLLM(LLM):
    """LangChain's text-in, text-out model over transformers alone."""

    plain: Any

    @property
    def _llm_type(self) -> str:
        return "plain"

    def _call(self, prompt: str, stop: list[str] | None = None, **kwargs: Any) -> str:
        return str(self.plain.answer(self.plain.tokenizer.encode(prompt)))


class PlainChat(BaseChatModel):
    """LangChain's chat model over transformers alone: the chat template gives the ids."""

    plain: Any

    @property
    def _llm_type(self) -> str:
        return "plain-chat"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Any:
        return self.bind(tools=[convert_to_openai_tool(one) for one in tools])

    def _generate(self, messages: list[BaseMessage], *args: Any, tools: Any = None, **kwargs: Any) -> ChatResult:
        ids = self.plain.tokenizer.apply_chat_template(
            [_plain_turn(one) for one in messages],
            tools=tools,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        message = read_message(parse_calls(self.plain.answer(ids), tools))
        return ChatResult(generations=[ChatGeneration(message=message)])


def _plain_turn(message: BaseMessage) -> dict[str, Any]:
    roles = {"human": "user", "ai": "assistant"}
    turn: dict[str, Any] = {"role": roles.get(message.type, message.type), "content": message.content}
    if isinstance(message, AIMessage) and message.tool_calls:
        calls = [{"name": call["name"], "arguments": call["args"]} for call in message.tool_calls]
        turn["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return turn


def find(what: str) -> str:
    """Find something."""
    return f"The {what} is red."
