"""One answer: split, choose a route, fuse, decode; keep what is worth storing, and report how it was made."""

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
from cacheblend_rag.engine.decode import DecodedAnswer, DecodeOptions, Step, decode, default_room, generate
from cacheblend_rag.engine.logits import LogProbs
from cacheblend_rag.engine.pipeline import Pauses, Pipeline
from cacheblend_rag.engine.route import Blend, Fused, Prefill, Route
from cacheblend_rag.engine.segments import Kind
from cacheblend_rag.engine.streaming import Cancelled, NumberedStreams, TextStream, begun_ahead, interpreter_ends
from cacheblend_rag.engine.turns import Turns
from cacheblend_rag.engine.verification import CheckedAnswer, Verifications, check
from cacheblend_rag.engine.write_back import Job, in_passes, run_pass
from cacheblend_rag.errors import ContextLengthError, GenerationError, PromptError, StoreError
from cacheblend_rag.loading.shared import SharedKV
from cacheblend_rag.models.memory import is_out_of_memory
from cacheblend_rag.prompt import DocumentPlace, Prompt
from cacheblend_rag.prompt.thoughts import check_reasoning
from cacheblend_rag.report import BlendReport, DocumentUse, ExpectedTimes, FusedKV, Generation, Verification
from cacheblend_rag.store.base import KVStore

