"""Split, look up, load, fuse: from a prompt to its fused KV."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.model_in_use import ModelInUse
from cacheblend_rag.engine.prompt_cache import KEPT_KEY, PromptCache, RecentPrompt, RecentPrompts, Ticket, blended_by
from cacheblend_rag.engine.ratio_policy import WORTH, RatioChoice, RatioPolicy, controller_beside
from cacheblend_rag.engine.segments import FOUND, Segment, Segments
from cacheblend_rag.engine.variants import Variants
from cacheblend_rag.engine.write_back import Job
from cacheblend_rag.errors import GenerationError
from cacheblend_rag.fusor import FusionPlan, fuse
from cacheblend_rag.fusor.work import RowsDone, work_share
from cacheblend_rag.loading import ChunkKV, LayerReader, Placement, load_as_it_pays, load_plainly
from cacheblend_rag.loading.loader import ReadClock, RecordLost
from cacheblend_rag.loading.shared import SharedKV
from cacheblend_rag.models.kv import LayerKV, SegmentKV
from cacheblend_rag.prompt import FittedPrompt, Prompt, PromptTokenizer, Span, TokenizedPrompt, check_fits, fitted
from cacheblend_rag.report import Seconds
from cacheblend_rag.store.base import KVStore, RecordInfo, StoredKV, discard
from cacheblend_rag.store.single_flight import compute_if_missing

_log = logging.getLogger(__name__)
# Bytes of a layer below which handing it to another thread costs more than reading it.
_WORTH_A_THREAD = 2**19


@dataclass(frozen=True)
class Lookup:
    """A prompt, and the records that are stored of it. Used as a context manager, it closes them.

    Parameters
    ----------
    fit : FittedPrompt
        The prompt as it is answered.
    split : TokenizedPrompt
        Its ids; what is kept from an earlier turn is its prefix.
    plain : bool
        Whether the prompt is better prefilled in full. Then nothing was looked for.
    prefix : Segment or None
    chunks : tuple of Segment
        One for each chunk of ``split``.
    records : mapping of str to StoredKV
        By key, those that are stored and worth reading.
    kept : RecentPrompt or None
        The kept prompt that this one goes on from.
    ticket : Ticket or None
        Lets it be kept with its answer; None if it is not to be.
    opened : list of (str, StoredKV)
        All records that were opened on the way, with their keys.
    seconds : float
        Seconds of looking up.
    why : str
        Why the prompt is prefilled in full, where that is not for its length.
    unread : Lookup or None
        The same prompt as it could have been blended, where that would have taken longer. What it lacks is stored.
    """

    fit: FittedPrompt
    split: TokenizedPrompt
    plain: bool = False
    prefix: Segment | None = None
    chunks: tuple[Segment, ...] = ()
    records: Mapping[str, StoredKV] = field(default_factory=dict)
    kept: RecentPrompt | None = None
    ticket: Ticket | None = None
    opened: list[tuple[str, StoredKV]] = field(default_factory=list)
    seconds: float = 0.0
    why: str = ""
    unread: Lookup | None = None

    def __enter__(self) -> Lookup:
        return self

    def __exit__(self, *error: object) -> None:
        for _, record in self.opened:
            record.close()

    @property
    def prefix_hit(self) -> bool:
        """Whether the prefix is read from the store."""
        return self.prefix is not None and self.prefix.key in self.records

    @property
    def hits(self) -> tuple[bool, ...]:
        """Of each chunk, whether it is read from the store."""
        return tuple(segment.key in self.records for segment in self.chunks)

    @property
    def found(self) -> bool:
        """Whether a chunk is one because its text repeats."""
        return any(chunk.found for chunk in self.split.located)

    @property
    def exact_tokens(self) -> int:
        """First tokens whose KV is that of a full prefill: what comes from the store may be in eight bits."""
        read = [span.start for span, hit in zip(self.split.chunks, self.hits, strict=False) if hit]
        if self.kept is not None:
            read += [] if self.kept.exact else [self.kept.exact_tokens]
        elif self.prefix_hit:
            read.append(0)
        return min(read, default=len(self.split.input_ids))

    def without(self, key: str) -> Lookup:
        """The same, as if a record had never been stored."""
        return dataclasses.replace(self, records={k: r for k, r in self.records.items() if k != key})


@dataclass(eq=False)
class LoadingKV(Iterator[LayerKV]):
    """The KV of a prompt on its way from the store, layer by layer.

    It ends when nobody wants the answer any more.

    Parameters
    ----------
    lookup : Lookup
        The records that are read; the controller may have left some to be recomputed.
    choice : RatioChoice
        The rule and its recompute ratio.
    layers : iterator of LayerKV
        As the loader gives them.
    clock : ReadClock
        Counts the time of reading.
    cancelled : callable
        True once nobody wants the answer.
    shared : SharedKV or None
        Layers that other prompts of a batch read, too.
    started : float
        When loading began, by ``time.perf_counter``.
    waited : float
        Seconds for which the pass waited.
    """

    lookup: Lookup
    choice: RatioChoice
    layers: Iterator[LayerKV]
    clock: ReadClock
    cancelled: Callable[[], bool]
    shared: SharedKV | None
    started: float
    waited: float = 0.0

    def __next__(self) -> LayerKV:
        if self.cancelled():
            raise GenerationError("the answer was given up while its prompt was fused")
        started = time.perf_counter()
        try:
            return next(self.layers)
        finally:
            self.waited += time.perf_counter() - started

    def close(self) -> None:
        """End the loader, whatever it still has in hand."""
        self.layers.close()  # type: ignore[attr-defined]


class Pauses(NamedTuple):
    """Where others may use the model while a prompt is prefilled."""

    between: Callable[[float], object]
    """Called between two slices of a plain prefill, with the seconds that the last one took."""
    each_layer: Callable[[], object]
    """Called at each layer."""


@dataclass(frozen=True)
class Blend:
    """A prompt's KV, ready for decoding, and how it was made.

    Parameters
    ----------
    lookup : Lookup
        With the records that were read in the end.
    cache : transformers Cache or None
        KV of all positions; None if the model's own generation has yet to make it.
    logits : Tensor, [vocab]
        Logits of the last position.
    computed : tuple of Tensor, each [rows] long
        Positions whose KV was computed, layer by layer.
    seconds : Seconds
        ``load``, ``fuse`` and ``read``.
    choice : RatioChoice or None
        The rule and its ratio; None after a plain prefill.
    recomputed_tokens : tuple of int
        Reused chunk tokens recomputed on each layer.
    deviation : Tensor or None, [tokens] float32
        KV deviation at the first check layer; NaN where it was not measured.
    done : RowsDone or None
        All rows the blended pass worked on.
    work : float
        Work of these rows, as a share of a full prefill's.
    lost : int
        Records that failed on the way.
    exact : bool
        Whether the KV is that of a full prefill; see `Lookup.exact_tokens`.
    resumed : int
        Tokens at the beginning that were not computed, since states behind them were kept.
    plain_reason : str
        Why no prompt of this kind is blended; empty if they are.
    ready_at : float
        When it was ready, by ``time.perf_counter``.
    jobs : mapping of str to Job
        By key of the record, what computes and stores it.
    """

    lookup: Lookup
    cache: Any
    logits: torch.Tensor
    computed: tuple[torch.Tensor, ...]
    seconds: Seconds
    choice: RatioChoice | None = None
    recomputed_tokens: tuple[int, ...] = ()
    deviation: torch.Tensor | None = None
    done: RowsDone | None = None
    work: float = 1.0
    lost: int = 0
    exact: bool = False
    resumed: int = 0
    plain_reason: str = ""
    ready_at: float = 0.0
    jobs: Mapping[str, Job] = field(default_factory=dict)

    @property
    def input_ids(self) -> tuple[int, ...]:
        """Ids the model was fed."""
        return self.lookup.split.input_ids


@dataclass(frozen=True)
class Pipeline:
    """The first four verbs over one model and one store, under some options.

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

    def with_config(self, config: BlendConfig) -> Pipeline:
        """The same model and store with other options; the model is not hashed again."""
        return self._again(config)

    def of_tenant(self, salt: str) -> Pipeline:
        """The same model and store for a tenant, with remembered texts of its own."""
        config = dataclasses.replace(self.config, salt=salt)
        tokenizer = self.segments.tokenizer.forgetful()
        own = dataclasses.replace(self, segments=dataclasses.replace(self.segments, tokenizer=tokenizer))
        return own._again(config)

    def _again(self, config: BlendConfig) -> Pipeline:
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

    # Look up -------------------------------------------------------------------------------

    def look_up(self, fit: FittedPrompt, plain: bool = False) -> Lookup:
        """Open what is stored of a prompt; nothing of one that is better prefilled in full, or shall be (``plain``)."""
        started, split, recent = time.perf_counter(), fit.split, self.recent_prompts
        ticket = recent.begin(len(split.input_ids))
        if not self.segments.model.adapter.reusable(len(split.input_ids)):
            return Lookup(fit, split, plain=True, ticket=ticket)
        few = self.config.min_tokens
        short = has_few_chunks(split, few)
        why = "verify='held' lets full prefill answer" if plain and not short else ""
        plain = plain or short
        begun = recent.find_exact(ticket, split) if plain else recent.find(ticket, split, exact=False)
        if plain or (begun is not None and begun.exact and has_few_chunks(begun.split, few)):
            lookup = _plainly(fit, begun)
        else:
            part_of_prefix = begun is not None and begun.tokens < len(split.prefix)
            lookup = self._opened(fit, None if part_of_prefix else begun, [])
            if part_of_prefix and not lookup.prefix_hit:
                lookup = self._opened(fit, begun, lookup.opened)
        return dataclasses.replace(lookup, ticket=ticket, why=why, seconds=time.perf_counter() - started)

    @property
    def recent_prompts(self) -> RecentPrompts:
        """The prompt cache under these options."""
        segments = self.segments

        def like(tokens: int) -> RecordInfo:
            regime = segments.model.adapter.regime(tokens) or 0
            return dataclasses.replace(segments.info(segments.describe("kept", (), (), regime)), rotated=True)

        config = self.config if self.policy.rule.reads_store else dataclasses.replace(self.config, prompt_cache=0)
        rule = blended_by(self.policy.config, segments.condition)
        return RecentPrompts(self.prompts, segments.model.adapter, segments.model.fingerprint, config, like, rule)

    def _opened(self, fit: FittedPrompt, kept: RecentPrompt | None, opened: list[tuple[str, StoredKV]]) -> Lookup:
        """Open what is stored of the prefix and the chunks, or of what stands behind a kept prompt."""
        segments, split = self.segments, fit.split if kept is None else kept.split
        prefix_ids = split.ids(split.prefix)
        regime = segments.model.adapter.regime(len(split.input_ids)) or 0
        has_prefix = len(prefix_ids) > len(segments.tokenizer.start_ids)
        prefix = segments.describe("prefix", (), prefix_ids, regime) if has_prefix else None
        records: dict[str, StoredKV] = {}
        if kept is not None:
            prefix = Segment("kept", (), prefix_ids, KEPT_KEY, regime)
            records[KEPT_KEY] = kept.record
        chunks = chunks_of(segments, fit, split)
        if not self.policy.rule.reads_store:
            return Lookup(fit, split, chunks=chunks)
        chunks = self.variants.instead_of(chunks, fit.split, segments)
        opened += records.items()
        records |= _open_all(self, [one for one in (prefix, *chunks) if one and one.key not in records], opened)
        lookup = Lookup(fit, split, False, prefix, chunks, records, kept, opened=opened)
        return _with_usual(self, lookup, {one.key for one in chunks if one.key not in records})

    def is_of(self, record: StoredKV, segment: Segment) -> bool:
        """Whether a record is of a segment; one that is not is closed and erased."""
        # Contexts are no part of the key, so they are not compared; nor is what stood before a variant, by its ids.
        before = () if segment.kind == "variant" else record.info.context_ids
        if dataclasses.replace(record.info, behind=(), context_ids=before) == self.segments.info(segment):
            return True
        _log.warning("KV record %s is of another segment or model and counts as a miss", segment.key)
        record.close()
        discard(self.store, segment.key)
        return False

    # Load ----------------------------------------------------------------------------------

    def load(self, lookup: Lookup, cancelled: Callable[[], bool], shared: SharedKV | None = None) -> LoadingKV | Lookup:
        """Choose the recompute ratio and begin to read what is worth it; the prompt itself if it is to be prefilled."""
        if lookup.plain:
            return lookup
        started = time.perf_counter()
        choice, chosen = self._choose(lookup)
        sooner = _sooner_prefilled(self, lookup, chosen, choice)
        return sooner or self._loading(chosen, choice, ReadClock(), cancelled, shared, started)

    def _choose(self, lookup: Lookup) -> tuple[RatioChoice, Lookup]:
        """Let the loading controller, where there is one, choose the ratio and what is worth reading."""
        tokens = len(lookup.split.input_ids)
        if self.policy.controller is None:
            return self.policy.choose((), tokens, 0, ""), lookup
        keys = list(dict.fromkeys(segment.key for segment in lookup.chunks if segment.key in lookup.records))
        stores = self.store.traits.tiers or (self.store,)
        elsewhere = {one.traits.tier for one in stores if one.traits.remote}
        chunks = []
        for record in (lookup.records[key] for key in keys):
            device = record.tier if record.tier in elsewhere else ""
            chunks.append(ChunkKV(record.info.tokens, self.store.record_bytes(record.info), device))
        reused = sum(record.info.tokens for record in lookup.records.values())
        computed, left_out = max(0, tokens - reused), sum(map(len, _plan(self, lookup).missing))
        choice = self.policy.choose(chunks, tokens, computed, self.store.traits.tier, max(0, computed - left_out))
        for number in choice.plan.recomputed_chunks if choice.plan else ():
            lookup = lookup.without(keys[number])
        return choice, lookup

    def _loading(
        self,
        lookup: Lookup,
        choice: RatioChoice,
        clock: ReadClock,
        cancelled: Callable[[], bool],
        shared: SharedKV | None,
        started: float,
    ) -> LoadingKV:
        reader = self.reader_of(lookup, clock, shared)
        ahead = reader.stored_layer_bytes >= _WORTH_A_THREAD
        layers = load_as_it_pays(reader) if ahead else load_plainly(reader)
        return LoadingKV(lookup, choice, layers, clock, cancelled, shared, started)

    def reader_of(self, lookup: Lookup, clock: ReadClock, shared: SharedKV | None = None) -> LayerReader:
        """Reader of the stored KV of a prompt; it may rotate keys to their positions on the way."""
        adapter, split, placements = self.segments.model.blended, lookup.split, []
        located = [(split.prefix, lookup.fit.prompt.prefix), *((chunk.span, chunk.text) for chunk in split.located)]
        for (span, text), segment in zip(located, (lookup.prefix, *lookup.chunks), strict=True):
            if segment is not None and segment.key in lookup.records:
                key, record = segment.key, lookup.records[segment.key]
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

    # Fuse ----------------------------------------------------------------------------------

    def fuse(self, loading: LoadingKV | Lookup, pauses: Pauses | None = None) -> Blend:
        """The KV of the whole prompt, as `load` left it, and the logits of its last position.

        A record that fails on the way counts as never stored: the pass begins again without it.
        """
        if isinstance(loading, Lookup):
            return self._prefilled(loading, pauses)
        adapter, each_layer, lost = self.segments.model.blended, pauses.each_layer if pauses else None, 0
        while True:
            try:
                with contextlib.closing(loading), self.segments.model.products():
                    fusion = fuse(adapter, _plan(self, loading.lookup), loading, loading.choice.rule, each_layer)
                break
            except RecordLost as error:
                _log.warning("%s; the prompt is blended again without it", error)
                if error.damaged:
                    discard(self.store, error.key)
                lost += 1
                left = _with_usual(self, loading.lookup.without(error.key), {error.key})
                loading = self._loading(
                    left, loading.choice, loading.clock, loading.cancelled, loading.shared, loading.started
                )
        took = time.perf_counter() - loading.started
        seconds = Seconds(load=loading.waited, fuse=took - loading.waited, read=loading.clock.seconds)
        # Layers from memory say nothing of the disk.
        if not lost and not self.store.traits.tiers and loading.shared is None:
            self.policy.note(loading.choice, seconds.read)
        return Blend(
            lookup=loading.lookup,
            cache=adapter.new_cache(fusion.layers),
            logits=fusion.logits,
            computed=fusion.computed,
            seconds=seconds,
            choice=loading.choice,
            recomputed_tokens=fusion.recomputed_tokens,
            deviation=fusion.deviation,
            done=fusion.done,
            work=work_share(adapter.shape, len(loading.lookup.split.input_ids), fusion.done),
            lost=lost,
            exact=loading.lookup.exact_tokens == len(loading.lookup.split.input_ids),
            ready_at=time.perf_counter(),
            jobs=self._write_back(loading.lookup, fusion.layers),
        )

    def _prefilled(self, lookup: Lookup, pauses: Pauses | None) -> Blend:
        """By the model's own prefill, behind what is remembered of the prompt's beginning."""
        started, model, ids = time.perf_counter(), self.segments.model, lookup.split.input_ids
        if model.adapter.plain_reason:
            return _read_plainly(self, lookup, pauses)
        begun = None if lookup.kept is None else lookup.kept.new_cache()
        first = 0 if begun is None else begun.get_seq_length()
        with model.products():
            result = model.blended.prefill(ids, pauses and pauses.between, pauses and pauses.each_layer, begun)
        rows = (torch.arange(first, len(ids), device=model.adapter.device),) * model.adapter.num_layers
        ready_at = time.perf_counter()
        seconds, work = Seconds(fuse=ready_at - started), 1.0
        if first:
            work = work_share(model.blended.shape, len(ids), RowsDone(rows))
        jobs = {} if lookup.unread is None else self._write_back(lookup.unread, _whole_layers(model, result.cache))
        return Blend(
            lookup, result.cache, result.logits, rows, seconds, work=work, exact=True, ready_at=ready_at, jobs=jobs
        )

    # Write back ----------------------------------------------------------------------------

    def _write_back(self, lookup: Lookup, layers: tuple[LayerKV, ...]) -> dict[str, Job]:
        """Jobs that compute and store each missing segment, from the KV of the prompt or without it."""
        if not self.policy.rule.reads_store or self.config.write_back == "off":
            return {}
        segments, jobs = self.segments, dict[str, Job]()
        prefix = lookup.prefix
        if prefix is not None and not lookup.prefix_hit and layers:
            # Nothing stands before the prefix, so the pass has just computed its exact KV.
            kv = _first_rows(layers, len(prefix.token_ids))
            held = sum(tensor.nbytes for tensor in kv.keys + kv.values)
            jobs[prefix.key] = Job(
                lambda: self.store.put(prefix.key, segments.record(prefix, kv)), held, partial(segments.info, prefix)
            )
        return {**jobs, **self.chunk_jobs(lookup)}

    def chunk_jobs(self, lookup: Lookup) -> dict[str, Job]:
        """Jobs that compute and store each chunk that is not stored yet."""
        segments, jobs, located = self.segments, dict[str, Job](), lookup.split.located
        contexts = segments.contexts([chunk.text for chunk in located])
        # Text that was found stays in records of its own kind, so that all of it can be erased.
        known = segments.contexts([one.text for one in located if not one.found]) if lookup.found else contexts
        for segment in _to_store(self, lookup):
            beside = contexts if segment.key.startswith(FOUND) else known
            behind = dataclasses.replace(segment, contexts=beside if segment.averaged else None)
            one = partial(self.compute_and_store, [behind])
            jobs[segment.key] = Job(one, 0, partial(segments.info, behind), behind, self.compute_and_store)
        return jobs

    def compute_and_store(self, segments: Sequence[Segment]) -> dict[str, bool | None]:
        """Store what is missing of segments as `Segments.compute` takes them; see `compute_if_missing`."""
        return compute_if_missing(self.store, {segment.key: segment for segment in segments}, self.segments.compute)

    # Keep ----------------------------------------------------------------------------------

    def keep_answered(self, blend: Blend, answer_ids: Sequence[int]) -> None:
        """Keep a prompt with its answer in memory."""
        lookup = blend.lookup
        self.segments.model.look()  # adapters may have been switched meanwhile
        if blend.plain_reason:
            self.recent_prompts.keep_turn(lookup.ticket, lookup.split, answer_ids, blend.cache)
            return
        exact = None if blend.exact else lookup.exact_tokens
        self.recent_prompts.keep(lookup.ticket, lookup.fit.split, answer_ids, blend.cache, exact)

    def store_unread(self, lookup: Lookup) -> Mapping[str, Job]:
        """Jobs that store the chunks of a prompt that went on from one in memory, so that no record was looked for.

        Other prompts have these chunks in another order, and nothing to go on from.
        """
        config, fit, split = self.config, lookup.fit, lookup.fit.split
        few = has_few_chunks(split, config.min_tokens)
        if not lookup.plain or lookup.unread is not None or config.write_back == "off" or lookup.kept is None or few:
            return {}
        chunks = chunks_of(self.segments, fit, split)
        return self.chunk_jobs(dataclasses.replace(lookup, split=split, chunks=chunks, records={}))

    def keep_variants(self, lookup: Lookup, cache: Any) -> Mapping[str, Job]:
        """Jobs that store the chunks of a prompt behind what stood before them, if that is wanted; see `Variants.jobs`.

        It is if an earlier prompt had the same prefix, or there is none. So nothing is kept behind a prefix that holds
        what was said in one conversation, unless that goes on from it.
        """
        lookup = lookup.unread or lookup  # as it could have been blended
        config, kept, split = self.config, lookup.kept, lookup.fit.split
        whole = kept is None or kept.tokens >= len(split.prefix)
        known = lookup.prefix is None or (lookup.prefix_hit and whole)
        wanted = config.write_back != "off" and self.policy.rule.reads_store
        if not (wanted and known) or lookup.plain or lookup.found:
            return {}
        regime = self.segments.model.adapter.regime(len(split.input_ids)) or 0
        return self.variants.jobs(split, cache, self.segments, regime)


