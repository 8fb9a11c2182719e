"""Uploads read, split, embedded, saved and warmed in the background, tenants in turns.

Pending work stands in the catalogue of each tenant, so a server that is started again goes on with it. A turn
takes a batch of files of one tenant, for a few seconds. KV is stored when no tenant has files to be read, and after
each turn that slow files made long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document

from cacheblend_rag.app.server.problems import Problem, problem_of
from cacheblend_rag.app.server.security.file_reader import FileReader
from cacheblend_rag.app.server.services.library import Library
from cacheblend_rag.app.server.services.metrics import Metrics
from cacheblend_rag.app.server.services.shared_kv import SharedKV, take_some
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.app.server.storage.catalogue import PendingFile, stored_bytes
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.engine.turns import Turns
from cacheblend_rag.errors import CacheBlendError, DocumentError, StoreError
from cacheblend_rag.retrieval.embedder import SharedEmbeddings, embed_in_parts
from cacheblend_rag.retrieval.splitting import split
from cacheblend_rag.retrieval.vectors import Vectors

_log = logging.getLogger(__name__)
# Jobs whose events are kept.
_REMEMBERED = 500
# Files and chunks of a turn: together they are embedded and saved faster. A longer document takes several turns.
_FILES, _CHUNKS = 32, 256
_EMBEDDED = 32
# Passages between two events of warming, about.
_WARMED = 4
# Documents whose texts are read ahead for that.
_AHEAD = 32
# Seconds after which a turn ends, once the file in hand is read.
_TURN_SECONDS = 5.0
# Events of one stage of one file, about; all are kept for later readers.
_TOLD = 100
# Seconds until what failed for want of disk space is tried again.
_RETRY = 5.0


class UploadJob:
    """One upload and how far it is.

    Events are kept, so that a later reader gets all of them.
    """

    def __init__(self, id: str, names: Mapping[str, str]) -> None:
        self.id, self.names = id, dict(names)
        self.ended = False
        self.reported = -1
        """Files that waited when progress was last reported."""
        self._events: list[dict[str, Any]] = []
        self._listeners: set[Callable[[], object]] = set()
        self._lock = threading.Lock()

    def say(self, stage: str, file: str, done: int, total: int, error: str = "", *, last: bool = False) -> None:
        """Tell how far it is; ``done`` of ``total`` chunks of this stage."""
        event = {"stage": stage, "file": file, "done": done, "total": total, **({"error": error} if error else {})}
        with self._lock:
            if self.ended:
                return
            self._events.append(event)
            self.ended = last
            for wake in self._listeners:
                with contextlib.suppress(RuntimeError):  # a loop that is closed
                    wake()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """All events from the first to the last."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(news.set)

        with self._lock:
            self._listeners.add(wake)
        read = 0
        try:
            while True:
                news.clear()
                with self._lock:
                    fresh, ended = self._events[read:], self.ended
                for one in fresh:
                    yield one
                read += len(fresh)
                if ended and not fresh:
                    return
                if not fresh:
                    await news.wait()
        finally:
            with self._lock:
                self._listeners.discard(wake)


