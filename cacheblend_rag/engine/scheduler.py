"""The scheduler in front of a model: one holder at a time, and answers under way take their steps together.

All who run a model through this package share its scheduler: see `scheduler_of`.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from cacheblend_rag.errors import ConfigError, GenerationError

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")
# Seconds that requests have the model for each second of background work while both want it, and before the first.
_REQUESTS_SHARE, _REQUESTS_FIRST = 4.0, 10.0
# Of the time that a part of a long pass took: how long it waits for others who come back at once.
_PAUSE = 0.5
# Seconds within which answers under way should have their next token while the prompt of another is computed.
_GAP = 0.2


class ModelTime:
    """How long the model has worked for one request.

    Parameters
    ----------
    beside : callable
        How many others may be under way when it begins.
    """

    def __init__(self, beside: Callable[[], int]) -> None:
        self.beside = beside
        self.seconds = 0.0
        """Seconds; of a step that was taken together with others, its part."""


class _Step(Generic[_Given, _Result]):
    """The next step of an answer under way."""

    def __init__(self, given: _Given, run: Callable[[Sequence[_Given]], Sequence[_Result]], spent: ModelTime) -> None:
        self.given, self.run, self.spent = given, run, spent
        self.results: list[_Result] = []  # none before the step is done, then one
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has been taken, or has failed."""
        return bool(self.results) or self.error is not None


class _LongPass:
    """A long pass that gives way between two of its parts, to all or to steps alone."""

    def __init__(self, *, due: float = math.inf, pause: float = 0.0, steps: int = sys.maxsize) -> None:
        self.due, self.steps = due, steps
        """It goes before all others once requests have had the model for ``due`` seconds in all, or have taken more
        than so many common steps."""
        self.pause = pause
        """Seconds without a holder after which it goes on, where nobody else wants the model."""
        self.to_steps = steps < sys.maxsize


