"""From a prompt to its fused KV: split it, choose its route, go that way; and the jobs that store what it lacked."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.backends import ModelInUse, check_rule
from cacheblend_rag.engine.prompt_cache import Begun, PromptCache, Ticket
from cacheblend_rag.engine.ratio_policy import WORTH, RatioPolicy, controller_beside
from cacheblend_rag.engine.route import Blend, Fused, Prefill, Route
from cacheblend_rag.engine.segments import Kind, Segment, Segments
from cacheblend_rag.engine.variants import Variants
from cacheblend_rag.engine.write_back import Job
from cacheblend_rag.errors import GenerationError
from cacheblend_rag.fusor import FusionPlan
from cacheblend_rag.fusor.work import RowsDone, work_share
from cacheblend_rag.loading import ChunkKV, LayerReader, Placement, load_as_it_pays, load_plainly
from cacheblend_rag.loading.loader import ReadClock, RecordLost
from cacheblend_rag.loading.shared import SharedKV
from cacheblend_rag.models.kv import LayerKV, SegmentKV
from cacheblend_rag.prompt import FittedPrompt, Prompt, PromptTokenizer, Span, TokenizedPrompt, check_fits, fitted
from cacheblend_rag.report import Seconds
from cacheblend_rag.store.base import KVStore, StoredKV, compute_if_missing, discard

_log = logging.getLogger(__name__)
# Bytes of a layer below which handing it to another thread costs more than reading it.
_WORTH_A_THREAD = 2**19


class Pauses(NamedTuple):
    """Where others may use the model while a prompt is prefilled."""

    between: Callable[[float, int], object]
    """Called between two slices of a plain prefill, with the seconds of the last one and the tokens read so far."""
    each_layer: Callable[[], object]
    """Called at each layer."""


@dataclass(frozen=True)
class Pipeline:
    """From prompts to fused KV over one model and one store, under some options.

    Parameters
    ----------
    segments : Segments
    policy : RatioPolicy
    store : KVStore
    prompts : PromptCache
    variants : Variants
        All views of an engine share these two.
    """

    segments: Segments
    policy: RatioPolicy
    store: KVStore
    prompts: PromptCache
    variants: Variants

    @property
    def config(self) -> BlendConfig:
        """The options."""
        return self.segments.config

    def of_tenant(self, salt: str) -> Pipeline:
        """The same model and store for a tenant, with remembered texts of its own."""
        config = dataclasses.replace(self.config, salt=salt)
        tokenizer = self.segments.tokenizer.forgetful()
        own = dataclasses.replace(self, segments=dataclasses.replace(self.segments, tokenizer=tokenizer))
        return own.with_config(config)

    def with_config(self, config: BlendConfig) -> Pipeline:
        """The same model and store with other options; the model is not hashed again."""
        model = self.segments.model.with_config(config)
        tokenizer = self.segments.tokenizer.with_separator(config.separator)
        return open_pipeline(model, tokenizer, config, self.store, self)

    def with_found(self, prompt: Prompt) -> Prompt:
        """The prompt with the chunks that the engine's finder makes of its text."""
        finder = self.segments.finder
        return prompt if finder is None else finder.find(prompt, self.config.salt, self.segments.tokenizer)

    def split(self, prompt: Prompt, new_tokens: int = 0, room: int | None = None) -> FittedPrompt:
        """The prompt as it is answered, with the ids of its segments; see `fitted`."""
        drops, window = self.config.overflow == "drop_chunks", self.segments.model.adapter.context_window
        return fitted(self.segments.tokenizer, prompt, window, new_tokens, room, drops)

    def check_fits(self, prompt: Prompt, new_tokens: int) -> None:
        """Refuse a prompt that does not fit; see `check_fits`."""
        drops, window = self.config.overflow == "drop_chunks", self.segments.model.adapter.context_window
        check_fits(self.segments.tokenizer, prompt, window, new_tokens, drops)

    # Choose a route ------------------------------------------------------------------------

    def route(self, fit: FittedPrompt, verify: str = "off") -> Route:
        """Choose how the KV of a prompt is made, and open the records that are read for it.

        Parameters
        ----------
        fit : FittedPrompt
        verify : str
            How the answer is verified. With ``"held"`` the prompt is prefilled, whatever is stored of it.
        """
        started = time.perf_counter()
        return dataclasses.replace(self._choose(fit, verify), seconds=time.perf_counter() - started)

    def _choose(self, fit: FittedPrompt, verify: str) -> Route:
        split, few, model = fit.split, self.config.min_tokens, self.segments.model
        tokens = len(split.input_ids)
        ticket = Ticket(self.prompts, self.segments, self.policy, tokens)
        prefill = partial(Prefill, fit=fit, ticket=ticket)
        find_exact = partial(ticket.find, split, exact=True, aligned=verify != "off")
        if not model.adapter.reusable(tokens):
            return prefill(why=model.adapter.plain_reason)
        if has_few_chunks(split, few):
            return prefill(begun=find_exact())
        if verify == "held":
            return prefill(begun=find_exact(), why="verify='held' lets full prefill answer")
        begun = ticket.find(split)
        if begun is not None and begun.exact and has_few_chunks(begun.split, few):
            return prefill(begun=find_exact())
        blend = self.blend(fit, ticket, begun)
        if not few or not self.policy.rule.reads_store:
            return blend
        begun, plan = find_exact(), self.plan(blend)
        first = 0 if begun is None else begun.tokens
        reads_more = sum(map(len, (*plan.exact, *plan.reused))) > first
        if reads_more and self.policy.expected_work(blend.rule, blend.ratio, plan, model.blended.shape, first) <= WORTH:
            return blend
        why = "too little of it is stored to be worth reading"
        return prefill(begun=begun, why=why, instead_of=blend, opened=blend.opened)

    def blend(self, fit: FittedPrompt, ticket: Ticket, begun: Begun | None = None) -> Blend:
        """The blend of a prompt from all that is stored of it and worth reading.

        Its whole prefix is read from the store rather than a part of it from a kept prompt.
        """
        opened: list[tuple[str, StoredKV]] = []
        blend = self._opened(fit, ticket, None if begun and begun.tokens < len(fit.split.prefix) else begun, opened)
        if begun and not blend.prefix_hit:
            blend = self._opened(fit, ticket, begun, opened)
        return self._with_ratio(blend)

    def _opened(
        self, fit: FittedPrompt, ticket: Ticket, begun: Begun | None, opened: list[tuple[str, StoredKV]]
    ) -> Blend:
        """Open what is stored of the prefix and the chunks, or of the chunks behind a kept prompt."""
        segments, split = self.segments, fit.split if begun is None else begun.split
        prefix_ids = split.ids(split.prefix)
        regime = segments.model.adapter.regime(len(split.input_ids)) or 0
        has_prefix = len(prefix_ids) > len(segments.tokenizer.start_ids)
        prefix = segments.describe(Kind.PREFIX, (), prefix_ids, regime) if has_prefix else None
        records: dict[str, StoredKV] = {}
        if begun is not None:
            prefix, records = begun.segment, {begun.segment.key: begun.record}
        chunks = segments.of_prompt(fit, split)
        if self.policy.rule.reads_store:
            chunks = self.variants.instead_of(chunks, fit.split, segments)
            opened += records.items()
            records |= self._open([one for one in (prefix, *chunks) if one and one.key not in records], opened)
        blend = Blend(
            fit=fit,
            ticket=ticket,
            begun=begun,
            opened=opened,
            prefix=prefix,
            chunks=chunks,
            records=records,
            rule=self.policy.rule,
            ratio=self.policy.ratio,
        )
        return self._with_usual(blend, {one.key for one in chunks if one.key not in records})

    def _open(self, segments: Sequence[Segment], opened: list[tuple[str, StoredKV]]) -> dict[str, StoredKV]:
        """The records of segments, by key, in their order."""
        wanted = {one.key: one for one in segments if one.token_ids}
        stored = self.store.open_all([*wanted])
        found = {key: stored[key] for key, one in wanted.items() if key in stored and self._is_of(stored[key], one)}
        opened += found.items()
        return found

    def _is_of(self, record: StoredKV, segment: Segment) -> bool:
        """Whether a record is of a segment; one that is not is closed and erased."""
        # Contexts are no part of the key, so they are not compared; nor is what stood before a variant, by its ids.
        info = dataclasses.replace(record.info, behind=())
        variant = segment.kind is Kind.VARIANT
        info = dataclasses.replace(info, context_ids=()) if variant else dataclasses.replace(info, before=())
        if info == self.segments.info(segment):
            return True
        _log.warning("KV record %s is of another segment or model and counts as a miss", segment.key)
        record.close()
        discard(self.store, segment.key)
        return False

    def _with_usual(self, blend: Blend, lost: set[str]) -> Blend:
        """The same with the usual records of chunks whose variants are not there."""
        usual = [one.usual for one in blend.chunks if one.usual is not None and one.key in lost]
        if not usual:
            return blend
        self.variants.drop(lost)
        chunks = tuple(one.usual if one.usual is not None and one.key in lost else one for one in blend.chunks)
        return dataclasses.replace(blend, chunks=chunks, records={**blend.records, **self._open(usual, blend.opened)})

    def _with_ratio(self, blend: Blend) -> Blend:
        """Let the loading controller, where there is one, choose the ratio and what is worth reading."""
        if self.policy.controller is None:
            return blend
        tokens = len(blend.split.input_ids)
        keys = list(dict.fromkeys(segment.key for segment in blend.chunks if segment.key in blend.records))
        stores = self.store.traits.tiers or (self.store,)
        elsewhere = {one.traits.tier for one in stores if one.traits.remote}
        chunks = []
        for record in (blend.records[key] for key in keys):
            device = record.tier if record.tier in elsewhere else ""
            chunks.append(ChunkKV(record.info.tokens, self.store.record_bytes(record.info), device))
        rows = self.plan(blend)
        computed = tokens - sum(map(len, (*rows.exact, *rows.reused)))
        left_out = sum(map(len, rows.missing))
        rule, ratio, plan = self.policy.choose(
            chunks, tokens, computed, self.store.traits.tier, max(0, computed - left_out)
        )
        slow = [keys[number] for number in plan.recomputed_chunks] if plan else []
        return dataclasses.replace(blend.without(*slow), rule=rule, ratio=ratio, plan=plan)

    def plan(self, blend: Blend) -> FusionPlan:
        """Sort the rows of a blend into exact and reused ones, and those that are computed."""
        split, exact, reused = blend.split, list[range](), list[range]()
        unrotated, missing = list[Span](), list[range]()
        if blend.prefix_hit:
            exact.append(_range(split.prefix))
        for span, segment, hit in zip(split.chunks, blend.chunks, blend.hits, strict=True):
            if not hit:
                # A GPU's kernels have no mask that hides them.
                missing += [_range(span)] if self.segments.model.adapter.device.type == "cpu" else []
                continue
            unrotated.append(span)
            behind = blend.records[segment.key].info.context_ids
            in_place = not segment.averaged and split.input_ids[: span.start] == behind
            (exact if in_place else reused).append(_range(span))
        rotate = range(unrotated[0].start, unrotated[-1].stop) if unrotated else range(0)
        question = _range(split.suffix) if len(split.suffix) else None
        return FusionPlan(split.input_ids, exact, reused, rotate, question, missing)

    # Go that way ---------------------------------------------------------------------------

    def fuse(
        self,
        route: Route,
        cancelled: Callable[[], bool] = lambda: False,
        pauses: Pauses | None = None,
        shared: SharedKV | None = None,
    ) -> Fused:
        """Make the KV of the whole prompt, and the logits of its last position.

        A record that fails while it is read counts as never stored: the blended pass begins again.

        Parameters
        ----------
        route : Route
        cancelled : callable
            True once the answer is no longer wanted.
        pauses : Pauses, optional
        shared : SharedKV, optional
            Layers that other prompts of a batch read, too.
        """
        if not isinstance(route, Blend):
            return self._prefilled(route, pauses)
        model, blend, started, clock, lost = self.segments.model, route, time.perf_counter(), ReadClock(), 0
        while True:
            reader = self._reader(blend, clock, shared)
            ahead = reader.stored_layer_bytes >= _WORTH_A_THREAD
            layers = load_as_it_pays(reader) if ahead else load_plainly(reader)
            try:
                with contextlib.closing(layers), model.products():
                    arriving, each_layer = _arriving(layers, cancelled, clock), pauses and pauses.each_layer
                    fusion = model.fuse(model.blended, self.plan(blend), arriving, blend.rule, each_layer)
                break
            except RecordLost as error:
                _log.warning("%s; the prompt is blended again without it", error)
                if error.damaged:
                    discard(self.store, error.key)
                blend, lost = self._with_usual(blend.without(error.key), {error.key}), lost + 1
        took, tokens = time.perf_counter() - started, len(blend.split.input_ids)
        # Layers from memory say nothing of the disk.
        if not lost and not self.store.traits.tiers and shared is None:
            self.policy.note(blend.plan, clock.seconds)
        return Fused(
            route=blend,
            cache=fusion.cache,
            logits=fusion.logits,
            computed=fusion.done.computed,
            seconds=Seconds(load=clock.waited, fuse=took - clock.waited, read=clock.seconds),
            exact=blend.exact_tokens == tokens,
            fusion=fusion,
            resumed=0 if blend.begun is None else blend.begun.tokens,
            work=work_share(model.blended.shape, tokens, fusion.done),
            lost=lost,
            ready_at=time.perf_counter(),
            jobs=self._missing_jobs(blend, fusion.layers),
        )

    def _reader(self, blend: Blend, clock: ReadClock, shared: SharedKV | None) -> LayerReader:
        """Reader of the stored KV of a prompt; it may rotate keys to their positions on the way."""
        adapter, split, placements = self.segments.model.blended, blend.split, []
        located = [(split.prefix, blend.fit.prompt.prefix), *((chunk.span, chunk.text) for chunk in split.located)]
        for (span, text), segment in zip(located, (blend.prefix, *blend.chunks), strict=True):
            if segment is not None and segment.key in blend.records:
                key, record = segment.key, blend.records[segment.key]
                sharing = shared if shared is not None and shared.takes(key, text, record) else None
                placements.append(Placement(key, record, span.start, sharing))
        return LayerReader(
            placements=placements,
            layers=adapter.num_layers,
            kv_heads=adapter.kv_heads,
            tokens=len(split.input_ids),
            head_dim=adapter.head_dim,
            dtype=adapter.dtype,
            device=adapter.device,
            clock=clock,
            rotation=adapter.rotation(len(split.input_ids)),
        )

    def _prefilled(self, route: Route, pauses: Pauses | None) -> Fused:
        """By the model's own prefill, behind what is remembered of the prompt's beginning."""
        started, model, split = time.perf_counter(), self.segments.model, route.split
        adapter, tokens, how = model.adapter, len(split.input_ids), pauses or (None, None)
        with model.products():
            if adapter.plain_reason:
                resumed, result = route.ticket.prefill(split, *how)
            else:
                begun = None if route.begun is None else route.begun.new_cache()
                resumed = 0 if begun is None else begun.get_seq_length()
                result = model.blended.prefill(split.input_ids, how[0], how[1], begun)
        rows = (torch.arange(resumed, tokens, device=adapter.device),) * adapter.num_layers
        ready_at, work = time.perf_counter(), 1.0 - resumed / tokens
        if resumed and not adapter.plain_reason:
            work = work_share(model.blended.shape, tokens, RowsDone(rows))
        blend = route.instead_of if isinstance(route, Prefill) else None
        return Fused(
            route=route,
            cache=result.cache,
            logits=result.logits,
            computed=rows,
            seconds=Seconds(fuse=ready_at - started),
            exact=bool(adapter.plain_reason) or model.blended.aligned(resumed) == resumed,
            resumed=resumed,
            work=work,
            ready_at=ready_at,
            jobs={} if blend is None else self._missing_jobs(blend, model.blended.whole_layers(result.cache)),
        )

    # Keep ----------------------------------------------------------------------------------

    def keep_answered(self, fused: Fused, answer_ids: Sequence[int]) -> None:
        """Keep a prompt with its answer in memory."""
        route = fused.route
        if self.segments.model.adapter.plain_reason:
            route.ticket.keep_turn(route.split, answer_ids, fused.cache)
            return
        aligned, exact = self.segments.model.blended.aligned, None
        if not fused.exact:
            exact = route.exact_tokens if isinstance(route, Blend) else aligned(fused.resumed)
        route.ticket.keep(route.fit.split, answer_ids, fused.cache, exact)

    def _missing_jobs(self, blend: Blend, layers: Sequence[LayerKV]) -> dict[str, Job]:
        """Jobs that store what is missing of a blend: its prefix, from the KV of the prompt, and its chunks."""
        if self.config.write_back == "off" or not self.policy.rule.reads_store:
            return {}
        segments, jobs, prefix = self.segments, dict[str, Job](), blend.prefix
        if prefix is not None and not blend.prefix_hit and layers and segments.model.look() == prefix.model:
            # Nothing stands before the prefix, so the pass has just computed its exact KV.
            rows = slice(len(prefix.token_ids))  # copied where the prompt is: a store moves them
            copies = [(one.keys[0, :, rows].clone(), one.values[0, :, rows].clone()) for one in layers]
            kv = SegmentKV(tuple(keys for keys, _ in copies), tuple(values for _, values in copies), rotated=True)
            held = sum(tensor.nbytes for tensor in kv.keys + kv.values)
            jobs[prefix.key] = Job(
                lambda: self.store.put(prefix.key, segments.record(prefix, kv)), held, partial(segments.info, prefix)
            )
        # A record that was opened and is not read may still be there: it was left to be computed, or lost.
        there, opened = {*blend.records}, {key for key, _ in blend.opened}
        missing = {one.key: one for one in (chunk.usual or chunk for chunk in blend.chunks if chunk.key not in there)}
        there |= {key for key in missing if key in opened and self.store.contains(key)}
        return jobs | self._chunk_jobs(blend.split, [one for key, one in missing.items() if key not in there])

    def unread_jobs(self, route: Route) -> Mapping[str, Job]:
        """Jobs that store the chunks of a prompt that continued a kept prompt, so that no records were looked up.

        Other prompts have these chunks in another order, and nothing to go on from.
        """
        split, config = route.fit.split, self.segments.config
        unread = isinstance(route, Prefill) and route.instead_of is None and route.begun is not None
        if not unread or config.write_back == "off" or has_few_chunks(split, config.min_tokens):
            return {}
        chunks = self.segments.of_prompt(route.fit, split)
        return self._chunk_jobs(split, [one for one in chunks if not self.store.contains(one.key)])

    def _chunk_jobs(self, split: TokenizedPrompt, missing: Sequence[Segment]) -> dict[str, Job]:
        """Jobs that compute and store the chunks of a prompt, sorted by length."""
        if not missing:  # a prompt that hits waits for no contexts
            return {}
        segments, jobs, located = self.segments, dict[str, Job](), split.located
        contexts = segments.contexts([chunk.text for chunk in located])
        # Text that was found stays in records of its own kind, so that all of it can be erased.
        others = [chunk.text for chunk in located if not chunk.found]
        known = contexts if len(others) == len(located) else segments.contexts(others)
        together = partial(self.compute_and_store)  # one of its own, as chunks of two prompts never share a pass
        for segment in sorted((one for one in missing if one.token_ids), key=lambda one: len(one.own_ids)):
            beside = contexts if segment.kind is Kind.FOUND else known
            behind = dataclasses.replace(segment, contexts=beside if segment.averaged else None)
            one = partial(self.compute_and_store, [behind])
            jobs[segment.key] = Job(one, 0, partial(segments.info, behind), behind, together)
        return jobs

    def compute_and_store(self, segments: Sequence[Segment]) -> dict[str, bool | None]:
        """Store what is missing of segments as `Segments.compute` takes them; see `compute_if_missing`."""
        return compute_if_missing(self.store, {segment.key: segment for segment in segments}, self.segments.compute)

    def variant_jobs(self, route: Route, cache: Any) -> Mapping[str, Job]:
        """Jobs that store a prompt's chunks as computed after their real predecessors; see `Variants.jobs`.

        It is if an earlier prompt had the same prefix, or nothing stands before the first chunk. So nothing is kept
        behind a prefix that holds what was said in one conversation, unless that goes on from it.
        """
        split = route.fit.split
        blend = route.instead_of if isinstance(route, Prefill) else route
        if not isinstance(blend, Blend) or any(chunk.found for chunk in split.located):
            return {}
        if self.config.write_back == "off" or not self.policy.rule.reads_store:
            return {}
        whole = blend.begun is None or blend.begun.tokens >= len(split.prefix)
        if route.fit.prompt.preamble if blend.prefix is None else not (blend.prefix_hit and whole):
            return {}
        regime = self.segments.model.adapter.regime(len(split.input_ids)) or 0
        return self.variants.jobs(split, cache, self.segments, regime)


