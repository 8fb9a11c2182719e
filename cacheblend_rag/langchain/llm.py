"""CacheBlendLLM: LangChain's text-in, text-out model over a BlendEngine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from pydantic import ConfigDict, Field

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine, DecodeArguments
from cacheblend_rag.langchain.tracking import known_chunks, switch_on
from cacheblend_rag.noticing import notice
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.report import BlendReport, WarmReport
from cacheblend_rag.streaming import TextStream

__all__ = ["CacheBlendLLM"]


class CacheBlendLLM(BaseLLM):
    """A local model that reuses the KV cache of retrieved chunks.

    Constructing one switches on the tracking of retrievers: a "stuff" prompt of any chain is then
    recognised by the texts of the documents in it.

    Parameters
    ----------
    engine : BlendEngine
        What answers; see `from_model_id` for making one.
    model_name : str
        Name shown in traces.
    max_new_tokens : int
        Most tokens of an answer.
    temperature : float
        0 decodes greedily.
    top_p : float, optional
        Nucleus sampling.
    seed : int, optional
        Makes sampling repeatable.
    stop : list of str
        Texts that end an answer, besides those given by the call.
    keep_glue : bool
        Keep the white space between chunks as the chain wrote it, instead of the separator.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    engine: BlendEngine = Field(exclude=True, repr=False)
    model_name: str = ""
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] = Field(default_factory=list)
    keep_glue: bool = False

    def model_post_init(self, context: Any, /) -> None:
        """Switch on tracking, and name the model if the caller did not."""
        super().model_post_init(context)
        if not self.model_name:
            self.model_name = str(getattr(self.engine.model.config, "_name_or_path", "") or "local")
        switch_on()

    @classmethod
    def from_model_id(
        cls,
        model_id: str | os.PathLike[str],
        *,
        config: BlendConfig | None = None,
        store: str | os.PathLike[str] | None = None,
        device: str = "auto",
        dtype: str = "auto",
        model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> CacheBlendLLM:
        """Load a model by id or path; see `BlendEngine.from_pretrained`.

        Parameters
        ----------
        model_kwargs : dict, optional
            Passed on to transformers' ``from_pretrained``.
        **kwargs
            Fields of this class, such as ``max_new_tokens``.
        """
        engine = BlendEngine.from_pretrained(
            model_id, config=config, store=store, device=device, dtype=dtype, **(model_kwargs or {})
        )
        return cls(engine=engine, model_name=os.fspath(model_id), **kwargs)

    @classmethod
    def from_engine(cls, engine: BlendEngine, **kwargs: Any) -> CacheBlendLLM:
        """Wrap an engine the user has."""
        return cls(engine=engine, **kwargs)

    def warm(self, documents: list[Document], *, progress: bool | None = None) -> WarmReport:
        """Compute and store the KV of documents ahead of time; see `BlendEngine.warm`."""
        texts = [document.page_content for document in documents]
        known_chunks.add(texts)
        return self.engine.warm(texts, progress=progress)

    def notice(self, text: str) -> Prompt:
        """The segments this model sees in a finished prompt."""
        return notice(text, known_chunks, self.engine.config.separator, keep_glue=self.keep_glue)

    @property
    def _llm_type(self) -> str:
        return "cacheblend"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        config = self.engine.config
        return {
            "model_name": self.model_name,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": tuple(self.stop),
            "keep_glue": self.keep_glue,
            **{name: getattr(config, name) for name in ("separator", "selection", "recompute_ratio", "check_layers")},
            "min_tokens": config.min_tokens,
            "condition": config.condition,
        }

    def _arguments(self, stop: list[str] | None, overrides: dict[str, Any]) -> DecodeArguments:
        arguments = DecodeArguments(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=[*self.stop, *(stop or [])],
        )
        if "max_tokens" in overrides:
            overrides["max_new_tokens"] = overrides.pop("max_tokens")
        allowed = DecodeArguments.__annotations__
        arguments.update({name: value for name, value in overrides.items() if name in allowed})  # type: ignore[typeddict-item]
        return arguments

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        arguments = self._arguments(stop, dict(kwargs))
        answers = self.engine.generate_batch([self.notice(text) for text in prompts], **arguments)
        generations = [[Generation(text=a.text, generation_info=_info(a.report))] for a in answers]
        prompt_tokens = sum(answer.report.prompt_tokens for answer in answers)
        completion_tokens = sum(answer.report.generated_tokens for answer in answers)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        return LLMResult(generations=generations, llm_output={"token_usage": usage, "model_name": self.model_name})

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

    def _open_stream(self, prompt: str, stop: list[str] | None, overrides: dict[str, Any]) -> TextStream:
        return self.engine.stream(self.notice(prompt), **self._arguments(stop, dict(overrides)))


def _last_chunk(stream: TextStream) -> GenerationChunk:
    """An empty piece that carries what the whole answer's trace shows."""
    answer = stream.result
    return GenerationChunk(text="", generation_info=_info(answer.report) if answer else None)


def _info(report: BlendReport) -> dict[str, Any]:
    """What a trace shows of an answer."""
    return {
        "finish_reason": report.finish_reason,
        "ttft": report.ttft,
        "hits": report.hits,
        "misses": report.misses,
        "reused_tokens": report.reused_tokens,
        "recomputed_tokens": list(report.recomputed_tokens),
        "prompt_tokens": report.prompt_tokens,
        "generated_tokens": report.generated_tokens,
        "plain": report.plain,
        "input_ids": list(report.input_ids),
    }
