"""BlendEngine: split, look up, load, fuse, decode."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import logging
import os
import sys
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Unpack

import torch

from cacheblend_rag.config import BlendConfig, check_model_and_tokenizer
from cacheblend_rag.engine.at_exit import prepare_end
from cacheblend_rag.engine.batch import by_common_chunks
from cacheblend_rag.engine.decode import (
    DEFAULT_NEW_TOKENS,
    DecodeArguments,
    DecodedAnswer,
    DecodeOptions,
    Step,
    decode,
    generate,
)
from cacheblend_rag.engine.grammar import Form, Grammar
from cacheblend_rag.engine.guard import QualityGuard
from cacheblend_rag.engine.pipeline import OTHER_FORM, Blend, Pauses, Pipeline, Segment
from cacheblend_rag.engine.prompt_lookup import PromptLookup
from cacheblend_rag.engine.scheduler import ModelTime, Scheduler, scheduler_of
from cacheblend_rag.engine.session_cache import KEY_PREFIX, holds, keys_begin
from cacheblend_rag.engine.streaming import Cancelled, NumberedStreams, TextStream, begun_ahead, interpreter_ends
from cacheblend_rag.engine.traces import Operation, SpanNames, below_this, traced
from cacheblend_rag.engine.warm_up import WarmUp, behind_each_other
from cacheblend_rag.engine.write_back import CLOSE_SECONDS, Job, WriteBack
from cacheblend_rag.errors import (
    CacheBlendError,
    ConfigError,
    ContextLengthError,
    GenerationError,
    PromptError,
    StoreError,
)
from cacheblend_rag.fusor.self_check import check_adapter
from cacheblend_rag.loading import Prefetcher
from cacheblend_rag.loading.shared import SharedKV
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.batched_decode import BatchedDecode
from cacheblend_rag.models.cache import all_preallocated
from cacheblend_rag.models.contexts import LearnedContext
from cacheblend_rag.models.loading import load_model
from cacheblend_rag.models.lora import unwrapped
from cacheblend_rag.prompt import FittedPrompt, ImagePrompt, Prompt, PromptTokenizer, TokenizedPrompt
from cacheblend_rag.prompt.contexts import finder
from cacheblend_rag.prompt.images import ImageLimits, image_prompt
from cacheblend_rag.report import BlendReport, FusedKV, Generation, Seconds, WarmReport
from cacheblend_rag.store import KVStore, StoreLocations, open_store
from cacheblend_rag.store.factory import absolute_locations, are_locations

_log = logging.getLogger(__name__)


class BlendEngine:
    """Answers RAG prompts from stored KV, recomputing only the tokens that need it.

    Parameters
    ----------
    model : transformers PreTrainedModel or PeftModel
        A causal language model, perhaps with LoRA adapters, or a model that takes images too.
        Nothing is left behind on it. Several engines may share one: their requests wait for one another. A call without
        an engine, on whatever thread, gets the model's own results.
    tokenizer : transformers tokenizer
        Its tokenizer.
    config : BlendConfig, optional
        Options; by default read from the environment, else the defaults.
    store : KVStore, path, address, list of these two, or None
        Where KV is kept: a store; a folder; a store that machines share, such as ``"s3://bucket/kv"`` or
        ``"valkey://host:6379/0"``; several of these, the nearest first; or memory.
    fingerprint : str, optional
        Identity of the model's own weights, adapters aside, where it is known already; by default they are read
        through.
    processor : transformers processor, optional
        The model's own, for prompts that hold images. Without it, such prompts are refused.
    beside : BlendEngine, optional
        An engine over another model on the same device. Requests of both wait for one another, as those of one model
        do. Without it both models may run at once, and each takes longer.

    Raises
    ------
    UnsupportedModelError
        If the model's family is not known, or its layers do not act as the family's should.
    ConfigError
        If an option does not fit the model, or model and tokenizer are none.

    Notes
    -----
    Requests from several threads are answered one after another, or ``max_concurrent`` of them at once: each is
    let in between two tokens of the others, and from then on they take their steps together.

    An engine made by `from_pretrained` can be pickled and copied: the copy loads the model and opens the store anew.
    """

    _reopen: Callable[..., BlendEngine] | None = None  # makes the same again, of a config

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        config: BlendConfig | None = None,
        store: KVStore | StoreLocations | None = None,
        fingerprint: str | None = None,
        processor: Any = None,
        beside: BlendEngine | None = None,
    ) -> None:
        check_model_and_tokenizer(model, tokenizer)
        model = unwrapped(model)
        self.config = config or BlendConfig()
        self.model, self.tokenizer = model, tokenizer
        self._processor: Callable[[], Any] = lambda: processor
        self._owns_store = store is None or are_locations(store)
        adapter = ModelAdapter(model, like=self.config.like or None)
        self.store = open_store(store, self.config, beside_gpu=adapter.device.type == "cuda")
        segments = PromptTokenizer(tokenizer, self.config.separator)
        if self.config.check_model:
            check_adapter(adapter)
        self._pipeline = Pipeline(adapter, segments, self.config, self.store, fingerprint)
        self._prefetcher = Prefetcher(self.store)
        # Engines over one model take turns.
        self._scheduler: Scheduler = scheduler_of(model, None if beside is None else beside._scheduler)
        self._batched_decode = BatchedDecode(adapter)
        self._write_back = WriteBack(self._scheduler)
        self.guard = QualityGuard()
        self._viewed: BlendEngine | None = None
        self._named = SpanNames(str(getattr(model.config, "_name_or_path", "") or "local"))
        weakref.finalize(self, self._write_back.stop).atexit = False
        prepare_end()

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str],
        *,
        config: BlendConfig | None = None,
        store: KVStore | StoreLocations | None = None,
        device: str | int | torch.device | None = "auto",
        dtype: str | torch.dtype | None = "auto",
        beside: BlendEngine | None = None,
        **model_kwargs: Any,
    ) -> BlendEngine:
        """Load a model and its tokenizer by id or path.

        Parameters
        ----------
        model : str or path
            A folder, or an id that transformers can resolve.
        config, store
            As for `BlendEngine`.
        device : str, int or torch.device
            ``"auto"`` (a GPU if there is one), or a torch device. A number is that of a GPU, and -1 the CPU.
        dtype : str or torch.dtype
            ``"auto"`` (the checkpoint's, but float32 on a CPU that has no arithmetic of that type and
            memory enough), ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        beside
            As for `BlendEngine`. A copied or pickled engine does not keep this.
        **model_kwargs
            Passed on to ``from_pretrained``.

        Raises
        ------
        ModelLoadError
            If either cannot be loaded.
        UnsupportedModelError
            If the model cannot be blended, as its config says; weights are not fetched then.
        ConfigError
            If an argument cannot be used.
        """
        loaded = load_model(model, device=device, dtype=dtype, **model_kwargs)
        fingerprint = loaded.fingerprint()
        made = cls(loaded.model, loaded.tokenizer, config=config, store=store, fingerprint=fingerprint, beside=beside)
        made._named = SpanNames(os.fspath(model))
        made._processor = loaded.processor
        if made._owns_store:
            locations = absolute_locations(store) if are_locations(store) else None
            made._reopen = partial(
                cls.from_pretrained, os.fspath(model), store=locations, device=device, dtype=dtype, **model_kwargs
            )
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        if self._reopen is None:
            remedy = "make it by from_pretrained (or from_model_id), with a folder for its store, and it can be"
            raise ConfigError("engine", "made of objects that cannot be copied or pickled", remedy)
        return partial(self._reopen, config=self.config), ()

    def with_config(self, **changes: Any) -> BlendEngine:
        """An engine over the same model and store with other options.

        It shares everything with this one, so requests of both still wait for one another, and
        it ends when this one is closed; closing it does nothing. The quality guard is shared too: what it has seen
        is counted together, and a ratio it has raised is raised for both. ``guard_share`` and ``guard_bound`` may
        differ; they say how the requests of each are sampled and judged.

        Parameters
        ----------
        **changes
            Options of `BlendConfig`. Another ``selection`` begins without ``selection_options`` and
            ``recompute_ratios`` unless they are given with it: those of this engine are for its own rule.

        Raises
        ------
        ConfigError
            If an option is out of range or does not fit the rule or the model.
        """
        if changes.get("selection", self.config.selection) != self.config.selection:
            changes = {"selection_options": {}, "recompute_ratios": (), **changes}
        other = self._view()
        other.config = dataclasses.replace(self.config, **changes)
        segments = self._pipeline.tokenizer.with_separator(other.config.separator)
        other._pipeline = self._pipeline.with_config(other.config, segments)
        return other

    def named(self, model: str, operation: Operation = "text_completion") -> BlendEngine:
        """The same engine under another name. OpenTelemetry's spans and metrics of its answers give this name.

        Parameters
        ----------
        model : str
            Name of the model. By default it is the id or the folder that the model was loaded from.
        operation : str
            ``"chat"`` if prompts are conversations, else ``"text_completion"``.
        """
        other = self._view()
        other._named = SpanNames(model, operation)
        return other

    def _view(self) -> BlendEngine:
        """Another engine that shares everything with this one."""
        other = object.__new__(BlendEngine)
        other.__dict__.update(self.__dict__)
        other._viewed = self
        return other

    @property
    def adapter(self) -> ModelAdapter:
        """The model, taken apart into the steps of the blended pass."""
        return self._pipeline.adapter

    @property
    def fingerprint(self) -> str:
        """Identity of the model: its weights, its active adapters and what else its KV depends on."""
        return self._pipeline.look_at_model()

    @property
    def context_window(self) -> int | None:
        """Most tokens of a prompt with its answer; None if the model's config does not say it."""
        return self.adapter.context_window

    @property
    def takes_images(self) -> bool:
        """Whether the model has an image encoder."""
        return getattr(self.model.config, "vision_config", None) is not None

    @property
    def condition(self) -> str:
        """The condition that chunks are computed behind; ``"auto"`` of the options is decided."""
        return self._pipeline.condition

    @property
    def learned(self) -> LearnedContext | None:
        """The context learned by ``cacheblend-rag adapt``, or given to `use_learned`; None without one."""
        return self._pipeline.learned

    def use_learned(self, context: LearnedContext | None) -> None:
        """Hold a learned context from now on, as if it were kept beside the store; views made before do not."""
        self._pipeline = self._pipeline.with_learned(context)

    def products(self) -> contextlib.AbstractContextManager[None]:
        """Within this the model multiplies as it does while the engine runs it; see ``prepack_weights``."""
        return self._pipeline.prepacked()

    def tokenize(self, prompt: Prompt | str) -> TokenizedPrompt:
        """The ids of a prompt and where its segments lie, however long it is."""
        return self._pipeline.tokenizer.tokenize(self._prompt(prompt))

    def image_prompt(
        self,
        turns: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        begun: str = "",
        limits: ImageLimits | None = None,
    ) -> ImagePrompt:
        """The prompt of a conversation that holds images, by the model's own processor.

        It is answered by transformers' own ``generate``: nothing of it is blended or stored.

        Parameters
        ----------
        turns, tools, options, begun, limits
            As for `cacheblend_rag.prompt.images.image_prompt`.

        Raises
        ------
        ConfigError
            If the engine was made of objects and has no processor.
        ModelLoadError
            If the processor cannot be loaded.
        PromptError
            If the conversation or an image cannot be used.
        """
        processor = self._processor()
        if processor is None:
            remedy = "an image needs the model's own: give processor=AutoProcessor.from_pretrained(name of the model)"
            raise ConfigError("processor", None, remedy)
        return image_prompt(processor, self.tokenizer, turns, tools, options, begun=begun, limits=limits)

    def fitted(self, prompt: Prompt | str, max_new_tokens: int | None = None) -> FittedPrompt:
        """The prompt that is answered: with ``overflow="drop_chunks"`` perhaps with fewer chunks.

        Parameters
        ----------
        max_new_tokens : int, optional
            As `generate` is given it.

        Raises
        ------
        ContextLengthError
            If prompt and answer do not fit into the model's context window.
        """
        needed, room = _answer_room(DecodeOptions(max_new_tokens=max_new_tokens))
        return self._pipeline.split(self._prompt(prompt), needed, room)

    # Answering -----------------------------------------------------------------------------

    def generate(self, prompt: Prompt | str, **options: Unpack[DecodeArguments]) -> Generation:
        """Answer a prompt.

        Parameters
        ----------
        prompt : Prompt or str
            A text is answered by plain prefill, unless ``split_at_separator`` is set.
        **options
            ``max_new_tokens``, ``stop``, ``temperature``, ``do_sample``, ``top_p``, ``top_k``,
            ``repetition_penalty``, ``seed``, ``generation_config``, ``logits_processor``, ``grammar``;
            `DecodeOptions` explains each.

        Raises
        ------
        ContextLengthError
            If the prompt and ``max_new_tokens`` do not fit into the model's context window. Without a number of tokens
            the answer is as long as there is room for, 256 tokens at most.
        PromptError, ConfigError
            If the prompt or an option cannot be used.
        """
        return self._answer(self._prompt(prompt), DecodeOptions(**options), None)

    def grammar(self, schema: Mapping[str, Any]) -> Grammar:
        """Compile a JSON schema that answers shall follow: ``generate(prompt, grammar=engine.grammar(schema))``.

        The answer is JSON by the schema, unless ``max_new_tokens`` or a stop string cuts it.

        Parameters
        ----------
        schema : dict
            ``{"type": "object"}`` for any JSON object.

        Raises
        ------
        ConfigError
            If answers cannot be held to the schema.
        MissingExtraError
            If the extra ``structured`` is not installed.
        """
        return Grammar(self.tokenizer, [Form(schema)])

    def stream(
        self, prompt: Prompt | str, *, timeout: float | None = None, **options: Unpack[DecodeArguments]
    ) -> TextStream:
        """Answer a prompt piece by piece.

        Parameters
        ----------
        timeout : float, optional
            Seconds that the answer may take, from the first piece asked for.

        Returns
        -------
        TextStream
            Iterates over pieces of text; its ``result`` is the whole `Generation` afterwards.
            Leaving the iteration early ends the generation.
        """
        parsed, chosen = self._prompt(prompt), DecodeOptions(**options)
        return TextStream(below_this(lambda sink: self._answer(parsed, chosen, sink)), timeout)

    def generate_batch(self, prompts: Iterable[Prompt | str], **options: Unpack[DecodeArguments]) -> list[Generation]:
        """Answer several prompts; see `stream_batch`. Answers come in the order of the prompts."""
        with contextlib.closing(self.stream_batch(prompts, **options)) as streams:
            answers = {number: stream.complete() for number, stream in streams}
        return [answers[number] for number in range(len(answers))]

    def stream_batch(
        self, prompts: Iterable[Prompt | str], *, timeout: float | None = None, **options: Unpack[DecodeArguments]
    ) -> NumberedStreams:
        """Answer several prompts, ``max_concurrent`` of them at once, each chunk read once while prompts need it.

        Returns
        -------
        generator of (int, TextStream)
            The number of a prompt and its stream, to be read before the next is taken. Prompts
            with chunks in common come together. Closing it ends those that were begun ahead.

        Raises
        ------
        ContextLengthError
            If one of several prompts does not fit into the model's context window; none is answered then.
        """
        parsed, chosen = [self._prompt(prompt) for prompt in prompts], DecodeOptions(**options)
        if len(parsed) > 1:  # one alone is refused when it is answered, and its span tells so
            self._pipeline.check_all_fit(parsed, _answer_room(chosen)[0])
        return self._streams(parsed, chosen, timeout)

    def _streams(self, prompts: list[Prompt], options: DecodeOptions, timeout: float | None) -> NumberedStreams:
        if len(prompts) == 1:
            yield 0, TextStream(partial(self._answer, prompts[0], options), timeout)
            return
        with contextlib.closing(SharedKV([(one.prefix, *one.chunks) for one in prompts])) as shared:
            streams = (
                (number, TextStream(partial(self._answer, prompts[number], options, shared=shared), timeout))
                for number in by_common_chunks([prompt.chunks for prompt in prompts])
            )
            yield from begun_ahead(streams, self.config.max_concurrent if self._several else 1)

    def fuse(self, prompt: Prompt | str) -> FusedKV:
        """Make the KV of a prompt and the logits of its last position, without generating."""
        parsed = self._prompt(prompt)
        if isinstance(parsed, ImagePrompt):
            raise PromptError("a prompt that holds an image is not fused: use generate or stream")
        with self._held():
            blend = self._pipeline.blend(parsed)
            self._keep(blend)
        return blend.fused

    def _answer(
        self, prompt: Prompt, options: DecodeOptions, sink: Cancelled | None, shared: SharedKV | None = None
    ) -> Generation:
        """Split, look up, load, fuse, decode."""
        pipeline = self._pipeline
        cancelled = sink.cancelled if sink else interpreter_ends
        with (
            shared.read_by((prompt.prefix, *prompt.chunks)) if shared else contextlib.nullcontext(),
            traced(self._named, prompt, options, self.config, sink) as trace,
            self._held(prompt, options.max_new_tokens) as spent,
        ):
            trace.begins()
            if sink:
                sink.model_time = spent
            if cancelled():
                raise GenerationError("the answer was given up before its turn came")
            fit = pipeline.split(prompt, *_answer_room(options))
            if isinstance(prompt, ImagePrompt):
                answer = self._plain_answer(prompt, fit, options, sink)
                trace.answered(answer)
                return answer
            with pipeline.look_up(fit) as lookup:
                loading = pipeline.load(lookup, cancelled, shared)
                blend = pipeline.fuse(lookup, loading, self._pauses(cancelled) if self._several else None)
            answer = self._decode(blend, options, sink)
            trace.answered(answer)
            self._keep(pipeline.keep_session(blend, answer.token_ids))
        self.guard.watch(fit.prompt, answer, pipeline, self._scheduler, self._write_back)
        return answer

    def _plain_answer(
        self, prompt: ImagePrompt, fit: FittedPrompt, options: DecodeOptions, sink: Cancelled | None
    ) -> Generation:
        """The answer to a prompt that holds images: the model's own, from its own prefill."""
        started = time.perf_counter()
        with self.products():
            decoded = generate(
                self.model,
                self.tokenizer,
                inputs=copy.copy(prompt.inputs).to(self.adapter.device, self.adapter.dtype),
                options=options,
                on_text=sink.put if sink else None,
                cancelled=sink.cancelled if sink else interpreter_ends,
                window=self.context_window,
            )
        seconds = Seconds(split=prompt.seconds + fit.seconds, fuse=decoded.first_token_at - started)
        report = dataclasses.replace(
            self._pipeline.plain_report(fit.split), plain_reason="the prompt holds an image", seconds=seconds
        )
        return Generation(decoded.text, decoded.token_ids, _completed(report, decoded))

    def _decode(self, blend: Blend, options: DecodeOptions, sink: Cancelled | None) -> Generation:
        """The answer to a fused prompt, token by token."""
        fused, fused_at = blend.fused, time.perf_counter()
        with self.products(), self._steps(fused) as step:
            decoded = decode(
                self.model,
                self.tokenizer,
                input_ids=fused.input_ids,
                cache=fused.cache,
                logits=fused.logits,
                options=options,
                on_text=sink.put if sink else None,
                cancelled=sink.cancelled if sink else interpreter_ends,
                step=step,
                window=self.context_window,
            )
        return _generation(fused, decoded, fused_at)

    def _keep(self, blend: Blend) -> None:
        """Store what was missing, now or when nothing else waits; nothing in a store that cannot be written."""
        if self.store.read_only:
            return
        for key, job in blend.write_back.items():
            if self.config.write_back == "background":
                self._write_back.submit(key, job)
                continue
            try:
                job.run()
            except CacheBlendError as error:
                _log.warning("could not store %s: %s", key, error)

    # The store -----------------------------------------------------------------------------

    def warm(self, chunks: Iterable[str], *, prefix: str = "", progress: bool | None = None) -> WarmReport:
        """Compute and store the KV of chunks ahead of time, several in one pass.

        Requests that come meanwhile go before the next pass; while there are always some, warming gets a fifth of
        the model's time. It stops before the store would pass its size limit, so that it never evicts its own work.

        Chunks are looked at before the first pass: with one that is too long, none is computed. One that no tokenizer
        takes is left out, and a warning names it.

        Parameters
        ----------
        chunks : iterable of str
            Chunk texts, those of a document one after another: chunks are computed behind stretches of those next
            to them (``condition="context"``).
        prefix : str
            The prefix they will stand behind; needed with ``condition="prefix"`` only.
        progress : bool, optional
            Show a progress bar; by default if standard error is a terminal.

        Raises
        ------
        ContextLengthError
            If a chunk alone is longer than the model's context window; the message gives its first words.
        """
        self._check_open()
        texts = _texts(chunks)
        self._pipeline.look_at_model()
        pairs = [(text, found) for text in texts if (found := self._fitting_segment(text, prefix)) is not None]
        segments = behind_each_other(self._pipeline, [text for text, _ in pairs], [found for _, found in pairs])
        return WarmUp(self._pipeline, self.in_background).run(segments, progress)

    def estimate_bytes(self, chunks: Iterable[str]) -> int:
        """Bytes the KV of chunks will take in the store; nothing is computed."""
        texts = [text for text in _texts(chunks) if self._pipeline.chunk_segment(text) is not None]
        found = behind_each_other(self._pipeline, texts, list(self._segments(texts)))
        segments = {segment.key: segment for segment in found}
        return sum(self.store.record_bytes(self._pipeline.record_info(segment)) for segment in segments.values())

    def prefetch(self, chunks: Iterable[str], *, prefix: str = "") -> None:
        """Bring stored KV of chunks closer on a thread of its own, as soon as they are retrieved.

        With tiers, records rise to the nearest; of a single folder, the system is asked to read
        their files. Chunks that are not stored are left alone. Never waits and never fails.

        Parameters
        ----------
        chunks, prefix
            As for `warm`.
        """
        self._prefetcher.submit(segment.key for segment in self._segments(chunks, prefix))

    def forget(self, chunks: Iterable[str], *, prefix: str = "") -> int:
        """Erase the stored KV of chunks, and that of other chunks that was computed behind them.

        Returns
        -------
        int
            Records that were erased. Records that waited to be stored never were, and are not counted.

        Raises
        ------
        StoreError
            If some could not be erased, or not be looked for; all that could be erased are.
        """
        texts = _texts(chunks)
        self.drop_waiting(texts, prefix=prefix)
        failed: list[StoreError] = []
        keys = self._records_of(texts, prefix, failed, dependent=True)
        erased = 0
        for key in keys:
            with _noted(failed):
                erased += self.store.delete(key)
        if failed:
            raise StoreError(f"not all could be forgotten, {erased} records were: {failed[0]}") from failed[0]
        return erased

    def drop_waiting(self, chunks: Iterable[str], *, prefix: str = "") -> None:
        """Let no record be stored that waits to be and that `forget` would erase.

        A record of them that is being stored at this moment is waited for. Other records are stored as they
        would have been.

        Parameters
        ----------
        chunks, prefix
            As for `warm`.
        """
        self._check_open()
        self._pipeline.look_at_model()
        forms = self._forms(_texts(chunks), prefix)
        keys = {segment.key for segments in forms for segment in segments}
        ids = [segments[0].token_ids for segments in forms]
        begins, kept = finder(ids), keys_begin(self.config.salt)

        def holds_chunk(key: str, job: Job) -> bool:
            if job.info is None or key.split(OTHER_FORM)[0] in keys:
                return job.info is not None
            info = job.info()
            if key.startswith(KEY_PREFIX):
                return key.startswith(kept) and any(holds(info, chunk) for chunk in ids)
            return begins(info.behind) and self._pipeline.owns(key, info)

        if ids:
            self._write_back.drop(holds_chunk)

    def _forms(self, texts: Iterable[str], prefix: str) -> list[list[Segment]]:
        """Of each chunk all segments under which it may be stored; of one that is too short none."""
        return [forms for text in texts if (forms := self._pipeline.chunk_forms(text, prefix))]

    def records_of(self, chunks: Iterable[str], *, prefix: str = "", dependent: bool = True) -> set[str]:
        """Keys of all records that hold KV of chunks, and of those that would: what `forget` erases.

        Parameters
        ----------
        chunks, prefix
            As for `warm`.
        dependent : bool
            Those of other chunks that were computed behind them, too. All records of the store are looked at for it.

        Raises
        ------
        StoreError
            If some could not be looked for.
        """
        self._check_open()
        failed: list[StoreError] = []
        keys = self._records_of(chunks, prefix, failed, dependent)
        if failed:
            raise StoreError(f"not all records could be looked for: {failed[0]}") from failed[0]
        return keys

    def _records_of(self, chunks: Iterable[str], prefix: str, failed: list[StoreError], dependent: bool) -> set[str]:
        """See `records_of`; what went wrong on the way is added to ``failed``."""
        self._pipeline.look_at_model()
        forms = self._forms(_texts(chunks), prefix)
        keys = {segment.key for segments in forms for segment in segments}
        for key in [*keys]:
            with _noted(failed):
                keys.update(other for other, _ in self.store.infos(key + OTHER_FORM))
        ids = [segments[0].token_ids for segments in forms]
        if dependent and ids:  # whatever chunks are computed behind now
            begins = finder(ids)
            with _noted(failed):
                found = ((key, info) for key, info in self.store.infos("") if begins(info.behind))
                keys.update(key for key, info in found if self._pipeline.owns(key, info))
        # Prompts that were kept whole have their chunks in them.
        with _noted(failed):
            kept = self.store.infos(keys_begin(self.config.salt)) if ids else ()
            keys.update(key for key, info in kept if any(holds(info, chunk) for chunk in ids))
        # No text of theirs stays in memory either.
        self._pipeline.tokenizer.forget()
        return keys

    @property
    def storing_seconds(self) -> float:
        """Time spent in the background on computing and storing what was missing."""
        return self._write_back.seconds

    def flush(self) -> None:
        """Wait until everything computed is stored, on other machines too."""
        self._write_back.flush()
        self.store.flush()

    def close(self, *, seconds: float = CLOSE_SECONDS) -> None:
        """Store what waits, as far as the time allows, then release everything; closing twice is harmless.

        Parameters
        ----------
        seconds : float
            Most seconds for which KV that was missing is still computed and stored. What is left then is dropped, a
            warning says how much, and it is computed again when it is next missing. 0 drops all of it; `flush` waits
            for all of it. An interrupt (Ctrl-C) drops the rest, too.
        """
        if self._viewed is not None or self._write_back.closed:
            return
        self._prefetcher.close()
        self._write_back.close(seconds)
        with self._scheduler:  # a request on another thread may still be under way
            # Prepacked weights go with the last engine over the model.
            self._pipeline.prepacked = contextlib.nullcontext
            if self._owns_store:
                self.store.close()

    def __enter__(self) -> BlendEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Asynchronous forms --------------------------------------------------------------------

    async def agenerate(self, prompt: Prompt | str, **options: Unpack[DecodeArguments]) -> Generation:
        """`generate` without blocking the event loop; being cancelled stops it at the next token."""
        return await self.stream(prompt, **options).acomplete()

    async def agenerate_batch(
        self, prompts: Iterable[Prompt | str], **options: Unpack[DecodeArguments]
    ) -> list[Generation]:
        """`generate_batch` without blocking the event loop; being cancelled stops it."""
        with contextlib.closing(self.stream_batch(prompts, **options)) as streams:
            answers = {number: await stream.acomplete() for number, stream in streams}
        return [answers[number] for number in range(len(answers))]

    async def afuse(self, prompt: Prompt | str) -> FusedKV:
        """`fuse` without blocking the event loop."""
        return await asyncio.to_thread(self.fuse, prompt)

    async def awarm(self, chunks: Iterable[str], *, prefix: str = "", progress: bool | None = None) -> WarmReport:
        """`warm` without blocking the event loop."""
        return await asyncio.to_thread(self.warm, chunks, prefix=prefix, progress=progress)

    async def astream(self, prompt: Prompt | str, **options: Unpack[DecodeArguments]) -> AsyncIterator[str]:
        """`stream` without blocking the event loop."""
        pieces = self.stream(prompt, **options)
        try:
            async for piece in pieces:
                yield piece
        finally:
            await asyncio.to_thread(pieces.close)

    # Helpers -------------------------------------------------------------------------------

    def _segments(self, chunks: Iterable[str], prefix: str = "") -> Iterator[Segment]:
        """Stored segments of chunks; texts too short to have tokens of their own are left out."""
        self._pipeline.look_at_model()
        found = (self._pipeline.chunk_segment(text, prefix) for text in _texts(chunks))
        return (segment for segment in found if segment is not None)

    def _fitting_segment(self, text: str, prefix: str) -> Segment | None:
        """The stored segment of a chunk, if it is not too long for the model."""
        segment, window = self._pipeline.chunk_segment(text, prefix), self.context_window
        tokens = len(segment.context_ids) + len(segment.token_ids) if segment else 0
        if window is not None and tokens > window:
            first = " ".join(text.split()[:8])
            remedy = "split its document into smaller chunks, or take a model with a longer window"
            raise ContextLengthError(tokens, 0, window, remedy, f"the chunk that begins {first[:60]!r}")
        return segment

    def _prompt(self, prompt: Prompt | str) -> Prompt:
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, str):
            separator = self.config.text_separator
            return Prompt.parse(prompt, separator) if separator else Prompt(suffix=prompt)
        raise PromptError(f"prompt={prompt!r} is a {type(prompt).__name__}: give a Prompt or a text")

    @contextlib.contextmanager
    def _held(self, prompt: Prompt | None = None, new_tokens: int | None = None) -> Iterator[ModelTime]:
        """The model and the store: for one request alone, or for a prompt beside others that have begun."""
        beside: Callable[[], int] = _nobody
        if prompt is not None and self._several and not isinstance(prompt, ImagePrompt):  # that one lets nobody in
            # No tokenizer makes more tokens than there are bytes.
            size = len(prompt.written(self.config.separator).text.encode(errors="surrogatepass"))
            beside = partial(self._beside, size + (new_tokens or 256))
        with self._scheduler.entered(beside) as spent:
            self._check_open()
            self._pipeline.look_at_model()
            yield spent

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Hold the model for a short piece of a request's work that uses all cores, between passes of others."""
        with self._scheduler.entered(_anybody):
            self._check_open()
            yield

    @contextlib.contextmanager
    def in_background(self) -> Iterator[None]:
        """Hold the model for a short piece of work that no request waits for.

        It begins once no request wants the model. While requests never cease, such work gets a fifth of the time.
        """
        with self._scheduler.background():
            self._check_open()
            self._pipeline.look_at_model()
            yield

    @property
    def _several(self) -> bool:
        """Whether answers may be under way at once."""
        return self.config.max_concurrent > 1 and self._batched_decode.possible

    def _beside(self, tokens: int) -> int:
        """How many others may be under way when a prompt of so many tokens at most is begun."""
        return self.config.max_concurrent - 1 if self._batched_decode.fit(tokens) else 0

    @contextlib.contextmanager
    def _steps(self, fused: FusedKV) -> Iterator[Step]:
        """The function that takes each step of an answer."""
        if not (self.config.prompt_lookup and self._batched_decode.takes_several and all_preallocated(fused.cache)):
            yield self._step
            return
        lookup = PromptLookup(
            fused.input_ids,
            fused.cache,
            most=self.config.prompt_lookup,
            window=self.context_window or sys.maxsize,
            take=self._step,
            wanted=lambda: self._scheduler.alone,
        )
        with contextlib.closing(lookup):
            yield lookup

    def _step(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """A step's pass, together with those of others under way; logits ``[1, tokens, vocab]``."""
        if not self._several:
            return self._batched_decode([inputs])[0]
        return self._scheduler.step(inputs, self._batched_decode)

    def _pauses(self, cancelled: Callable[[], bool]) -> Pauses:
        """Pauses of a prefill, in which others use the model."""
        on_cpu = self.adapter.device.type == "cpu"

        def going_on() -> None:
            if cancelled():
                raise GenerationError("the answer was given up while its prompt was prefilled")

        def between(seconds: float) -> None:
            going_on()
            self._scheduler.give_way(seconds)

        def each_layer() -> None:
            going_on()
            if on_cpu:  # on a GPU a layer takes a millisecond
                self._scheduler.let_step()

        return Pauses(between, each_layer)

    def _check_open(self) -> None:
        if self._write_back.closed:
            raise ConfigError("engine", "closed", "make a new engine; this one was closed")


def _nobody() -> int:
    return 0


def _anybody() -> int:
    return sys.maxsize


def _answer_room(options: DecodeOptions) -> tuple[int, int]:
    """Tokens of an answer that must fit, and those that room is made for where chunks are left out."""
    requested = options.requested_tokens
    return requested or 1, requested or DEFAULT_NEW_TOKENS


def _generation(fused: FusedKV, decoded: DecodedAnswer, fused_at: float) -> Generation:
    seconds = dataclasses.replace(fused.report.seconds, first_token=decoded.first_token_at - fused_at)
    report = _completed(dataclasses.replace(fused.report, seconds=seconds), decoded)
    return Generation(decoded.text, decoded.token_ids, report, fused.recomputed, fused.deviation)


def _completed(report: BlendReport, decoded: DecodedAnswer) -> BlendReport:
    return dataclasses.replace(report, generated_tokens=len(decoded.token_ids), finish_reason=decoded.finish_reason)


@contextlib.contextmanager
def _noted(failed: list[StoreError]) -> Iterator[None]:
    """Go on after an error of the store, and remember it."""
    try:
        yield
    except StoreError as error:
        failed.append(error)


def _texts(chunks: Iterable[str]) -> list[str]:
    if isinstance(chunks, str):
        raise PromptError(f"chunks={chunks[:40]!r} is one text: give a list of texts, even for a single chunk")
    return list(chunks)
