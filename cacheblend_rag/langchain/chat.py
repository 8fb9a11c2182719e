"""ChatCacheBlend: LangChain's chat model over a BlendEngine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, Literal, cast

from langchain_core.language_models import BaseChatModel, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.output_parsers import BaseOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel, Field

from cacheblend_rag.engine.decode import reasoning_of
from cacheblend_rag.engine.grammar import can_follow
from cacheblend_rag.engine.logits import conversation_logprobs
from cacheblend_rag.engine.model_call import ModelCall, Said
from cacheblend_rag.errors import CacheBlendError, ConfigError
from cacheblend_rag.langchain.base import PROVIDER, BlendFields
from cacheblend_rag.langchain.messages import (
    CalledDict,
    CalledObject,
    WholeJson,
    artifact_texts,
    read_message,
    response_format,
    stream_chunks,
    thought_fields,
    turns_of,
)
from cacheblend_rag.langchain.tracking import documents_of_run, note_found
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.chat import check_choice, offers_tools, render_turns, writes_marked_calls
from cacheblend_rag.prompt.control import OWN
from cacheblend_rag.prompt.conversation import Conversation
from cacheblend_rag.prompt.matching import RetrievedDocument
from cacheblend_rag.prompt.thoughts import BUDGETS, marks_of
from cacheblend_rag.report import BlendReport, Generation

# Kinds of input and output, as LangChain's agents and middleware read them.
_TEXT = ("text_inputs", "text_outputs")
_NOT_TEXT = (
    *("image_inputs", "image_url_inputs", "pdf_inputs", "audio_inputs", "video_inputs", "attachment"),
    *("image_tool_message", "pdf_tool_message", "image_outputs", "audio_outputs", "video_outputs"),
)
# Arguments that a call may have beside options of decoding.
_CALL = ("tools", "tool_choice", "chat_template_kwargs")
# Errors about a conversation that a chat template does not take.
_NOT_WRITTEN = (CacheBlendError, TypeError, ValueError, KeyError)


class ChatCacheBlend(BlendFields, BaseChatModel):  # type: ignore[misc]  # both call what is answered by another name
    """A local chat model that reuses the KV cache of retrieved chunks.

    Its parameters are those of `BlendFields` and two of its own. They are of two kinds:

    - the engine: ``engine``, or ``model_id``, ``store``, ``device``, ``dtype``, ``config`` or its options one by one
    - decoding: the fields of `DecodeFields`, and ``timeout``

    The tokenizer's chat template renders conversations. Chunks are found inside messages, in documents that tools
    attached to their answers, and in earlier turns. In ``usage_metadata``, ``cache_read`` counts the tokens whose KV
    was reused exactly, and ``cache_creation`` those whose KV goes into the store. The ``response_metadata`` of each
    answer has its time to first token, hits and misses.

    Parameters
    ----------
    reuse_answers : bool
        Keep the KV of the model's own earlier answers, too.
    chat_template_kwargs : dict
        More arguments of the chat template, such as ``{"enable_thinking": False}``. They can also be given with a
        call.
    """

    reuse_answers: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)

    @property
    def _llm_type(self) -> str:
        return "cacheblend-chat"

    def _resolve_model_profile(self) -> ModelProfile:
        """The limits and abilities by which LangChain's agents and middleware choose; a prompt has what is left."""
        tokenizer, window, most = self.engine.tokenizer, self.engine.context_window, self.max_new_tokens
        tools, marks = offers_tools(tokenizer), marks_of(tokenizer)
        early = self.engine.config.verify != "always"
        profile: dict[str, Any] = {
            "name": self.model_name,
            "open_weights": True,
            **dict.fromkeys(_TEXT, True),
            **dict.fromkeys(_NOT_TEXT, False),
            "reasoning_output": marks.known,
            "tool_calling": tools,
            "tool_choice": tools,
            "tool_call_streaming": tools and writes_marked_calls(tokenizer) and early,
            "structured_output": can_follow(tokenizer),
            "temperature": True,
        }
        if marks.known:
            profile["reasoning_effort_levels"] = [level for level in BUDGETS if isinstance(level, str)]
        if window is not None:
            profile["max_input_tokens"] = max(1, window - (most or 0))
            profile["max_output_tokens"] = most or window
        declared = ModelProfile.__annotations__  # earlier versions of langchain-core lack some
        return cast(ModelProfile, {name: value for name, value in profile.items() if name in declared})

    @property
    def _identifying_params(self) -> dict[str, Any]:
        own = {"reuse_answers": self.reuse_answers, "chat_template_kwargs": self.chat_template_kwargs}
        return {**super()._identifying_params, **own}

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        # Parameters by which a response cache tells models apart; the serialised form alone lacks the weights.
        return f"{super()._get_llm_string(stop=stop, **kwargs)}---{sorted(self._identifying_params.items())}"

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Number of tokens of a conversation in the model's chat template.

        A conversation that the model would refuse is counted, too, so that it can be trimmed. Its order may be one that
        the template does not take, or it holds blocks that are not read. The count is then an estimate: each message
        is written as a question of its own.
        """
        if not messages:
            return 0
        offered = [convert_to_openai_tool(tool) for tool in tools] if tools else None
        try:
            return self._written_tokens(messages, offered)
        except _NOT_WRITTEN:
            return self._estimated_tokens(messages, offered)

    def _written_tokens(self, messages: Sequence[BaseMessage], offered: list[dict[str, Any]] | None = None) -> int:
        options, level = self.chat_template_kwargs, self.reasoning
        text = render_turns(self.engine.tokenizer, turns_of(messages), offered, options, level)
        if OWN in text:
            return len(self.engine.turns.segments.tokenizer.text_ids(text))
        return len(self.get_token_ids(text))

    def _estimated_tokens(self, messages: Sequence[BaseMessage], offered: list[dict[str, Any]] | None) -> int:
        frame = tokens = 0  # the frame is written once, whatever is said within
        with suppress(*_NOT_WRITTEN):
            said = [HumanMessage("x"), AIMessage("x"), HumanMessage("x")]
            one, three = self._written_tokens(said[:1]), self._written_tokens(said)
            frame = max(0, one - (three - one) // 2)
        for message in messages:
            try:
                tokens += max(0, self._written_tokens([HumanMessage(content=message.content)]) - frame)
            except _NOT_WRITTEN:
                tokens += self.get_num_tokens(message.text)
            if isinstance(message, AIMessage) and message.tool_calls:
                tokens += self.get_num_tokens(json.dumps(message.tool_calls))
        return frame + tokens + (self.get_num_tokens(json.dumps(offered)) if offered else 0)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Offer tools to a model whose chat template takes them.

        Parameters
        ----------
        tools : sequence
            Functions, classes, LangChain tools, or dicts in OpenAI's form.
        tool_choice : str, optional
            ``"auto"``: the model decides. ``"any"`` or a tool's name: it must call; its answer is
            then begun for it with the opening of a call.
        strict : bool, optional
            Hold calls to the schemas of the tools, whether they must be made or not (extra ``structured``).

        Raises
        ------
        ConfigError
            If ``tool_choice`` names no tool.
        """
        offered = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        choice = check_choice(tool_choice, [tool["function"]["name"] for tool in offered])
        if tool_choice == "none":
            return self.bind(**kwargs)
        return self.bind(tools=offered, **({"tool_choice": choice} if choice else {}), **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] | None = None,
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Make a runnable that answers with objects of a class, or with dicts.

        Parameters
        ----------
        schema : dict or type
            A JSON schema, a pydantic class or a TypedDict; optional with ``"json_mode"``.
        method : str, optional
            ``"json_schema"``: the answer is JSON by the schema. ``"function_calling"``: the answer is a call of a tool
            with the schema. ``"json_mode"``: the answer is any JSON object. By default a call, if the model's chat
            template takes tools.
        include_raw : bool
            Return the message together with the object.
        strict : bool, optional
            Whether objects have only those properties that ``"json_schema"`` names. They do, unless it is False.

        Raises
        ------
        ConfigError
            If a value cannot be used, or, when the runnable is called, if the schema cannot be enforced.
        """
        method = method or ("function_calling" if offers_tools(self.engine.tokenizer) else "json_schema")
        if kwargs:
            raise ConfigError(*next(iter(kwargs.items())), "leave it out; give method, include_raw and strict")
        described = {"kwargs": {"method": method}, "schema": schema}
        parser: BaseOutputParser[Any]
        if method == "function_calling":
            if schema is None:
                raise ConfigError("schema", None, "give one, or use method='json_mode'")
            model = self.bind_tools([schema], tool_choice="any", ls_structured_output_format=described)
            name = convert_to_openai_tool(schema)["function"]["name"]
            parser = CalledDict(key_name=name, first_tool_only=True)
            if isinstance(schema, type) and is_basemodel_subclass(schema):
                parser = CalledObject(tools=[schema], first_tool_only=True)
        else:
            form = response_format(schema, method, strict is not False)
            model = self.bind(response_format=form, ls_structured_output_format=described)
            own = schema if isinstance(schema, type) and issubclass(schema, BaseModel) else None
            parser = WholeJson(pydantic_object=own)
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")

    def segments(self, messages: Sequence[BaseMessage], tools: Sequence[dict[str, Any]] | None = None) -> Prompt:
        """The segments that this model recognises in a conversation."""
        return self._prepared(messages, None, {"tools": tools}).prompts[0]

    def _result(self, answers: list[ChatGeneration]) -> ChatResult:
        return ChatResult(generations=answers)

    def _prepared(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, overrides: dict[str, Any]
    ) -> ModelCall[ChatGeneration]:
        """The call of the engine for a conversation; pieces of its stream are chunks."""
        tools = overrides.get("tools")
        conversation = Conversation(
            turns_of(messages),
            tools,
            overrides.get("tool_choice"),
            reasoning_of(overrides.get("reasoning", self.reasoning)),
            overrides.get("chat_template_kwargs", self.chat_template_kwargs),
        )
        written, separator = conversation.write(self.engine.tokenizer), self.engine.config.text_separator
        # Documents that tools have attached, and those of the run.
        attached = dict.fromkeys(artifact_texts(messages))
        self._registry.add(attached)
        of_run = [one for one in documents_of_run(messages) if one.texts[0] not in attached]
        self._learn(of_run)
        documents = [*(RetrievedDocument((text,)) for text in attached), *of_run]
        prompt = conversation.split(written.text, self._registry, separator, documents, self.reuse_answers)
        note_found(messages, prompt)
        return self._model_call([prompt], self._generation, stop, overrides, _CALL, written)

    def _generation(self, said: Said) -> ChatGeneration:
        """A message of a whole answer, or a chunk of what is new; the last chunk says how the answer was made."""
        if said.answer is not None and not said.streamed:
            message = read_message(said.split.read, said.answer.thought)
            return ChatGeneration(message=message.model_copy(update=self._made(said.answer)))
        made = {} if said.answer is None else {**self._made(said.answer), "chunk_position": "last"}
        chunk = AIMessageChunk(
            content=said.text,
            additional_kwargs=thought_fields(said.thought),
            tool_call_chunks=stream_chunks(said.calls),
            **made,
        )
        return ChatGenerationChunk(message=chunk)

    def _made(self, answer: Generation) -> dict[str, Any]:
        """The fields of a message that say how it was made."""
        more = {} if answer.logprobs is None else {"logprobs": conversation_logprobs(answer.logprobs)}
        metadata = {"model_provider": PROVIDER, **self._info(answer.report), **more}
        return {"usage_metadata": _usage(answer.report), "response_metadata": metadata}


def _usage(report: BlendReport) -> UsageMetadata:
    usage = UsageMetadata(
        input_tokens=report.prompt_tokens,
        output_tokens=report.generated_tokens,
        total_tokens=report.prompt_tokens + report.generated_tokens,
        input_token_details=InputTokenDetails(cache_read=report.cached_tokens, cache_creation=report.tokens_to_store),
    )
    if report.thought_tokens:
        usage["output_token_details"] = OutputTokenDetails(reasoning=report.thought_tokens)
    return usage