def _arriving(layers: Iterator[LayerKV], cancelled: Callable[[], bool], clock: ReadClock) -> Iterator[LayerKV]:
    """KV on its way from the store, layer by layer. It ends when nobody wants the answer any more."""
    while True:
        if cancelled():
            raise GenerationError("the answer was given up while its prompt was fused")
        asked = time.perf_counter()
        try:
            kv = next(layers, None)
        finally:
            clock.waited += time.perf_counter() - asked
        if kv is None:
            return
        yield kv


def has_few_chunks(split: TokenizedPrompt, least: int) -> bool:
    """Whether so little can be read from the store that the model's own prefill is better."""
    return not split.chunks or split.chunk_tokens < least


def open_pipeline(
    model: ModelInUse, tokenizer: PromptTokenizer, config: BlendConfig, store: KVStore, earlier: Pipeline | None = None
) -> Pipeline:
    """A pipeline by its options and what was calibrated; the machine's profile is kept beside the store.

    It shares with an earlier one all that views of an engine have in common.
    """
    controller = controller_beside(store) if earlier is None else earlier.policy.controller
    policy = RatioPolicy(config, model.adapter.num_layers, model.fingerprint, controller)
    check_rule(model.adapter, config.selection, policy.rule)
    condition = "context" if policy.config.condition == "auto" else policy.config.condition
    if earlier is None:
        segments = Segments(model, tokenizer, config, condition)
        return Pipeline(segments, policy, store, PromptCache(), Variants(store))
    segments = dataclasses.replace(
        earlier.segments, model=model, tokenizer=tokenizer, config=config, condition=condition
    )
    return dataclasses.replace(earlier, segments=segments, policy=policy)


def _range(span: Span) -> range:
    return range(span.start, span.stop)
