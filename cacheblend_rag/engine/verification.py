"""Verification: an answer from blended KV is compared with full prefill and corrected where they differ.

The blended answer is a draft. The prompt is prefilled in full, and the answer is decoded again from that KV, by the
same options and with the same random numbers. As long as the tokens chosen are those of the draft, many are taken in
one pass; from the first other one on they are taken one by one. So the answer at the end is the one that the model
itself gives. VeriCache (arXiv 2605.17613) has this loop for compressed KV. `Verifications` has the answers that are
checked when nothing else waits.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from numbers import Real
from typing import Any

import torch
from transformers import LogitsProcessor

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.decode import DecodedAnswer, DecodeOptions, Step, decode
from cacheblend_rag.engine.pipeline import Pauses
from cacheblend_rag.engine.streaming import AnswerThread, interpreter_ends
from cacheblend_rag.errors import CacheBlendError, ConfigError, GenerationError
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.cache import CacheMark
from cacheblend_rag.prompt.tokenizer import common_length
from cacheblend_rag.report import Verification

_log = logging.getLogger(__name__)
# Tokens of a draft that one pass takes: enough that the weights are read seldom, few enough that others wait little.
_SLICE = 64
# Lead up to which a token counts as tied, as a multiple of the element type's epsilon and of the highest score. Between
# one pass and steps of one token it changed by 15 at most in float32, 2.8 in bfloat16 and 1.4 in float16. In bfloat16
# that would be half a nat, so only scores that are neighbours in the type count as tied.
_ROUNDING = {torch.float32: 32.0, torch.bfloat16: 1.0, torch.float16: 2.0}
# Answers that may wait, and results that are remembered.
_WAITING, _REMEMBERED = 64, 1000


@dataclass(frozen=True)
class CheckedAnswer:
    """An answer that full prefill gives.

    Parameters
    ----------
    decoded : DecodedAnswer
    verification : Verification
    cache : transformers Cache
        Exact KV of the prompt and the answer but for its last token.
    """

    decoded: DecodedAnswer
    verification: Verification
    cache: Any


def check(
    adapter: ModelAdapter,
    tokenizer: Any,
    input_ids: Sequence[int],
    draft: DecodedAnswer,
    options: DecodeOptions,
    *,
    step: Step,
    pauses: Pauses | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    begun: Any = None,
    products: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> CheckedAnswer:
    """Hold an answer against full prefill.

    Parameters
    ----------
    adapter : ModelAdapter
    tokenizer : transformers tokenizer
    input_ids : sequence of int
        Ids of the prompt.
    draft : DecodedAnswer
        Its answer from other KV.
    options : DecodeOptions
        Those of the draft. Where tokens are drawn, with its seed.
    step : callable
        Takes a token once the answer has left the draft; see `decode`.
    pauses : Pauses, optional
        Where others may use the model.
    cancelled : callable
        True once the answer is no longer wanted.
    begun : transformers Cache, optional
        Exact KV of the prompt's beginning; see `ModelAdapter.prefill`.
    products : callable
        Gives a context within which the model multiplies as it does for prompts.

    Returns
    -------
    CheckedAnswer
        Where the model chooses greedily, a token of the draft is kept if the lead of the model's own choice over it is
        no more than rounding explains; see `tie_bound`.

    Raises
    ------
    GenerationError
        If it was cancelled.
    """
    started = time.perf_counter()
    with products():
        exact = adapter.prefill(input_ids, pauses and pauses.between, pauses and pauses.each_layer, begun)
    steps = _DraftSteps(adapter, exact.cache, draft.token_ids, step, pauses)
    ties = _KeptTies(draft.token_ids, len(input_ids), adapter.dtype)
    if not adapter.repeats_exactly and not options.samples(adapter.model, tokenizer):
        options = options.model_copy(update={"logits_processor": [*options.logits_processor, ties]})
    decoded = decode(
        adapter.model,
        tokenizer,
        input_ids=input_ids,
        cache=exact.cache,
        logits=exact.logits,
        options=options,
        cancelled=cancelled,
        step=steps,
        window=adapter.context_window,
    )
    if cancelled():
        raise GenerationError("the answer was given up while it was verified")
    steps.close()
    found = _compared(draft, decoded, ties.kept, time.perf_counter() - started)
    return CheckedAnswer(decoded, found, exact.cache)


def _compared(draft: DecodedAnswer, decoded: DecodedAnswer, ties: int, seconds: float) -> Verification:
    if draft.token_ids == decoded.token_ids:
        kept_tokens, position = len(draft.token_ids), len(draft.text)
        return Verification("verified", kept_tokens, position, ties=ties, seconds=seconds)
    return Verification(
        "corrected",
        kept_tokens=common_length(draft.token_ids, decoded.token_ids),
        position=(kept := common_length(draft.text, decoded.text)),
        before=draft.text[kept:],
        after=decoded.text[kept:],
        ties=ties,
        seconds=seconds,
    )


def tie_bound(scores: torch.Tensor, dtype: torch.dtype) -> float:
    """Lead over another token that rounding alone explains.

    Parameters
    ----------
    scores : Tensor, [vocab], float32
        Scores of all tokens.
    dtype : torch.dtype
        Element type in which the model computes.
    """
    # Of scores that a processor has pushed far down nothing follows.
    return _ROUNDING[dtype] * torch.finfo(dtype).eps * float(scores.max().abs())


class _KeptTies(LogitsProcessor):  # type: ignore[misc]
    """Lets the tokens of a draft win where rounding alone parts them from the model's choice.

    Parameters
    ----------
    draft : sequence of int
    prompt_tokens : int
    dtype : torch.dtype
        Element type in which the model computes.
    """

    def __init__(self, draft: Sequence[int], prompt_tokens: int, dtype: torch.dtype) -> None:
        self._draft, self._prompt_tokens, self._dtype = list(draft), prompt_tokens, dtype
        self.kept = 0
        """Tokens that won so."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = input_ids[0, self._prompt_tokens :].tolist()
        at = len(chosen)
        if at >= len(self._draft) or chosen != self._draft[:at]:
            return scores
        token, highest = self._draft[at], scores[0].max()
        if 0 < highest - scores[0, token] <= tie_bound(scores[0], self._dtype):
            self.kept += 1
            scores = scores.clone()
            scores[0, token] = highest + 1
        return scores