def _open_all(
    pipeline: Pipeline, segments: Sequence[Segment], opened: list[tuple[str, StoredKV]]
) -> dict[str, StoredKV]:
    """The records of segments, by key, in their order."""
    wanted = {one.key: one for one in segments if one.token_ids}
    stored = pipeline.store.open_all([*wanted])
    found = {key: stored[key] for key, one in wanted.items() if key in stored and pipeline.is_of(stored[key], one)}
    opened += found.items()
    return found


def _to_store(pipeline: Pipeline, lookup: Lookup) -> list[Segment]:
    """The segments of chunks that are not stored yet and may be, those of like length side by side."""
    store, opened, found = pipeline.store, {key for key, _ in lookup.opened}, []
    # A record that was not read may be stored all the same: none was looked for, or it was left to be computed.
    looked_for = not lookup.plain and pipeline.policy.rule.reads_store
    for one in lookup.chunks:
        if not one.token_ids or one.key in lookup.records:
            continue
        one = one.usual or one
        there = one.key in lookup.records or ((not looked_for or one.key in opened) and store.contains(one.key))
        if not there:
            found.append(one)
    return sorted(found, key=lambda one: len(one.own_ids))


def _with_usual(pipeline: Pipeline, lookup: Lookup, lost: set[str]) -> Lookup:
    """The same with the usual records of chunks whose variants are not there."""
    usual = [one.usual for one in lookup.chunks if one.usual is not None and one.key in lost]
    if not usual:
        return lookup
    pipeline.variants.drop(lost)
    chunks = tuple(one.usual if one.usual is not None and one.key in lost else one for one in lookup.chunks)
    records = {**lookup.records, **_open_all(pipeline, usual, lookup.opened)}
    return dataclasses.replace(lookup, chunks=chunks, records=records)


