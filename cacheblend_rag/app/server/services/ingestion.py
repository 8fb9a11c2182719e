"""Uploads read, split, embedded, saved and warmed in the background, tenants in turns.

Pending work stands in the catalogue of each tenant, so a server that is started again goes on with it. A turn
takes a batch of files of one tenant. KV is stored when no tenant has files to be read.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

from langchain_core.documents import Document

from cacheblend_rag.app.server.problems import Problem, problem_of
from cacheblend_rag.app.server.security.file_reader import Reader
from cacheblend_rag.app.server.services.jobs import Job, Jobs
from cacheblend_rag.app.server.services.library import Library
from cacheblend_rag.app.server.services.metrics import Metrics
from cacheblend_rag.app.server.services.warming import SharedTexts, Warming
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.app.server.storage.catalogue import stored_bytes
from cacheblend_rag.app.server.storage.uploads import PendingFile
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import CacheBlendError, DocumentError, StoreError
from cacheblend_rag.retrieval.embedder import SharedEmbeddings, embed_in_parts
from cacheblend_rag.retrieval.splitting import split
from cacheblend_rag.retrieval.vectors import Vectors

_log = logging.getLogger(__name__)
# Files and chunks of a turn: together they are embedded and saved faster. A longer document takes several turns.
_FILES, _CHUNKS = 32, 256
_EMBEDDED = 32
# Events of one stage of one file, about; all are kept for later readers.
_TOLD = 100
# Seconds until what failed for want of disk space is tried again.
_RETRY = 5.0


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
    base : SharedTexts
        Warmed like the documents of a tenant.
    """

    def __init__(
        self,
        limits: Limits,
        metrics: Metrics,
        embeddings: SharedEmbeddings,
        libraries: Mapping[str, Library],
        engine: Callable[[str], BlendEngine],
        base: SharedTexts,
    ) -> None:
        self._limits, self._metrics, self._embeddings = limits, metrics, embeddings
        self._libraries, self._base = libraries, base
        self._indexing, self._warming = deque[str](), deque([""])  # whose turn is next
        self._begun: dict[str, Iterator[None]] = {}  # work of a tenant that is more than a turn
        self._not_before: dict[str, float] = {}
        self._jobs = Jobs()
        self._warming_up = Warming(base, engine, self._jobs)
        self._stopping, self._news, self._idle = threading.Event(), threading.Event(), threading.Event()
        self._reader, self._read_for = Reader(limits), ""
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

    def accepted(self, tenant: str, job: str, files: Iterable[PendingFile]) -> None:
        """An upload was taken in: get to it."""
        self._jobs.accepted(self._libraries[tenant], job, files)
        self.wake()

    def job(self, id: str, tenant: str) -> Job:
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
            try:
                self._erase()
                while not self._stopping.is_set() and (self._index() or self._warm()):
                    self._erase()
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
            waits = any(time.monotonic() < until for until in self._not_before.values())
            if not waits and any(one.erasing.unfinished for one in self._libraries.values()):
                continue
            if not waits and not self._news.is_set():
                self._idle.set()
            self._news.wait(_RETRY / 5 if waits else None)
        self._reader.close()

    def _next(self, turns: deque[str]) -> Iterable[str]:
        """Tenants whose turn can come; one that had its turn goes to the end."""
        now = time.monotonic()
        for name in list(turns):
            if self._not_before.get(name, 0.0) <= now:
                turns.remove(name)
                turns.append(name)
                yield name

    @contextlib.contextmanager
    def _for(self, name: str) -> Iterator[None]:
        """Work for a tenant; where the disk is full or fails it is tried again later."""
        try:
            yield
        except (Problem, StoreError) as error:
            _log.warning("work for a tenant waits: %s", error)
            self._not_before[name] = time.monotonic() + _RETRY

    def _erase(self) -> None:
        """Try again to erase what was deleted."""
        for name, library in self._libraries.items():
            waits = self._not_before.get(name, 0.0) > time.monotonic()
            if library.erasing.unfinished and not waits and not library.erasing.erase():
                self._not_before[name] = time.monotonic() + _RETRY

    def _index(self) -> bool:
        """One turn of one tenant; whether there was anything to be done."""
        for name in [one for one in self._libraries if one not in self._not_before]:  # who has come meanwhile
            self._not_before[name] = 0.0
            self._indexing.append(name)
            self._warming.append(name)
        for name in self._next(self._indexing):
            library = self._libraries[name]
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
        for file in files:
            if self._stopping.is_set() or sum(len(chunks) for _, chunks in read) >= _CHUNKS:
                break
            try:
                read.append((file, self._read(name, library, file)))
            except Problem:  # the database is away, which is no fault of the file
                raise
            except Exception as error:
                if self._stopping.is_set():
                    return
                self._fail(library, file, error)
        yield from self._embed_and_save(name, library, read)
        for job in dict.fromkeys(file.job for file in files):
            self._jobs.end_if_done(library, job)

    def _read(self, name: str, library: Library, file: PendingFile) -> list[Document]:
        self._jobs.say(name, file.job, "reading", file.name, 0, 1)
        if name != self._read_for:
            self._reader.close()  # each tenant's files are parsed in a process of their own
            self._read_for = name
        source = self._reader.read(library.incoming.fetched(file), file.name)
        self._jobs.say(name, file.job, "splitting", file.name, 0, 1)
        with self._base.engine.in_background():
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
        except (Problem, StoreError):
            raise  # the disk is full or fails, which is no fault of the files
        except Exception as error:
            if len(read) == 1:
                self._fail(library, read[0][0], error)
            for one in read if len(read) > 1 else ():  # it may be the fault of one alone
                yield from self._embed_and_save(name, library, [one])
            return
        library.incoming.discard([file for file, _ in read])
        self._metrics.ingested.labels("ready").inc(len(came))

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
            with self._base.engine.in_background():  # beside the model's passes both would take several times as long
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
                if self._warming_up.warm_shared():
                    return True
                continue
            with self._for(name):
                if self._warming_up.step(name, self._libraries[name]):
                    return True
        return False
