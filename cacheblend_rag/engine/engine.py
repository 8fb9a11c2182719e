"""BlendEngine: split, choose a route, fuse, decode, verify."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Unpack, cast

import torch

from cacheblend_rag.config import BlendConfig, check_config, check_model_and_tokenizer
from cacheblend_rag.engine.answering import Answering, answer_room
from cacheblend_rag.engine.backends import ModelInUse, adapter_of, decode_of, load
from cacheblend_rag.engine.chunks import Chunks
from cacheblend_rag.engine.decode import DecodeArguments, DecodeOptions
from cacheblend_rag.engine.grammar import Form, Grammar
from cacheblend_rag.engine.pipeline import Pipeline, open_pipeline
from cacheblend_rag.engine.scheduler import all_schedulers, scheduler_of
from cacheblend_rag.engine.streaming import NumberedStreams, TextStream, end_answers
from cacheblend_rag.engine.traces import Operation, SpanNames, below_this
from cacheblend_rag.engine.turns import Lifetime, Turns
from cacheblend_rag.engine.verification import Verifications
from cacheblend_rag.engine.write_back import CLOSE_SECONDS, WriteBack, closing_seconds, queues_begun
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.llama_cpp.runtime import is_in_llama_cpp
from cacheblend_rag.loading import Prefetcher
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.lora import unwrap
from cacheblend_rag.prompt import FittedPrompt, Prompt, PromptTokenizer, TokenizedPrompt
from cacheblend_rag.prompt.finder import Finder
from cacheblend_rag.report import FusedKV, Generation, WarmReport
from cacheblend_rag.store import KVStore, StoreLocations, open_store
from cacheblend_rag.store.factory import absolute_locations, are_locations


class BlendEngine(contextlib.AbstractContextManager["BlendEngine"]):
    """Answers RAG prompts from stored KV, recomputing only the tokens that need it.

    Parameters
    ----------
    model : transformers PreTrainedModel or PeftModel
        A causal language model, perhaps with LoRA adapters. Nothing is left behind on it.
        Several engines may share one: their requests take turns. A call without an engine gets the model's own results.
    tokenizer : transformers tokenizer
        Its tokenizer.
    config : BlendConfig, optional
        Options; by default read from the environment, else the defaults.
    store : KVStore, path, address, list of these two, or None
        Where KV is kept: a store; a folder; a store that machines share, such as ``"s3://bucket/kv"`` or
        ``"valkey://host:6379/0"``; several of these, the nearest first; or memory.
    fingerprint : str, optional
        Hash of the base weights. If not given, it is computed by reading all of them.
    beside : BlendEngine, optional
        An engine over another model on the same device, so that requests of both take turns instead of slowing each
        other.

    Raises
    ------
    UnsupportedModelError
        If transformers cannot run the model, or the model is not shaped like the family that it was registered as.
        Other models that cannot be blended are answered by full prefill.
    ConfigError
        If an option does not fit the model, or ``model`` or ``tokenizer`` is of another kind.

    Notes
    -----
    Requests from several threads are answered one after another, or ``max_concurrent`` of them at once: each is
    let in between two tokens of the others, and from then on they take their steps together.

    An engine made by `from_pretrained` can be pickled and copied: the copy loads the model and opens the store again.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        config: BlendConfig | None = None,
        store: KVStore | StoreLocations | None = None,
        fingerprint: str | None = None,
        beside: BlendEngine | None = None,
    ) -> None:
        check_model_and_tokenizer(model, tokenizer)
        model, config = unwrap(model), check_config(config)
        adapter = adapter_of(model)
        opened = open_store(store, config, beside_gpu=adapter.device.type == "cuda")
        in_use = ModelInUse(adapter, config, adapter.identity(fingerprint), anew=True)
        # Engines over one model take turns.
        scheduler = scheduler_of(model, None if beside is None else beside._parts.turns.scheduler)
        write_back, lifetime = WriteBack(scheduler), Lifetime()
        pipeline = open_pipeline(in_use, PromptTokenizer(tokenizer, config.separator), config, opened)
        parts = EngineParts(
            tokenizer=tokenizer,
            pipeline=pipeline,
            turns=Turns(scheduler, pipeline.segments, decode_of(adapter), write_back, lifetime),
            verifications=Verifications(),
            prefetcher=Prefetcher(opened),
            names=SpanNames(str(getattr(model.config, "_name_or_path", "") or "local")),
            owns_store=store is None or are_locations(store),
        )
        self._consist_of(parts)
        weakref.finalize(lifetime, write_back.stop).atexit = False
        # The last to be registered is called first: before stores are closed. A fork may have lost its parent's hooks.
        atexit.unregister(_end_all)
        atexit.register(_end_all)

    # Answering -----------------------------------------------------------------------------

    def generate(self, prompt: Prompt | str, **options: Unpack[DecodeArguments]) -> Generation:
        """Answer a prompt.

        Parameters
        ----------
        prompt : Prompt or str
            A text is answered by plain prefill, unless ``split_at_separator`` is set.
        **options
            The fields of `DecodeOptions`, such as ``max_new_tokens``, ``stop``, ``temperature`` or ``logprobs``.

        Raises
        ------
        ContextLengthError
            If the prompt and ``max_new_tokens`` do not fit into the model's context window. Without a number of tokens
            the answer is as long as there is room for, 512 tokens at most.
        PromptError, ConfigError
            If the prompt or an option cannot be used.
        """
        return self._answers.to(_prompt_of(prompt, self.config.text_separator), DecodeOptions(**options))(None)

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
            Iterates over pieces of text, with ``for`` or ``async for``. Its ``result`` is the whole `Generation`
            afterwards.
            Leaving the iteration early ends the generation.
        """
        answer = self._answers.to(_prompt_of(prompt, self.config.text_separator), DecodeOptions(**options))
        return TextStream(below_this(answer), timeout)

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
            If one of several prompts does not fit into the model's context window; then no prompt is answered.
        """
        parsed = [_prompt_of(prompt, self.config.text_separator) for prompt in prompts]
        chosen = DecodeOptions(**options)
        if len(parsed) > 1:  # one alone is refused when it is answered, and its span tells so
            self._answers.check_all_fit(parsed, chosen)
        return self._answers.streams(parsed, chosen, timeout)

    async def agenerate(self, prompt: Prompt | str, **options: Unpack[DecodeArguments]) -> Generation:
        """`generate` without blocking the event loop; being cancelled stops it at the next token."""
        return await self.stream(prompt, **options).acomplete()

    def fuse(self, prompt: Prompt | str) -> FusedKV:
        """Make the KV of a prompt and the logits of its last position, without generating."""
        return self._answers.fuse(_prompt_of(prompt, self.config.text_separator))

    # Prompts ---------------------------------------------------------------------------------

    def tokenize(self, prompt: Prompt | str) -> TokenizedPrompt:
        """Token ids of a prompt and the positions of its segments, without regard to the context window."""
        return self._parts.pipeline.segments.tokenizer.tokenize(_prompt_of(prompt, self.config.text_separator))

    def fitted(self, prompt: Prompt | str, max_new_tokens: int | None = None) -> FittedPrompt:
        """The prompt as it is answered; ``overflow="drop_chunks"`` may have left out chunks that do not fit.

        Parameters
        ----------
        max_new_tokens : int, optional
            As `generate` is given it.

        Raises
        ------
        ContextLengthError
            If prompt and answer do not fit into the model's context window.
        """
        needed, room = answer_room(DecodeOptions(max_new_tokens=max_new_tokens), self.context_window)
        return self._parts.pipeline.split(_prompt_of(prompt, self.config.text_separator), needed, room)

    def grammar(self, schema: Mapping[str, Any]) -> Grammar:
        """Compile a JSON schema for answers: ``generate(prompt, grammar=engine.grammar(schema))``.

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

    # The store -----------------------------------------------------------------------------

    def warm(self, chunks: Iterable[str], *, prefix: str = "", progress: bool | None = None) -> WarmReport:
        """Compute and store the KV of chunks ahead of time; see `Chunks.warm`."""
        return self.chunks.warm(chunks, prefix=prefix, progress=progress)

    def forget(self, chunks: Iterable[str]) -> int:
        """Erase the stored KV of chunks and return the number of records; see `Chunks.forget`."""
        return self.chunks.forget(chunks)

    def flush(self) -> None:
        """Wait until all computed KV is stored, also on other machines, and all waiting answers are verified."""
        self.verifications.wait()
        self.turns.write_back.flush()
        self.store.flush()

    def close(self, *, seconds: float = CLOSE_SECONDS) -> None:
        """Store waiting KV as far as the time allows, then release everything. Closing twice is harmless.

        Parameters
        ----------
        seconds : float
            Most seconds for which KV that was missing is still computed and stored. What is left then is dropped, a
            warning says how much, and it is computed again when it is next missing. 0 drops all of it; `flush` waits
            for all of it. An interrupt (Ctrl-C) drops the rest, too.
        """
        write_back = self.turns.write_back
        if self._parts.base is not None or write_back.closed:
            return
        for part in (self._parts.prefetcher, self.verifications, self.prompts):
            part.close()
        write_back.close(seconds)
        with self.turns.scheduler.entered():  # a request on another thread may still be under way
            self.turns.segments.model.release()
            if self._parts.owns_store:
                self.store.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(seconds=closing_seconds(kind))

    # Engines over models ---------------------------------------------------------------------

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
        config, store, beside
            As for `BlendEngine`. A copied or pickled engine does not keep ``beside``.
        device : str, int or torch.device
            ``"auto"`` (a GPU if there is one), or a torch device. A number is that of a GPU, and -1 the CPU.
        dtype : str or torch.dtype
            ``"auto"`` (the checkpoint's, but float32 on a CPU that has no arithmetic of that type and
            memory enough), ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        **model_kwargs
            Passed on to ``from_pretrained``. A ``backend`` among them says what computes: ``"torch"``, ``"llama.cpp"``
            (GGUF files and starters), or by default llama.cpp for GGUF files on a CPU and PyTorch for all else.

        Raises
        ------
        ModelLoadError
            If either cannot be loaded.
        UnsupportedModelError
            If the model does not go on from a prompt, as its config says; weights are not fetched then.
        ConfigError
            If an argument cannot be used.
        """
        config = check_config(config)
        arguments = {"device": device, "dtype": dtype, **model_kwargs}
        loaded = load(model, **arguments)
        fingerprint = None if is_in_llama_cpp(loaded.model) else loaded.fingerprint()
        made = cls(loaded.model, loaded.tokenizer, config=config, store=store, fingerprint=fingerprint, beside=beside)
        again = partial(cls.from_pretrained, os.fspath(model), **arguments)
        parts = dataclasses.replace(made._parts, names=SpanNames(loaded.name))
        if parts.owns_store:
            locations = absolute_locations(store) if are_locations(store) else None
            parts = dataclasses.replace(parts, reopen=partial(again, store=locations))
        made._consist_of(parts)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        if self._parts.reopen is None:
            remedy = "make it by from_pretrained (or from_model_id), with a folder for its store, and it can be"
            raise ConfigError("engine", "made of objects that cannot be copied or pickled", remedy)
        return partial(self._parts.reopen, config=self.config), ()

    def with_config(self, **changes: Any) -> BlendEngine:
        """An engine over the same model and store with other options.

        It shares everything with this one, so requests of both still wait for one another, and it ends when this one is
        closed; closing it does nothing. Verifications are counted together; ``verify_share`` is that of whichever
        answered.

        Parameters
        ----------
        **changes
            Options of `BlendConfig`. Another ``selection`` begins without ``selection_options`` unless they are given
            with it: those of this engine are for its own rule.

        Raises
        ------
        ConfigError
            If an option is out of range or does not fit the rule or the model.
        """
        if changes.get("selection", self.config.selection) != self.config.selection:
            changes = {"selection_options": {}, **changes}
        return self._changed(pipeline=self._parts.pipeline.with_config(dataclasses.replace(self.config, **changes)))

    def of_tenant(self, salt: str, finder: Finder | None = None) -> BlendEngine:
        """A view of this engine for one tenant, which shares only the model, the store and the scheduler with others.

        The texts that it remembers are its own. It ends with this engine. It can be let go of, and made again when the
        tenant asks again: prompts of the tenant that lie in memory stay.

        Parameters
        ----------
        salt : str
            Of the tenant.
        finder : Finder, optional
            Makes chunks of text in prompts; by default that of this engine, if it has one. Text so found is stored for
            its tenant alone, and erased with each text of which it holds a part. The server finds text that repeats so
            (`cacheblend_rag.prompt.repeated.RepeatedTexts`).
        """
        pipeline = self._parts.pipeline.of_tenant(salt)
        if finder is not None:
            segments = dataclasses.replace(pipeline.segments, finder=finder)
            pipeline = dataclasses.replace(pipeline, segments=segments)
        return self._changed(pipeline=pipeline)

    def named(self, model: str, operation: Operation = "text_completion") -> BlendEngine:
        """The same engine under another name, which OpenTelemetry's spans of its answers show.

        Parameters
        ----------
        model : str
            Name of the model. By default it is the id or the folder that the model was loaded from.
        operation : str
            ``"chat"`` if prompts are conversations, else ``"text_completion"``.
        """
        return self._changed(names=SpanNames(model, operation))

    @property
    def fingerprint(self) -> str:
        """Identity of the model: its weights, active adapters and everything else that its KV depends on."""
        return self._parts.pipeline.segments.model.look()

    def _changed(self, **changes: Any) -> BlendEngine:
        """Another engine that shares everything else with this one."""
        if "pipeline" in changes:
            changes["turns"] = dataclasses.replace(self.turns, segments=changes["pipeline"].segments)
        other = BlendEngine.__new__(BlendEngine)
        other._consist_of(dataclasses.replace(self._parts, base=self, **changes))
        return other

    def _consist_of(self, parts: EngineParts) -> None:
        self._parts = parts
        self.tokenizer, self.verifications, pipeline = parts.tokenizer, parts.verifications, parts.pipeline
        self.config, self.store, self.prompts = pipeline.config, pipeline.store, pipeline.prompts
        self.adapter = cast(ModelAdapter, (segments := pipeline.segments).model.adapter)
        """The model, taken apart into the steps of the blended pass; a `PlainAdapter` if it is answered plainly."""
        self.model = self.adapter.model
        self.context_window = self.adapter.context_window
        """Most tokens of a prompt with its answer; None if the model's config does not say it."""
        self.condition = segments.condition
        """The condition that chunks are computed behind; ``"auto"`` of the options is decided."""
        self.products = segments.model.products
        """Gives a context within which the model multiplies as the engine runs it; see ``prepack_weights``."""
        self.turns = parts.turns
        """They let requests have the model in turn."""
        self.chunks = Chunks(pipeline, parts.turns, parts.prefetcher, parts.verifications)
        """The stored KV of chunks."""
        self._answers = Answering(parts.tokenizer, pipeline, parts.turns, parts.verifications, parts.names.traced)


