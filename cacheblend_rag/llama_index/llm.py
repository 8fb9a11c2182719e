"""CacheBlendLLM: LlamaIndex's LLM over a BlendEngine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Annotated, Any, cast

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.constants import DEFAULT_CONTEXT_WINDOW
from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]
from llama_index.core.instrumentation.span import active_span_id
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.program.utils import get_program_for_llm
from llama_index.core.prompts import BasePromptTemplate, PromptTemplate
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore
from llama_index.core.tools import BaseTool
from llama_index.core.types import Model, PydanticProgramMode
from pydantic import BeforeValidator, Field

from cacheblend_rag.engine.decode import default_room, reasoning_of
from cacheblend_rag.engine.llm_base import LLMBase
from cacheblend_rag.engine.model_call import ModelCall, Said
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.llama_index.answering import CUT, CacheBlendEvent, check_whole, delta_of, logprobs_of, thought_of
from cacheblend_rag.llama_index.context import CONTEXT_NAMES, Hint, MarkedMessages, MarkedText, see
from cacheblend_rag.llama_index.messages import ByTemplate, answer_message, calls_of, growing_message, turns_of
from cacheblend_rag.llama_index.tracking import (
    answers_noted,
    documents_retrieved,
    rewritten_texts,
    split_again,
    switch_on,
)
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.chat import offers_tools
from cacheblend_rag.prompt.conversation import Conversation
from cacheblend_rag.prompt.registry import chunk_text
from cacheblend_rag.report import Generation, usage_of

_dispatcher = get_dispatcher(__name__)
# Arguments that a conversation may have beside options of decoding.
_CALL = ("tools", "tool_choice", "as_object")
# Where LlamaIndex asks for an object by a tool call.
_CALLING = (PydanticProgramMode.DEFAULT, PydanticProgramMode.FUNCTION)


def _as_template(given: Any) -> Any:
    """The template that wraps a question; a text is taken for one, as ``HuggingFaceLLM`` does."""
    made = PromptTemplate(given) if isinstance(given, str) and given else given or None
    if made is not None and (not isinstance(made, BasePromptTemplate) or "query_str" not in made.template_vars):
        raise ConfigError("query_wrapper_prompt", given, "use a text or a PromptTemplate with {query_str} in it")
    return made


class ObjectAnswers(CustomLLM, FunctionCallingLLM):
    """Answers that are objects of pydantic classes: made by a tool call if the model takes tools, else from JSON."""

    is_function_calling_model: bool | None = None

    def structured_predict(
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: dict[str, Any] | None = None, **values: Any
    ) -> Model:
        """Answer with an object of a pydantic class: by a tool call if the model takes tools, else as JSON."""
        options = self._in_form(output_cls, llm_kwargs)
        return cast(Model, super().structured_predict(output_cls, prompt, options, **values))

    async def astructured_predict(
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: dict[str, Any] | None = None, **values: Any
    ) -> Model:
        """`structured_predict` without blocking the event loop."""
        options = self._in_form(output_cls, llm_kwargs)
        return cast(Model, await super().astructured_predict(output_cls, prompt, options, **values))

    def _structured_stream_call(
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: dict[str, Any] | None = None, **values: Any
    ) -> Generator[Any, None, None]:
        """The objects of `stream_structured_predict`, in the form that `structured_predict` asks for."""
        program, options = self._streaming_program(output_cls, prompt, llm_kwargs)
        made: Any = None
        for made in program.stream_call(llm_kwargs=options, **values):
            yield made
        _check_object(made, output_cls)

    async def _structured_astream_call(
        self, output_cls: type[Model], prompt: PromptTemplate, llm_kwargs: dict[str, Any] | None = None, **values: Any
    ) -> AsyncGenerator[Any, None]:
        program, options = await asyncio.to_thread(self._streaming_program, output_cls, prompt, llm_kwargs)
        stream = await program.astream_call(llm_kwargs=options, **values)

        async def objects() -> AsyncGenerator[Any, None]:
            made: Any = None
            async for made in stream:
                yield made
            _check_object(made, output_cls)

        return objects()

    def _streaming_program(
        self, output_cls: type[Model], prompt: PromptTemplate, options: dict[str, Any] | None
    ) -> tuple[Any, dict[str, Any]]:
        """The program that makes the objects of a stream, and the options of its call.

        LlamaIndex's own leaves it to the model whether it calls.
        """
        must = {"tool_choice": "any"} if self._by_call() else {}
        program = get_program_for_llm(output_cls, prompt, self, self.pydantic_program_mode, **must)
        return program, {"as_object": True, **self._in_form(output_cls, options)}

    def _by_call(self) -> bool:
        """Whether objects are asked for by a tool call."""
        return bool(self.is_function_calling_model) and self.pydantic_program_mode in _CALLING

    def _in_form(self, output_cls: type[Model], options: dict[str, Any] | None) -> dict[str, Any]:
        """The options of a call, with the format of its answer where that is no tool call.

        Without the package for it, LlamaIndex parses whatever the model says.
        """
        if self._by_call():
            return options or {}
        form: dict[str, Any] = {"as_object": True}
        if find_spec("llguidance") is not None:
            described = {"name": output_cls.__name__, "schema": output_cls.model_json_schema(), "strict": True}
            form["response_format"] = {"type": "json_schema", "json_schema": described}
        return {**form, **(options or {})}


class CacheBlendLLM(LLMBase, ObjectAnswers):
    """A local model that reuses the KV cache of retrieved nodes.

    Its parameters are those of `LLMBase` and those below. They are of two kinds:

    - the engine: ``engine``, or ``model_id``, ``store``, ``device``, ``dtype``, ``config`` or its options one by one
    - decoding: the fields of `DecodeFields`, and ``timeout``

    Constructing one turns on the tracking of retrievers. The nodes in a prompt of any query engine, chat
    engine or agent are then found by their texts. The ``raw`` of each response says how it was made. A
    `CacheBlendEvent` sends the same to tracing. The answer of a query engine has the sums of all its calls
    under ``"cacheblend"`` in its ``metadata``.

    Parameters
    ----------
    context_window : int, optional
        Tokens that prompt and answer may have together; by default from the model's config.
    is_chat_model : bool, optional
        Whether prompts go to the model as messages; by default if its tokenizer has a chat
        template or ``messages_to_prompt`` is given.
    is_function_calling_model : bool, optional
        Whether tools may be offered to it; by default if the chat template takes them.
    messages_to_prompt : callable, optional
        Renders messages; by default the tokenizer's chat template does.
    completion_to_prompt : callable, optional
        Wraps a prompt that is not formatted yet.
    query_wrapper_prompt : str or PromptTemplate, optional
        Wraps the questions of `predict` and its like; ``{query_str}`` stands for the question.
    json_mode : bool
        Let each answer be a JSON object, where a call does not ask for another form (extra ``structured``).
    normalise_lists : bool
        Write retrieved text as text where LlamaIndex writes a Python list (``simple_summarize``). This changes the
        prompt.

    Raises
    ------
    ConfigError
        If a field cannot be used.
    """

    context_window: int | None = None
    is_chat_model: bool | None = None
    json_mode: bool = False
    normalise_lists: bool = False
    query_wrapper_prompt: Annotated[BasePromptTemplate | None, BeforeValidator(_as_template)] = Field(
        default=None, description="Query wrapper prompt for LLM calls.", exclude=True
    )

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)

    def model_post_init(self, context: Any, /) -> None:
        """Make the engine if there is none, and choose how messages are rendered."""
        super().model_post_init(context)
        given = self.messages_to_prompt is not None
        template = bool(self.engine.tokenizer.chat_template)
        if template and not given:
            self.messages_to_prompt = ByTemplate(self.engine.tokenizer)
        if self.is_chat_model is None:
            self.is_chat_model = template or given
        if self.is_function_calling_model is None:
            self.is_function_calling_model = not given and offers_tools(self.engine.tokenizer)

    @classmethod
    def class_name(cls) -> str:
        """Name of the class, as LlamaIndex shows it."""
        return "CacheBlendLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """The metadata by which LlamaIndex plans prompts."""
        window = self.context_window or self.engine.context_window
        return LLMMetadata(
            context_window=window or DEFAULT_CONTEXT_WINDOW,
            num_output=self.max_new_tokens or default_room(window),
            is_chat_model=bool(self.is_chat_model),
            is_function_calling_model=bool(self.is_function_calling_model),
            model_name=self.model_name,
        )

    # Answering -------------------------------------------------------------------------------

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a prompt.

        Parameters
        ----------
        prompt : str
        formatted : bool
            Whether it is as the model shall read it; else ``completion_to_prompt`` wraps it.
        **kwargs
            The fields of `DecodeFields`, ``timeout`` and ``response_format``.
        """
        return self._completion(prompt, formatted, kwargs).whole()[0]

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """`complete` without blocking the event loop."""
        return (await (await asyncio.to_thread(self._completion, prompt, formatted, kwargs)).awhole())[0]

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer a prompt piece by piece; ``text`` is the whole answer so far, ``delta`` its newest piece."""
        call = self._completion(prompt, formatted, kwargs)
        return call.read(call.open())

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """`stream_complete` without blocking the event loop."""
        call = await asyncio.to_thread(self._completion, prompt, formatted, kwargs)
        return call.aread(call.open())

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation; see `complete` for options, and ``tools`` in OpenAI's form."""
        return self._conversation(messages, kwargs).whole()[0]

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat` without blocking the event loop."""
        return (await (await asyncio.to_thread(self._conversation, messages, kwargs)).awhole())[0]

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer a conversation piece by piece; each piece has the tool calls as written so far.

        The last piece has those calls alone that can be read. With ``verify="always"`` calls come with it alone, since
        an answer may be corrected until then. With ``as_object=True``, as streams of objects ask for it, an answer that
        is none in the end, or was cut, is an error.
        """
        call = self._conversation(messages, kwargs)
        return call.read(call.open())

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """`stream_chat` without blocking the event loop."""
        call = await asyncio.to_thread(self._conversation, messages, kwargs)
        return call.aread(call.open())

    def _completion(self, prompt: str, formatted: bool, options: dict[str, Any]) -> ModelCall[CompletionResponse]:
        text = prompt if formatted or self.completion_to_prompt is None else self.completion_to_prompt(prompt)
        seen = self._see(text, prompt.hint if isinstance(prompt, MarkedText) else None)
        info = self._teller()

        def respond(said: Said) -> CompletionResponse:
            whole = said.split.handed_out if said.answer is None else said.answer.text
            if options.get("as_object"):
                check_whole(said.answer)
            more: Any = {"logprobs": logprobs_of(said.answer), "additional_kwargs": thought_of(said)}
            return CompletionResponse(text=whole, delta=delta_of(said, whole), raw=info(said.answer), **more)

        return self._model_call([replace(seen, turns=())], respond, None, self._in_json(options), ("as_object",))

    def _conversation(self, messages: Sequence[ChatMessage], options: dict[str, Any]) -> ModelCall[ChatResponse]:
        tools, level = options.get("tools"), reasoning_of(options.get("reasoning", self.reasoning))
        said_before = Conversation(turns_of(messages), tools, options.get("tool_choice"), level)
        text: str | None = None
        if not isinstance(self.messages_to_prompt, ByTemplate):
            if tools:
                remedy = "leave out messages_to_prompt and use a model whose chat template takes tools"
                raise ConfigError("tools", [tool["function"]["name"] for tool in tools], remedy)
            if self.messages_to_prompt is None:
                raise ConfigError("messages_to_prompt", None, "give a callable")
            text = self.messages_to_prompt(messages)
        written = said_before.write(self.engine.tokenizer, text)
        hint = messages.hint if isinstance(messages, MarkedMessages) else None
        seen = replace(self._see(written.text, hint, messages), turns=tuple(said_before.turns))
        info, as_object, begun = self._teller(), bool(options.get("as_object")), written.opening

        def respond(said: Said) -> ChatResponse:
            if (answer := said.answer) is not None:
                names = [one.call_id for one in said.split.calls if one.whole]
                message = answer_message(begun + answer.text, tools, bool(begun), answer.thought, names)
            else:
                message = growing_message(said.split.handed_out, said.split.calls, said.split.thought)
            more: Any = {"logprobs": logprobs_of(answer), "additional_kwargs": thought_of(said)}
            delta = delta_of(said, message.content or "")
            response = ChatResponse(message=message, delta=delta, raw=info(answer), **more)
            if as_object and begun and answer is not None:
                self.get_tool_calls_from_response(response)
            elif as_object:
                check_whole(answer)
            return response

        given = options if begun else self._in_json(options)
        return self._model_call([seen], respond, None, given, _CALL, written, growing=as_object)

    def _in_json(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"response_format": {"type": "json_object"}, **options} if self.json_mode else options

    def _see(self, text: str, hint: Hint | None, messages: Sequence[ChatMessage] = ()) -> Prompt:
        """The segments of a finished prompt, by what this model knows and what was retrieved for it."""
        documents, known = documents_retrieved(), self._registry
        if self.known is not None:
            self._learn(documents)
            self.known.add(rewritten_texts(documents))
        separator, again = self.engine.config.text_separator, split_again(known, documents)
        return see(text, known, separator, hint=hint, messages=messages, documents=documents, split_again=again)

    def _teller(self) -> Any:
        """Function that makes ``raw`` of an answer, and reports it to tracing once."""
        span, note = active_span_id.get(), answers_noted()

        def info(answer: Generation | None) -> dict[str, Any] | None:
            if answer is None:
                return None
            report = answer.report
            info = self._info(report)
            note(report)
            own = {name: info[name] for name in CacheBlendEvent.model_fields if name in info}
            _dispatcher.event(CacheBlendEvent(**own, info=info, span_id=span))
            return {**info, "usage": usage_of([report])}

        return info

    # Prompts ---------------------------------------------------------------------------------

    def _get_prompt(self, prompt: BasePromptTemplate, **prompt_args: Any) -> str:
        """The prompt that `predict` and its like make of a template; it is marked with the context in it."""
        values = self._values(prompt_args)
        return MarkedText(super()._get_prompt(prompt, **values), Hint.from_values({**prompt.kwargs, **values}))

    def _get_messages(self, prompt: BasePromptTemplate, **prompt_args: Any) -> list[ChatMessage]:
        values = self._values(prompt_args)
        return MarkedMessages(super()._get_messages(prompt, **values), Hint.from_values({**prompt.kwargs, **values}))

    def _values(self, values: dict[str, Any]) -> dict[str, Any]:
        if not self.normalise_lists:
            return values
        lists = {name: value for name in CONTEXT_NAMES if isinstance(value := values.get(name), list)}
        return {**values, **{name: "\n".join(map(str, value)) for name, value in lists.items()}}

    # Tools -----------------------------------------------------------------------------------

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Arguments of `chat` that offer tools; where one is required, the answer is begun as a call."""
        messages = list(chat_history or [])
        if user_msg is not None:
            messages.append(ChatMessage(role="user", content=user_msg) if isinstance(user_msg, str) else user_msg)
        if tool_required and kwargs.get("tool_choice") in (None, "auto"):
            kwargs["tool_choice"] = "any"
        return {"messages": messages, "tools": [tool.metadata.to_openai_tool() for tool in tools], **kwargs}

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The tool calls of a response.

        Raises
        ------
        ValueError
            If there is none and ``error_on_no_tool_call``. It says so if the answer was cut.
        """
        calls = calls_of(response.message)
        if not calls and error_on_no_tool_call:
            cut = isinstance(response.raw, dict) and response.raw.get("finish_reason") == "length"
            why = CUT if cut else "the model called no tool"
            raise ValueError(f"{why}; it said: {response.message.content!r}")
        return calls

    # Documents -------------------------------------------------------------------------------

    def _begin_tracking(self) -> None:
        switch_on()

    @staticmethod
    def _texts(documents: Iterable[BaseNode | NodeWithScore | str]) -> list[str]:
        """Texts of nodes as LlamaIndex puts them into prompts, with the metadata meant for the model."""
        if isinstance(documents, (str, BaseNode, NodeWithScore)):
            raise ConfigError("documents", documents, "give a list, even for a single one")
        return [text for one in documents if (text := chunk_text(_content(one)))]


def _check_object(made: Any, output_cls: type[Any]) -> None:
    """Refuse a stream of objects whose last one is not whole."""
    if not isinstance(made, output_cls):
        raise ValueError(f"the answer is not a {output_cls.__name__}; it ended as {made!r}")


def _content(document: BaseNode | NodeWithScore | str) -> str:
    return document if isinstance(document, str) else document.get_content(metadata_mode=MetadataMode.LLM)
