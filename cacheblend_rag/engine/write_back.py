"""Work in the background: storing what a request had to compute."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cacheblend_rag.engine.scheduler import Scheduler
from cacheblend_rag.engine.segments import Segment
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.store.base import RecordInfo

_log = logging.getLogger(__name__)


CLOSE_SECONDS = 30.0
"""Most seconds for which KV is still stored while an engine is closed or the interpreter ends."""


def closing_seconds(error: type[BaseException] | None) -> float:
    """Seconds for which KV is still stored where a ``with`` block ends by an error; an interrupt leaves no time."""
    return 0.0 if error is not None and issubclass(error, KeyboardInterrupt) else CLOSE_SECONDS


# Tokens of a pass that several chunks share; a request may have to wait for it. A pass of few tokens takes longer for
# each, so small chunks are computed together. Larger ones gain nothing; alone they have the same bits, whatever else is
# missing.
_PASS_TOKENS = 256
# Padding of a pass, as a share of the tokens that are wanted.
_PADDING = 0.25
# Nothing is said of a wait that is no longer than so many seconds.
_SILENT = 1.0


@dataclass(frozen=True)
class Job:
    """A record to be made and stored.

    Parameters
    ----------
    run : callable
        Makes and stores it.
    held : int
        Bytes it keeps in memory until then.
    info : callable, optional
        Info of the record; None if the record holds no chunk.
    segment : Segment, optional
        The segment that is computed for it.
    compute : callable, optional
        Computes and stores several segments in one pass, with padding to the longest.
    """

    run: Callable[[], object]
    held: int = 0
    info: Callable[[], RecordInfo] | None = None
    segment: Segment | None = None
    compute: Callable[[Sequence[Segment]], object] | None = None

    @property
    def stored_tokens(self) -> int:
        """Tokens of the record; 0 where no chunk is in it."""
        if self.segment is not None:
            return len(self.segment.token_ids)
        return 0 if self.info is None else self.info().tokens

    @property
    def tokens(self) -> int:
        """Tokens that are computed for it."""
        return 0 if self.segment is None else len(self.segment.own_ids)


def in_passes(jobs: Iterable[tuple[str, Job]]) -> Iterator[Sequence[tuple[str, Job]]]:
    """Jobs in their order, those together that are done in one pass."""
    batch: list[tuple[str, Job]] = []
    longest = wanted = 0
    for name, job in jobs:
        longest, wanted = max(longest, job.tokens), wanted + job.tokens
        padded = (len(batch) + 1) * longest
        first = batch[0][1] if batch else job
        one, two = job.segment, first.segment
        alike = one is not None and two is not None and job.compute == first.compute and one.passes == two.passes
        if batch and not (alike and padded <= min(_PASS_TOKENS, (1 + _PADDING) * wanted)):
            yield batch
            batch, longest, wanted = [], job.tokens, job.tokens
        batch.append((name, job))
    if batch:
        yield batch


def run_pass(jobs: Sequence[tuple[str, Job]]) -> None:
    """Do jobs that belong to one pass; this package's errors are logged."""
    (name, first), *others = jobs
    name += f" and {len(others)} more" * bool(others)
    try:
        if others and first.compute is not None:
            first.compute([job.segment for _, job in jobs if job.segment is not None])
        else:
            first.run()
    except CacheBlendError as error:
        _log.warning("could not store %s: %s", name, error)


class Dropped:
    """Which jobs are to be left out of those of an answer under way: what was forgotten since it began."""

    def __init__(self) -> None:
        self.chosen: list[Callable[[str, Job], bool]] = []

    def left(self, jobs: Mapping[str, Job]) -> dict[str, Job]:
        """The others."""
        return {key: job for key, job in jobs.items() if not any(chosen(key, job) for chosen in self.chosen)}


