"""One answer: split, choose a route, fuse, decode; then keep what is worth storing."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.answer_report import report_of, why_exact
from cacheblend_rag.engine.decode import DecodedAnswer, DecodeOptions, Step, decode, default_room, generate
from cacheblend_rag.engine.logits import LogProbs
from cacheblend_rag.engine.pipeline import Pauses, Pipeline
from cacheblend_rag.engine.route import Fused, Route
from cacheblend_rag.engine.streaming import Cancelled, NumberedStreams, TextStream, begun_ahead, interpreter_ends
from cacheblend_rag.engine.turns import Turns
from cacheblend_rag.engine.verification import CheckedAnswer, check
from cacheblend_rag.engine.verifications import Verifications
from cacheblend_rag.engine.write_back import Job, run_all
from cacheblend_rag.errors import ContextLengthError, GenerationError, PromptError
from cacheblend_rag.loading.shared import SharedKV
from cacheblend_rag.models.memory import is_out_of_memory
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.thoughts import check_reasoning
from cacheblend_rag.report import FusedKV, Generation, Verification

_log = logging.getLogger(__name__)
_NO_MEMORY = Verification("given up", reason="memory ran out")
_CHANGED = Verification("given up", reason="the model has changed since the answer")


Observer = Callable[[Prompt, DecodeOptions, BlendConfig, Cancelled | None], AbstractContextManager[Any]]
"""A context for each answer, such as `SpanNames.traced`. What it gives is told when the answer begins and is there."""


@dataclass(frozen=True)
class Answering:
    """Answers prompts one by one, on the thread that asks.

    Parameters
    ----------
    tokenizer : transformers tokenizer
    pipeline : Pipeline
        Makes the KV of prompts.
    turns : Turns
        Lets requests have the model in turn.
    verifications : Verifications
        Has the answers that are verified later.
    observer : Observer
        Is told of each answer.
    """

    tokenizer: Any
    pipeline: Pipeline
    turns: Turns
    verifications: Verifications
    observer: Observer

    def to(
        self, prompt: Prompt, options: DecodeOptions, shared: SharedKV | None = None
    ) -> Callable[[Cancelled | None], Generation]:
        """Function that answers a prompt, handing text to the sink that it is given.

        Raises
        ------
        ConfigError
            If the model shall think and cannot.
        """
        check_reasoning(self.tokenizer, options.reasoning, most_thought=options.reasoning_tokens)
        return partial(self.answer, prompt, options, shared=shared)

    def streams(self, prompts: Sequence[Prompt], options: DecodeOptions, timeout: float | None) -> NumberedStreams:
        """The answers to several prompts, those with chunks in common together; see `BlendEngine.stream_batch`."""
        if len(prompts) == 1:
            yield 0, TextStream(self.to(prompts[0], options), timeout)
            return
        texts = [(prompt.prefix, *prompt.chunks) for prompt in prompts]
        with contextlib.closing(SharedKV(texts)) as shared:
            streams = (
                (number, TextStream(self.to(prompts[number], options, shared), timeout))
                for number in _by_common_chunks([prompt.chunks for prompt in prompts])
            )
            yield from begun_ahead(streams, self.pipeline.config.max_concurrent if self.turns.several else 1)

    def answer(
        self, prompt: Prompt, options: DecodeOptions, sink: Cancelled | None = None, shared: SharedKV | None = None
    ) -> Generation:
        """Split, choose a route, fuse, decode; keep.

        Parameters
        ----------
        prompt : Prompt
        options : DecodeOptions
        sink : Cancelled, optional
            Takes each piece of text, and tells whether its reader has gone.
        shared : SharedKV, optional
            Layers that other prompts of a batch read, too.
        """
        pipeline, model, cancelled = self.pipeline, self.pipeline.segments.model, self._cancelled_by(sink)
        read = shared.read_by((prompt.prefix, *prompt.chunks)) if shared else contextlib.nullcontext()
        held = self.turns.beside_others(prompt, options.most_tokens)
        with read, self.observer(prompt, options, pipeline.config, sink) as trace, held as spent:
            trace.begins()
            if sink:
                sink.model_time = spent
            if cancelled():
                raise GenerationError("the answer was given up before its turn came")
            dropped, changes = self.turns.write_back.begin(), model.identity.changes
            fit = pipeline.split(pipeline.with_found(prompt), *answer_room(options, model.adapter.context_window))
            with pipeline.route(fit, self._verifies(options)) as route:
                tokens, told = len(fit.split.input_ids), None
                if sink and not model.adapter.plain_reason:
                    told = sink.reading(tokens, route.reused_tokens)
                fused = pipeline.fuse(route, cancelled, self.turns.pauses(cancelled, told), shared)
                if told:
                    told(tokens)
            answer, fused = self._decode(fused, options, sink)
            if (finder := pipeline.segments.finder) is not None:
                finder.hear(pipeline.config.salt, (answer.text, answer.thought))
            trace.answered(answer)
            later = _later_ids(answer.token_ids, answer.report.thought_tokens)
            model.look()
            if model.identity.changes == changes:  # else its KV is of several adapters
                pipeline.keep_answered(fused, later)
                self._keep(dropped.left(fused.jobs))
                if answer.verification.done:
                    self._keep(dropped.left(pipeline.keeping.variant_jobs(fused.route, fused.cache)))
        return answer

    def check_all_fit(self, prompts: Sequence[Prompt], options: DecodeOptions) -> None:
        """Refuse several prompts if one of them does not fit, before any is answered.

        Raises
        ------
        ContextLengthError
            It names the first that does not fit.
        """
        needed = options.requested_tokens or 1
        for number, prompt in enumerate(prompts):
            try:
                self.pipeline.check_fits(prompt, needed)
            except ContextLengthError as error:
                which = f"prompt {number + 1} of {len(prompts)}"
                raise ContextLengthError(error.tokens, needed, error.window, error.remedy, which) from None
            except PromptError:  # an error of its own, which shows when its turn comes
                continue

    def fuse(self, prompt: Prompt) -> FusedKV:
        """The KV of a prompt and the logits of its last position, without an answer."""
        with self.turns.held():
            pipeline, identity = self.pipeline, self.pipeline.segments.model.identity
            dropped, changes = self.turns.write_back.begin(), identity.changes
            with pipeline.route(pipeline.split(pipeline.with_found(prompt))) as route:
                fused = pipeline.fuse(route)
            if fused.cache is None:
                reason = pipeline.segments.model.adapter.plain_reason
                raise PromptError(f"this model fuses no prompt: use generate or stream; {reason}")
            pipeline.segments.model.look()
            if identity.changes == changes:  # else its KV is of several adapters
                self._keep(dropped.left(fused.jobs))
        report, fusion = report_of(self.pipeline, fused), fused.fusion
        deviation, done = (None, None) if fusion is None else (fusion.deviation, fusion.done)
        return FusedKV(fused.cache, fused.logits, list(fused.input_ids), fused.computed, deviation, report, done)

    def _decode(self, fused: Fused, options: DecodeOptions, sink: Cancelled | None) -> tuple[Generation, Fused]:
        """The answer to a fused prompt, verified if it is to be, and the same prompt with the KV behind it."""
        options = self._repeatable(options)
        draft = self._draft(fused, options, sink)
        checked = self._verify(fused, draft, options, sink)
        decoded, deviation = checked.decoded, None if fused.fusion is None else fused.fusion.deviation
        self.verifications.note(checked.verification)
        jobs = {**fused.jobs, **self.pipeline.keeping.unread_jobs(fused.route)}
        exact = fused.exact or checked.cache is not fused.cache  # that of a check is
        kept = dataclasses.replace(fused, jobs=jobs, cache=checked.cache, exact=exact)
        report = report_of(self.pipeline, kept, draft.first_token_at - fused.ready_at, checked)
        answer = Generation(
            decoded.text, decoded.token_ids, report, decoded.thought, decoded.logprobs, fused.computed, deviation
        )
        return answer, kept

    def _draft(self, fused: Fused, options: DecodeOptions, sink: Cancelled | None) -> DecodedAnswer:
        """The answer to a fused prompt, token by token."""
        model, put = self.pipeline.segments.model, sink.put if sink else None
        window, cancelled = model.adapter.context_window, self._cancelled_by(sink)
        how: dict[str, Any] = {"options": options, "on_text": put, "cancelled": cancelled, "window": window}
        if fused.cache is None:  # by transformers' own generation, prefill and all; nobody is let in beside it
            ids = torch.tensor([fused.input_ids], device=model.adapter.device)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            return generate(model.adapter.model, self.tokenizer, inputs=inputs, **how)
        with model.products(), self.turns.steps(fused) as step:
            how |= {"input_ids": fused.input_ids, "cache": fused.cache, "logits": fused.logits, "step": step}
            return decode(model.adapter.model, self.tokenizer, **how)

    def _cancelled_by(self, sink: Cancelled | None) -> Callable[[], bool]:
        return self.pipeline.segments.model.identity.glancing(sink.cancelled if sink else interpreter_ends)

    def _verifies(self, options: DecodeOptions) -> str:
        return options.verify or self.pipeline.config.verify

    def _repeatable(self, options: DecodeOptions) -> DecodeOptions:
        """The options, with a seed where an answer that is drawn will be drawn again."""
        model = self.pipeline.segments.model.adapter.model
        if self._verifies(options) not in ("always", "idle") or options.seed is not None:
            return options
        if not options.samples(model, self.tokenizer):
            return options
        return options.model_copy(update={"seed": int(torch.randint(2**31, ()))})

    def _verify(
        self, fused: Fused, draft: DecodedAnswer, options: DecodeOptions, sink: Cancelled | None
    ) -> CheckedAnswer:
        """The answer that full prefill gives, if it is to be verified now."""
        mode, turns, cancelled = self._verifies(options), self.turns, self._cancelled_by(sink)
        if mode == "off":
            found = Verification()
        elif cancelled():
            found = Verification("given up", reason="the answer was cut short")
        elif fused.exact:
            found = Verification("verified", len(draft.token_ids), len(draft.text), reason=why_exact(fused))
        elif mode == "idle":
            found = self._verify_later(fused, draft, options)
        else:
            checked = self._check(fused.route, draft, options, turns.step, turns.pauses(cancelled), cancelled)
            if checked is not None:
                return checked
            found = _NO_MEMORY
        return CheckedAnswer(draft, dataclasses.replace(found, exact=fused.exact), fused.cache)

    def _check(
        self,
        route: Route,
        draft: DecodedAnswer,
        options: DecodeOptions,
        step: Step,
        pauses: Pauses | None,
        cancelled: Callable[[], bool],
    ) -> CheckedAnswer | None:
        """The answer that full prefill gives; None if memory ran out."""
        model, ids = self.pipeline.segments.model, route.split.input_ids
        begun = route.ticket.exact_cache(ids)
        how = {"step": step, "pauses": pauses, "cancelled": model.identity.glancing(cancelled), "begun": begun}
        try:
            with model.products():
                return check(model.blended, self.tokenizer, ids, draft, options, products=model.products, **how)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            _log.warning("an answer could not be verified: %s", error)
            return None

    def _verify_later(self, fused: Fused, draft: DecodedAnswer, options: DecodeOptions) -> Verification:
        """Let an answer be verified when nothing else waits, if it is among the share that is."""
        if not self.verifications.chosen(self.pipeline.config):
            return Verification(reason="verify_share leaves it out")
        model, route = self.pipeline.segments.model, fused.route
        split, dropped = route.fit.split, self.turns.write_back.begin()
        fingerprint = model.fingerprint
        # Log-probabilities are those of the answer that was given; a program may read what noted them meanwhile.
        others = [one for one in options.logits_processor if not isinstance(one, LogProbs)]
        config = copy.deepcopy(options.generation_config or model.adapter.model.generation_config)
        kept = {
            "logits_processor": others,
            "generation_config": config,
            "do_sample": options.samples(model.adapter.model, self.tokenizer),
            "logprobs": None,
            "top_logprobs": None,
        }
        options = options.model_copy(update=kept)

        def has_changed() -> bool:
            return model.look() != fingerprint or model.adapter.model.training

        def verify(cancelled: Callable[[], bool]) -> Verification:
            turns = self.turns
            with turns.in_background():
                if has_changed():
                    return _CHANGED
                pauses, changes = turns.pauses_in_background(cancelled), model.identity.changes
                found = self._check(route, draft, options, turns.step_in_background, pauses, cancelled)
                if found is None:
                    return _NO_MEMORY
                if has_changed() or model.identity.changes != changes:
                    return _CHANGED
                self.verifications.note(found.verification)
                with self.verifications.storing:
                    if not cancelled():  # else one of its chunks was forgotten meanwhile
                        later = _later_ids(found.decoded.token_ids, found.decoded.thought_tokens)
                        route.ticket.keep(split, later, found.cache)
                        self._keep(dropped.left(self.pipeline.keeping.variant_jobs(route, found.cache)))
            return found.verification

        return self.verifications.submit(verify, self.pipeline.config.salt, [chunk.text for chunk in split.located])

    def _keep(self, jobs: Mapping[str, Job]) -> None:
        """Store what was missing, now or when nothing else waits; nothing in a store that cannot be written."""
        if self.pipeline.store.traits.read_only:
            return
        if self.pipeline.config.write_back == "background":
            for key, job in jobs.items():
                self.turns.write_back.submit(key, job)
            return
        run_all(jobs)


def _later_ids(token_ids: list[int], thought_tokens: int) -> list[int]:
    """Ids of an answer as a later turn begins with them: none of one behind a thought."""
    return [] if thought_tokens else token_ids


def answer_room(options: DecodeOptions, window: int | None) -> tuple[int, int]:
    """Tokens of an answer that must fit, and those that room is made for where chunks are left out."""
    requested = options.requested_tokens
    return requested or 1, requested or default_room(window)


def _by_common_chunks(prompts: Sequence[Sequence[str]]) -> list[int]:
    """An order of prompts in which those with chunks in common are neighbours.

    Parameters
    ----------
    prompts : sequence of sequence of str
        The chunks of each prompt.

    Returns
    -------
    list of int
        Their numbers: always the prompt next that shares the most chunks with the one before, of
        several the first.
    """
    chunks = [frozenset(prompt) for prompt in prompts]
    waiting, order = dict.fromkeys(range(len(prompts))), list[int]()
    last: frozenset[str] = frozenset()
    while waiting:
        number = max(waiting, key=lambda one: (len(chunks[one] & last), -one))
        del waiting[number]
        order.append(number)
        last = chunks[number]
    return order
