"""Prompt cache: KV of the last prompts and their answers, in memory.

A prompt that begins as one of them goes on from there. So the steps of an agent and the turns of a chat compute only
what is new in them. What a full prefill gave serves every prompt. What a blended pass gave serves the next turn of the
same conversation alone: its recomputed rows were chosen for a question that the next turn still holds.

A recurrent layer keeps one state of all that it has read, and nothing can be cut off from that. So of a model that is
answered plainly, states behind beginnings of prompts are kept. They serve prompts that begin with all these ids.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from cacheblend_rag.config import BlendConfig, options_of
from cacheblend_rag.engine.ratio_policy import RatioPolicy
from cacheblend_rag.engine.segments import Kind, Segment, Segments
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.cache import first_rows, held_bytes, tokens_read
from cacheblend_rag.models.identity import fingerprint_in
from cacheblend_rag.models.kv import Prefilled
from cacheblend_rag.models.memory import is_out_of_memory, total_memory
from cacheblend_rag.prompt import Span, TokenizedPrompt
from cacheblend_rag.prompt.tokenizer import common_length
from cacheblend_rag.store.base import RecordInfo, StoredKV

_log = logging.getLogger(__name__)
# A pass over so few rows is bound by reading the weights, so going on from fewer tokens saves nothing.
_LEAST = 32
LEAST_STATE = 16
"""Tokens of the shortest beginning whose states are kept: fewer are sooner read than copied."""
# Prompts whose beginnings are compared with that of a new one.
_REMEMBERED = 32
# Of "auto": most bytes, and the share of memory that they may be.
_MOST, _SHARE = 2**30, 16
# Key, among the records that a prompt reads, of what it goes on from.
_KEPT_KEY = "prompt cache"
# Settings on which the KV of a blended prompt depends, apart from its ids and the model.
_BLENDED_BY = tuple(option.name for option in options_of(BlendConfig) if option.of_kv)

Holds = Callable[[Collection[str], Sequence[int]], bool]
"""Whether a prompt of some chunk texts and ids holds something that was forgotten."""


@dataclass(frozen=True)
class PromptKind:
    """All that a prompt must have in common with a kept one, ids apart.

    Parameters
    ----------
    salt : str
        Tenant.
    fingerprint : str
        Identity of the model, within the frequency regime of the prompt.
    rule : str
        How prompts are blended. KV of a full prefill does not depend on it.
    """

    salt: str
    fingerprint: str
    rule: str


@dataclass(frozen=True, eq=False)
class KeptPrompt:
    """A prompt with its answer.

    Parameters
    ----------
    kind : PromptKind
    token_ids : tuple of int
    prompt_tokens : int
        How many of them are the prompt's.
    exact_tokens : int
        How many of the first have the KV of a full prefill.
    texts : frozenset of str
        Its chunks.
    cache : transformers Cache
        KV of these ids; of sliding layers perhaps that of the last alone. Nobody writes to it.
    state : bool
        Whether it holds states: it is copied for a prompt that goes on from it, and never cut.
    """

    kind: PromptKind
    token_ids: tuple[int, ...]
    prompt_tokens: int
    exact_tokens: int
    texts: frozenset[str]
    cache: Any
    state: bool = False

    def usable(self, kind: PromptKind, ids: Sequence[int], chunks: Sequence[Span], exact: bool) -> int:
        """First tokens that a prompt can go on from; see `PromptCache.find`."""
        if (kind.salt, kind.fingerprint) != (self.kind.salt, self.kind.fingerprint):
            return 0
        tokens = common_length(ids[:-1], self.token_ids)
        if self.state:
            return tokens if tokens == len(self.token_ids) else 0
        # The same prompt computes its last token anew.
        asked_again = not exact and kind.rule == self.kind.rule and tokens >= self.prompt_tokens - 1
        tokens = tokens if asked_again else min(tokens, self.exact_tokens)
        tokens = min([tokens, *(span.start for span in chunks if span.start < tokens < span.stop)])
        # A layer that has lost its first rows is no use to a blended pass.
        uncut = self.whole or (exact and tokens == len(self.token_ids))
        return tokens if tokens >= _LEAST and uncut else 0

    @property
    def whole(self) -> bool:
        """Whether every layer has all rows, so that they can be cut anywhere."""
        return not self.state and all(layer.keys.shape[2] == len(self.token_ids) for layer in self.cache.layers)

    def stands_for(self, other: KeptPrompt) -> bool:
        """Whether it serves every prompt that another one does, or goes on where only the whole other one could."""
        if (other.whole and not self.whole) or (self.state and self.token_ids != other.token_ids):
            return False
        if (self.kind.salt, self.kind.fingerprint) != (other.kind.salt, other.kind.fingerprint):
            return False
        alike = self.kind.rule == other.kind.rule or self.exact_tokens >= len(other.token_ids)
        begins = self.token_ids[: len(other.token_ids)] == other.token_ids
        return begins and alike and self.exact_tokens >= other.exact_tokens


class PromptCache:
    """The last prompts of an engine and its views: ``engine.prompts``. Those used least recently are dropped first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[KeptPrompt] = []  # the one used last is the last
        self._tickets: weakref.WeakSet[Ticket] = weakref.WeakSet()
        self._asked: list[tuple[PromptKind, tuple[int, ...]]] = []
        self._closed = False
        self.tenants: Callable[[], int] = lambda: 1
        """How many there are. Each has an even part, and no more while others ask nothing: that would show."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that they take."""
        return sum(held_bytes(one.cache) for one in list(self._kept))

    def begin(self, ticket: Ticket) -> None:
        """Tell a prompt's ticket from now on what is forgotten."""
        with self._lock:
            self._tickets.add(ticket)

    def find(
        self, kind: PromptKind, ids: Sequence[int], chunks: Sequence[Span] = (), exact: bool = True
    ) -> tuple[KeptPrompt, int] | None:
        """The kept prompt that most can be gone on from, and with how many tokens.

        Parameters
        ----------
        kind : PromptKind
        ids : sequence of int
            The prompt. Its last token is always computed.
        chunks : sequence of Span
            None of them is cut in two.
        exact : bool
            Whether only the KV of a full prefill will do.
        """
        best: tuple[int, bool] = 0, False
        found = None
        with self._lock:
            for one in self._kept:
                if one.token_ids[: best[0]] != tuple(ids[: best[0]]):
                    continue
                tokens = one.usable(kind, ids, chunks, exact)
                if tokens and (tokens, tokens <= one.exact_tokens) >= best:
                    best, found = (tokens, tokens <= one.exact_tokens), one
            if found is not None:
                self._kept.remove(found)
                self._kept.append(found)
        return None if found is None else (found, best[0])

    def keep(self, prompt: KeptPrompt, limit: int, forgotten: Sequence[Holds] = ()) -> None:
        """Keep a prompt in place of those that it stands for.

        Parameters
        ----------
        prompt : KeptPrompt
        limit : int
            Bytes that all may take, each tenant its part of them.
        forgotten : sequence of callable
            Say what was forgotten since the prompt came; with some of that, it is not kept.
        """
        with self._lock:
            most = limit // self.tenants()
            gone = any(holds(prompt.texts, prompt.token_ids) for holds in forgotten)
            if self._closed or gone or held_bytes(prompt.cache) > most:  # for one too large, no others are dropped
                return
            if any(one.whole and one.stands_for(prompt) for one in self._kept):
                return
            kept = [one for one in self._kept if not prompt.stands_for(one)] + [prompt]
            for salt, bound in ((prompt.kind.salt, most), (None, limit)):
                held = [one for one in kept if salt in (None, one.kind.salt)]
                while sum(held_bytes(one.cache) for one in held) > bound:
                    kept.remove(held.pop(0))
            self._kept = kept

    def repeated(self, kind: PromptKind, ids: Sequence[int]) -> int:
        """Number of first tokens that a prompt shares with a recent one; the prompt then counts as recent."""
        with self._lock:
            found = max((common_length(ids, known) for of, known in self._asked if of == kind), default=0)
            mine = [one for one in self._asked if one[0].salt == kind.salt]
            for one in mine[: max(0, len(mine) + 1 - max(1, _REMEMBERED // self.tenants()))]:
                self._asked.remove(one)  # never another tenant's, however many there are
            self._asked.append((kind, tuple(ids)))
        return found

    def drop(self, salt: str | None, holds: Holds = lambda texts, ids: True) -> None:
        """Drop those of a tenant that hold something, by default all, and keep none of them that is being answered.

        Without a salt, those of every tenant.
        """

        def goes(one: KeptPrompt) -> bool:
            return salt in (None, one.kind.salt) and holds(one.texts, one.token_ids)

        with self._lock:
            for ticket in self._tickets:
                if salt in (None, ticket.kind.salt):
                    ticket.forgotten.append(holds)
            self._kept = [one for one in self._kept if not goes(one)]
            self._asked = [one for one in self._asked if salt not in (None, one[0].salt)]

    def close(self) -> None:
        """Drop all, and keep nothing any more."""
        with self._lock:
            self._closed, self._kept = True, []
            self._asked.clear()


@dataclass(frozen=True)
class Begun:
    """The kept prompt that a prompt goes on from.

    Parameters
    ----------
    split : TokenizedPrompt
        The prompt, with all of that as its prefix.
    segment : Segment
        These first tokens.
    record : StoredKV
        Their KV, keys rotated.
    cache : transformers Cache
        KV of the kept prompt.
    exact_tokens : int
        How many of its first tokens have the KV of a full prefill.
    """

    split: TokenizedPrompt
    segment: Segment
    record: StoredKV
    cache: Any
    exact_tokens: int

    @property
    def tokens(self) -> int:
        """Number of tokens that are reused."""
        return len(self.split.prefix)

    @property
    def exact(self) -> bool:
        """Whether they have the KV of a full prefill."""
        return self.exact_tokens >= self.tokens

    def new_cache(self) -> Any:
        """A cache that holds their KV; what is added to it is written elsewhere."""
        return first_rows(self.cache, self.tokens)


class Ticket:
    """A prompt's access to the prompt cache: finds a kept prompt to continue, and keeps this prompt with its answer.

    Parameters
    ----------
    cache : PromptCache
    segments : Segments
        They know the model and the options.
    policy : RatioPolicy
        It knows how prompts are blended.
    tokens : int
        Of the prompt.
    """

    def __init__(self, cache: PromptCache, segments: Segments, policy: RatioPolicy, tokens: int) -> None:
        self._cache, self._segments, self._policy = cache, segments, policy
        adapter = self._adapter = segments.model.adapter
        fingerprint = fingerprint_in(segments.model.fingerprint, adapter.regime(tokens) or 0)
        options = {name: getattr(policy.config, name) for name in sorted(_BLENDED_BY)}
        options["condition"] = segments.condition  # that chunks are computed behind
        options["selection_options"] = sorted(policy.config.selection_options.items())
        self.kind = PromptKind(segments.config.salt, fingerprint, repr(options))
        self.forgotten: list[Holds] = []
        """Say what was forgotten since the prompt came."""
        limit = segments.config.prompt_cache
        self._limit = _auto_limit(adapter.device) if isinstance(limit, str) else limit
        # Where rows depend on one another, no pass over some of them gives what one over all would.
        cannot = not adapter.plain_reason and (adapter.mixes_rows or not adapter.reusable(tokens))
        if cannot or not policy.rule.reads_store:
            self._limit = 0
        if self._limit:
            cache.begin(self)

    def find(self, split: TokenizedPrompt, *, exact: bool = False, aligned: bool = False) -> Begun | None:
        """The kept prompt with the longest common beginning.

        Parameters
        ----------
        split : TokenizedPrompt
        exact : bool
            True for a prefill, which needs the KV of a full prefill and may continue within a chunk, because no record
            is read. Otherwise no chunk is divided.
        aligned : bool
            Whether the prefill must give the same rounding as a full one.
        """
        ids, chunks = split.input_ids, () if exact else split.chunks
        found = self._cache.find(self.kind, ids, chunks, exact) if self._limit else None
        if found is None:
            return None
        kept, tokens = found
        if aligned and not (tokens := self._segments.model.blended.aligned(tokens)):
            return None
        model, regime = self._segments.model, self._adapter.regime(len(ids)) or 0
        segment = Segment(Kind.BEGINNING, (), ids[:tokens], _KEPT_KEY, regime, model=model.fingerprint)
        record = _InMemory(self._segments.info(segment), model.blended, kept.cache)
        resumed = dataclasses.replace(
            split,
            prefix=Span(0, tokens),
            # A chunk that this cuts in two is no part of it.
            located=tuple(one for one in split.located if one.span.start >= tokens or one.span.stop > tokens),
            suffix=Span(max(tokens, split.suffix.start), max(tokens, split.suffix.stop)),
        )
        return Begun(resumed, segment, record, kept.cache, kept.exact_tokens)

    def exact_cache(self, ids: Sequence[int]) -> Any:
        """A cache with the KV that a full prefill gives to the first of some ids; None without any."""
        found = self._cache.find(self.kind, ids) if self._limit else None
        tokens = 0 if found is None else self._segments.model.blended.aligned(found[1])
        return first_rows(found[0].cache, tokens) if found is not None and tokens else None

    def keep(
        self, split: TokenizedPrompt, answer_ids: Sequence[int], cache: Any, exact_tokens: int | None = None
    ) -> None:
        """Keep a prompt with its answer.

        Parameters
        ----------
        split : TokenizedPrompt
            The whole prompt, as it was given.
        answer_ids : sequence of int
        cache : transformers Cache
            KV of prompt and answer, perhaps without the last token. It is taken over.
        exact_tokens : int, optional
            How many of the first tokens have the KV of a full prefill; by default all, and those of the answer if its
            steps compute as a prefill does.
        """
        if not self._limit:
            return
        prompt, ids = split.input_ids, (*split.input_ids, *answer_ids)
        ids = ids[: cache.get_seq_length()]
        regime = self._adapter.regime
        if regime(len(ids)) != regime(len(prompt)) or len(ids) < max(_LEAST, len(prompt)):
            return
        if (rows := self._segments.model.blended.at_rest(cache, len(ids))) is None:
            _log.debug("a prompt of %d tokens is not kept: its cache cannot be cut", len(prompt))
            return
        exact = exact_tokens
        if exact is None:
            exact = len(ids) if self._adapter.steps_as_prefill else len(prompt)
        texts = frozenset(chunk.text for chunk in split.located)
        self._keep(KeptPrompt(self.kind, ids, len(prompt), exact, texts, rows))

    def prefill(
        self,
        split: TokenizedPrompt,
        between: Callable[[float, int], object] | None = None,
        each_layer: Callable[[], object] | None = None,
    ) -> tuple[int, Prefilled]:
        """The prefill of a model that is answered plainly, and the tokens whose states it went on from.

        States are kept behind the prompt's prefix, and behind what an earlier prompt began with: instructions that
        nobody marked as a prefix, or a conversation whose last answer stands there in other tokens, such as without its
        thoughts.

        Parameters
        ----------
        split : TokenizedPrompt
        between, each_layer
            As for `PlainAdapter.prefill`.

        Returns
        -------
        int, Prefilled
            Without a cache, where the model's own generation has yet to make it.
        """
        ids, adapter = split.input_ids, self._adapter
        if adapter.goes_on == "whole":
            return 0, Prefilled(None, torch.empty(0))
        if not self._limit or adapter.goes_on == "steps":
            return 0, adapter.prefill(ids, between, each_layer)
        found = self._cache.find(self.kind, ids)
        start = resumed = 0 if found is None else found[1]
        cache = adapter.empty_cache() if found is None else copy.deepcopy(found[0].cache)
        for stop in sorted({split.prefix.stop, self._cache.repeated(self.kind, ids[:-1])}):
            if start < stop < len(ids) and stop >= LEAST_STATE:
                adapter.go_on(cache, ids[start:stop], between, each_layer)
                self._keep_state(split, ids[:stop], cache)
                start = stop
        return resumed, adapter.go_on(cache, ids[start:], between, each_layer)

    def keep_turn(self, split: TokenizedPrompt, answer_ids: Sequence[int], cache: Any) -> None:
        """Keep the states after a finished turn: prompt and answer without the last token, which was not read.

        Parameters
        ----------
        split : TokenizedPrompt
        answer_ids : sequence of int
            Empty after a thought: the cache contains the thought, but states do not show it.
        cache : transformers Cache
            The cache after the answer.
        """
        ids = (*split.input_ids, *answer_ids[:-1])
        read = answer_ids and self._adapter.goes_on == "slices" and tokens_read(cache, len(ids)) == len(ids)
        if self._limit and read:
            self._keep_state(split, ids, cache)

    def _keep_state(self, split: TokenizedPrompt, ids: tuple[int, ...], cache: Any) -> None:
        """Keep a copy of a cache that has read these ids, and nothing else."""
        if len(ids) < LEAST_STATE or held_bytes(cache) > self._limit // self._cache.tenants():
            return
        try:
            copied = copy.deepcopy(cache)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            _log.warning("%d tokens are not kept, since memory ran out: %s", len(ids), error)
            return
        texts = frozenset(chunk.text for chunk in split.located if chunk.span.start < len(ids))
        self._keep(KeptPrompt(self.kind, ids, len(ids), len(ids), texts, copied, state=True))

    def _keep(self, prompt: KeptPrompt) -> None:
        self._cache.keep(prompt, self._limit, self.forgotten)


class _InMemory(StoredKV):
    """The first tokens of a kept prompt, as a blended pass reads them."""

    tier = "memory"

    def __init__(self, info: RecordInfo, adapter: ModelAdapter, cache: Any) -> None:
        self.info, self._adapter, self._cache = info, adapter, cache

    def read_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        (kv,) = self._adapter.layers_of([self._cache.layers[layer]])
        return kv.keys[0, :, : self.info.tokens], kv.values[0, :, : self.info.tokens]


@lru_cache
def _auto_limit(device: torch.device) -> int:
    """Bytes that ``"auto"`` stands for: 1 GiB, or a sixteenth of the device's memory if that is less."""
    if device.type == "cuda":
        total: int | None = torch.cuda.get_device_properties(device).total_memory
    else:
        total = total_memory()
    return _MOST if total is None else min(_MOST, total // _SHARE)