def _read_plainly(pipeline: Pipeline, lookup: Lookup, pauses: Pauses | None) -> Blend:
    """By the prefill of a model that is not blended, behind states that were kept where there are some."""
    started, model, ids = time.perf_counter(), pipeline.segments.model, lookup.split.input_ids
    adapter = model.adapter
    with model.products():
        resumed, result = pipeline.recent_prompts.prefill(lookup.ticket, lookup.split, *(pauses or ()))
    ready_at = time.perf_counter()
    return Blend(
        lookup,
        result.cache,
        result.logits,
        (torch.arange(resumed, len(ids), device=adapter.device),) * adapter.num_layers,
        Seconds(fuse=ready_at - started),
        work=1.0 - resumed / len(ids),
        exact=True,
        resumed=resumed,
        plain_reason=adapter.plain_reason,
        ready_at=ready_at,
    )


def open_pipeline(
    model: ModelInUse,
    tokenizer: PromptTokenizer,
    config: BlendConfig,
    store: KVStore,
    earlier: Pipeline | None = None,
) -> Pipeline:
    """A pipeline by its options and what was calibrated; the machine's profile is kept beside the store.

    It shares with an earlier one all that views of an engine have in common.
    """
    controller = controller_beside(store) if earlier is None else earlier.policy.controller
    policy = RatioPolicy(config, model.adapter.num_layers, model.fingerprint, controller)
    condition = "context" if policy.config.condition == "auto" else policy.config.condition
    if earlier is None:
        segments = Segments(model, tokenizer, config, condition)
        return Pipeline(segments, policy, store, PromptCache(), Variants(store))
    segments = dataclasses.replace(
        earlier.segments, model=model, tokenizer=tokenizer, config=config, condition=condition
    )
    return dataclasses.replace(earlier, segments=segments, policy=policy)


