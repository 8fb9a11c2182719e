"""What both LangChain models share beyond the fields of all adapters."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from typing import Any, Self

from langchain_core.documents import Document
from langchain_core.language_models import LangSmithParams

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.langchain.tracking import begin_tracking, documents_of_run, known_chunks
from cacheblend_rag.modelfields import ModelFields
from cacheblend_rag.noticing import chunk_text, notice
from cacheblend_rag.prompt import Prompt

__all__ = ["BlendFields"]


class BlendFields(ModelFields):
    """Fields of a LangChain model over a `BlendEngine`; see `ModelFields`.

    Constructing one switches on the tracking of retrievers: a "stuff" prompt of any chain is then
    recognised by the texts of the documents in it.
    """

    def _begin_tracking(self) -> None:
        begin_tracking()

    @staticmethod
    def _texts(documents: Iterable[Document | str]) -> list[str]:
        if isinstance(documents, (str, Document)):
            raise ConfigError("documents", documents, "give a list, even for a single one")
        return [chunk_text(one if isinstance(one, str) else one.page_content) for one in documents]

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """A model made by `from_model_id` can be loaded again; of others, only the fields are kept."""
        return True

    @classmethod
    def from_pipeline(
        cls,
        pipeline: Any,
        *,
        config: BlendConfig | None = None,
        store: str | os.PathLike[str] | None = None,
        **fields: Any,
    ) -> Self:
        """Take over the model, the tokenizer and the settings of a transformers pipeline.

        Parameters
        ----------
        pipeline : transformers TextGenerationPipeline
            Generation settings it was made with are kept; its built-in defaults (sampling at
            temperature 0.7) are not.
        config, store
            As for `from_model_id`.

        Raises
        ------
        ConfigError
            If it is not a pipeline for text generation.
        """
        if getattr(pipeline, "task", None) != "text-generation":
            raise ConfigError("pipeline", pipeline, 'use transformers.pipeline("text-generation", …)')
        given = {**getattr(pipeline, "_generate_kwargs", {}), **getattr(pipeline, "_forward_params", {})}
        own = given.pop("generation_config", None)
        if own is not None or given:
            settings = copy.deepcopy(own or pipeline.model.generation_config)
            settings.update(**{name: value for name, value in given.items() if hasattr(settings, name)})
            fields = {"generation_config": settings, **fields}
        return cls(engine=BlendEngine(pipeline.model, pipeline.tokenizer, config=config, store=store), **fields)

    def notice(self, text: str) -> Prompt:
        """The segments this model sees in a finished prompt."""
        known = (documents_of_run(text), known_chunks)
        return notice(text, known, self.engine.config.separator, keep_glue=self.keep_glue)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything an answer depends on, so that a response cache never mixes settings up."""
        names = ("model_name", "max_new_tokens", "temperature", "top_p", "seed", "keep_glue")
        own: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.generation_config is not None:
            own["generation_config"] = self.generation_config.to_diff_dict()
        if self.logits_processor:
            own["logits_processor"] = [repr(one) for one in self.logits_processor]
        # Not "stop": that name is the call's.
        return {**own, "stop_texts": list(self.stop), "model_fingerprint": self.engine.fingerprint, **self.blend}

    def _tracing_params(self, params: LangSmithParams, overrides: dict[str, Any]) -> LangSmithParams:
        """What LangSmith calls this model and a call's settings, those given with the call first."""
        temperature = overrides.get("temperature", self.temperature)
        most = overrides.get("max_tokens", overrides.get("max_new_tokens", self.max_new_tokens))
        stop = [*self.stop, *(params.get("ls_stop") or [])]
        params.update({"ls_provider": "cacheblend", "ls_model_name": overrides.get("model", self.model_name)})
        if temperature is not None:
            params["ls_temperature"] = temperature
        if most is not None:
            params["ls_max_tokens"] = most
        if stop:
            params["ls_stop"] = stop
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of a text by this model's tokenizer, without what opens a text."""
        return list(self.engine.tokenizer.encode(text, add_special_tokens=False))
