"""Segments: pieces of text whose KV is stored. Their identity, their keys, and computing them."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.backends import ModelInUse
from cacheblend_rag.errors import PromptError, StoreError
from cacheblend_rag.models.adapter import ContextKV
from cacheblend_rag.models.identity import fingerprint_in
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.prompt import FittedPrompt, PromptTokenizer, TokenizedChunk, TokenizedPrompt
from cacheblend_rag.prompt.contexts import CONTEXTS, Contexts, context_tokens, contexts_beside
from cacheblend_rag.prompt.finder import Finder
from cacheblend_rag.store.base import KVRecord, RecordInfo, record_key

_log = logging.getLogger(__name__)


class Kind(StrEnum):
    """Kinds of segments. A key has four parts: the kind, the tenant, the text, and the record's own."""

    CHUNK = "chunk"
    FOUND = "found"
    """A chunk that was found because its text repeats: nobody named it, so any text that it shares erases it."""
    VARIANT = "variant"
    """A chunk as an earlier prompt left it."""
    PREFIX = "prefix"
    BEGINNING = "beginning"
    """The beginning that a prompt has in common with one in memory; never stored."""


def tenants_keys(kind: Kind, salt: str) -> str:
    """Beginning of the keys of a tenant's records of a kind."""
    return f"{kind}-{hashlib.sha256(salt.encode()).hexdigest()[:16]}-"


def texts_keys(kind: Kind, salt: str, ids: Sequence[int]) -> str:
    """Common prefix of the keys of a text's records of one kind, for all models, contexts and forms.

    Parameters
    ----------
    kind : Kind
    salt : str
        Of the tenant.
    ids : sequence of int
        Token ids of the text alone.
    """
    digest = hashlib.sha256(salt.encode() + b"\0" + array("q", ids).tobytes())
    return f"{tenants_keys(kind, salt)}{digest.hexdigest()[:32]}-"


@dataclass(frozen=True)
class Segment:
    """A piece of text whose KV is stored.

    Parameters
    ----------
    kind : Kind
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
        Any other is that of a full prefill where its context ids are all that stands before it.
    contexts : Contexts or None
        These contexts, where it is to be computed.
    before : tuple of str
        Of a variant; see `RecordInfo.before`.
    usual : Segment or None
        Of a variant, the segment under which the chunk is stored otherwise.
    """

    kind: Kind
    context_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    key: str
    regime: int = 0
    head: int = 0
    model: str = ""
    averaged: bool = False
    contexts: Contexts | None = None
    before: tuple[str, ...] = ()
    usual: Segment | None = None

    @property
    def tokens(self) -> int:
        """Tokens of its context and of itself."""
        return len(self.context_ids) + len(self.token_ids)

    @property
    def shared_ids(self) -> tuple[int, ...]:
        """The part of its context that other segments have in common with it."""
        return self.context_ids[: len(self.context_ids) - self.head]

    @property
    def own_ids(self) -> tuple[int, ...]:
        """Ids that are computed after `shared_ids`: the rest of the context, then the segment's own."""
        return self.context_ids[len(self.context_ids) - self.head :] + self.token_ids

    @property
    def passes(self) -> tuple[object, ...]:
        """Equal for segments that one pass can compute; see `Segments.compute`."""
        return self.shared_ids, self.regime, id(self.contexts)


