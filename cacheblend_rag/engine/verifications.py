"""Answers that are verified when nothing else waits, and what all verifications together say of the model.

::

    engine = BlendEngine(model, tokenizer, config=BlendConfig(verify="idle"), store="blend_data/kv")
    answer = engine.generate(prompt)
    engine.verifications.result(answer.verification.id, wait=30).status  # "verified" or "corrected"
    engine.verifications.status  # counts
"""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from numbers import Real

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.streaming import AnswerThread, interpreter_ends
from cacheblend_rag.errors import CacheBlendError, ConfigError
from cacheblend_rag.report import Verification

_log = logging.getLogger(__name__)
# Answers that may wait, and results that are remembered.
_WAITING, _REMEMBERED = 64, 1000

Cancelled = Callable[[], bool]


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
    check: Callable[[Cancelled], Verification]
    salt: str
    texts: frozenset[str]


class Verifications:
    """Checks answers one by one in the background, and counts what all checks find.

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
            Its status is ``"waiting"`` if it is not done yet. None for an id that is unknown, or of an answer before
            the last thousand that were checked so.

        Raises
        ------
        ConfigError
            If the seconds are no number, or below 0.
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
        """Call a function with the result of a waiting answer, on the thread that has it; at once if it is there."""
        if (future := self._results.get(id)) is not None:
            future.add_done_callback(lambda found: done(found.result()))

    def chosen(self, config: BlendConfig) -> bool:
        """Whether the next answer is among the share that is checked."""
        with self._lock:
            return self._chooser.random() < config.verify_share

    def submit(
        self, check: Callable[[Cancelled], Verification], salt: str = "", texts: Iterable[str] = ()
    ) -> Verification:
        """Let an answer be checked when nothing else waits.

        Parameters
        ----------
        check : callable
            Takes a function that says whether to give it up, and gives the result.
        salt : str
            Tenant of the answer.
        texts : iterable of str
            Chunks of its prompt; it is given up if one of them is forgotten.

        Returns
        -------
        Verification
            Its status is ``"waiting"``, or ``"given up"`` if too many wait.
        """
        one = _Waiting(uuid.uuid4().hex, check, salt, frozenset(texts))
        with self._lock:
            if self._closed or len(self._waiting) >= _WAITING:
                self._add(given_up=1)
                reason = "the engine was closed" if self._closed else f"{_WAITING} answers wait to be checked"
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
        """Give up the checks of a tenant whose prompts hold a text; when this returns, none of them stores anything.

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
            _log.warning("%d answers were still to be checked, and are not; they stay as they were given", given_up)

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
