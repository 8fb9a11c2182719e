"""Base of the models of every adapter: their fields, and how an engine answers for them."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Self, cast

import torch
from pydantic import BaseModel, Field, PrivateAttr, ValidationError, model_validator

from cacheblend_rag.config import BlendConfig, as_json, check_config, check_mapping, check_names, whole
from cacheblend_rag.engine.answer_form import answer_grammar
from cacheblend_rag.engine.decode import (
    DecodeArguments,
    DecodeFields,
    DecodeOptions,
    calls_early,
    checked,
    field_error,
    stop_texts,
)
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.engine.given_arguments import named_model, settle
from cacheblend_rag.engine.model_call import ModelCall, R, Said
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.loading import loading_arguments
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.calls import CALL_END
from cacheblend_rag.prompt.conversation import WrittenConversation
from cacheblend_rag.prompt.matching import RetrievedDocument
from cacheblend_rag.prompt.registry import ChunkRegistry
from cacheblend_rag.prompt.thoughts import check_reasoning
from cacheblend_rag.report import AnswerStats, BlendReport, Generation, Tally, WarmReport
from cacheblend_rag.store import StoreLocations
from cacheblend_rag.store.base import UNLIMITED
from cacheblend_rag.store.factory import are_locations

known_chunks = ChunkRegistry()
"""Chunk texts that models look for unless they are given a registry of their own, whatever framework they belong to."""

# Fields of a report that the info of an answer has as they are, and tokens that it counts.
_TOLD = (
    *("fidelity", "finish_reason", "stopped_by", "ttft", "hits", "misses"),
    *("recompute_ratio", "tokens_to_store", "plain", "plain_reason"),
)
_COUNTED = ("reused", "blended", "resumed", "prompt", "generated", "thought")
_DECODING = tuple(name for name in DecodeFields.model_fields if name != "stop")


class LLMBase(DecodeFields):
    """Fields of a framework's model over a `BlendEngine`; those of `DecodeFields` say how answers are decoded.

    Parameters
    ----------
    engine : BlendEngine
        The engine. Without one, it is made of the fields that follow.
    model_id : str
        Model that an engine is made of: a folder, or an id that transformers can resolve. Without one, ``model`` or
        ``model_name`` names it.
    store : str or list of str, optional
        Where KV is kept: a folder, the address of a store that machines share (``"s3://bucket/kv"``,
        ``"valkey://host:6379/0"``), or several, the nearest first; memory if there is none.
    device, dtype : str
        Where the model runs and in which element type, as for `BlendEngine.from_pretrained`; numbers and objects of
        PyTorch are taken, too.
    threads : int, optional
        Threads of the CPU that PyTorch computes with, as Ollama's ``num_thread``. They are the process's: the model
        that was made last decides for all. By default as PyTorch has it.
    model_kwargs : dict
        Passed on to transformers' ``from_pretrained``: ``device_map``, ``quantization_config``, …
        ``device`` and ``dtype`` may be among them.
    config : BlendConfig
        Options of an engine that is made here. Each may also be given by itself, such as ``recompute_ratio=0.2``.
    blend : dict
        The same as a plain dict; afterwards what the engine uses, whoever made it.
    model_name : str
        Name shown in traces; by default the model's id or path.
    timeout : float, optional
        Seconds an answer may take; then the call raises `GenerationTimeoutError` and the
        generation stops at its next token.
    max_retries : int
        How often a call that ran out of device memory is tried again. Nothing else that goes wrong passes by itself.
    track : bool
        Whether constructing this model switches the tracking of retrievers on.
    known : ChunkRegistry, optional
        Chunk texts that this model looks for; by default `known_chunks`, which all models share. One of its own learns
        what this model warms, and the documents of the runs in which this model is called. It never has texts of
        other runs, such as those of another tenant.
    report_input_ids : bool
        Give the ids the model was fed with each answer; they are many.
    pipeline_kwargs, generate_kwargs, additional_kwargs : dict
        Some of these fields, in the form in which other packages take them, and more options of transformers'
        generation.

    Raises
    ------
    ConfigError
        If there is neither an engine nor a model to make one of, a field is not known, or a value cannot be used, such
        as ``reasoning`` of a model that marks no thoughts.

    Notes
    -----
    A model made by its id can be copied and pickled: the copy loads it again. Calls take the options of decoding and
    ``timeout``, too; a call's options take precedence. A call's ``stop`` texts are added to the model's; an empty
    list in a call means that no text ends the answer. The length of an answer may be called ``max_tokens``. An
    unknown argument is refused. A call also takes ``response_format`` in OpenAI's form: the answer is then JSON, by
    a schema if it has one.
    """

    engine: BlendEngine = Field(default=None, exclude=True, repr=False)  # type: ignore[assignment]
    config: BlendConfig | None = Field(default=None, exclude=True, repr=False)
    model_id: str | None = None
    store: str | list[str] | None = None
    device: str = "auto"
    dtype: str = "auto"
    threads: Annotated[int | None, checked(whole(1))] = None
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    blend: dict[str, Any] = Field(default_factory=dict, repr=False)
    model_name: str = ""
    timeout: float | None = None
    max_retries: int = 0
    track: bool = True
    known: ChunkRegistry | None = Field(default=None, exclude=True, repr=False)
    report_input_ids: bool = False

    _tally: Tally = PrivateAttr(default_factory=Tally)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise field_error(error) from None

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, given: Any) -> Any:
        """Refuse unknown fields, and collect the options of the engine."""
        if not isinstance(given, dict):
            return given
        known = {*cls.model_fields, "max_tokens"}
        named = named_model(given) if given.get("engine") is None else given
        fields = settle(named, (*known, *BlendConfig.names()))
        options = {name: fields.pop(name) for name in BlendConfig.names() if name in fields and name not in known}
        engine = fields.get("engine")
        if engine is None:
            fields |= _loading(fields, (*known - _OF_LOADING, *BlendConfig.names()))
            return {**fields, "blend": {**fields.get("blend", {}), **options}}
        if not isinstance(engine, BlendEngine):
            remedy = "give a BlendEngine, or use from_model for a model with its tokenizer and from_model_id for a name"
            raise ConfigError("engine", type(engine).__name__, remedy)
        used = engine.config.asdict()
        check_names(fields.get("blend", {}).items(), tuple(used))
        for name, value in {**fields.get("blend", {}), **options}.items():
            if as_json(value) != used[name]:
                raise ConfigError(name, value, f"give it to the engine: engine.with_config({name}={value!r})")
        return fields

    def model_post_init(self, context: Any, /) -> None:
        """Make the engine if there is none, switch on tracking, and name the model."""
        super().model_post_init(context)
        if self.timeout is not None and self.timeout <= 0:
            raise ConfigError("timeout", self.timeout, "use a number of seconds above 0, or None")
        DecodeOptions(**self._arguments(None, {}))
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        given = self.engine
        if given is None:
            if self.model_id is None:
                raise ConfigError("engine", None, "give an engine, or a model_id to make one from")
            check_names(self.blend.items(), BlendConfig.names())
            config = dataclasses.replace(self.config, **self.blend) if self.config else BlendConfig(**self.blend)
            loading: dict[str, Any] = {
                "store": self.store,
                "device": self.device,
                "dtype": self.dtype,
                **self.model_kwargs,
            }
            self.engine = BlendEngine.from_pretrained(self.model_id, config=config, **loading)
        try:
            check_reasoning(self.engine.tokenizer, self.reasoning, most_thought=self.reasoning_tokens)
        except ConfigError:
            if given is None:
                self.engine.close()
            raise
        self.blend = self.engine.config.asdict()
        if not self.model_name:
            path = getattr(self.engine.model.config, "_name_or_path", "")
            self.model_name = self.model_id or str(path or "local")
        if self.track:
            self._begin_tracking()

    def __getstate__(self) -> dict[Any, Any]:
        # Not LlamaIndex's, which leaves out what cannot be pickled.
        return BaseModel.__getstate__(self)

    def __setstate__(self, state: dict[Any, Any]) -> None:
        BaseModel.__setstate__(self, state)
        if self.track:
            self._begin_tracking()

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        if self.engine is None:  # while it is made
            return
        yield "model", self.model_name
        traits = self.engine.store.traits
        yield "store", str(traits.folder or traits.tier or "memory")
        yield from self.engine.config.changed().items()
        for name in (*DecodeFields.model_fields, "timeout"):
            field = LLMBase.model_fields[name]
            if field.repr and (value := getattr(self, name)) != field.get_default(call_default_factory=True):
                yield name, value

    def _begin_tracking(self) -> None:
        """Learn of what retrievers return from now on; each adapter knows how."""
        raise NotImplementedError

    @staticmethod
    def _texts(documents: Iterable[Any]) -> list[str]:
        """Texts of an adapter's documents, as chunks are stored."""
        raise NotImplementedError

    @classmethod
    def from_model_id(
        cls, model_id: str | os.PathLike[str], *, store: StoreLocations | None = None, **fields: Any
    ) -> Self:
        """Load a model and its tokenizer: from a folder, or by an id that transformers can resolve.

        Options of the engine are among the fields: ``store="kv"``, ``device="cuda"``, ``recompute_ratio=0.2``.

        Raises
        ------
        ConfigError
            If a field is not known or has a value it cannot take.
        ModelLoadError
            If the model cannot be loaded.
        """
        if not isinstance(model_id, (str, os.PathLike)):
            remedy = "give a path or an id; use from_model for a model with its tokenizer"
            raise ConfigError("model_id", type(model_id).__name__, remedy)
        if store is not None and not are_locations(store):
            own = "from_engine(BlendEngine.from_pretrained(…, store=store))"
            remedy = f"give a folder, an address, or a list of them; for a store of your own use {own}"
            raise ConfigError("store", type(store).__name__, remedy)
        if isinstance(store, os.PathLike):
            store = os.fspath(store)
        elif isinstance(store, (list, tuple)):
            store = [os.fspath(place) for place in store]
        return cls(model_id=os.fspath(model_id), store=store, **fields)

    @classmethod
    def from_engine(cls, engine: BlendEngine, **fields: Any) -> Self:
        """Wrap an engine the user has; its options are its own, see `BlendEngine.with_config`."""
        return cls(engine=engine, **fields)

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any,
        *,
        store: StoreLocations | None = None,
        config: BlendConfig | None = None,
        **fields: Any,
    ) -> Self:
        """Use the user's transformers model and tokenizer, without changing them."""
        options = {name: fields[name] for name in BlendConfig.names() if name in fields}
        own = {name: value for name, value in fields.items() if name not in options}
        if options:
            config = dataclasses.replace(check_config(config), **options)
        given: dict[str, Any] = {"config": config, "store": store}
        return cls(engine=BlendEngine(model, tokenizer, **given), **own)

    # Documents -------------------------------------------------------------------------------

    def warm(self, documents: Iterable[Any], *, progress: bool | None = None) -> WarmReport:
        """Compute and store the KV of documents ahead of time; see `BlendEngine.warm`."""
        texts = self._texts(documents)
        self._registry.add(texts)
        return self.engine.warm(texts, progress=progress)

    async def awarm(self, documents: Iterable[Any], *, progress: bool | None = None) -> WarmReport:
        """`warm` without blocking the event loop."""
        return await asyncio.to_thread(self.warm, documents, progress=progress)

    def warm_aloud(
        self, documents: Iterable[Any], *, progress: bool | None = None, say: Callable[[str], object] | None = None
    ) -> WarmReport:
        """`warm`, after saying how many bytes the store will take for it.

        Parameters
        ----------
        say : callable, optional
            Gets the message; by default it is printed to standard error.
        """
        texts, room = self._texts(documents), self.engine.store.traits.size_limit
        if reason := self.engine.adapter.plain_reason:
            message = f"no KV of {len(texts):,} documents is stored: the model is answered plainly, as {reason}"
        else:
            needed = self.engine.chunks.estimate_bytes(texts)
            limit = f"may take {room:,}" if room < UNLIMITED else "has no limit"
            message = f"KV of {len(texts):,} documents: {needed:,} bytes; the KV store {limit}"
        (say or partial(print, file=sys.stderr))(message)
        self._registry.add(texts)
        return self.engine.warm(texts, progress=progress)

    def estimate_bytes(self, documents: Iterable[Any]) -> int:
        """Bytes that the KV of documents takes in the store."""
        return self.engine.chunks.estimate_bytes(self._texts(documents))

    def forget(self, documents: Iterable[Any]) -> int:
        """Erase the stored KV of documents in every form that prompts held, and return the number of erased records."""
        texts = self._texts(documents)
        self._registry.discard(texts)
        # Texts that steps of chains rewrote are noted where retrievers are tracked, which is the shared registry.
        texts += known_chunks.forms.find(texts)
        return self.engine.forget([*texts, *self._registry.forms.find(texts)])

    @property
    def _registry(self) -> ChunkRegistry:
        return known_chunks if self.known is None else self.known

    def _learn(self, documents: Iterable[RetrievedDocument]) -> None:
        """Know documents of a run in which this model is called; the shared registry has them from the tracker."""
        if self.known is not None:
            self.known.add(text for one in documents for text in one.texts)

    # Answering -------------------------------------------------------------------------------

    def stats(self) -> AnswerStats:
        """Counts of this model's requests so far, and how much of them was found in the store."""
        return self._tally.stats()

    @property
    def last_report(self) -> BlendReport | None:
        """Report of the newest answer in this context and the threads and tasks that it started; else None.

        Tasks of asyncio that ask at once share it.
        """
        return self._tally.last

    def _arguments(
        self, stop: str | Sequence[str] | None, overrides: Mapping[str, Any], also: Sequence[str] = (), begun: str = ""
    ) -> DecodeArguments:
        """Decoding options of one call.

        Parameters
        ----------
        stop : str or list of str, optional
            Texts that end this answer, too. If the list is empty, no text ends it.
        overrides : dict
            Arguments of the call.
        also : sequence of str
            Other names that the call takes.
        begun : str
            Beginning of the tool call that was written for the model. The answer ends with that call.

        Raises
        ------
        ConfigError
            If it was given something else.
        """
        known = ("max_tokens", "timeout", "response_format", "stop", *_DECODING, *also)
        given = settle(overrides, known, self.model_name)
        own = {name: getattr(self, name) for name in _DECODING}
        # A call that says how tokens are chosen overrules all that contradicts it.
        if given.get("do_sample") is False:
            own |= dict.fromkeys(("temperature", "top_p", "top_k", "min_p"))
        elif given.get("do_sample") and own["temperature"] == 0:
            own["temperature"] = None
        elif given.get("temperature") is not None:
            own["do_sample"] = None
        if given.get("logprobs") is False:
            own["top_logprobs"] = None
        if more := given.get("additional_kwargs"):
            given["additional_kwargs"] = {**self.additional_kwargs, **more}
        own |= {name: given[name] for name in _DECODING if name in given}
        form, tools, grammar = given.get("response_format"), given.get("tools"), None
        if form is not None or tools:  # before the engine is made there is neither
            grammar = own["grammar"] = answer_grammar(form, tools, given.get("tool_choice"), self.engine.tokenizer)
        stops, config = self._stops(stop, given.get("stop")), own["generation_config"]
        if stops is None and getattr(config, "stop_strings", None):
            own["generation_config"] = copy.deepcopy(config)
            own["generation_config"].stop_strings = None
        stops = stops or []
        if begun and not grammar:
            stops.append(CALL_END)
        return cast(DecodeArguments, {"stop": stops, **own})

    def _stops(self, *given: str | Sequence[str] | None) -> list[str] | None:
        """Texts that end an answer, from the model and from the call; None if the call says that no text does."""
        own, called = stop_texts(self.stop), [text for one in given for text in stop_texts(one)]
        return None if not called and any(one is not None for one in given) else [*own, *called]

    def _model_call(
        self,
        prompts: Sequence[Prompt],
        respond: Callable[[Said], R],
        stop: str | Sequence[str] | None,
        overrides: Mapping[str, Any],
        also: Sequence[str] = (),
        conversation: WrittenConversation | None = None,
        growing: bool = False,
    ) -> ModelCall[R]:
        """A call with these prompts; ``growing`` hands out tool calls though the answer may still be corrected."""
        begun = "" if conversation is None else conversation.opening
        arguments = self._arguments(stop, overrides, also, begun)
        if conversation is not None:
            arguments |= {"reasoning": conversation.reasoning, "answer_begins": conversation.later}
        return ModelCall(
            self.engine.named(self.model_name, "text_completion" if conversation is None else "chat"),
            prompts,
            arguments,
            respond,
            timeout=overrides.get("timeout", self.timeout),
            tries=self.max_retries + 1,
            noted=self._answered,
            tools=overrides.get("tools"),
            opening=begun,
            early=growing or calls_early(arguments, self.engine.config),
        )

    def _answered(self, answer: Generation) -> None:
        self._tally.note(answer)
        self.engine.verifications.call_when_done(answer.verification.id, self._tally.note_verification)
        if self.track and not ((report := answer.report).hits or report.misses or report.left_out or report.documents):
            self._registry.hint_at_unknown(report.prompt_tokens - report.resumed_tokens)

    def _info(self, report: BlendReport) -> dict[str, Any]:
        """The info of an answer in traces; times in seconds."""
        info = {
            "model_name": self.model_name,
            **{name: getattr(report, name) for name in _TOLD},
            **{name: list(getattr(report, name)) for name in ("left_out", "variants", "recomputed_tokens")},
            **{f"{name}_tokens": getattr(report, f"{name}_tokens") for name in _COUNTED},
            "answer_id": report.id,
            "verification": report.verification.asdict(),
            "documents": [dict[str, Any](one.asdict()) for one in report.documents],
        }
        return {**info, "input_ids": list(report.input_ids)} if self.report_input_ids else info


# Fields of loading that `model_kwargs` may hold, too.
_OF_LOADING = {"device", "dtype"}


def _loading(fields: Mapping[str, Any], others: Sequence[str]) -> dict[str, Any]:
    """The fields of loading, as `loading_arguments` settles them.

    Raises
    ------
    ConfigError
        If ``model_kwargs`` holds one of the other fields, or two contradict one another.
    """
    model_kwargs = fields.get("model_kwargs")
    check_mapping("model_kwargs", model_kwargs, "arguments of transformers' from_pretrained")
    for name, value in (model_kwargs or {}).items():
        if name in others:
            raise ConfigError("model_kwargs", {name: value}, f"give {name} outside model_kwargs")
    settled = loading_arguments(fields.get("device"), fields.get("dtype"), model_kwargs)
    return dict(zip(("device", "dtype", "model_kwargs"), settled, strict=True))