_log = logging.getLogger(__name__)
_NO_MEMORY = Verification("given up", reason="memory ran out")
_CHANGED = Verification("given up", reason="the model has changed since the answer")
# Characters by which a report names a document.
_BEGINS = 80


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
    observer : callable
        Gives a context for each answer, such as `SpanNames.traced`. The trace in it is told when the answer begins, and
        the answer once it is there.
    """

    tokenizer: Any
    pipeline: Pipeline
    turns: Turns
    verifications: Verifications
    observer: Callable[[Prompt, DecodeOptions, BlendConfig, Cancelled | None], AbstractContextManager[Any]]

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
        """Split, choose a route, fuse, decode, verify; keep.

        Parameters
        ----------
        prompt : Prompt
        options : DecodeOptions
        sink : Cancelled, optional
            Takes each piece of text, and tells whether its reader has gone.
        shared : SharedKV, optional
            Layers that other prompts of a batch read, too.
        """
        pipeline, model = self.pipeline, self.pipeline.segments.model
        cancelled = model.identity.glancing(sink.cancelled if sink else interpreter_ends)
        read = shared.read_by((prompt.prefix, *prompt.chunks)) if shared else contextlib.nullcontext()
        held = self.turns.beside_others(prompt, options.most_tokens)
        with read, self.observer(prompt, options, pipeline.config, sink) as trace, held as spent:
            trace.begins()
            if sink:
                sink.model_time = spent
            if cancelled():
                raise GenerationError("the answer was given up before its turn came")
            dropped, is_same = self.turns.write_back.begin(), model.watch()
            fit = pipeline.split(pipeline.with_found(prompt), *answer_room(options, model.adapter.context_window))
            with pipeline.route(fit, self._verifies(options)) as route:
                tokens, plain = len(fit.split.input_ids), model.adapter.plain_reason
                told = None if plain else Cancelled.reading(sink, tokens, route.reused_tokens)
                fused = pipeline.fuse(route, cancelled, self.turns.pauses(cancelled, told), shared)
                if told:
                    told(tokens)
            options = self._repeatable(options)
            draft = self._decode(fused, options, sink, cancelled)
            checked = self._verify(fused, draft, options, cancelled)
            self.verifications.note(checked.verification)
            jobs = {**fused.jobs, **pipeline.unread_jobs(fused.route)}
            exact = fused.exact or checked.cache is not fused.cache  # that of a check is
            fused = dataclasses.replace(fused, jobs=jobs, cache=checked.cache, exact=exact)
            answer = _generation(fused, draft, checked, pipeline.store)
            if (finder := pipeline.segments.finder) is not None:
                finder.hear(pipeline.config.salt, (answer.text, answer.thought))
            trace.answered(answer)
            later = [] if answer.report.thought_tokens else answer.token_ids  # a later turn begins without the thought
            if is_same():  # else its KV is of several adapters
                pipeline.keep_answered(fused, later)
                self._keep(dropped.left(fused.jobs))
                if answer.verification.done:
                    self._keep(dropped.left(pipeline.variant_jobs(fused.route, fused.cache)))
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
            pipeline, model = self.pipeline, self.pipeline.segments.model
            dropped, is_same = self.turns.write_back.begin(), model.watch()
            with pipeline.route(pipeline.split(pipeline.with_found(prompt))) as route:
                fused = pipeline.fuse(route)
            if fused.cache is None:
                raise PromptError(f"this model fuses no prompts: use generate or stream; {model.adapter.plain_reason}")
            if is_same():  # else its KV is of several adapters
                self._keep(dropped.left(fused.jobs))
        report, fusion = report_of(fused, self.pipeline.store), fused.fusion
        deviation, done = (None, None) if fusion is None else (fusion.deviation, fusion.done)
        return FusedKV(fused.cache, fused.logits, list(fused.input_ids), fused.computed, deviation, report, done)

    def _decode(
        self, fused: Fused, options: DecodeOptions, sink: Cancelled | None, cancelled: Callable[[], bool]
    ) -> DecodedAnswer:
        """The answer to a fused prompt, token by token."""
        model, put = self.pipeline.segments.model, sink.put if sink else None
        window = model.adapter.context_window
        how: dict[str, Any] = {"options": options, "on_text": put, "cancelled": cancelled, "window": window}
        if fused.cache is None:  # by transformers' own generation, prefill and all; nobody is let in beside it
            ids = torch.tensor([fused.input_ids], device=model.adapter.device)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            return generate(model.adapter.model, self.tokenizer, inputs=inputs, **how)
        with model.products(), self.turns.steps(fused) as step:
            how |= {"input_ids": fused.input_ids, "cache": fused.cache, "logits": fused.logits, "step": step}
            return decode(model.adapter.model, self.tokenizer, **how)

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
        self, fused: Fused, draft: DecodedAnswer, options: DecodeOptions, cancelled: Callable[[], bool]
    ) -> CheckedAnswer:
        """The answer that full prefill gives, if it is to be verified now."""
        mode, turns = self._verifies(options), self.turns
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
        how = {"step": step, "pauses": pauses, "cancelled": cancelled, "begun": begun}
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
        split, dropped, answered_by = route.fit.split, self.turns.write_back.begin(), model.fingerprint
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

        def verify(ends: Callable[[], bool]) -> Verification:
            turns, cancelled = self.turns, model.identity.glancing(ends)
            with turns.in_background():
                is_same = model.watch()
                if model.fingerprint != answered_by or model.adapter.model.training:
                    return _CHANGED
                pauses = turns.pauses_in_background(cancelled)
                found = self._check(route, draft, options, turns.step_in_background, pauses, cancelled)
                if found is None:
                    return _NO_MEMORY
                if not is_same() or model.adapter.model.training:
                    return _CHANGED
                self.verifications.note(found.verification)
                with self.verifications.storing:
                    if not cancelled():  # else one of its chunks was forgotten meanwhile
                        later = [] if found.decoded.thought_tokens else found.decoded.token_ids
                        route.ticket.keep(split, later, found.cache)
                        self._keep(dropped.left(self.pipeline.variant_jobs(route, found.cache)))
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
        for one_pass in in_passes(jobs.items()):
            run_pass(one_pass)


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


def _generation(fused: Fused, draft: DecodedAnswer, checked: CheckedAnswer, store: KVStore) -> Generation:
    """The answer with its report."""
    decoded, deviation = checked.decoded, None if fused.fusion is None else fused.fusion.deviation
    report = report_of(fused, store, draft.first_token_at - fused.ready_at, checked)
    return Generation(
        decoded.text, decoded.token_ids, report, decoded.thought, decoded.logprobs, fused.computed, deviation
    )


def report_of(
    fused: Fused, store: KVStore, first_token: float = 0.0, checked: CheckedAnswer | None = None
) -> BlendReport:
    """How a prompt was answered.

    Parameters
    ----------
    fused : Fused
        Its KV.
    store : KVStore
    first_token : float
        Seconds from the logits to the first token.
    checked : CheckedAnswer, optional
        Its answer, if it was answered.
    """
    route, whole, layers = fused.route, fused.route.fit.split, len(fused.computed)
    blend = route if isinstance(route, Blend) else None
    tiers, decoded = _tiers(fused), None if checked is None else checked.decoded
    plan, expected = None if blend is None else blend.plan, None
    if plan is not None:
        expected = ExpectedTimes(plan.load_seconds, plan.recompute_seconds, plan.prefill_seconds)
    # Those of a kept prompt come first.
    chunks = () if blend is None else enumerate(blend.chunks, len(whole.chunks) - len(blend.chunks))
    reads_whole_prefix = blend is not None and blend.begun is None and blend.prefix_hit
    recomputed = (0,) * layers if fused.fusion is None else fused.fusion.recomputed_tokens
    exact = fused.resumed if blend is None else min(fused.resumed, blend.exact_tokens)
    return BlendReport(
        input_ids=whole.input_ids,
        prefix_tokens=len(whole.prefix),
        chunk_tokens=whole.chunk_tokens,
        suffix_tokens=len(whole.suffix),
        hits=len(tiers) - tiers.count(""),
        misses=tiers.count(""),
        chunk_tiers=tiers,
        missed=_why_missed(store, blend, len(tiers)),
        variants=tuple(number for number, one in chunks if one.kind is Kind.VARIANT and tiers[number]),
        left_out=route.fit.left_out,
        prefix_hit=0 < len(whole.prefix) <= fused.resumed or reads_whole_prefix,
        reused_tokens=fused.reused_tokens,
        blended_tokens=fused.reused_tokens - recomputed[-1] - exact,
        resumed_tokens=fused.resumed,
        recomputed_tokens=recomputed,
        computed_tokens=tuple(map(len, fused.computed)),
        work=fused.work,
        plain=blend is None,
        plain_reason=route.why if isinstance(route, Prefill) else "",
        lost=fused.lost,
        recompute_ratio=0.0 if blend is None else blend.ratio,
        expected=expected,
        seconds=dataclasses.replace(
            fused.seconds, split=route.fit.seconds, look_up=route.seconds, first_token=first_token
        ),
        generated_tokens=0 if decoded is None else len(decoded.token_ids),
        thought_tokens=0 if decoded is None else decoded.thought_tokens,
        finish_reason="" if decoded is None else decoded.finish_reason,
        stopped_by="" if decoded is None else decoded.stopped_by,
        documents=_uses(route.fit.prompt.documents, tiers),
        found=tuple(bool(tier) for tier, chunk in zip(tiers, whole.located, strict=True) if chunk.found),
        tokens_to_store=0 if store.traits.read_only else sum(job.stored_tokens for job in fused.jobs.values()),
        verification=Verification() if checked is None else checked.verification,
    )


def why_exact(fused: Fused) -> str:
    """Why an answer is full prefill's without a check."""
    reused = fused.reused_tokens
    where = "of it" if isinstance(fused.route, Blend) else "of its beginning"
    exact = f"exact KV of {reused:,} tokens {where} was reused, and the rest of the prompt was prefilled"
    return exact if reused else "the prompt was prefilled in full"