class Jobs:
    """Jobs of all tenants."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[tuple[str, str], UploadJob] = OrderedDict()

    def recall(self, library: Library) -> None:
        """Know the jobs of a tenant that an earlier server has not ended."""
        for id, _ in library.catalogue.uploads.jobs():
            self._know(library, id)

    def _know(self, library: Library, id: str) -> UploadJob:
        names = {one.id: one.name for one in library.catalogue.uploads.files(job=id)}
        job = self._jobs[library.tenant.name, id] = UploadJob(id, names)
        return job

    def accepted(self, library: Library, id: str, files: Iterable[PendingFile]) -> None:
        """Know an upload that was taken in."""
        self._jobs[library.tenant.name, id] = UploadJob(id, {one.id: one.name for one in files})
        ended = [key for key, one in self._jobs.items() if one.ended]
        for key in ended[: max(0, len(self._jobs) - _REMEMBERED)]:
            del self._jobs[key]
        self.end_if_done(library, id)  # the thread may have been quicker

    def find(self, library: Library, id: str) -> UploadJob:
        """A job of a tenant.

        Raises
        ------
        Problem
            404 if it has none of this id.
        """
        job, uploads = self._jobs.get((library.tenant.name, id)), library.catalogue.uploads
        if job is None and id in dict(uploads.jobs()):  # taken in by another server
            job = self._know(library, id)
        if job is None and uploads.job(id) is not None:
            job = UploadJob(id, {})  # one that ended before the server was started
            self._tell_end(library, job)
        if job is None:
            raise Problem(404, "no_job", "there is no such job")
        return job

    def say(self, tenant: str, id: str, stage: str, file: str, done: int, total: int) -> None:
        """Tell how far a job is, as `UploadJob.say`."""
        found = self._jobs.get((tenant, id))
        if found is not None:
            found.say(stage, file, done, total)

    def follow(self, libraries: Mapping[str, Library]) -> None:
        """Tell how far uploads are that other servers are at work on, too."""
        for (tenant, id), job in list(self._jobs.items()):
            if job.ended or tenant not in libraries:
                continue
            library, uploads = libraries[tenant], libraries[tenant].catalogue.uploads
            if id not in dict(uploads.jobs()):
                self._tell_end(library, job)
                continue
            coming = [one for one in uploads.files(job=id) if not one.error]
            total = max(len(job.names), 1)
            if coming and len(coming) != job.reported:
                job.reported = len(coming)
                job.say("reading", coming[0].name, total - len(coming), total)

    def stop(self) -> None:
        """Tell that the server stops."""
        message = "the server stops; it goes on with this when it runs again"
        for job in list(self._jobs.values()):
            job.say("waiting", "", 0, len(job.names), message, last=True)

    def end_all_done(self, library: Library) -> None:
        """End jobs whose last document was deleted, or whose end a killed server did not note."""
        for id, _ in library.catalogue.uploads.jobs():
            self.end_if_done(library, id)

    def end_if_done(self, library: Library, id: str) -> None:
        """End a job of which nothing is left to be done."""
        uploads = library.catalogue.uploads
        if any(not one.error for one in uploads.files(job=id)) or uploads.count_unwarmed(id):
            return
        uploads.end_job(id)
        job = self._jobs.get((library.tenant.name, id))
        if job is not None:
            self._tell_end(library, job)

    def _tell_end(self, library: Library, job: UploadJob) -> None:
        uploads = library.catalogue.uploads
        failed = uploads.files(job=job.id)
        total = max(len(job.names), uploads.count_taken(job.id) + len(failed))
        name = failed[0].name if failed else list(job.names.values())[-1] if job.names else ""
        problem = "; ".join(f"{one.name}: {one.error}" for one in failed)
        stage = "failed" if failed and len(failed) == total else "done"
        job.say(stage, name, total - len(failed), total, problem, last=True)


@dataclass(frozen=True)
class _PassageText:
    """A passage whose KV is to be stored."""

    document: str
    name: str
    job: str
    text: str
    number: int
    of: int


class Warming:
    """Documents whose KV is still to be stored.

    Parameters
    ----------
    engine : callable
        The engine of a tenant.
    jobs : Jobs
    """

    def __init__(self, engine: Callable[[str], BlendEngine], jobs: Jobs) -> None:
        self._engine, self._jobs = engine, jobs
        self._texts: dict[str, deque[_PassageText]] = {}  # read ahead, by tenant

    def step(self, name: str, library: Library) -> bool:
        """Store the KV of some passages of a tenant; whether any were left. A document deleted meanwhile gets none."""
        texts = self._texts.setdefault(name, deque())
        if not texts:
            texts.extend(self._ahead(library))
        if not texts:
            return False
        self._warm_some(name, library, texts)
        return True

    def _ahead(self, library: Library) -> Iterable[_PassageText]:
        for id, name, job in library.catalogue.uploads.to_warm(_AHEAD):
            found = library.catalogue.texts_of(id)
            yield from (_PassageText(id, name, job, text, number, len(found)) for number, text in enumerate(found))
            if len(found) > _CHUNKS:
                return

    def _warm_some(self, name: str, library: Library, texts: deque[_PassageText]) -> None:
        some = take_some(texts, lambda one: len(one.text))
        there = {id for id in dict.fromkeys(one.document for one in some) if library.catalogue.holds(id)}
        for one in some:
            if one.document in there and one.number % (max(1, one.of // _WARMED // _TOLD) * _WARMED) == 0:
                self._jobs.say(name, one.job, "warming", one.name, one.number, one.of)
        done = [one for one in some if one.number == one.of - 1]
        try:
            kept = [one.text for one in some if one.document in there]
            skipped = self._engine(name).warm(kept, progress=False).skipped
        except CacheBlendError as error:  # the documents are in; their KV is stored when it is used
            _log.warning("documents could not be warmed: %s", type(error).__name__)
            skipped = 0
        if gone := [one.text for one in some if one.document in there and not library.catalogue.holds(one.document)]:
            library.forget_behind(gone)  # others were computed behind them
        if skipped:  # the store is full; the rest is stored as it is used
            done = [*some, *texts]
            texts.clear()
        library.catalogue.uploads.mark_warmed(list(dict.fromkeys(one.document for one in done)))
        for job in dict.fromkeys(one.job for one in done):
            self._jobs.end_if_done(library, job)


def _passes(error: Exception) -> bool:
    """Whether an error is no fault of a file: the database is away, or there is too little of something for a while.

    Python and torch have no kinds of their own for some of these.
    """
    if isinstance(error, RuntimeError):
        return any(words in str(error) for words in ("can't start new thread", "allocate memory", "out of memory"))
    return isinstance(error, (Problem, StoreError, OSError, MemoryError))


class Ingestion:
    """The background thread through which everything goes into collections.

    Parameters
    ----------
    limits : Limits
    metrics : Metrics
    embeddings : SharedEmbeddings
    libraries : mapping of str to Library
        By tenant.
    engine : callable
        The engine of a tenant.
    turns : Turns
        Of the models.
    shared : SharedKV
        KV of texts that all may read. It has its turn like a tenant.
    """

    def __init__(
        self,
        limits: Limits,
        metrics: Metrics,
        embeddings: SharedEmbeddings,
        libraries: Mapping[str, Library],
        engine: Callable[[str], BlendEngine],
        turns: Turns,
        shared: SharedKV,
    ) -> None:
        self._limits, self._metrics, self._embeddings = limits, metrics, embeddings
        self._libraries, self._turns, self._shared = libraries, turns, shared
        self._indexing, self._warming = deque[str](), deque([""])  # whose turn is next
        self._begun: dict[str, Iterator[None]] = {}  # work of a tenant that is more than a turn
        self._not_before: dict[str, float] = {}
        self._slow = False  # whether a turn was ended by time
        self._passed_over = False  # whether somebody's time to be tried again had not come
        self._jobs = Jobs()
        self._warming_up = Warming(engine, self._jobs)
        self._stopping, self._news, self._idle = threading.Event(), threading.Event(), threading.Event()
        self._reader, self._read_for = FileReader(limits), ""
        for library in libraries.values():
            self._jobs.recall(library)
        self._thread = threading.Thread(target=self._run, name="ingestion", daemon=True)
        self._thread.start()

    # For requests --------------------------------------------------------------------------

    def join(self, name: str, library: Library) -> None:
        """A tenant has come while the server runs."""
        self._jobs.recall(library)
        self._libraries = {**self._libraries, name: library}  # the thread may be looking through it
        self.wake()

    def leave(self, name: str) -> None:
        """Look after a tenant no more."""
        self._libraries = {other: library for other, library in self._libraries.items() if other != name}

    def accepted(self, tenant: str, job: str, files: Iterable[PendingFile]) -> None:
        """An upload was taken in: get to it."""
        self._jobs.accepted(self._libraries[tenant], job, files)
        self.wake()

    def job(self, id: str, tenant: str) -> UploadJob:
        """`Jobs.find` of a tenant."""
        return self._jobs.find(self._libraries[tenant], id)

    def dismiss(self, library: Library, collection: str, file: str) -> bool:
        """Take a file that failed or waits off the list; whether there was one."""
        found = library.dismiss(collection, file)
        if found is not None:
            self._jobs.end_if_done(library, found.job)
        return found is not None

    def follow_jobs(self) -> None:
        """Tell how far uploads are that other servers are at work on, too."""
        self._jobs.follow(self._libraries)

    def wake(self) -> None:
        """There is something to be done."""
        self._idle.clear()
        self._news.set()

    def wait_idle(self, seconds: float) -> bool:
        """Wait until nothing is left to be done; whether that came true."""
        return self._idle.wait(seconds)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop after the step in hand; what is not done yet is done when the server runs again."""
        self._stopping.set()
        self._reader.stop()
        self._jobs.stop()
        self.wake()

    def close(self) -> None:
        """`stop`, and wait for it."""
        self.stop()
        self._thread.join()

    # The thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._news.clear()
            self._passed_over = False
            try:
                self._erase()
                while not self._stopping.is_set() and (self._index() or self._warm()):
                    self._erase()
                    if self._slow:  # they may go on for hours
                        self._slow = False
                        self._warm()
                for library in self._libraries.values():
                    self._jobs.end_all_done(library)
            except Problem as problem:
                _log.warning("background work waits: %s", problem.message)
                self._stopping.wait(_RETRY)
                continue
            except Exception as error:
                _log.error("background work failed: %s", type(error).__name__, exc_info=True)
                self._stopping.wait(_RETRY)
                continue
            self._reader.close()
            waits = self._passed_over
            if not waits and any(one.erasing.unfinished for one in self._libraries.values()):
                continue
            if not waits and not self._news.is_set():
                self._idle.set()
            self._news.wait(_RETRY / 5 if waits else self._shared.waits)
        self._reader.close()

    def _next(self, turns: deque[str]) -> Iterable[str]:
        """Tenants whose turn can come; one that had its turn goes to the end."""
        now = time.monotonic()
        for name in list(turns):
            if self._not_before.get(name, 0.0) <= now:
                turns.remove(name)
                turns.append(name)
                yield name
            else:
                self._passed_over = True

    @contextlib.contextmanager
    def _for(self, name: str) -> Iterator[None]:
        """Work for a tenant; where the disk is full or fails it is tried again later."""
        try:
            yield
        except Exception as error:
            if not _passes(error):
                raise
            _log.warning(
                "work for a tenant waits: %s",
                error if isinstance(error, CacheBlendError | Problem) else type(error).__name__,
            )
            self._not_before[name] = time.monotonic() + _RETRY

    def _erase(self) -> None:
        """Try again to erase what was deleted."""
        for name, library in self._libraries.items():
            waits = self._not_before.get(name, 0.0) > time.monotonic()
            self._passed_over |= waits
            if library.erasing.unfinished and not waits and not library.erasing.erase():
                self._not_before[name] = time.monotonic() + _RETRY

    def _index(self) -> bool:
        """One turn of one tenant; whether there was anything to be done."""
        for name in [one for one in self._not_before if one not in self._libraries]:  # who has left
            self._begun.pop(name, None)
            del self._not_before[name]
            self._indexing.remove(name)
            self._warming.remove(name)
        for name in [one for one in self._libraries if one not in self._not_before]:  # who has come meanwhile
            self._not_before[name] = 0.0
            self._indexing.append(name)
            self._warming.append(name)
        for name in self._next(self._indexing):
            if (library := self._libraries.get(name)) is None:
                continue
            work = self._begun.pop(name, None)
            if work is None and (files := library.catalogue.uploads.waiting(_FILES)):
                work = self._take_in(name, library, files)
            if work is None:
                continue
            with self._for(name):
                for _ in work:  # there is more of it than fits a turn
                    self._begun[name] = work
                    break
            return True
        return False

    def _take_in(self, name: str, library: Library, files: Sequence[PendingFile]) -> Iterator[None]:
        """Make documents of some files; gives way after each turn's share of the work."""
        read: list[tuple[PendingFile, list[Document]]] = []
        lacking: Exception | None = None
        ends = time.monotonic() + _TURN_SECONDS
        for number, file in enumerate(files):
            if self._stopping.is_set() or sum(len(chunks) for _, chunks in read) >= _CHUNKS:
                break
            if number and time.monotonic() >= ends:  # slow files of one tenant keep nobody waiting
                self._slow = True
                break
            try:
                read.append((file, self._read(name, library, file)))
            except Exception as error:
                if self._stopping.is_set():
                    return
                if _passes(error):  # those that were read are taken in first
                    lacking = error
                    break
                self._fail(library, file, error)
        yield from self._embed_and_save(name, library, read)
        if lacking is not None:
            raise lacking
        for job in dict.fromkeys(file.job for file in files):
            self._jobs.end_if_done(library, job)

    def _read(self, name: str, library: Library, file: PendingFile) -> list[Document]:
        self._jobs.say(name, file.job, "reading", file.name, 0, 1)
        if name != self._read_for:
            self._reader.close()  # each tenant's files are parsed in a process of their own
            self._read_for = name
        source = self._reader.read(library.incoming.fetched(file), file.name)
        self._jobs.say(name, file.job, "splitting", file.name, 0, 1)
        with self._turns.in_background():
            chunks = split([source])
        if not chunks:
            raise DocumentError("the file holds no text")
        return chunks

    def _embed_and_save(
        self, name: str, library: Library, read: Sequence[tuple[PendingFile, list[Document]]]
    ) -> Iterator[None]:
        try:
            taken = yield from self._embedded(name, read)
            if self._stopping.is_set():
                return
            taken = self._with_room(library, taken)
            came: list[PendingFile] = []
            for id in dict.fromkeys(file.collection for file, _ in read):
                if (collection := library.get(id)) is not None:
                    came += library.add(
                        collection, [one for one in taken if one[0].collection == id], self._limits.disk_bytes
                    )
        except Exception as error:
            if _passes(error):
                raise
            if len(read) == 1:
                self._fail(library, read[0][0], error)
            for one in read if len(read) > 1 else ():  # it may be the fault of one alone
                yield from self._embed_and_save(name, library, [one])
            return
        library.incoming.discard([file for file, _ in read])
        self._metrics.ingested.labels("ready").inc(len(came))
        for file, chunks, _ in taken:
            if file in came:
                self._jobs.say(name, file.job, "ready", file.name, len(chunks), len(chunks))

    def _with_room(
        self, library: Library, taken: Sequence[tuple[PendingFile, list[Document], list[Vectors]]]
    ) -> list[tuple[PendingFile, list[Document], list[Vectors]]]:
        """Those documents that the tenant has room for; they may take more than their files did."""
        used, most, fit = library.catalogue.bytes_used(), self._limits.disk_bytes, []
        for file, chunks, vectors in taken:
            more = stored_bytes(chunks, vectors) - file.bytes
            if used + more <= most:
                used += more
                fit.append((file, chunks, vectors))
            else:
                message = f"with it your documents would take {used + more:,} bytes; they may take {most:,}"
                self._fail(library, file, DocumentError(message))
        return fit

    def _embedded(
        self, name: str, read: Sequence[tuple[PendingFile, list[Document]]]
    ) -> Generator[None, None, list[tuple[PendingFile, list[Document], list[Vectors]]]]:
        """Embed the chunks of several files together."""
        places = [(file, number, len(chunks)) for file, chunks in read for number in range(len(chunks))]
        texts = [chunk.page_content for _, chunks in read for chunk in chunks]
        vectors: list[Vectors] = []
        for start in range(0, len(texts), _EMBEDDED):
            if start and start % _CHUNKS == 0:
                yield
            for file, number, total in places[start : start + _EMBEDDED]:
                if number % (max(1, total // _EMBEDDED // _TOLD) * _EMBEDDED) == 0:
                    self._jobs.say(name, file.job, "embedding", file.name, number, total)
            some = texts[start : start + _EMBEDDED]
            # Beside the model's passes both would take several times as long.
            with self._turns.in_background():
                vectors += embed_in_parts(self._embeddings, some)
            if self._stopping.is_set():
                return []
        taken, at = [], 0
        for file, chunks in read:
            taken.append((file, chunks, vectors[at : at + len(chunks)]))
            at += len(chunks)
        return taken

    def _fail(self, library: Library, file: PendingFile, error: BaseException) -> None:
        """Note that a file cannot become a document; nothing failed if it was taken back or deleted meanwhile."""
        if not library.incoming.waits(file):
            _log.info("an upload is not read: it was taken back")
            return
        if not isinstance(error, (CacheBlendError, Problem)):
            _log.error("a document could not be ingested: %s", type(error).__name__)
        library.catalogue.uploads.fail(file.id, problem_of(error).message)
        library.incoming.discard([file])
        self._metrics.ingested.labels("failed").inc()

    def _warm(self) -> bool:
        """One step for one tenant; whether there was anything to be done."""
        for name in self._next(self._warming):
            if name == "":
                if self._shared.step():
                    return True
                continue
            if (library := self._libraries.get(name)) is None:
                continue
            with self._for(name):
                if self._warming_up.step(name, library):
                    return True
        return False
