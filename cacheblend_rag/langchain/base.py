"""Fields and methods that both LangChain models share, in addition to those of all adapters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import replace
from typing import Any

from langchain_core.callbacks.manager import BaseRunManager
from langchain_core.documents import Document
from langchain_core.language_models import LangSmithParams
from langchain_core.runnables import ensure_config
from pydantic import Field

from cacheblend_rag.engine.decode import DecodeFields, stop_texts
from cacheblend_rag.engine.given_arguments import one_length
from cacheblend_rag.engine.llm_base import LLMBase
from cacheblend_rag.engine.model_call import ModelCall
from cacheblend_rag.engine.traces import below
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.langchain.tracking import answer_of_run, begin_tracking, documents_of_run, note_found
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.matching import match_chunks
from cacheblend_rag.prompt.registry import chunk_text
from cacheblend_rag.report import BlendReport

PROVIDER = "cacheblend"
"""The name of who provides the models, in traces and in the metadata of messages."""


class BlendFields(LLMBase):
    """Fields of a LangChain model over a `BlendEngine`: those of `LLMBase`, and those that LangChain's models have.

    Constructing one turns on the tracking of retrievers. The documents in a prompt of any chain are then found by
    their texts.
    """

    custom_get_token_ids: Callable[[str], list[int]] | None = Field(default=None, exclude=True)

    def _begin_tracking(self) -> None:
        begin_tracking()

    @staticmethod
    def _texts(documents: Iterable[Document | str]) -> list[str]:
        if isinstance(documents, (str, Document)):
            raise ConfigError("documents", documents, "give a list, even for a single one")
        return [chunk_text(one if isinstance(one, str) else one.page_content) for one in documents]

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """True: a model made by `from_model_id` can be loaded again. Of other models only the fields are saved."""
        return True

    def report_of(self, id: str) -> BlendReport | None:
        """Report of one of the last 64 answers, by the id of its run or the ``answer_id`` in its info.

        Runs are known if retrievers are tracked. None if the id is unknown.
        """
        return self._tally.reports.get(answer_of_run(str(id)))

    def match_chunks(self, text: str) -> Prompt:
        """The segments that this model recognises in a finished prompt."""
        documents = documents_of_run(text)
        self._learn(documents)
        prompt = match_chunks(text, self._registry, self.engine.config.text_separator, documents=documents)
        note_found(text, prompt)
        return replace(prompt, turns=())

    def _prepared(self, given: Any, stop: list[str] | None, overrides: dict[str, Any]) -> ModelCall[Any]:
        """The call of the engine for what LangChain hands over: prompts, one prompt, or messages."""
        raise NotImplementedError

    def _result(self, answers: list[Any]) -> Any:
        """LangChain's result of whole answers."""
        raise NotImplementedError

    def _generate(self, given: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any) -> Any:
        call = self._prepared(given, stop, kwargs)
        with within_run(run_manager, len(call.prompts)):
            return self._result(call.whole())

    async def _agenerate(
        self, given: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Any:
        call = await asyncio.to_thread(self._prepared, given, stop, kwargs)
        with within_run(run_manager, len(call.prompts)):
            return self._result(await call.awhole())

    def _stream(
        self, given: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[Any]:
        """The pieces of an answer, each of them told to the run if there is one."""
        call = self._prepared(given, stop, kwargs)
        with within_run(run_manager):
            pieces = call.read(call.open())
        for chunk in pieces:
            if run_manager is not None and chunk.text:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self, given: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        call = await asyncio.to_thread(self._prepared, given, stop, kwargs)
        with within_run(run_manager):
            pieces = call.aread(call.open())
        async with aclosing(pieces):
            async for chunk in pieces:
                if run_manager is not None and chunk.text:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything an answer depends on, so that a response cache never mixes settings up."""
        left_out = ("generation_config", "logits_processor", "stop")
        names = ("model_name", *(name for name in DecodeFields.model_fields if name not in left_out))
        own: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.generation_config is not None:
            own["generation_config"] = self.generation_config.to_diff_dict()
        if self.logits_processor:
            own["logits_processor"] = [repr(one) for one in self.logits_processor]
        # Not "stop": that name is the call's.
        return {**own, "stop_texts": stop_texts(self.stop), "model_fingerprint": self.engine.fingerprint, **self.blend}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        """LangSmith's names for this model and a call's settings, those given with the call first."""
        params: LangSmithParams = super()._get_ls_params(stop=stop, **kwargs)  # type: ignore[misc]
        temperature = kwargs.get("temperature", self.temperature)
        most = one_length(kwargs).get("max_new_tokens", self.max_new_tokens)
        params.update({"ls_provider": PROVIDER, "ls_model_name": kwargs.get("model", self.model_name)})
        if temperature is not None:
            params["ls_temperature"] = temperature
        if most is not None:
            params["ls_max_tokens"] = most
        if stops := self._stops(stop):
            params["ls_stop"] = stops
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, by ``custom_get_token_ids`` or by the model's tokenizer without its start tokens."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return list(self.engine.tokenizer.encode(text, add_special_tokens=False))


def within_run(run: BaseRunManager | None, prompts: int = 1) -> AbstractContextManager[None]:
    """Place OpenTelemetry's spans below the one that OpenInference keeps for a run of LangChain.

    OpenInference does not make it current: callbacks may be called in another thread.

    Parameters
    ----------
    run : BaseRunManager, optional
        Of the model's call. LangChain gives none to a chat model that streams. That of its chain is taken then.
    prompts : int
        Prompts that are answered with it. Of several only the first has this run, and all have its parent.
    """
    source: Any = run or ensure_config().get("callbacks")
    for one in getattr(source, "handlers", ()):
        if callable(get_span := getattr(one, "get_span", None)):
            return below(get_span(run.run_id if run is not None and prompts == 1 else source.parent_run_id))
    return nullcontext()
