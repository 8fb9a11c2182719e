"""Split, look up, load, fuse: from a prompt to its fused KV."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.ratio_policy import MinimumRatio, RatioChoice, RatioPolicy, controller_beside
from cacheblend_rag.engine.session_cache import ResumedPrompt, SessionCache
from cacheblend_rag.engine.write_back import Job
from cacheblend_rag.errors import ConfigError, GenerationError, PromptError, StoreError
from cacheblend_rag.fusor import Fusion, FusionPlan, fuse
from cacheblend_rag.fusor.work import work_share
from cacheblend_rag.loading import ChunkKV, LayerReader, LoadingController, Placement, load_as_it_pays, load_plainly
from cacheblend_rag.loading.loader import ReadClock, RecordLost
from cacheblend_rag.loading.shared import SharedKV
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.contexts import ContextKV, LearnedContext
from cacheblend_rag.models.cpu.weight_prepacking import Prepacking, prepacked_products
from cacheblend_rag.models.identity import fingerprint_in
from cacheblend_rag.models.kv import LayerKV, SegmentKV
from cacheblend_rag.prompt import (
    DocumentPlace,
    FittedPrompt,
    Prompt,
    PromptTokenizer,
    Span,
    TokenizedChunk,
    TokenizedPrompt,
    check_all_fit,
    fitted,
)
from cacheblend_rag.prompt.contexts import Contexts, context_tokens, contexts_beside
from cacheblend_rag.report import BlendReport, DocumentUse, FusedKV, Seconds
from cacheblend_rag.store.base import KVRecord, KVStore, RecordInfo, StoredKV, discard, record_key
from cacheblend_rag.store.learned import kept_context
from cacheblend_rag.store.single_flight import compute_if_missing

_log = logging.getLogger(__name__)
# Stands in the key of a chunk whose ids differ in one prompt, behind the key under which the chunk is usually stored.
OTHER_FORM = "-as-"
# Bytes of a layer below which handing it to another thread costs more than reading it.
_WORTH_A_THREAD = 2**19
# Characters by which a report names a document.
_BEGINS = 80


@dataclass(frozen=True)
class Segment:
    """A piece of text whose KV is stored.

    Parameters
    ----------
    kind : str
        ``"chunk"`` or ``"prefix"``.
    context_ids : tuple of int
        Ids it is computed behind.
    token_ids : tuple of int
        Its ids.
    key : str
        Key of its record.
    regime : int
        Frequency regime it is computed in; see `ModelAdapter.regime`.
    head : int
        How many of the context's last ids belong to this segment alone; see `ChunkTokens`.
    model : str
        Identity of the model, and of its adapters, that the key is of.
    averaged : bool
        Whether its KV is the mean over several contexts, which stand before its context ids and are no part of its key.
    contexts : Contexts or None
        These contexts, where it is to be computed.
    learned : str
        Digest of the learned context that it is computed behind; empty for none.
    """

    kind: str
    context_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    key: str
    regime: int = 0
    head: int = 0
    model: str = ""
    averaged: bool = False
    contexts: Contexts | None = None
    learned: str = ""

    @property
    def exact_in_place(self) -> bool:
        """Whether its KV is that of a full prefill where its context ids are all that stands before it."""
        return not self.averaged and not self.learned

    @property
    def shared_ids(self) -> tuple[int, ...]:
        """The part of its context that other segments have in common with it."""
        return self.context_ids[: len(self.context_ids) - self.head]

    @property
    def own_ids(self) -> tuple[int, ...]:
        """Ids that are computed behind `shared_ids`: the rest of its context, then its own."""
        return self.context_ids[len(self.context_ids) - self.head :] + self.token_ids


@dataclass(frozen=True)
class StoredSegments:
    """The segments of a prompt, with the records of those that are stored."""

    prefix: Segment | None
    chunks: tuple[Segment, ...]
    records: dict[str, StoredKV]

    def tier(self, key: str) -> str:
        """The tier that a segment is read from; empty if it is not stored."""
        return self.records[key].tier if key in self.records else ""

    def without(self, key: str) -> StoredSegments:
        return dataclasses.replace(self, records={k: r for k, r in self.records.items() if k != key})


@dataclass(frozen=True)
class Lookup:
    """Result of looking up a prompt. Used as a context manager, it closes the records that were opened for it.

    Parameters
    ----------
    fit : FittedPrompt
        The prompt as it is answered.
    split : TokenizedPrompt
        Its ids; what is kept from an earlier turn is its prefix.
    found : StoredSegments or None
        The records; None if the prompt is better prefilled in full.
    kept : ResumedPrompt or None
        The kept prompt that this one goes on from.
    opened : list of StoredKV
        All records that were opened on the way.
    seconds : float
        Seconds of looking up.
    """

    fit: FittedPrompt
    split: TokenizedPrompt
    found: StoredSegments | None = None
    kept: ResumedPrompt | None = None
    opened: list[StoredKV] = field(default_factory=list)
    seconds: float = 0.0

    def __enter__(self) -> Lookup:
        return self

    def __exit__(self, *error: object) -> None:
        for record in self.opened:
            record.close()


@dataclass(frozen=True)
class LoadingKV:
    """The KV of a prompt on its way from the store.

    Parameters
    ----------
    found : StoredSegments
        The records that are read; the controller may have left some to be recomputed.
    choice : RatioChoice
        The rule and its recompute ratio.
    layers : TimedIterator
        KV of each layer, in order.
    clock : ReadClock
        Counts the time of reading.
    started : float
        When loading began, by ``time.perf_counter``.
    shared : SharedKV or None
        Layers that other prompts of a batch read, too.
    """

    found: StoredSegments
    choice: RatioChoice
    layers: TimedIterator
    clock: ReadClock
    started: float
    shared: SharedKV | None = None


def reader_of(
    adapter: ModelAdapter, lookup: Lookup, found: StoredSegments, clock: ReadClock, shared: SharedKV | None = None
) -> LayerReader:
    """Reader of the stored KV of a prompt; it may rotate keys to their positions on the way."""
    split, placements = lookup.split, []
    located = [(split.prefix, lookup.fit.prompt.prefix), *((chunk.span, chunk.text) for chunk in split.located)]
    for (span, text), segment in zip(located, (found.prefix, *found.chunks), strict=True):
        if segment is not None and segment.key in found.records:
            key, record = segment.key, found.records[segment.key]
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


class TimedIterator:
    """An iterator that notes how long its reader waited for it, and ends when nobody wants the answer."""

    def __init__(self, layers: Iterator[LayerKV], cancelled: Callable[[], bool]) -> None:
        self._layers, self.cancelled = layers, cancelled
        self.seconds = 0.0

    def __iter__(self) -> Iterator[LayerKV]:
        return self

    def __next__(self) -> LayerKV:
        if self.cancelled():
            raise GenerationError("the answer was given up while its prompt was fused")
        started = time.perf_counter()
        try:
            return next(self._layers)
        finally:
            self.seconds += time.perf_counter() - started

    def close(self) -> None:
        """End the loader, whatever it still has in hand."""
        self._layers.close()  # type: ignore[attr-defined]


class Pauses(NamedTuple):
    """Where others may use the model while a prompt is prefilled."""

    between: Callable[[float], object]
    """Called between two slices of a plain prefill, with the seconds that the last one took."""
    each_layer: Callable[[], object]
    """Called at each layer."""


@dataclass(frozen=True)
class Blend:
    """A fused prompt, and what is worth storing of it.

    Parameters
    ----------
    fused : FusedKV
        The result.
    write_back : dict of str to Job
        By key of the record, what computes and stores it.
    split : TokenizedPrompt or None
        Its ids, if it can be kept whole.
    """

    fused: FusedKV
    write_back: dict[str, Job]
    split: TokenizedPrompt | None = None


@dataclass
class _LatestContexts:
    """The contexts that chunks were computed behind last, shared by all views of an engine."""

    identity: tuple[str, ...] = ()  # of the model and of the contexts
    kv: ContextKV | None = None


class Pipeline:
    """The first four verbs over one model and one store.

    Parameters
    ----------
    adapter : ModelAdapter
    tokenizer : PromptTokenizer
    config : BlendConfig
    store : KVStore
    fingerprint : str, optional
        Identity of the model's own weights, adapters aside, where it is known already.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        tokenizer: PromptTokenizer,
        config: BlendConfig,
        store: KVStore,
        fingerprint: str | None = None,
    ) -> None:
        self.adapter, self.tokenizer, self.config, self.store = adapter, tokenizer, config, store
        self._identity = adapter.identity(fingerprint)
        self._latest_contexts = _LatestContexts()
        self._set_learned(_learned_context(store, self.fingerprint, adapter), config, controller_beside(store))
        self.prepacked = self._prepacking(anew=True)

    def with_config(self, config: BlendConfig, tokenizer: PromptTokenizer) -> Pipeline:
        """The same model, store and minimum ratio with other options; the model is not hashed again."""
        other = object.__new__(Pipeline)
        other.__dict__.update(self.__dict__)
        other.config, other.tokenizer = config, tokenizer
        other._set_learned(self.learned, config, self._ratio_policy.controller, self._ratio_policy.minimum)
        if config.prepack_weights != self.config.prepack_weights:
            other.prepacked = other._prepacking(anew=False)
        return other

    def with_learned(self, context: LearnedContext | None) -> Pipeline:
        """The same with another learned context."""
        other = self.with_config(self.config, self.tokenizer)
        other._set_learned(context, self.config, self._ratio_policy.controller, self._ratio_policy.minimum)
        return other

    def _set_learned(
        self,
        learned: LearnedContext | None,
        config: BlendConfig,
        controller: LoadingController | None,
        minimum: MinimumRatio | None = None,
    ) -> None:
        """Take over a learned context, and choose the condition and the rule by it."""
        self.learned = learned
        """The context that the model was adapted to; None if it was not."""
        layers, digest = self.adapter.num_layers, self._learned_digest
        self._ratio_policy = RatioPolicy(config, layers, self.fingerprint, controller, minimum, digest)
        if self.condition == "context" and not config.contexts:
            raise ConfigError("contexts", 0, "use 1 or more; only a learned context does without neighbours")
        if self.condition == "learned" and learned is None:
            remedy = f"run `cacheblend-rag adapt` for this model over the same folder, {str(self.store.folder)!r}"
            raise ConfigError("condition", "learned", remedy)

    @property
    def fingerprint(self) -> str:
        """Identity of the model when it was last looked at; see `look_at_model`."""
        return self._identity.value

    @property
    def condition(self) -> str:
        """The condition of chunks: as the options say, as calibration found best, or as was learned."""
        chosen = self._ratio_policy.config.condition
        if chosen != "auto":
            return chosen
        return "context" if self.learned is None else "learned"

    @property
    def _behind_neighbours(self) -> bool:
        return self.config.contexts > 0 and self.condition in ("context", "learned")

    @property
    def _learned_digest(self) -> str:
        return "" if self.learned is None else self.learned.digest

    def look_at_model(self) -> str:
        """Notice that adapters were switched, merged or trained since; the identity of the model now."""
        if self._identity.refresh():  # copies of its weights are of what they were
            self._prepacking(anew=True)
        return self._identity.value

    def _prepacking(self, anew: bool) -> Prepacking:
        """The context within which the model is run here."""
        model = self.adapter.model
        return prepacked_products(model, (*self.adapter.layers, model.lm_head), self.config.prepack_weights, anew=anew)

    def raise_ratio(self, ratio: float) -> None:
        """Let no prompt be blended with a smaller recompute ratio from now on, whatever the options."""
        self._ratio_policy.minimum.raise_to(ratio)

    def segment(
        self, kind: str, context_ids: tuple[int, ...], token_ids: tuple[int, ...], regime: int = 0, head: int = 0
    ) -> Segment:
        """Describe a segment and derive its key."""
        averaged = kind == "chunk" and self._behind_neighbours
        learned = self._learned_digest if kind == "chunk" and self.condition == "learned" else ""
        key = record_key(
            fingerprint=fingerprint_in(self.fingerprint, regime),
            salt=self.config.salt,
            kind=kind,
            context_ids=context_ids,
            token_ids=token_ids,
            contexts=self.config.contexts * averaged,
            learned=learned,
        )
        model = self.fingerprint
        return Segment(kind, context_ids, token_ids, key, regime, head, model, averaged, learned=learned)

    def chunk_segment(self, text: str, prefix: str = "") -> Segment | None:
        """The segment of a chunk, or None if the text is too short to have one.

        Parameters
        ----------
        text : str
        prefix : str
            Matters only if chunks are computed behind it.
        """
        forms = self.chunk_forms(text, prefix)
        if not forms:
            return None
        regime = self.adapter.regime(len(forms[0].context_ids) + len(forms[0].token_ids)) or 0
        return next(form for form in forms if form.regime == regime)

    def chunk_forms(self, text: str, prefix: str = "") -> list[Segment]:
        """All segments under which a chunk may be stored, one a frequency regime; none if it can be in no prompt."""
        try:
            chunk = self.tokenizer.chunk(text)
        except PromptError as error:  # it can be in no prompt either
            _log.warning("a chunk has no KV: %s", error)
            return []
        if not chunk.ids:
            return []
        context = self.tokenizer.context_ids(text, prefix if self.condition == "prefix" else "")
        return [self._chunk(context, chunk.head, chunk.ids, regime) for regime in self.adapter.regimes]

    def _chunk(
        self, context_ids: tuple[int, ...], head: tuple[int, ...], token_ids: tuple[int, ...], regime: int
    ) -> Segment:
        # Behind contexts all that stands directly before a chunk is its own.
        own = len(context_ids) * (self.condition in ("context", "learned")) + len(head)
        return self.segment("chunk", context_ids + head, token_ids, regime, own)

    def contexts(self, chunks: Sequence[str]) -> Contexts:
        """The contexts of chunks that belong together."""
        sizes = [len(self.tokenizer.chunk(text).ids) for text in chunks]
        tokens = context_tokens(sizes, self.adapter.context_window)
        return Contexts(self.tokenizer, chunks, self.config.contexts, tokens)

    def contexts_beside(self, chunks: Sequence[str], sizes: Sequence[int]) -> list[Contexts]:
        """The contexts of each chunk, of those next to it; see `contexts_beside`."""
        window = self.adapter.context_window
        return contexts_beside(self.tokenizer, chunks, sizes, self.config.contexts, window)

    def compute(self, segments: Sequence[Segment]) -> list[KVRecord]:
        """Compute the KV of segments, in one pass for each context.

        Parameters
        ----------
        segments : sequence of Segment
            Behind the same shared context, or the same contexts, and of the same regime.

        Raises
        ------
        StoreError
            If adapters were switched since the segments' keys were made.
        """
        self._check_model(segments)
        first, ids = segments[0], [segment.own_ids for segment in segments]
        heads = [segment.head for segment in segments]
        with self.prepacked():
            if first.exact_in_place:
                computed = self.adapter.segments_kv(first.shared_ids, ids, first.regime, heads)
            else:
                learned = self.learned if first.learned else None
                computed = self._kv_of(first.contexts, learned).segments_kv(
                    ids, first.regime, heads, [_numbers(segment) for segment in segments]
                )
        self._check_model(segments)
        return [self._record(segment, kv) for segment, kv in zip(segments, computed, strict=True)]

    def _kv_of(self, contexts: Contexts | None, learned: LearnedContext | None) -> ContextKV:
        """The KV of contexts, to compute chunks behind; the last one is kept, since more of its chunks may come."""
        digests = [one.digest for one in (contexts, learned) if one is not None]
        wanted, last = (self.fingerprint, *digests), self._latest_contexts
        if last.kv is None or last.identity != wanted:
            ids = () if contexts is None else contexts.ids
            last.identity = wanted
            last.kv = ContextKV(self.adapter, (*ids, learned) if learned is not None else ids)
        return last.kv

    def _check_model(self, segments: Sequence[Segment]) -> None:
        """Let no KV be stored as that of another adapter."""
        now = self.look_at_model()
        if any(segment.model != now for segment in segments):
            raise StoreError("the model's adapter was switched before this was computed; warm chunks once it is active")

    def record_info(self, segment: Segment) -> RecordInfo:
        """Info for the record of a segment."""
        adapter = self.adapter
        behind = segment.contexts
        contexts = () if behind is None else sum((behind.ids[at] for at in behind.of(segment.token_ids)), ())
        return RecordInfo(
            fingerprint=fingerprint_in(segment.model, segment.regime),
            context_ids=segment.context_ids,
            token_ids=segment.token_ids,
            layers=adapter.num_layers,
            kv_heads=adapter.kv_heads,
            head_dim=adapter.head_dim,
            dtype=str(adapter.dtype).removeprefix("torch."),
            rotated=segment.kind == "prefix",
            kind=segment.kind,
            contexts=self.config.contexts * segment.averaged,
            behind=contexts,
            learned=segment.learned,
        )

    def owns(self, key: str, info: RecordInfo) -> bool:
        """Whether a record is one of ours, and not another tenant's with the same text."""
        own = record_key(
            fingerprint=info.fingerprint,
            salt=self.config.salt,
            kind=info.kind,
            context_ids=info.context_ids,
            token_ids=info.token_ids,
            contexts=info.contexts,
            learned=info.learned,
        )
        return key.endswith(own)

    # The first four verbs --------------------------------------------------------------------

    def blend(self, prompt: Prompt, cancelled: Callable[[], bool] = lambda: False) -> Blend:
        """Split, look up, load and fuse a prompt that is not answered.

        Parameters
        ----------
        prompt : Prompt
        cancelled : callable
            The blended pass ends before its next layer once this returns True.

        Raises
        ------
        ContextLengthError
            If the prompt does not fit.
        GenerationError
            If it was cancelled.
        """
        fit = self.split(prompt)
        with self.look_up(fit) as lookup:
            loading = self.load(lookup, cancelled)
            return self.fuse(lookup, loading)

    def split(self, prompt: Prompt, new_tokens: int = 0, room: int | None = None) -> FittedPrompt:
        """The prompt as it is answered, with the ids of its segments; see `fitted`."""
        drops = self.config.overflow == "drop_chunks"
        return fitted(self.tokenizer, prompt, self.adapter.context_window, new_tokens, room, drops)

    def look_up(self, fit: FittedPrompt) -> Lookup:
        """Open what is stored of a prompt; of one that is better prefilled in full, nothing."""
        started, split = time.perf_counter(), fit.split
        few = not split.chunks or split.chunk_tokens < self.config.min_tokens
        if few or not self.adapter.reusable(len(split.input_ids)):
            return Lookup(fit, split)
        kept = self._session_cache(split).find(split) if self._keeps_sessions else None
        lookup = self._opened(fit, kept, [])
        return dataclasses.replace(lookup, seconds=time.perf_counter() - started)

    def load(self, lookup: Lookup, cancelled: Callable[[], bool], shared: SharedKV | None = None) -> LoadingKV | None:
        """Choose the recompute ratio and begin to read what is worth it; None if the prompt is prefilled in full."""
        if lookup.found is None:
            return None
        started, clock = time.perf_counter(), ReadClock()
        choice, found = self._choose(lookup.split, lookup.found)
        layers = self._layers(lookup, found, clock, cancelled, shared)
        return LoadingKV(found, choice, layers, clock, started, shared)

    def fuse(self, lookup: Lookup, loading: LoadingKV | None, pauses: Pauses | None = None) -> Blend:
        """The KV of the whole prompt, and the logits of its last position."""
        blend = self._plain(lookup, pauses) if loading is None else self._blended(lookup, loading, pauses)
        fit, report = lookup.fit, blend.fused.report
        seconds = dataclasses.replace(report.seconds, split=fit.seconds, look_up=lookup.seconds)
        documents = _uses(fit.prompt.documents, report.chunk_tiers)
        report = dataclasses.replace(report, documents=documents, left_out=fit.left_out, seconds=seconds)
        return dataclasses.replace(blend, fused=dataclasses.replace(blend.fused, report=report))

    def check_all_fit(self, prompts: Sequence[Prompt], new_tokens: int) -> None:
        """Refuse several prompts if one of them does not fit; see `check_all_fit`."""
        drops = self.config.overflow == "drop_chunks"
        check_all_fit(self.tokenizer, prompts, self.adapter.context_window, new_tokens, drops)

    def _plain(self, lookup: Lookup, pauses: Pauses | None) -> Blend:
        """Answer by the model's own prefill."""
        started, split = time.perf_counter(), lookup.split
        with self.prepacked():
            result = self.adapter.prefill(split.input_ids, *(pauses or ()))
        rows = torch.arange(len(split.input_ids), device=self.adapter.device)
        report = dataclasses.replace(self.plain_report(split), seconds=Seconds(fuse=time.perf_counter() - started))
        layers = self.adapter.num_layers
        fused = FusedKV(result.cache, result.logits, list(split.input_ids), (rows,) * layers, None, report)
        return Blend(fused, {})

    def plain_report(self, split: TokenizedPrompt) -> BlendReport:
        """Report of a prompt that is prefilled in full."""
        layers = self.adapter.num_layers
        return dataclasses.replace(
            self._counts(split),
            misses=len(split.chunks),
            chunk_tiers=("",) * len(split.chunks),
            recomputed_tokens=(0,) * layers,
            computed_tokens=(len(split.input_ids),) * layers,
            plain=True,
            work=1.0,
        )

    def _blended(self, lookup: Lookup, loading: LoadingKV, pauses: Pauses | None) -> Blend:
        """Answer by the blended pass; a record that fails on the way counts as never stored."""
        lost = 0
        while True:
            try:
                with contextlib.closing(loading.layers), self.prepacked():
                    plan = self._plan(lookup.split, loading.found)
                    each_layer = pauses.each_layer if pauses else None
                    fusion = fuse(self.adapter, plan, loading.layers, loading.choice.rule, each_layer)
                break
            except RecordLost as error:
                _log.warning("%s; the prompt is blended again without it", error)
                if error.damaged:
                    discard(self.store, error.key)
                lost += 1
                lookup, loading = self._without(error.key, lookup, loading)
        took, clock = time.perf_counter() - loading.started, loading.clock
        seconds = Seconds(load=loading.layers.seconds, fuse=took - loading.layers.seconds, read=clock.seconds)
        # Layers from memory say nothing of the disk.
        if not lost and not self.store.tiers and loading.shared is None:
            self._ratio_policy.note(loading.choice, clock.seconds)
        fused = self._fused(lookup.split, loading.found, fusion, loading.choice)
        whole = lookup.fit.split
        report = dataclasses.replace(self._whole(fused.report, whole, lookup.kept), lost=lost, seconds=seconds)
        keep = self._keeps_sessions and self.config.write_back != "off"
        write_back = self._write_back(lookup.split, loading.found, fusion)
        fused = dataclasses.replace(fused, report=report)
        return Blend(fused, write_back, whole if keep else None)

    def _without(self, key: str, lookup: Lookup, loading: LoadingKV) -> tuple[Lookup, LoadingKV]:
        """The same prompt without a record; without a kept prompt, its chunks are looked up instead."""
        found = loading.found.without(key)
        if lookup.kept is not None and key == lookup.kept.key:
            again = self._opened(lookup.fit, None, lookup.opened)
            lookup = dataclasses.replace(again, seconds=lookup.seconds)
            found = lookup.found or found
        layers = self._layers(lookup, found, loading.clock, loading.layers.cancelled, loading.shared)
        return lookup, dataclasses.replace(loading, found=found, layers=layers)

    def _whole(self, report: BlendReport, whole: TokenizedPrompt, kept: ResumedPrompt | None) -> BlendReport:
        """Report of a resumed prompt, as that of the whole one."""
        if kept is None:
            return report
        counts, resumed = self._counts(whole), len(whole.chunks) - len(kept.split.chunks)
        return dataclasses.replace(
            report,
            prefix_tokens=counts.prefix_tokens,
            chunk_tokens=counts.chunk_tokens,
            suffix_tokens=counts.suffix_tokens,
            hits=report.hits + resumed,
            chunk_tiers=(kept.record.tier,) * resumed + report.chunk_tiers,
            resumed_tokens=kept.tokens,
        )

    @property
    def _keeps_sessions(self) -> bool:
        return self.config.session_cache and self._ratio_policy.rule.reads_store

    def _session_cache(self, split: TokenizedPrompt) -> SessionCache:
        regime = self.adapter.regime(len(split.input_ids)) or 0
        like = self.record_info(self.segment("session", (), (), regime))
        config = dataclasses.replace(self._ratio_policy.config, condition=self.condition)
        learned = self._learned_digest if self.condition == "learned" else ""
        return SessionCache(self.store, config, dataclasses.replace(like, rotated=True), learned)

    def keep_session(self, blend: Blend, answer_ids: Sequence[int]) -> Blend:
        """Add to what is worth storing the whole prompt with its answer, if that is wanted."""
        if blend.split is None:
            return blend
        layers = self.adapter.layers_of(blend.fused.cache.layers)
        found = self._session_cache(blend.split).job(blend.split, answer_ids, layers)
        if found is None:
            return blend
        key, job = found
        return dataclasses.replace(blend, write_back={**blend.write_back, key: job})

    def _choose(self, split: TokenizedPrompt, found: StoredSegments) -> tuple[RatioChoice, StoredSegments]:
        """Let the loading controller, where there is one, choose the ratio and what is worth reading."""
        if self._ratio_policy.controller is None:
            return self._ratio_policy.choose((), len(split.input_ids), 0, ""), found
        keys = list(dict.fromkeys(segment.key for segment in found.chunks if segment.key in found.records))
        elsewhere = {tier.tier for tier in self.store.tiers or (self.store,) if tier.remote}
        chunks = []
        for record in (found.records[key] for key in keys):
            device = record.tier if record.tier in elsewhere else ""
            chunks.append(ChunkKV(record.info.tokens, self.store.record_bytes(record.info), device))
        tokens = len(split.input_ids)
        reused = sum(record.info.tokens for record in found.records.values())
        choice = self._ratio_policy.choose(chunks, tokens, max(0, tokens - reused), self.store.tier)
        for number in choice.plan.recomputed_chunks if choice.plan else ():
            found = found.without(keys[number])
        return choice, found

    def _opened(self, fit: FittedPrompt, kept: ResumedPrompt | None, opened: list[StoredKV]) -> Lookup:
        """Open what is stored of the prefix and the chunks, or of what stands behind a kept prompt."""
        split = fit.split if kept is None else kept.split
        prefix_ids = split.ids(split.prefix)
        start = self.tokenizer.start_ids
        regime = self.adapter.regime(len(split.input_ids)) or 0
        prefix = self.segment("prefix", (), prefix_ids, regime) if len(prefix_ids) > len(start) else None
        behind_prefix = self.condition == "prefix" and prefix is not None
        records: dict[str, StoredKV] = {}
        if kept is not None:
            prefix = Segment("session", (), prefix_ids, kept.key, regime)
            records[kept.key] = kept.record
        chunks = tuple(
            self._located(chunk, split.ids(chunk.span), prefix_ids if behind_prefix else None, regime)
            for chunk in split.located
        )
        if not self._ratio_policy.rule.reads_store:
            return Lookup(fit, split, StoredSegments(None, chunks, {}))
        wanted = {one.key: one for one in (*([prefix] if prefix else []), *chunks) if one.token_ids}
        stored = self.store.open_all([key for key in wanted if key not in records])
        for key, segment in wanted.items():  # in the order of the prompt
            if key in stored and self._is_of(stored[key], segment):
                records[key] = stored[key]
        opened += records.values()
        return Lookup(fit, split, StoredSegments(prefix, chunks, records), kept, opened)

    def _located(
        self, chunk: TokenizedChunk, ids: tuple[int, ...], context: tuple[int, ...] | None, regime: int
    ) -> Segment:
        """The segment of a chunk as it stands in a prompt; ids that it has nowhere else are a record of their own."""
        own = self.tokenizer.chunk(chunk.text)
        behind = self.tokenizer.context_ids(chunk.text) if context is None else context
        usual = self._chunk(behind, own.head, own.ids, regime)
        if chunk.usual:
            return usual
        segment = self._chunk(behind, (), ids, regime)
        return dataclasses.replace(segment, key=f"{usual.key}{OTHER_FORM}{segment.key}")

    def _is_of(self, record: StoredKV, segment: Segment) -> bool:
        """Whether a record is of a segment; one that is not is closed and erased."""
        # Contexts are no part of the key, so they are not compared.
        if dataclasses.replace(record.info, behind=()) == self.record_info(segment):
            return True
        _log.warning("KV record %s is of another segment or model and counts as a miss", segment.key)
        record.close()
        discard(self.store, segment.key)
        return False

    def _layers(
        self,
        lookup: Lookup,
        found: StoredSegments,
        clock: ReadClock,
        cancelled: Callable[[], bool],
        shared: SharedKV | None,
    ) -> TimedIterator:
        """Stored KV, layer by layer."""
        reader = reader_of(self.adapter, lookup, found, clock, shared)
        ahead = self.config.prefetch and reader.stored_layer_bytes >= _WORTH_A_THREAD
        return TimedIterator(load_as_it_pays(reader) if ahead else load_plainly(reader), cancelled)

    def _plan(self, split: TokenizedPrompt, found: StoredSegments) -> FusionPlan:
        """Sort the stored segments into exact and reused ones."""
        exact: list[range] = []
        reused: list[range] = []
        unrotated: list[Span] = []
        if found.prefix is not None and found.prefix.key in found.records:
            exact.append(_range(split.prefix))
        for span, segment in zip(split.chunks, found.chunks, strict=True):
            if segment.key not in found.records:
                continue
            unrotated.append(span)
            in_place = segment.exact_in_place and split.input_ids[: span.start] == segment.context_ids
            if in_place:
                exact.append(_range(span))
            else:
                reused.append(_range(span))
        rotate = range(unrotated[0].start, unrotated[-1].stop) if unrotated else range(0)
        question = _range(split.suffix) if len(split.suffix) else None
        return FusionPlan(split.input_ids, exact, reused, rotate, question)

    def _fused(self, split: TokenizedPrompt, found: StoredSegments, fusion: Fusion, choice: RatioChoice) -> FusedKV:
        read = tuple(segment.key in found.records for segment in found.chunks)
        hits = [span for span, hit in zip(split.chunks, read, strict=True) if hit]
        prefix_hit = found.prefix is not None and found.prefix.key in found.records
        report = dataclasses.replace(
            self._counts(split),
            hits=len(hits),
            misses=len(split.chunks) - len(hits),
            chunk_tiers=tuple(found.tier(segment.key) for segment in found.chunks),
            prefix_hit=prefix_hit,
            reused_tokens=sum(map(len, hits)) + (len(split.prefix) if prefix_hit else 0),
            recomputed_tokens=fusion.recomputed_tokens,
            computed_tokens=tuple(map(len, fusion.computed)),
            work=work_share(self.adapter.shape, len(split.input_ids), fusion.done),
            recompute_ratio=choice.ratio,
            expected=choice.expected,
        )
        cache = self.adapter.new_cache(fusion.layers)
        ids = list(split.input_ids)
        return FusedKV(cache, fusion.logits, ids, fusion.computed, fusion.deviation, report, fusion.done)

    def _counts(self, split: TokenizedPrompt) -> BlendReport:
        return BlendReport(
            input_ids=split.input_ids,
            prefix_tokens=len(split.prefix),
            chunk_tokens=split.chunk_tokens,
            suffix_tokens=len(split.suffix),
        )

    def _write_back(self, split: TokenizedPrompt, found: StoredSegments, fusion: Fusion) -> dict[str, Job]:
        """Jobs that compute and store each missing segment."""
        if not self._ratio_policy.rule.reads_store or self.config.write_back == "off":
            return {}
        jobs: dict[str, Job] = {}
        prefix = found.prefix
        if prefix is not None and prefix.key not in found.records:
            # Nothing stands before the prefix, so the pass has just computed its exact KV.
            kv = _first_rows(fusion.layers, len(prefix.token_ids))
            held = sum(tensor.nbytes for tensor in kv.keys + kv.values)
            jobs[prefix.key] = Job(lambda: self.store.put(prefix.key, self._record(prefix, kv)), held)
        contexts = self.contexts([chunk.text for chunk in split.located])
        for segment in found.chunks:
            if segment.token_ids and segment.key not in found.records:
                behind = dataclasses.replace(segment, contexts=contexts if segment.averaged else None)
                jobs[segment.key] = Job(
                    partial(self.compute_and_store, [behind]), info=partial(self.record_info, behind)
                )
        return jobs

    def compute_and_store(self, segments: Sequence[Segment]) -> dict[str, bool | None]:
        """Store what is missing of segments as `compute` takes them; see `compute_if_missing`."""
        return compute_if_missing(self.store, {segment.key: segment for segment in segments}, self.compute)

    def _record(self, segment: Segment, kv: SegmentKV) -> KVRecord:
        return KVRecord(self.record_info(segment), kv)


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


def _numbers(segment: Segment) -> tuple[int, ...]:
    """The contexts of a segment: those of `Contexts`, then the learned one."""
    behind = segment.contexts
    neighbours, learned = (behind.of(segment.token_ids), len(behind.ids)) if behind is not None else ((), 0)
    return (*neighbours, learned) if segment.learned else neighbours


def _learned_context(store: KVStore, fingerprint: str, adapter: ModelAdapter) -> LearnedContext | None:
    """The learned context beside this store; one that cannot be used is logged, and counts as none."""
    try:
        return kept_context(store.folder, fingerprint, adapter)
    except StoreError as error:
        _log.warning("%s", error)
        return None


def _range(span: Span) -> range:
    return range(span.start, span.stop)


def _first_rows(layers: tuple[LayerKV, ...], tokens: int) -> SegmentKV:
    """A copy of the first positions of a fused prompt, keys rotated, where the prompt is: a store moves it."""
    keys = tuple(layer.keys[0, :, :tokens].clone() for layer in layers)
    values = tuple(layer.values[0, :, :tokens].clone() for layer in layers)
    return SegmentKV(keys, values, rotated=True)
