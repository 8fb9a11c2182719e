"""CacheBlendLLM: LangChain's text-in, text-out model over a BlendEngine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LangSmithParams
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult

from cacheblend_rag import report
from cacheblend_rag.engine.logits import completion_logprobs
from cacheblend_rag.engine.streaming import TextStream
from cacheblend_rag.langchain.base import BlendFields, within_run
from cacheblend_rag.langchain.messages import thought_fields
from cacheblend_rag.prompt import Prompt


class CacheBlendLLM(BlendFields, BaseLLM):
    """A local model that reuses the KV cache of retrieved chunks.

    Its parameters are those of `BlendFields` and one of its own. They are of two kinds:

    - the engine: ``engine``, or ``model_id``, ``store``, ``device``, ``dtype``, ``config`` or its options one by one
    - decoding: the fields of `DecodeFields`, and ``timeout``

    The prompt is not echoed. ``stop`` holds in every mode. The ``generation_info`` of each answer has its time to first
    token, hits and misses. Prompts of one ``batch`` that share chunks are answered one after the other, and each chunk
    is read once.

    Parameters
    ----------
    prompt_prefix : str
        Text that stands before every prompt, such as the ``prefix`` of a transformers pipeline.
    """

    prompt_prefix: str = ""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)

    @property
    def _llm_type(self) -> str:
        return "cacheblend"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._tracing_params(super()._get_ls_params(stop=stop, **kwargs), stop, kwargs)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**super()._identifying_params, "prompt_prefix": self.prompt_prefix}

    def match_chunks(self, text: str) -> Prompt:
        """The segments this model sees in a finished prompt, behind the text that stands before every prompt."""
        return super().match_chunks(self.prompt_prefix + text)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        with within_run(run_manager, len(prompts)):
            return self._result(self._complete(self._prompts(prompts), self._arguments(stop, kwargs), kwargs))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        matched = await asyncio.to_thread(self._prompts, prompts)
        with within_run(run_manager, len(prompts)):
            return self._result(await self._acomplete(matched, self._arguments(stop, kwargs), kwargs))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        with within_run(run_manager):
            stream = self._open(self.match_chunks(prompt), self._arguments(stop, kwargs), kwargs)
        try:
            for piece in stream:
                chunk = GenerationChunk(text=piece)
                if run_manager is not None:
                    run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        finally:
            stream.cancel()
        yield self._last_chunk(stream)

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        matched = await asyncio.to_thread(self.match_chunks, prompt)
        with within_run(run_manager):
            stream = self._open(matched, self._arguments(stop, kwargs), kwargs)
        try:
            async for piece in stream:
                chunk = GenerationChunk(text=piece)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(piece, chunk=chunk)
                yield chunk
        finally:
            stream.cancel()
        yield self._last_chunk(stream)

    def _prompts(self, prompts: list[str]) -> list[Prompt]:
        return [self.match_chunks(text) for text in prompts]

    def _result(self, answers: list[report.Generation]) -> LLMResult:
        read = sum(answer.report.prompt_tokens for answer in answers)
        made = sum(answer.report.generated_tokens for answer in answers)
        usage = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
        return LLMResult(
            generations=[[Generation(text=a.text, generation_info=self._made(a))] for a in answers],
            llm_output={"token_usage": usage, "model_name": self.model_name},
        )

    def _last_chunk(self, stream: TextStream) -> GenerationChunk:
        """An empty piece that carries what a trace shows of the whole answer."""
        answer = stream.result
        return GenerationChunk(text="", generation_info=self._made(answer) if answer else None)

    def _made(self, answer: report.Generation) -> dict[str, Any]:
        """The info of an answer, with the thought before it, and its log-probabilities if they were asked for."""
        info = {**self._info(answer.report), **thought_fields(answer.thought)}
        return info if answer.logprobs is None else {**info, "logprobs": completion_logprobs(answer.logprobs)}