@dataclass(frozen=True)
class Segments:
    """Describes and computes the segments of one model under some options.

    Parameters
    ----------
    model : ModelInUse
    tokenizer : PromptTokenizer
    config : BlendConfig
    condition : str
        The condition that chunks are computed after, with ``"auto"`` resolved.
    latest : dict
        The contexts that chunks were computed behind last, by model and digest, as more of their chunks may come.
        Shared by all views of an engine.
    finder : Finder or None
        Finds further chunks in prompts; also shared.
    """

    model: ModelInUse
    tokenizer: PromptTokenizer
    config: BlendConfig
    condition: str
    latest: dict[tuple[str, str], ContextKV] = field(default_factory=dict)
    finder: Finder | None = None

    # Identity ------------------------------------------------------------------------------

    def describe(
        self,
        kind: Kind,
        context_ids: tuple[int, ...],
        token_ids: tuple[int, ...],
        regime: int = 0,
        head: int = 0,
        text_ids: Sequence[int] | None = None,
    ) -> Segment:
        """The segment with its key; ``text_ids`` are those that its text has by itself, if they are others."""
        averaged = kind in (Kind.CHUNK, Kind.FOUND) and self.condition == "context"
        model = self.model.fingerprint
        own = record_key(
            fingerprint=fingerprint_in(model, regime),
            salt=self.config.salt,
            kind=kind,
            context_ids=context_ids,
            token_ids=token_ids,
            contexts=CONTEXTS * averaged,
        )
        key = texts_keys(kind, self.config.salt, token_ids if text_ids is None else text_ids) + own
        return Segment(kind, context_ids, token_ids, key, regime, head, model, averaged)

    def chunk(self, text: str, prefix: str = "") -> Segment | None:
        """The segment of a chunk, or None if the text is too short to have one.

        Parameters
        ----------
        text : str
        prefix : str
            Matters only if chunks are computed behind it.
        """
        forms = self.forms(text, prefix)
        if not forms:
            return None
        regime = self.model.adapter.regime(forms[0].tokens) or 0
        return next(form for form in forms if form.regime == regime)

    def forms(self, text: str, prefix: str = "") -> list[Segment]:
        """All segments that may store a chunk, one for each frequency regime; empty if it is too long."""
        try:
            chunk = self.tokenizer.chunk(text)
        except PromptError as error:  # it can be in no prompt either
            _log.warning("a chunk has no KV: %s", error)
            return []
        if not chunk.ids:
            return []
        context = self.tokenizer.context_ids(text, prefix if self.condition == "prefix" else "")
        regimes = self.model.adapter.regimes
        return [self._chunk(Kind.CHUNK, context, chunk.head, chunk.ids, regime, chunk.ids) for regime in regimes]

    def of_prompt(self, fit: FittedPrompt, split: TokenizedPrompt) -> tuple[Segment, ...]:
        """The segments of a prompt's chunks, all or those behind what it goes on from."""
        prefix, regime = fit.split.ids(fit.split.prefix), self.model.adapter.regime(len(split.input_ids)) or 0
        is_behind = self.condition == "prefix" and len(prefix) > len(self.tokenizer.start_ids)
        behind = prefix if is_behind else None
        return tuple(self.located(chunk, split.ids(chunk.span), behind, regime) for chunk in split.located)

    def located(
        self, chunk: TokenizedChunk, ids: tuple[int, ...], behind: tuple[int, ...] | None, regime: int
    ) -> Segment:
        """The segment of a chunk as it stands in a prompt; ids that it has nowhere else are a record of their own.

        Parameters
        ----------
        chunk : TokenizedChunk
        ids : tuple of int
            Its ids there.
        behind : tuple of int or None
            Ids of the prefix, if chunks are computed behind it.
        regime : int
            Of the prompt.
        """
        own = self.tokenizer.chunk(chunk.text)
        behind = self.tokenizer.context_ids(chunk.text) if behind is None else behind
        kind = Kind.FOUND if chunk.found else Kind.CHUNK
        head, ids = (own.head, own.ids) if chunk.usual else ((), ids)
        return self._chunk(kind, behind, head, ids, regime, own.ids)

    def _chunk(
        self,
        kind: Kind,
        context_ids: tuple[int, ...],
        head: tuple[int, ...],
        token_ids: tuple[int, ...],
        regime: int,
        text_ids: tuple[int, ...],
    ) -> Segment:
        # Behind contexts all that stands directly before a chunk is its own.
        own = len(context_ids) * (self.condition == "context") + len(head)
        return self.describe(kind, context_ids + head, token_ids, regime, own, text_ids)

    def info(self, segment: Segment) -> RecordInfo:
        """Info for the record of a segment."""
        adapter, behind = self.model.blended, segment.contexts
        numbers = () if behind is None else behind.numbers_for(segment.token_ids)
        contexts = () if behind is None else sum((behind.ids[at] for at in numbers), ())
        return RecordInfo(
            fingerprint=fingerprint_in(segment.model, segment.regime),
            context_ids=segment.context_ids,
            token_ids=segment.token_ids,
            layers=adapter.num_layers,
            kv_heads=adapter.kv_heads,
            head_dim=adapter.head_dim,
            dtype=str(adapter.dtype).removeprefix("torch."),
            rotated=segment.kind in (Kind.PREFIX, Kind.BEGINNING),
            kind=segment.kind.value,
            contexts=CONTEXTS * segment.averaged,
            behind=contexts,
            before=segment.before if behind is None else ("", *behind.chunks_in(numbers)),
        )

    def record(self, segment: Segment, kv: SegmentKV) -> KVRecord:
        """The record of a segment."""
        return KVRecord(self.info(segment), kv)

    def owns(self, key: str, info: RecordInfo) -> bool:
        """Whether a record belongs to this tenant, and not to another tenant with the same text."""
        own = record_key(
            fingerprint=info.fingerprint,
            salt=self.config.salt,
            kind=info.kind,
            context_ids=info.context_ids,
            token_ids=info.token_ids,
            contexts=info.contexts,
        )
        return key.endswith(own)

    # Computing -----------------------------------------------------------------------------

    def contexts(self, chunks: Sequence[str]) -> Contexts:
        """The contexts of chunks that belong together."""
        sizes = [len(self.tokenizer.chunk(text).ids) for text in chunks]
        tokens = context_tokens(sizes, self.model.adapter.context_window)
        return Contexts(self.tokenizer, chunks, CONTEXTS, tokens)

    def behind_each_other(self, texts: Sequence[str], segments: Sequence[Segment]) -> list[Segment]:
        """Segments with the contexts that they are computed after, which are made of their neighbours.

        Parameters
        ----------
        texts : sequence of str
            Those of the segments.
        segments : sequence of Segment
            In the order of their documents, where they have one.
        """
        window, sizes = self.model.adapter.context_window, [len(segment.token_ids) for segment in segments]
        beside = contexts_beside(self.tokenizer, texts, sizes, CONTEXTS, window)
        return [
            dataclasses.replace(segment, contexts=contexts) if segment.averaged else segment
            for segment, contexts in zip(segments, beside, strict=True)
        ]

    def compute(self, segments: Sequence[Segment]) -> list[KVRecord]:
        """Compute the KV of segments, in one pass for each context.

        Parameters
        ----------
        segments : sequence of Segment
            Segments with the same shared context, or the same contexts, and the same RoPE frequency regime.

        Raises
        ------
        StoreError
            If adapters were switched since the segments' keys were made.
        """
        self._check_model(segments)
        first, ids = segments[0], [segment.own_ids for segment in segments]
        heads = [segment.head for segment in segments]
        with self.model.products():
            if first.contexts is None:
                computed = self.model.blended.segments_kv(first.shared_ids, ids, first.regime, heads)
            else:
                numbers = [first.contexts.numbers_for(segment.token_ids) for segment in segments]
                wanted = self.model.fingerprint, first.contexts.digest
                if wanted not in self.latest:
                    self.latest.clear()
                    self.latest[wanted] = ContextKV(self.model.blended, first.contexts.ids)
                computed = self.latest[wanted].segments_kv(ids, first.regime, heads, numbers)
        self._check_model(segments)
        return [self.record(segment, kv) for segment, kv in zip(segments, computed, strict=True)]

    def _check_model(self, segments: Sequence[Segment]) -> None:
        """Let no KV be stored as that of another adapter."""
        if {segment.model for segment in segments} != {self.model.look()}:
            self.latest.clear()  # contexts that were computed meanwhile are of several adapters
            raise StoreError("the model's adapter was switched before this was computed; warm chunks once it is active")