class WriteBack:
    """A bounded queue of jobs, done pass by pass in the background of the scheduler.

    Parameters
    ----------
    scheduler : Scheduler
        Shared with requests.
    limit : int
        Most jobs waiting; further ones are dropped and made again on the next miss.
    held : int
        Most bytes that waiting jobs may keep in memory.
    """

    def __init__(self, scheduler: Scheduler, limit: int = 1024, held: int = 2**30) -> None:
        self._scheduler = scheduler
        self._limit, self._most_held, self._held = limit, held, 0
        self._jobs: deque[tuple[str, Job]] = deque()
        self.seconds = 0.0
        """Time spent on jobs; no request waited for it but one that came during a job."""
        self._names: set[str] = set()
        self._under_way = weakref.WeakSet[Dropped]()
        self._doing: Sequence[tuple[str, Job]] = ()  # those of one pass
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self.closed = False

    def submit(self, name: str, job: Job) -> bool:
        """Queue a job unless a job of the same name waits already; True if a job of this name will be done."""
        with self._condition:
            if self.closed or name in self._names:
                return not self.closed
            if len(self._jobs) >= self._limit or (job.held and self._held + job.held > self._most_held):
                _log.warning("write-back queue is full (%d jobs); %s is left for the next miss", len(self._jobs), name)
                return False
            self._jobs.append((name, job))
            self._held += job.held
            self._names.add(name)
            if self._thread is None:
                _begun.add(self)
                self._thread = threading.Thread(target=self._work, name="kv-write-back", daemon=True)
                self._thread.start()
            self._condition.notify_all()
            return True

    def begin(self) -> Dropped:
        """Begin an answer; jobs that `drop` cancels meanwhile will be left out of it."""
        with self._condition:
            self._under_way.add(begun := Dropped())
        return begun

    def drop(self, chosen: Callable[[str, Job], bool]) -> None:
        """Cancel matching jobs, including those of current answers, and wait for a matching job that is running.

        Parameters
        ----------
        chosen : callable
            Takes the name of a job and the job; True for those to cancel or to wait for.
        """
        with self._condition:
            for begun in self._under_way:
                begun.chosen.append(chosen)
            there = [*self._jobs, *self._doing]
        dropped = {id(job) for name, job in there if chosen(name, job)}
        with self._condition:
            for name, job in [one for one in self._jobs if id(one[1]) in dropped]:
                self._held -= job.held
                self._names.discard(name)
            self._jobs = deque(one for one in self._jobs if id(one[1]) not in dropped)
            self._condition.notify_all()
            self._condition.wait_for(lambda: not any(id(job) in dropped for _, job in self._doing))

    def flush(self, seconds: float | None = None) -> int:
        """Wait until all queued jobs are done or the time is up, and return the number of jobs that are left."""
        with self._condition:
            self._condition.wait_for(lambda: not self._names, seconds)
            return len(self._names)

    def stop(self) -> None:
        """Take no more jobs; queued jobs will still be done."""
        with self._condition:
            self.closed = True
            self._condition.notify_all()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Do what is queued, as far as the time allows, then stop.

        Jobs that are left are dropped, and a warning says how many. One that has begun is always finished. An
        interrupt drops the rest, too.

        Parameters
        ----------
        seconds : float
            Most seconds that jobs may still begin in; 0 drops all that wait.
        """
        self.stop()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        try:
            thread.join(min(seconds, _SILENT))
            waiting = len(self._jobs)
            if thread.is_alive() and waiting and seconds > _SILENT:
                _log.warning(
                    "KV of %d more segments is being stored before the end, for %.0f s at most; an interrupt (Ctrl-C) "
                    "ends this, and then they are computed again when they are next missing",
                    waiting,
                    seconds,
                )
                thread.join(None if math.isinf(seconds) else seconds - _SILENT)
        finally:
            self.drop_waiting()
            thread.join()

    def drop_waiting(self) -> None:
        """Let no job that waits be done; a warning says how many there were."""
        with self._condition:
            dropped, self._held = len(self._jobs), sum(job.held for _, job in self._doing)
            self._names.difference_update(name for name, _ in self._jobs)
            self._jobs.clear()
            self._condition.notify_all()
        if dropped:
            _log.warning("KV of %d segments was not stored; it is computed again when it is next missing", dropped)

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._jobs and not self.closed:
                    self._condition.wait()
                if not self._jobs:
                    break
            with self._scheduler.background():  # until then any of them can be dropped
                self._do_next()

    def _do_next(self) -> None:
        with self._condition:
            if not self._jobs:
                return
            self._doing = next(in_passes(self._jobs))
            for _ in self._doing:
                self._jobs.popleft()
        started = time.perf_counter()
        try:
            run_pass(self._doing)
        except Exception:
            _log.exception("storing %s failed", ", ".join(name for name, _ in self._doing))
        finally:
            with self._condition:
                self.seconds += time.perf_counter() - started
                for name, job in self._doing:
                    self._held -= job.held
                    self._names.discard(name)
                self._doing = ()
                self._condition.notify_all()


_begun: weakref.WeakSet[WriteBack] = weakref.WeakSet()


def queues_begun() -> list[WriteBack]:
    """All queues that have had a job."""
    return list(_begun)