def chunks_of(segments: Segments, fit: FittedPrompt, split: TokenizedPrompt) -> tuple[Segment, ...]:
    """The segments of a prompt's chunks, all or those behind what it goes on from."""
    own, regime = fit.split.ids(fit.split.prefix), segments.model.adapter.regime(len(split.input_ids)) or 0
    behind = own if segments.condition == "prefix" and len(own) > len(segments.tokenizer.start_ids) else None
    return tuple(segments.located(chunk, split.ids(chunk.span), behind, regime) for chunk in split.located)


def has_few_chunks(split: TokenizedPrompt, least: int) -> bool:
    """Whether so little can be read from the store that the model's own prefill is better."""
    return not split.chunks or split.chunk_tokens < least


def _plainly(fit: FittedPrompt, begun: RecentPrompt | None) -> Lookup:
    """A prompt that the model itself prefills, perhaps from what it begins with."""
    if begun is None:
        return Lookup(fit, fit.split, plain=True)
    prefix = Segment("kept", (), begun.record.info.token_ids, KEPT_KEY)
    return Lookup(fit, begun.split, True, prefix, records={KEPT_KEY: begun.record}, kept=begun)


def _sooner_prefilled(pipeline: Pipeline, lookup: Lookup, chosen: Lookup, choice: RatioChoice) -> Lookup | None:
    """The prompt as it is prefilled from what it begins with, if that is sooner than reading what was chosen of it.

    Without ``min_tokens`` nobody asks.
    """
    policy, split = pipeline.policy, lookup.fit.split
    if not (pipeline.config.min_tokens and policy.rule.reads_store):
        return None
    begun = pipeline.recent_prompts.find_exact(lookup.ticket, split)
    first, plan = 0 if begun is None else begun.tokens, _plan(pipeline, chosen)
    more = sum(map(len, (*plan.exact, *plan.reused))) > first
    if more and policy.expected_work(choice, plan, pipeline.segments.model.blended.shape, first) <= WORTH:
        return None
    plain, why = _plainly(lookup.fit, begun), "too little of it is stored to be worth reading"
    return dataclasses.replace(plain, ticket=lookup.ticket, seconds=lookup.seconds, why=why, unread=lookup)


