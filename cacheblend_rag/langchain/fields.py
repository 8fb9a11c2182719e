"""What both LangChain models share: their fields, and how a prompt is noticed and answered."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Self

from langchain_core.documents import Document
from pydantic import BaseModel, ConfigDict, Field

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine, DecodeArguments
from cacheblend_rag.langchain.tracking import known_chunks, switch_on
from cacheblend_rag.noticing import notice
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.report import BlendReport, WarmReport
from cacheblend_rag.streaming import TextStream

__all__ = ["BlendFields", "answer_info"]

_SETTINGS = (
    "separator",
    "selection",
    "recompute_ratio",
    "check_layers",
    "recompute_ratios",
    "metric",
    "selection_options",
    "min_tokens",
    "condition",
)


class BlendFields(BaseModel):
    """Fields of a LangChain model over a `BlendEngine`.

    Constructing one switches on the tracking of retrievers: a "stuff" prompt of any chain is then
    recognised by the texts of the documents in it.

    Parameters
    ----------
    engine : BlendEngine
        What answers; see `from_model_id` for making one.
    model_name : str
        Name shown in traces.
    max_new_tokens : int
        Most tokens of an answer; also taken as ``max_tokens``.
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

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=(), populate_by_name=True)

    engine: BlendEngine = Field(exclude=True, repr=False)
    model_name: str = ""
    max_new_tokens: int = Field(default=256, alias="max_tokens")
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
        **fields: Any,
    ) -> Self:
        """Load a model by id or path; see `BlendEngine.from_pretrained`.

        Parameters
        ----------
        model_kwargs : dict, optional
            Passed on to transformers' ``from_pretrained``.
        **fields
            Fields of this class, such as ``max_new_tokens``.
        """
        engine = BlendEngine.from_pretrained(
            model_id, config=config, store=store, device=device, dtype=dtype, **(model_kwargs or {})
        )
        return cls(engine=engine, **{"model_name": os.fspath(model_id), **fields})

    @classmethod
    def from_engine(cls, engine: BlendEngine, **fields: Any) -> Self:
        """Wrap an engine the user has."""
        return cls(engine=engine, **fields)

    def warm(self, documents: Iterable[Document], *, progress: bool | None = None) -> WarmReport:
        """Compute and store the KV of documents ahead of time; see `BlendEngine.warm`."""
        texts = [document.page_content for document in documents]
        known_chunks.add(texts)
        return self.engine.warm(texts, progress=progress)

    def notice(self, text: str) -> Prompt:
        """The segments this model sees in a finished prompt."""
        return notice(text, known_chunks, self.engine.config.separator, keep_glue=self.keep_glue)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything an answer depends on, so that a response cache never mixes settings up."""
        names = ("model_name", "max_new_tokens", "temperature", "top_p", "seed", "keep_glue")
        own = {name: getattr(self, name) for name in names}
        return {**own, "stop": tuple(self.stop), **{name: getattr(self.engine.config, name) for name in _SETTINGS}}

    def _arguments(self, stop: list[str] | None, overrides: dict[str, Any]) -> DecodeArguments:
        """Decoding options of one call."""
        arguments = DecodeArguments(
            max_new_tokens=overrides.get("max_tokens", self.max_new_tokens),
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=[*self.stop, *(stop or [])],
        )
        given = {name: overrides[name] for name in DecodeArguments.__annotations__ if name in overrides}
        arguments.update(given)  # type: ignore[typeddict-item]
        return arguments

    def _open_stream(self, text: str, stop: list[str] | None, overrides: dict[str, Any]) -> TextStream:
        return self.engine.stream(self.notice(text), **self._arguments(stop, overrides))


def answer_info(report: BlendReport) -> dict[str, Any]:
    """What a trace shows of an answer; times in seconds."""
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
