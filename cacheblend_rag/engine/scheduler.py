"""The scheduler in front of a model: one holder at a time, and answers under way take their steps together.

All who run a model through this package share its scheduler: see `scheduler_of`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from cacheblend_rag.errors import GenerationError

__all__ = ["Scheduler", "scheduler_of"]

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")


class _Place:
    """A place in the line of those who have not begun."""

    def __init__(self, beside: Callable[[], int]) -> None:
        self.beside = beside


class _Step(Generic[_Given, _Result]):
    """What an answer under way waits for."""

    def __init__(self, given: _Given, run: Callable[[Sequence[_Given]], Sequence[_Result]]) -> None:
        self.given, self.run = given, run
        self.results: list[_Result] = []  # none before the step is done, then one
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has been taken, or has failed."""
        return bool(self.results) or self.error is not None


class Scheduler:
    """One holder at a time, in the order of asking; background work waits until no request does.

    ``with scheduler:`` is for requests beside which no other may be under way, `entered` for those that let others in
    at every `step`, `when_idle` for background work, one short piece at a time.

    Notes
    -----
    Who has not begun goes before those under way, as long as he agrees to their number: somebody waits for his
    first token. Those under way take their steps together, once none of them has anything else to do; those of one
    engine together, those of another over the same model in a pass of their own.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._busy = False
        self._owner: int | None = None
        self._depth = 0
        self._begun = 0  # requests under way, the holder's included
        self._line: deque[_Place] = deque()  # who has not begun, the first to ask first
        self._steps: list[_Step[Any, Any]] = []  # of those under way but the holder, the first to ask first

    def __enter__(self) -> None:
        self._enter(lambda: 0)

    def __exit__(self, *exc: object) -> None:
        self._leave()

    @contextmanager
    def entered(self, beside: Callable[[], int]) -> Iterator[None]:
        """Hold the scheduler, with others under way.

        Parameters
        ----------
        beside : callable
            How many of them at most; asked where there are some, and to be answered quickly.
        """
        self._enter(beside)
        try:
            yield
        finally:
            self._leave()

    @property
    def awaited(self) -> bool:
        """Whether a request waits for the scheduler."""
        return bool(self._line)

    def step(self, given: _Given, run: Callable[[Sequence[_Given]], Sequence[_Result]]) -> _Result:
        """Let others in, then take a step together with all who wait for theirs.

        Called by the holder, who holds the scheduler again afterwards.

        Parameters
        ----------
        given : object
            What the step is about.
        run : callable
            Takes the steps of several that gave the same one, on the thread of one of them; a result for each.

        Raises
        ------
        GenerationError
            If the step failed on the thread of another.
        """
        if self._depth > 1 or not (self._line or self._steps):  # who has entered twice cannot give way
            return run([given])[0]
        mine: _Step[_Given, _Result] = _Step(given, run)
        try:
            with self._condition:
                self._steps.append(mine)
                self._release()
                self._take(mine)
                waiting = [step for step in self._steps if not step.done and step.run is run]
            if mine in waiting:
                self._run(waiting, run)
        finally:
            with self._condition:
                self._steps.remove(mine)
        if mine.error is not None:
            raise GenerationError("a step taken together with other answers failed") from mine.error
        return mine.results[0]

    def when_idle(self, work: Callable[[], None]) -> None:
        """Run ``work`` as the holder once no request holds or awaits the scheduler, and none is under way."""
        with self._condition:
            while self._busy or self._line or self._begun:
                self._condition.wait()
            self._hold()
            self._begun += 1
        try:
            work()
        finally:
            self._leave()

    # Turns --------------------------------------------------------------------------------------

    def _enter(self, beside: Callable[[], int]) -> None:
        with self._condition:
            if self._owner == threading.get_ident():
                self._depth += 1
                return
            place = _Place(beside)
            self._line.append(place)
            try:
                self._take(place)
            finally:
                self._line.remove(place)
                self._condition.notify_all()  # who is first now may have been waiting for this one
            self._begun += 1

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
        try:
            for step, result in zip(steps, run([step.given for step in steps]), strict=True):
                step.results.append(result)
        except BaseException as error:
            for step in steps:
                step.error = error
            raise

    def _next(self) -> object:
        """Whose turn it is: who has not begun and may, then who can go on, then who takes the steps of all."""
        if self._line and (not self._begun or self._begun <= self._line[0].beside()):
            return self._line[0]
        return next((step for step in self._steps if step.done), self._steps[0] if self._steps else None)

    def _take(self, mine: object) -> None:
        while self._busy or self._next() is not mine:
            self._condition.wait()
        self._hold()

    def _hold(self) -> None:
        self._busy, self._owner, self._depth = True, threading.get_ident(), 1

    def _release(self) -> None:
        self._busy, self._owner, self._depth = False, None, 0
        self._condition.notify_all()


_gates: weakref.WeakKeyDictionary[object, Scheduler] = weakref.WeakKeyDictionary()
_gates_lock = threading.Lock()


def scheduler_of(model: object) -> Scheduler:
    """The scheduler in front of a model, one for all engines over it."""
    with _gates_lock:
        return _gates.setdefault(model, Scheduler())
