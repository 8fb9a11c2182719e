"""Checkpoints: KV and states behind beginnings of prompts, for models that are answered plainly.

A recurrent layer keeps one state of all that it has read, and nothing can be cut off from that. So a checkpoint is of
use to prompts that begin with all the ids that it is behind. Checkpoints lie in memory, on the model's device.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cacheblend_rag.engine.prompt_cache import Holds, next_to_go
from cacheblend_rag.models.cache import held_bytes, tokens_read
from cacheblend_rag.models.kv import Prefill
from cacheblend_rag.models.memory import is_out_of_memory
from cacheblend_rag.models.plain import PlainAdapter
from cacheblend_rag.prompt import TokenizedPrompt
from cacheblend_rag.prompt.tokenizer import common_length

_log = logging.getLogger(__name__)
MEMORY_BYTES = 2**30
"""Most bytes that the checkpoints of an engine and of its views take."""
# A beginning of fewer tokens is sooner read than copied.
LEAST_TOKENS = 16
# Prompts whose beginnings are compared with that of a new one.
_REMEMBERED = 32


@dataclass(frozen=True)
class Owner:
    """Whose checkpoints are found: those of one model, and of one tenant.

    Parameters
    ----------
    fingerprint : str
        Identity of the model, with its adapters.
    salt : str
        Tenant.
    """

    fingerprint: str
    salt: str


@dataclass(frozen=True)
class _Checkpoint:
    """A cache that nobody writes to: it is copied when it is kept, and again when it is found."""

    cache: Any
    nbytes: int
    texts: frozenset[str]


class Checkpoints:
    """The latest checkpoints, as many as their bytes allow.

    Parameters
    ----------
    most_bytes : int
        Those that were used least lately go first.
    """

    def __init__(self, most_bytes: int = MEMORY_BYTES) -> None:
        self._most_bytes, self._lock = most_bytes, threading.Lock()
        self._held: OrderedDict[tuple[Owner, tuple[int, ...]], _Checkpoint] = OrderedDict()
        self._prompts: deque[tuple[Owner, tuple[int, ...]]] = deque(maxlen=_REMEMBERED)
        self._times_forgotten = Counter[str | None]()

    @property
    def nbytes(self) -> int:
        """Bytes that they take."""
        with self._lock:
            return sum(one.nbytes for one in self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def find(self, owner: Owner, ids: Sequence[int]) -> tuple[Any, int] | None:
        """A copy of the cache behind the longest kept beginning of a prompt, and the tokens of that.

        The last token of the prompt is no part of it: its logits are still to be computed.
        """
        with self._lock:
            lengths = sorted({len(known) for of, known in self._held if of == owner and len(known) < len(ids)})
            for length in reversed(lengths):
                key = (owner, tuple(ids[:length]))
                if key in self._held:
                    self._held.move_to_end(key)
                    found = self._held[key]
                    break
            else:
                return None
        return copy.deepcopy(found.cache), length

    def times_forgotten(self, salt: str) -> int:
        """How often chunks of a tenant were forgotten; see `keep`."""
        return self._times_forgotten[salt] + self._times_forgotten[None]

    def keep(
        self,
        owner: Owner,
        ids: Sequence[int],
        cache: Any,
        texts: Iterable[str] = (),
        times_forgotten: int | None = None,
    ) -> None:
        """Keep a copy of a cache that has read these ids, and nothing else.

        Parameters
        ----------
        owner : Owner
        ids : sequence of int
        cache : transformers Cache
        texts : iterable of str
            Chunks among them; it goes when one of these is forgotten.
        times_forgotten : int, optional
            As `times_forgotten` gave it when the prompt came. Nothing is kept if chunks were forgotten since.
        """
        if len(ids) < LEAST_TOKENS or held_bytes(cache) > self._most_bytes:
            return
        try:
            copied = copy.deepcopy(cache)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            _log.warning("%d tokens are not kept, since memory ran out: %s", len(ids), error)
            return
        kept = _Checkpoint(copied, held_bytes(copied), frozenset(texts))
        with self._lock:
            if times_forgotten not in (None, self.times_forgotten(owner.salt)):
                return
            self._held[owner, tuple(ids)] = kept
            self._held.move_to_end((owner, tuple(ids)))
            while len(self._held) > 1 and sum(one.nbytes for one in self._held.values()) > self._most_bytes:
                salts = [of.salt for of, _ in self._held]
                del self._held[list(self._held)[next_to_go(salts, [one.nbytes for one in self._held.values()])]]

    def repeated(self, owner: Owner, ids: Sequence[int]) -> int:
        """Tokens at its beginning that a prompt shares with one of the last ones; from now on it is one of them."""
        with self._lock:
            found = max((common_length(ids, known) for of, known in self._prompts if of == owner), default=0)
            self._prompts.append((owner, tuple(ids)))
        return found

    def drop(self, salt: str | None, holds: Holds = lambda texts, ids: True) -> None:
        """Drop those of a tenant that hold something, by default all; without a salt, those of every tenant."""
        with self._lock:
            self._times_forgotten[salt] += 1
            self._prompts = deque((one for one in self._prompts if salt not in (None, one[0].salt)), _REMEMBERED)
            held = [(key, one.texts) for key, one in self._held.items() if salt in (None, key[0].salt)]
            for key, texts in held:
                if holds(texts, key[1]):
                    del self._held[key]

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            self._held.clear()
            self._prompts.clear()


def begin_prompt(
    checkpoints: Checkpoints | None,
    owner: Owner,
    adapter: PlainAdapter,
    split: TokenizedPrompt,
    between: Callable[[float], object] | None = None,
    each_layer: Callable[[], object] | None = None,
) -> tuple[int, Prefill]:
    """The prefill of a prompt, and the tokens of the checkpoint that it went on from; one is kept behind its prefix.

    One is kept, too, behind what an earlier prompt began with: instructions that nobody marked as a prefix, or a
    conversation whose last answer stands there in other tokens, such as without its thoughts.

    Parameters
    ----------
    checkpoints : Checkpoints or None
        None if nothing is to be reused.
    owner, adapter
    split : TokenizedPrompt
    between, each_layer
        As for `PlainAdapter.prefill`.

    Returns
    -------
    int, Prefill
        Without a cache, where the model's own generation has yet to make it.
    """
    ids, times = split.input_ids, 0 if checkpoints is None else checkpoints.times_forgotten(owner.salt)
    if adapter.goes_on == "whole":
        return 0, Prefill(None, torch.empty(0))
    if checkpoints is None or adapter.goes_on == "steps":
        return 0, adapter.prefill(ids, between, each_layer)
    cache, resumed = checkpoints.find(owner, ids) or (adapter.empty_cache(), 0)
    start = resumed
    for stop in sorted({split.prefix.stop, checkpoints.repeated(owner, ids[:-1])}):
        if start < stop < len(ids) and stop >= LEAST_TOKENS:
            adapter.go_on(cache, ids[start:stop], between, each_layer)
            checkpoints.keep(owner, ids[:stop], cache, _texts(split, stop), times)
            start = stop
    return resumed, adapter.go_on(cache, ids[start:], between, each_layer)


def keep_turn(
    checkpoints: Checkpoints,
    owner: Owner,
    adapter: PlainAdapter,
    split: TokenizedPrompt,
    answer_ids: Sequence[int],
    cache: Any,
    times_forgotten: int,
) -> None:
    """Keep a checkpoint behind a finished turn: a prompt and its answer, whose last token was never read.

    Parameters
    ----------
    checkpoints, owner, adapter
    split : TokenizedPrompt
    answer_ids : sequence of int
        None if a thought stood before them: the cache has read it, and states alone do not say so.
    cache : transformers Cache
        As it is after the answer.
    times_forgotten : int
        See `Checkpoints.keep`.
    """
    ids = (*split.input_ids, *answer_ids[:-1])
    if answer_ids and adapter.goes_on == "slices" and tokens_read(cache, len(ids)) == len(ids):
        checkpoints.keep(owner, ids, cache, _texts(split, len(ids)), times_forgotten)


def _texts(split: TokenizedPrompt, tokens: int) -> list[str]:
    """Chunks that begin within the first tokens of a prompt."""
    return [chunk.text for chunk in split.located if chunk.span.start < tokens]