def _tiers(fused: Fused) -> tuple[str, ...]:
    """Of each chunk of the whole prompt, what its KV was read from; empty where it was computed."""
    route, split = fused.route, fused.route.split
    resumed = ("memory",) * (len(route.fit.split.chunks) - len(split.chunks))
    if isinstance(route, Blend):
        return resumed + tuple(route.records[one.key].tier if one.key in route.records else "" for one in route.chunks)
    return resumed + tuple("memory" if span.stop <= fused.resumed else "" for span in split.chunks)


def _why_missed(store: KVStore, blend: Blend | None, count: int) -> tuple[str, ...]:
    """Of each chunk of a whole prompt, why its KV was not read, as far as that costs nothing."""
    if blend is None or any(one.traits.remote for one in (store, *store.traits.tiers)):
        return ()
    why, opened = [""] * count, {key for key, _ in blend.opened}
    for number, (segment, hit) in enumerate(zip(blend.chunks, blend.hits, strict=True), count - len(blend.chunks)):
        if not hit:
            with contextlib.suppress(StoreError):
                others = any(key != segment.key for key, _ in store.infos(segment.key.rpartition("-")[0] + "-"))
                why[number] = "stored otherwise" if others else "not stored"
            why[number] = "left to be computed" if segment.key in opened else why[number]
    return tuple(why)


def _uses(documents: Sequence[DocumentPlace], tiers: Sequence[str]) -> tuple[DocumentUse, ...]:
    """The use of each document, by the tier from which its chunk was read."""
    uses = []
    for one in documents:
        begins = " ".join(one.text[: 2 * _BEGINS].split())[:_BEGINS]
        if one.chunk is None:
            uses.append(DocumentUse(begins, "left out" if one.left_out else "not found", one.change))
        elif one.chunk >= len(tiers):  # left out of a prompt that was too long
            uses.append(DocumentUse(begins, "left out", one.change))
        else:
            uses.append(DocumentUse(begins, "hit" if tiers[one.chunk] else "miss", one.change))
    return tuple(uses)
