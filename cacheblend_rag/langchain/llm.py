"""CacheBlendLLM: LangChain's text-in, text-out model over a BlendEngine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult

from cacheblend_rag.langchain.fields import BlendFields, answer_info
from cacheblend_rag.streaming import TextStream

__all__ = ["CacheBlendLLM"]


class CacheBlendLLM(BlendFields, BaseLLM):
    """A local model that reuses the KV cache of retrieved chunks.

    See `BlendFields` for its parameters. The prompt is not echoed, ``stop`` holds in every mode,
    and each answer's ``generation_info`` has its time to first token, hits and misses.
    """

    @property
    def _llm_type(self) -> str:
        return "cacheblend"

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        noticed = [self.notice(text) for text in prompts]
        answers = self.engine.generate_batch(noticed, **self._arguments(stop, kwargs))
        read = sum(answer.report.prompt_tokens for answer in answers)
        made = sum(answer.report.generated_tokens for answer in answers)
        usage = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
        return LLMResult(
            generations=[[Generation(text=a.text, generation_info=answer_info(a.report))] for a in answers],
            llm_output={"token_usage": usage, "model_name": self.model_name},
        )

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        return await asyncio.to_thread(self._generate, prompts, stop, None, **kwargs)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        stream = self._open_stream(prompt, stop, kwargs)
        try:
            for piece in stream:
                chunk = GenerationChunk(text=piece)
                if run_manager is not None:
                    run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        finally:
            stream.close()
        yield _last_chunk(stream)

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        stream = self._open_stream(prompt, stop, kwargs)
        try:
            while (piece := await asyncio.to_thread(next, stream, None)) is not None:
                chunk = GenerationChunk(text=piece)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        finally:
            await asyncio.to_thread(stream.close)
        yield _last_chunk(stream)


def _last_chunk(stream: TextStream) -> GenerationChunk:
    """An empty piece that carries what a trace shows of the whole answer."""
    answer = stream.result
    return GenerationChunk(text="", generation_info=answer_info(answer.report) if answer else None)