def _prompt_of(prompt: Prompt | str, separator: str) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return dataclasses.replace(Prompt.parse(prompt, separator) if separator else Prompt(suffix=prompt), turns=())
    raise PromptError(f"prompt={prompt!r} is a {type(prompt).__name__}: give a Prompt or a text")


@dataclass(frozen=True)
class EngineParts:
    """Parts of an engine. Another engine over the same model and store shares most of them.

    Parameters
    ----------
    tokenizer : transformers tokenizer
    pipeline : Pipeline
    turns : Turns
    verifications : Verifications
    prefetcher : Prefetcher
    names : SpanNames
        Names of its answers in traces.
    owns_store : bool
        Whether the store is closed with the engine.
    reopen : callable, optional
        Makes the same engine again, of a config.
    base : BlendEngine, optional
        The engine that this one is another view of.
    """

    tokenizer: Any
    pipeline: Pipeline
    turns: Turns
    verifications: Verifications
    prefetcher: Prefetcher
    names: SpanNames
    owns_store: bool
    reopen: Callable[..., BlendEngine] | None = None
    base: BlendEngine | None = None


def _end_all() -> None:
    """Cancel current answers, store waiting KV, and refuse all further use of models.

    The interpreter ends after it: no thread of ours may be within PyTorch then, or the process is aborted.
    """
    with _interrupts_drop_what_waits():
        end_answers()
        queues, ends = queues_begun(), time.monotonic() + CLOSE_SECONDS
        for queue in queues:
            queue.stop()
        for queue in queues:
            queue.close(max(0.0, ends - time.monotonic()))
        for scheduler in all_schedulers():
            scheduler.hold_for_good()


@contextlib.contextmanager
def _interrupts_drop_what_waits() -> Iterator[None]:
    """Within this an interrupt drops the KV that waits to be stored. Another ends the process at once.

    The process ends as an interrupted one then, after all that is still to be closed.
    """
    interrupted = False

    def drop(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for queue in queues_begun():
            queue.drop_waiting()

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not on the main thread
            signal.signal(signal.SIGINT, drop)
    yield
    if interrupted:
        # An exception cannot leave a hook. But the interpreter notes an interrupt of code that it is given as text, and
        # ends by SIGINT once all hooks have run, as after an interrupted program.
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")
