"""ChatCacheBlend: LangChain's chat model over a BlendEngine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.langchain.fields import BlendFields, answer_info
from cacheblend_rag.langchain.messages import artifact_texts, parse_answer, render
from cacheblend_rag.langchain.tracking import known_chunks
from cacheblend_rag.report import BlendReport, Generation
from cacheblend_rag.streaming import TextStream

__all__ = ["ChatCacheBlend"]


class ChatCacheBlend(BlendFields, BaseChatModel):
    """A local chat model that reuses the KV cache of retrieved chunks.

    See `BlendFields` for its parameters. Conversations are rendered by the tokenizer's chat
    template; chunks are noticed inside messages, in documents that tools attached to their
    answers, and in earlier turns. ``usage_metadata`` counts as ``cache_read`` the tokens whose KV
    was read, and each answer's ``response_metadata`` has its time to first token, hits and misses.
    """

    @property
    def _llm_type(self) -> str:
        return "cacheblend-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params.update({"ls_provider": "cacheblend", "ls_model_name": kwargs.get("model", self.model_name)})
        params.update({"ls_temperature": self.temperature, "ls_max_tokens": self.max_new_tokens})
        return params

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Offer tools to a model whose chat template takes them.

        Raises
        ------
        ConfigError
            If ``tool_choice`` asks for a call: a local model cannot be made to call.
        """
        if tool_choice not in (None, "auto"):
            raise ConfigError("tool_choice", tool_choice, "use None or 'auto'; a call cannot be forced")
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        tools = kwargs.get("tools")
        text = self._render(messages, tools)
        answer = self.engine.generate(self.notice(text), **self._arguments(stop, kwargs))
        return ChatResult(generations=[ChatGeneration(message=self._message(answer, tools))])

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return await asyncio.to_thread(self._generate, messages, stop, None, **kwargs)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        tools = kwargs.get("tools")
        stream = self._open_stream(self._render(messages, tools), stop, kwargs)
        try:
            for piece in stream:
                if tools:
                    continue  # whether a text is a tool call shows at its end
                chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
                if run_manager is not None:
                    run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        finally:
            stream.close()
        yield self._last_chunk(stream, tools)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        tools = kwargs.get("tools")
        stream = self._open_stream(self._render(messages, tools), stop, kwargs)
        try:
            while (piece := await asyncio.to_thread(next, stream, None)) is not None:
                if tools:
                    continue
                chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
                if run_manager is not None:
                    await run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        finally:
            await asyncio.to_thread(stream.close)
        yield self._last_chunk(stream, tools)

    def _render(self, messages: list[BaseMessage], tools: list[dict[str, Any]] | None) -> str:
        known_chunks.add(artifact_texts(messages))
        return render(self.engine.tokenizer, messages, tools)

    def _message(self, answer: Generation, tools: list[dict[str, Any]] | None) -> AIMessage:
        message = parse_answer(answer.text, tools)
        message.usage_metadata = _usage(answer.report)
        message.response_metadata = {"model_name": self.model_name, **answer_info(answer.report)}
        return message

    def _last_chunk(self, stream: TextStream, tools: list[dict[str, Any]] | None) -> ChatGenerationChunk:
        """What is known only at the end: usage, how it was made, and tool calls."""
        answer = stream.result
        if answer is None:
            return ChatGenerationChunk(message=AIMessageChunk(content="", chunk_position="last"))
        whole = self._message(answer, tools)
        chunk = AIMessageChunk(
            content=whole.content if tools else "",
            usage_metadata=whole.usage_metadata,
            response_metadata=whole.response_metadata,
            tool_call_chunks=_call_chunks(whole),
            chunk_position="last",
        )
        return ChatGenerationChunk(message=chunk)


def _call_chunks(message: AIMessage) -> list[Any]:
    whole = [(call["name"], json.dumps(call["args"]), call["id"]) for call in message.tool_calls]
    broken = [(call["name"], call["args"], call["id"]) for call in message.invalid_tool_calls]
    return [tool_call_chunk(name=n, args=a, id=i, index=at) for at, (n, a, i) in enumerate([*whole, *broken])]


def _usage(report: BlendReport) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=report.prompt_tokens,
        output_tokens=report.generated_tokens,
        total_tokens=report.prompt_tokens + report.generated_tokens,
        input_token_details=InputTokenDetails(cache_read=report.reused_tokens),
    )