class _DraftSteps:
    """Takes the steps of an answer, many at once as long as it follows a draft.

    Parameters
    ----------
    adapter : ModelAdapter
    cache : transformers Cache
        Exact KV of the prompt; it grows.
    draft : sequence of int
        Ids of the draft.
    step : callable
        Takes one token once the answer has left the draft.
    pauses : Pauses or None
        Where others may use the model.
    """

    def __init__(
        self, adapter: ModelAdapter, cache: Any, draft: Sequence[int], step: Step, pauses: Pauses | None
    ) -> None:
        self._adapter, self._cache, self._step, self._pauses = adapter, cache, step, pauses
        self._size = 1 if adapter.repeats_exactly else _SLICE
        self._left = deque(draft[:-1])  # behind the last one nothing is chosen
        self._pass: list[int] = []  # ids of the last pass that took several
        self._rows = deque[torch.Tensor]()  # logits behind those that were not chosen again yet
        self._mark = CacheMark(cache)  # the cache before that pass

    def __call__(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The logits behind the newest token, ``[1, 1, vocab]``."""
        token = int(inputs["input_ids"])
        if self._left and token == self._left[0]:
            if not self._rows:
                began, known, size = time.perf_counter(), self._cache.get_seq_length(), min(self._size, len(self._left))
                # A pass has the frequencies of its last position, so it ends where they change.
                while size > 1 and not self._adapter.positions.alike((known + 1, known + size), 0):
                    size -= 1
                self._mark, self._pass = CacheMark(self._cache), list(islice(self._left, size))
                self._rows.extend(self._adapter.extend(self._cache, self._pass))
                if self._pauses is not None:
                    self._pauses.between(time.perf_counter() - began, 0)
            self._left.popleft()
            return self._rows.popleft()[None, None]
        self.close()
        return self._step(inputs)

    def close(self) -> None:
        """Leave the draft: take what was not chosen again out of the cache."""
        if self._rows:
            forgotten = self._mark.take_back(self._cache, len(self._pass), len(self._rows))
            if again := self._pass[len(self._pass) - forgotten : len(self._pass) - len(self._rows)]:
                self._adapter.extend(self._cache, again, logits_to_keep=1)
        self._rows.clear()
        self._left.clear()


@dataclass(frozen=True)
class VerificationStatus:
    """Counts of an engine's verifications, with those of its views.

    Parameters
    ----------
    waiting : int
        Answers that are still to be checked.
    verified, corrected, given_up : int
        Answers that were checked and stayed, that were corrected, and that could not be checked.
    """

    waiting: int = 0
    verified: int = 0
    corrected: int = 0
    given_up: int = 0


@dataclass(frozen=True)
class _Waiting:
    """A check that is still to be done; see `Verifications.submit`."""

    id: str
    check: Callable[[Callable[[], bool]], Verification]
    salt: str
    texts: frozenset[str]


class Verifications:
    """Checks answers one by one in the background, and counts what all checks find.

    ::

        engine = BlendEngine(model, tokenizer, config=BlendConfig(verify="idle"), store="blend_data/kv")
        answer = engine.generate(prompt)
        engine.verifications.result(answer.verification.id, wait=30).status  # "verified" or "corrected"
        engine.verifications.status  # counts

    An engine and all its views share one. ``verify_share`` of whichever answered says how likely an answer is checked.
    """

    def __init__(self) -> None:
        self._chooser = random.Random(0)
        self._lock = threading.Lock()
        self._status = VerificationStatus()
        self._results: OrderedDict[str, Future[Verification]] = OrderedDict()
        self._waiting: deque[_Waiting] = deque()
        self._under_way: _Waiting | None = None
        self._thread: threading.Thread | None = None
        self._closed, self._unwanted = False, dict[str, str]()  # why a check under way is given up, by its id
        self.tenants: Callable[[], int] = lambda: 1
        """How many there are. Each has an even part of the answers that may wait."""
        self.storing = threading.Lock()
        """Held while a check stores something; nothing is stored for a check that was given up before."""

    @property
    def status(self) -> VerificationStatus:
        """Counts so far."""
        return self._status

    def result(self, id: str, wait: float = 0.0) -> Verification | None:
        """How a waiting answer was verified.

        Parameters
        ----------
        id : str
            ``Generation.verification.id``.
        wait : float
            Seconds to wait for it at most.

        Returns
        -------
        Verification or None
            Its status is ``"waiting"`` until the check is done. None if the id is unknown or is not among the last
            thousand checked.

        Raises
        ------
        ConfigError
            If the seconds are negative or not a number.
        """
        if not (isinstance(wait, Real) and wait >= 0):
            raise ConfigError("wait", wait, "use a number of seconds, 0 or more")
        if (future := self._results.get(id)) is None:
            return None
        try:
            return future.result(min(wait, threading.TIMEOUT_MAX))
        except FutureTimeoutError:
            return Verification("waiting", id=id)

    def call_when_done(self, id: str, done: Callable[[Verification], object]) -> None:
        """Call a function with a waiting answer's result: at once if it is known, else on the checking thread."""
        if (future := self._results.get(id)) is not None:
            future.add_done_callback(lambda found: done(found.result()))

    def chosen(self, config: BlendConfig) -> bool:
        """Whether the next answer is among the share that is checked."""
        with self._lock:
            return self._chooser.random() < config.verify_share

    def submit(
        self, check: Callable[[Callable[[], bool]], Verification], salt: str = "", texts: Iterable[str] = ()
    ) -> Verification:
        """Let an answer be checked when nothing else waits.

        Parameters
        ----------
        check : callable
            Takes a function that says whether to give up, and returns the result.
        salt : str
            Tenant of the answer.
        texts : iterable of str
            Chunks of the prompt; the check is given up if one of them is forgotten.

        Returns
        -------
        Verification
            Its status is ``"waiting"``, or ``"given up"`` if too many of the tenant's wait.
        """
        one = _Waiting(uuid.uuid4().hex, check, salt, frozenset(texts))
        most = max(1, _WAITING // self.tenants())
        with self._lock:
            if self._closed or sum(other.salt == salt for other in self._waiting) >= most:
                self._add(given_up=1)
                reason = "the engine was closed" if self._closed else f"{most} answers wait to be checked"
                return Verification("given up", reason=reason)
            if self._thread is None or not self._thread.is_alive():  # after a fork it is not
                thread = AnswerThread(target=self._work, name="verification", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the system lets no thread begin
                    self._add(given_up=1)
                    return Verification("given up", reason=str(error))
                self._thread = thread
            self._results[one.id] = Future()
            self._waiting.append(one)
            self._add(waiting=1)
        return Verification("waiting", id=one.id)

    def note(self, found: Verification) -> None:
        """Count a verification, if it was done."""
        if found.done:
            with self._lock:
                self._add(**{found.status: 1})

    def give_up(self, reason: str, salt: str | None, texts: Collection[str]) -> None:
        """Give up the checks of a tenant whose prompts contain a text; after this returns, they store nothing.

        Parameters
        ----------
        reason : str
        salt : str or None
            None for those of every tenant.
        texts : collection of str
            A chunk that holds one of them, or is part of one, counts, too.
        """

        def holds(one: _Waiting) -> bool:
            pairs = ((chunk, text) for chunk in one.texts if chunk for text in texts if text)
            return salt in (None, one.salt) and any(text in chunk or chunk in text for chunk, text in pairs)

        with self._lock:
            given_up = [one for one in self._waiting if holds(one)]
            self._waiting = deque(one for one in self._waiting if one not in given_up)
            self._add(waiting=-len(given_up), given_up=len(given_up))
            if self._under_way is not None and holds(self._under_way):
                self._unwanted[self._under_way.id] = reason
        for one in given_up:
            self._tell(Verification("given up", reason=reason, id=one.id))
        with self.storing:
            pass

    def wait(self) -> None:
        """Wait until no answer waits any more."""
        if threading.current_thread() is not self._thread:
            for future in list(self._results.values()):
                future.result()

    def close(self) -> None:
        """Give up all that waits, and the check under way at its next layer or token; a warning says how many."""
        with self._lock:
            self._closed = True
            before, thread = self._status.given_up, self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        if given_up := self._status.given_up - before:
            _log.warning("%d answers were still to be checked, but were not; they stay as they were given", given_up)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                self._under_way = one = self._waiting.popleft()
            found = dataclasses.replace(self._checked(one), id=one.id)
            with self._lock:
                self._under_way = None
                self._unwanted.pop(one.id, None)
                self._add(waiting=-1, given_up=int(found.status == "given up"))
            self._tell(found)
            with self._lock:
                known = [id for id, future in self._results.items() if future.done()]
                for id in known[: max(0, len(self._results) - _REMEMBERED)]:
                    del self._results[id]

    def _tell(self, found: Verification) -> None:
        """Have a result; an error of a function that is called with it ends no further check."""
        if (future := self._results.get(found.id)) is not None:
            try:
                future.set_result(found)
            except BaseException:
                _log.exception("a function that was to be called with a verification failed")

    def _checked(self, one: _Waiting) -> Verification:
        def ends() -> bool:
            return self._closed or one.id in self._unwanted or interpreter_ends()

        try:
            if not ends():
                return one.check(ends)
        except CacheBlendError as error:
            if not ends():
                _log.warning("an answer could not be verified: %s", error)
                return Verification("given up", reason=str(error))
        except BaseException:  # whatever a function of the user's own raises, others are still to be checked
            _log.exception("an answer could not be verified")
            return Verification("given up", reason="the check failed; the log has its error")
        return Verification("given up", reason=self._unwanted.get(one.id, "the engine was closed"))

    def _add(self, **counts: int) -> None:
        status = self._status
        self._status = dataclasses.replace(status, **{name: getattr(status, name) + by for name, by in counts.items()})
