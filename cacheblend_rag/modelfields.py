"""What the models of every adapter share: their fields, and how an engine answers for them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field
from tenacity import AttemptManager, Retrying, retry_if_exception, stop_after_attempt

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine, DecodeArguments
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.noticing import known_chunks, written_forms
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.report import BlendReport, Generation, WarmReport
from cacheblend_rag.streaming import NumberedStreams, TextStream

__all__ = ["ModelFields"]

# Options of the engine that say what an answer is made of and where its KV is kept.
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
    "write_back",
    "salt",
    "like",
)


class ModelFields(BaseModel):
    """Fields of a framework's model over a `BlendEngine`.

    Parameters
    ----------
    engine : BlendEngine
        What answers. Without one, it is made of the fields that follow.
    model_id, store, device, dtype, model_kwargs
        See `from_model_id`.
    config : BlendConfig
        Options of an engine that is made here.
    blend : dict
        The same as a plain dict; afterwards what the engine uses, whoever made it.
    model_name : str
        Name shown in traces; by default the model's id or path.
    max_new_tokens : int, optional
        Most tokens of an answer, also taken as ``max_tokens``; by default the generation
        config's, else 256.
    temperature : float, optional
        0 decodes greedily; by default the generation config decides if there is one, else 0.
    top_p : float, optional
        Nucleus sampling.
    seed : int, optional
        Makes sampling repeatable.
    stop : list of str
        Texts that end an answer, besides those given by the call.
    generation_config : transformers GenerationConfig, optional
        Anything else transformers offers.
    logits_processor : list of callable
        transformers logits processors applied to each step.
    timeout : float, optional
        Seconds an answer may take; then the call raises `GenerationTimeoutError` and the
        generation stops at its next token.
    max_retries : int
        How often a call that ran out of device memory is tried again, after what torch holds
        unused is given back. Nothing else that goes wrong locally passes by itself.
    keep_glue : bool
        Keep the white space between chunks as the chain wrote it, instead of the separator.
    track : bool
        Whether constructing this model switches the tracking of retrievers on.
    report_input_ids : bool
        Give the ids the model was fed with each answer; they are many.

    Raises
    ------
    ConfigError
        If there is neither an engine nor a model to make one of, or ``timeout`` is not above 0.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=(), populate_by_name=True)

    engine: BlendEngine = Field(default=None, exclude=True, repr=False)  # type: ignore[assignment]
    config: BlendConfig | None = Field(default=None, exclude=True, repr=False)
    model_id: str | None = None
    store: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    blend: dict[str, Any] = Field(default_factory=dict, repr=False)
    model_name: str = ""
    max_new_tokens: int | None = Field(default=None, alias="max_tokens")
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] = Field(default_factory=list)
    generation_config: Any = Field(default=None, exclude=True, repr=False)
    logits_processor: list[Any] = Field(default_factory=list, exclude=True, repr=False)
    timeout: float | None = None
    max_retries: int = 0
    keep_glue: bool = False
    track: bool = True
    report_input_ids: bool = False

    def model_post_init(self, context: Any, /) -> None:
        """Make the engine if there is none, switch on tracking, and name the model."""
        super().model_post_init(context)
        if self.engine is None:
            self.engine = self._make_engine()
        config = self.engine.config
        self.blend = {name: _plain(getattr(config, name)) for name in _SETTINGS}
        if not self.model_name:
            path = getattr(self.engine.model.config, "_name_or_path", "")
            self.model_name = self.model_id or str(path or "local")
        if self.timeout is not None and self.timeout <= 0:
            raise ConfigError("timeout", self.timeout, "use a number of seconds above 0, or None")
        if self.track:
            self._begin_tracking()

    def _begin_tracking(self) -> None:
        """Learn of what retrievers return from now on; each adapter knows how."""
        raise NotImplementedError

    @staticmethod
    def _texts(documents: Iterable[Any]) -> list[str]:
        """Texts of an adapter's documents, as chunks are stored."""
        raise NotImplementedError

    def _make_engine(self) -> BlendEngine:
        if self.model_id is None:
            raise ConfigError("engine", None, "give an engine, or a model_id to make one of")
        return BlendEngine.from_pretrained(
            self.model_id,
            config=self.config or BlendConfig(**self.blend),
            store=self.store,
            device=self.device,
            dtype=self.dtype,
            **self.model_kwargs,
        )

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
        store : path, optional
            Folder where KV is kept; memory if there is none.
        model_kwargs : dict, optional
            Passed on to transformers' ``from_pretrained``: ``device_map``, ``quantization_config``, …
        **fields
            Fields of this class, such as ``max_new_tokens``.
        """
        return cls(
            model_id=os.fspath(model_id),
            config=config,
            store=None if store is None else os.fspath(store),
            device=device,
            dtype=dtype,
            model_kwargs=model_kwargs or {},
            **fields,
        )

    @classmethod
    def from_engine(cls, engine: BlendEngine, **fields: Any) -> Self:
        """Wrap an engine the user has."""
        return cls(engine=engine, **fields)

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any,
        *,
        config: BlendConfig | None = None,
        store: str | os.PathLike[str] | None = None,
        **fields: Any,
    ) -> Self:
        """Take a transformers model and its tokenizer that the user has; nothing is left behind on them."""
        return cls(engine=BlendEngine(model, tokenizer, config=config, store=store), **fields)

    # Documents -------------------------------------------------------------------------------

    def warm(self, documents: Iterable[Any], *, progress: bool | None = None) -> WarmReport:
        """Compute and store the KV of documents ahead of time; see `BlendEngine.warm`."""
        texts = self._texts(documents)
        known_chunks.add(texts)
        return self.engine.warm(texts, progress=progress)

    async def awarm(self, documents: Iterable[Any], *, progress: bool | None = None) -> WarmReport:
        """`warm` without blocking the event loop."""
        return await asyncio.to_thread(self.warm, documents, progress=progress)

    def warm_aloud(
        self,
        documents: Iterable[Any],
        *,
        progress: bool | None = None,
        say: Callable[[str], object] | None = None,
    ) -> WarmReport:
        """`warm`, after saying how many bytes the store will take for it.

        Parameters
        ----------
        say : callable, optional
            Gets the message; by default it is printed to standard error.
        """
        texts = self._texts(documents)
        needed, room = self.engine.estimate_bytes(texts), self.engine.store.size_limit
        (say or _print)(f"KV of {len(texts):,} documents: {needed:,} bytes; the KV store may take {room:,}")
        known_chunks.add(texts)
        return self.engine.warm(texts, progress=progress)

    def estimate_bytes(self, documents: Iterable[Any]) -> int:
        """Bytes that the KV of documents takes in the store."""
        return self.engine.estimate_bytes(self._texts(documents))

    def forget(self, documents: Iterable[Any]) -> int:
        """Erase the stored KV of documents, in every form in which prompts held them; how many records there were."""
        texts = self._texts(documents)
        known_chunks.discard(texts)
        return self.engine.forget([*texts, *written_forms(texts)])

    # Answering -------------------------------------------------------------------------------

    def _arguments(self, stop: list[str] | None, overrides: dict[str, Any]) -> DecodeArguments:
        """Decoding options of one call."""
        arguments = DecodeArguments(
            max_new_tokens=overrides.get("max_tokens", self.max_new_tokens),
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=[*self.stop, *(stop or [])],
            generation_config=self.generation_config,
            logits_processor=self.logits_processor,
        )
        given = {name: overrides[name] for name in DecodeArguments.__annotations__ if name in overrides}
        arguments.update(given)  # type: ignore[typeddict-item]
        return arguments

    def _open(self, prompt: Prompt, arguments: DecodeArguments, overrides: dict[str, Any]) -> TextStream:
        return self.engine.stream(prompt, timeout=overrides.get("timeout", self.timeout), **arguments)

    def _complete(
        self, prompts: Sequence[Prompt], arguments: DecodeArguments, overrides: dict[str, Any]
    ) -> list[Generation]:
        """Whole answers, in the order of the prompts."""
        answers: dict[int, Generation] = {}
        for attempt in self._attempts():
            with attempt, closing(self._streams(prompts, arguments, overrides)) as streams:
                for number, stream in streams:
                    answers[number] = stream.complete()
        return [answers[number] for number in range(len(prompts))]

    async def _acomplete(
        self, prompts: Sequence[Prompt], arguments: DecodeArguments, overrides: dict[str, Any]
    ) -> list[Generation]:
        answers: dict[int, Generation] = {}
        for attempt in self._attempts():
            with attempt, closing(self._streams(prompts, arguments, overrides)) as streams:
                for number, stream in streams:
                    answers[number] = await stream.acomplete()
        return [answers[number] for number in range(len(prompts))]

    def _streams(
        self, prompts: Sequence[Prompt], arguments: DecodeArguments, overrides: dict[str, Any]
    ) -> NumberedStreams:
        return self.engine.stream_batch(prompts, timeout=overrides.get("timeout", self.timeout), **arguments)

    def _attempts(self) -> Iterator[AttemptManager]:
        return iter(
            Retrying(stop=stop_after_attempt(self.max_retries + 1), retry=retry_if_exception(_passes), reraise=True)
        )

    def _info(self, report: BlendReport) -> dict[str, Any]:
        """What a trace shows of an answer; times in seconds."""
        info = {
            "model_name": self.model_name,
            "finish_reason": report.finish_reason,
            "ttft": report.ttft,
            "hits": report.hits,
            "misses": report.misses,
            "recompute_ratio": self.engine.config.recompute_ratio,
            "recomputed_tokens": list(report.recomputed_tokens),
            "reused_tokens": report.reused_tokens,
            "continued_tokens": report.continued_tokens,
            "prompt_tokens": report.prompt_tokens,
            "generated_tokens": report.generated_tokens,
            "plain": report.plain,
        }
        return {**info, "input_ids": list(report.input_ids)} if self.report_input_ids else info


def _print(message: str) -> None:
    print(message, file=sys.stderr)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _passes(error: BaseException) -> bool:
    """Whether an error may be gone at another try."""
    import torch

    if not isinstance(error, torch.OutOfMemoryError):
        return False
    torch.cuda.empty_cache()
    return True
