"""CacheBlendLLM: LangChain's text-in, text-out model over a BlendEngine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult

from cacheblend_rag.engine.logits import completion_logprobs
from cacheblend_rag.engine.model_call import ModelCall, Said
from cacheblend_rag.langchain.base import BlendFields
from cacheblend_rag.langchain.messages import thought_fields
from cacheblend_rag.prompt import Prompt


class CacheBlendLLM(BlendFields, BaseLLM):  # type: ignore[misc]  # both call what is answered by another name
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

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**super()._identifying_params, "prompt_prefix": self.prompt_prefix}

    def match_chunks(self, text: str) -> Prompt:
        """The segments that this model recognises in a finished prompt, after its `prompt_prefix`."""
        return super().match_chunks(self.prompt_prefix + text)

    def _prepared(
        self, given: str | list[str], stop: list[str] | None, overrides: dict[str, Any]
    ) -> ModelCall[GenerationChunk]:
        """The call of the engine for prompts; in a stream the last piece has no text, and says how it was made."""

        def respond(said: Said) -> GenerationChunk:
            if (answer := said.answer) is None:
                return GenerationChunk(text=said.text)
            info = {**self._info(answer.report), **thought_fields(answer.thought)}
            if answer.logprobs is not None:
                info["logprobs"] = completion_logprobs(answer.logprobs)
            return GenerationChunk(text="" if said.streamed else answer.text, generation_info=info)

        texts = [given] if isinstance(given, str) else given
        call = self._model_call([self.match_chunks(text) for text in texts], respond, stop, overrides)
        return replace(call, thoughts=False)

    def _result(self, answers: list[GenerationChunk]) -> LLMResult:
        made = [answer.generation_info or {} for answer in answers]
        usage = {
            "prompt_tokens": sum(one["prompt_tokens"] for one in made),
            "completion_tokens": sum(one["generated_tokens"] for one in made),
        }
        usage["total_tokens"] = sum(usage.values())
        return LLMResult(
            generations=[[Generation(text=one.text, generation_info=one.generation_info)] for one in answers],
            llm_output={"token_usage": usage, "model_name": self.model_name},
        )