def _plan(pipeline: Pipeline, lookup: Lookup) -> FusionPlan:
    """Sort the stored segments into exact and reused ones."""
    split, exact, reused = lookup.split, list[range](), list[range]()
    unrotated, missing = list[Span](), list[range]()
    if lookup.prefix_hit:
        exact.append(_range(split.prefix))
    for span, segment, hit in zip(split.chunks, lookup.chunks, lookup.hits, strict=True):
        if not hit:
            # A GPU's kernels have no mask that hides them.
            missing += [_range(span)] if pipeline.segments.model.adapter.device.type == "cpu" else []
            continue
        unrotated.append(span)
        behind = lookup.records[segment.key].info.context_ids
        in_place = not segment.averaged and split.input_ids[: span.start] == behind
        (exact if in_place else reused).append(_range(span))
    rotate = range(unrotated[0].start, unrotated[-1].stop) if unrotated else range(0)
    question = _range(split.suffix) if len(split.suffix) else None
    return FusionPlan(split.input_ids, exact, reused, rotate, question, missing)


def _range(span: Span) -> range:
    return range(span.start, span.stop)


def _whole_layers(model: ModelInUse, cache: Any) -> tuple[LayerKV, ...]:
    """KV of a prefill; none if a layer has forgotten its first rows."""
    layers = tuple(model.blended.layers_of(cache.layers))
    tokens = cache.get_seq_length()
    return layers if all(layer.keys.shape[2] >= tokens for layer in layers) else ()


def _first_rows(layers: tuple[LayerKV, ...], tokens: int) -> SegmentKV:
    """A copy of the first positions of a fused prompt, keys rotated, where the prompt is: a store moves it."""
    keys = tuple(layer.keys[0, :, :tokens].clone() for layer in layers)
    values = tuple(layer.values[0, :, :tokens].clone() for layer in layers)
    return SegmentKV(keys, values, rotated=True)