class Scheduler:
    """One holder at a time, in the order of asking; background work waits for requests, though not for ever.

    `entered` is for requests, which let others in at every `step` if they agree to some, `background` for background
    work, one short piece at a time or a long one that will `step_aside`.

    Parameters
    ----------
    clock : callable
        Seconds, from any beginning.

    Notes
    -----
    A request that has not begun goes before those under way, as long as it agrees to their number: somebody waits for
    its first token. Those under way take their steps together, once none of them has anything else to do; those of one
    engine together, those of another over the same model in a pass of their own. A long pass goes on once each of the
    others has had the model for as long as its last part took, or none of them wants it. Between two layers of a pass
    those under way may take a step.

    Background work has the model while no request wants it. Under load it gets a fifth of the time: it stores what
    requests miss, and without it a server that is never idle would compute the same chunks for ever.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._condition = clock, threading.Condition()
        self._owner: int | None = None  # thread of the holder, which may enter again
        self._depth = 0
        self._begun = 0  # requests under way, the holder's included
        self._queue: deque[ModelTime] = deque()  # requests that have not begun, the first to ask first
        self._steps: list[_Step[Any, Any]] = []  # of those under way but the holder, the first to ask first
        self._long: list[_LongPass] = []  # that give way now, the first to do so first
        self._background: deque[ModelTime] = deque()
        self._holder = ModelTime(lambda: 0)
        self._since = 0.0  # when the holder began to hold
        self._used, self._freed = 0.0, 0.0  # seconds for which requests had the model, and when it was left last
        self._steps_taken = 0  # those taken together count once
        self._step_seconds, self._layer_since = 0.0, 0.0  # what the last step took; when the holder's last layer began
        # Seconds that requests have the model while background work waits, before it goes first.
        self._owed = _REQUESTS_FIRST

    @contextmanager
    def entered(self, beside: Callable[[], int] = lambda: 0) -> Iterator[ModelTime]:
        """Hold the scheduler for a request; gives the time that the model works for it.

        Parameters
        ----------
        beside : callable
            How many others may be under way; asked where there are some, and to be answered quickly.
        """
        with self._condition:
            if self._owner == threading.get_ident():
                mine = self._holder
                self._depth += 1
            else:
                mine = ModelTime(beside)
                self._wait(self._queue, mine, mine)
                self._begun += 1
        try:
            yield mine
        finally:
            self._leave()

    @property
    def waiting(self) -> int:
        """How many requests wait to begin."""
        return len(self._queue)

    @property
    def alone(self) -> bool:
        """Whether no other request is under way or waits, besides the holder's own."""
        return self._begun <= 1 and not self._queue

    def step(self, given: _Given, run: Callable[[Sequence[_Given]], Sequence[_Result]]) -> _Result:
        """Let waiting requests in, then take a step together with all answers that wait for one.

        Called by the holder, who holds the scheduler again afterwards.

        Parameters
        ----------
        given : object
            Input of the step.
        run : callable
            Takes the steps of all answers that gave the same function, on one of their threads, and returns a result
            for each, or the `GenerationError` that it failed with.

        Raises
        ------
        GenerationError
            If the step failed alone, or on the thread of another.
        """
        if self._nobody_waits:
            return run([given])[0]
        spent = self._holder
        mine: _Step[_Given, _Result] = _Step(given, run, spent)
        with self._condition:
            self._release()
            self._wait(self._steps, mine, spent)
            together = [mine, *(step for step in self._steps if not step.done and step.run is run)]
        if not mine.done:
            self._run(together, run)
        if mine.error is not None:
            raise GenerationError(f"a step taken together with other answers failed: {mine.error}") from mine.error
        return mine.results[0]

    def give_way(self, seconds: float) -> None:
        """Let each waiting request have the model for the given number of seconds.

        Called by the holder between two parts of a long pass, with the seconds that the last part took. So each of
        those who want the model gets as much of it as this pass does.

        Many a request wants the model several times, with short work of its own in between: it searches, then it is
        answered. A little is waited for those. The next part of the pass would begin in each such pause otherwise.
        """
        if self._nobody_waits:
            return
        with self._condition:
            spent, others = self._holder, self._begun - 1 + (len(self._queue) if self._first_may_begin else 0)
            self._release()
            due, pause = self._used + seconds * others, seconds * _PAUSE if others else 0.0
            self._wait(self._long, _LongPass(due=due, pause=pause), spent, pause)

    def let_step(self) -> None:
        """Let current answers take one step, if their tokens would be late after another layer.

        Called by the holder between two layers of a pass, so that tokens of others come evenly. No new request begins
        meanwhile, because two alternating passes would both end late.
        """
        now = self._clock()
        layer, self._layer_since = now - self._layer_since, now
        late = now - self._since + layer + self._step_seconds > _GAP
        if self._depth > 1 or not self._steps or not late:
            return
        with self._condition:
            spent = self._holder
            self._release()
            self._wait(self._long, _LongPass(steps=self._steps_taken), spent, 0.0)

    @property
    def _nobody_waits(self) -> bool:
        """Whether the holder may keep the model; a holder that has entered twice must."""
        return self._depth > 1 or not (self._queue or self._steps or self._long or self._background_is_due)

    @contextmanager
    def background(self) -> Iterator[None]:
        """Hold the scheduler for background work, once no request wants it or the work is due."""
        if self._owner == threading.get_ident():  # part of a request, or of such a piece
            with self.entered():
                yield
            return
        with self._condition:
            self._begin_background()
        try:
            yield
        finally:
            with self._condition:
                self._end_background()

    def step_aside(self) -> None:
        """Let requests go before the rest of a long piece of background work, until they are done or its share is due.

        Called by the holder, who holds the scheduler again afterwards.
        """
        if self._depth > 1 or not (self._queue or self._steps or self._long or self._background):
            return
        with self._condition:
            self._end_background()
            self._begin_background()

    def _begin_background(self) -> None:
        mine = ModelTime(lambda: 0)
        self._wait(self._background, mine, mine)
        self._owed = 0.0 if self._queue or self._begun else _REQUESTS_FIRST
        self._begun += 1

    def _end_background(self) -> None:
        mine = self._holder
        if self._owner != threading.get_ident():  # interrupted while it had stepped aside
            return
        self._leave()
        self._used -= mine.seconds
        self._owed = max(self._owed, _REQUESTS_SHARE * mine.seconds)

    def hold_for_good(self) -> None:
        """Refuse the model to all requests, once its current holder has released it."""
        with self._condition:
            while self._owner is not None and self._owner in {thread.ident for thread in threading.enumerate()}:
                if self._owner == threading.get_ident():
                    return
                self._condition.wait(0.1)  # the holder may end without leaving
            self._hold(ModelTime(lambda: 0))

    # Holding ------------------------------------------------------------------------------------

    def _leave(self) -> None:
        with self._condition:
            if self._owner != threading.get_ident():  # interrupted while it had given way
                self._begun -= 1
                self._condition.notify_all()
                return
            self._depth -= 1
            if self._depth == 0:
                self._begun -= 1
                self._release()

    def _run(self, steps: Sequence[_Step[Any, Any]], run: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        began = self._clock()
        try:
            for step, result in zip(steps, run([step.given for step in steps]), strict=True):
                failed = isinstance(result, GenerationError)
                step.error, step.results = (result, []) if failed else (None, [result])
        except BaseException as error:
            for step in steps:
                step.error = error
            raise
        finally:
            took = self._clock() - began
            self._steps_taken += 1
            self._step_seconds = took
            self._holder.seconds -= took  # all of it is counted when it leaves
            for step in steps:
                step.spent.seconds += took / len(steps)

    def _next(self) -> object:
        """The next holder.

        Background work whose share is due, then a long pass that is due, then the first request that may begin, then
        one whose step is done, then the one that takes the steps of all, then a long pass that has waited for others,
        then background work.
        """
        if self._background_is_due:
            return self._background[0]
        for one in self._long:
            if one.due <= self._used or one.steps < self._steps_taken:
                return one
        if self._first_may_begin:
            return self._queue[0]
        if self._steps:
            return next((step for step in self._steps if step.done), self._steps[0])
        if self._long:
            idle = self._clock() - self._freed
            return next((one for one in self._long if one.pause <= idle), None)
        return next(iter(self._background), None) if not (self._queue or self._begun) else None

    @property
    def _first_may_begin(self) -> bool:
        """Whether a waiting request agrees to the number of those under way, and no pass lets in steps alone."""
        if not self._queue or any(one.to_steps for one in self._long):
            return False
        return not self._begun or self._begun <= self._queue[0].beside()

    @property
    def _background_is_due(self) -> bool:
        """Whether requests have had their share of the model, while background work waits."""
        held = 0.0 if self._owner is None else self._clock() - self._since
        return bool(self._background) and self._owed <= held

    def _wait(self, line: MutableSequence[Any], mine: object, spent: ModelTime, pause: float | None = None) -> None:
        """Wait in a line until it is the turn of ``mine``, then hold; a pause ends when no other wants the model."""
        line.append(mine)
        try:
            while self._owner is not None or self._next() is not mine:
                idle = pause is not None and self._owner is None and not (self._first_may_begin or self._steps)
                self._condition.wait(pause if idle else None)
        finally:
            line.remove(mine)
            self._condition.notify_all()  # who is next now may have been waiting for this one
        self._hold(spent)

    def _hold(self, spent: ModelTime) -> None:
        self._owner, self._depth = threading.get_ident(), 1
        self._holder, self._since = spent, self._clock()
        self._layer_since = self._since

    def _release(self) -> None:
        self._freed = self._clock()
        held = self._freed - self._since
        self._holder.seconds += held
        self._used += held
        if self._background:
            self._owed -= held
        self._owner, self._depth = None, 0
        self._condition.notify_all()


def all_schedulers() -> list[Scheduler]:
    """The schedulers in front of all models."""
    with _schedulers_lock:
        return list(set(_schedulers.values()))


_schedulers: weakref.WeakKeyDictionary[object, Scheduler] = weakref.WeakKeyDictionary()
_schedulers_lock = threading.Lock()


def scheduler_of(model: object, shared: Scheduler | None = None) -> Scheduler:
    """The scheduler in front of a model, one for all engines over it.

    Parameters
    ----------
    model : object
    shared : Scheduler, optional
        That of another model, which becomes the scheduler of this one, too.

    Raises
    ------
    ConfigError
        If the model has a scheduler of its own already.
    """
    with _schedulers_lock:
        found = _schedulers.setdefault(model, shared or Scheduler())
    if shared is not None and found is not shared:
        raise ConfigError("beside", "an engine of another model", "give it to the first engine over this model")
    return found
