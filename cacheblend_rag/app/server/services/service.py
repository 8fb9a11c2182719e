"""Objects that all requests share: the models and their store, tenants, the queue, folders, counts."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cacheblend_rag.app.collection import is_bundled
from cacheblend_rag.app.folder_rag import FolderRAG
from cacheblend_rag.app.server.keys_file import secret_kept
from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.security.file_reader import FileReader
from cacheblend_rag.app.server.security.grammars import SchemaCheck
from cacheblend_rag.app.server.security.tenants import Keys, TokenQuota
from cacheblend_rag.app.server.services.admission_queue import AdmissionQueue
from cacheblend_rag.app.server.services.folders import DocumentEntry, Folder, SearchHit, Watcher, shown_name
from cacheblend_rag.app.server.services.logs import ServedRequest, served
from cacheblend_rag.app.server.services.metrics import Metrics
from cacheblend_rag.app.server.services.served_model import ServedModel, check_model
from cacheblend_rag.app.server.services.verifications import AnswerVerifications
from cacheblend_rag.app.server.settings import ServerSettings, without_folders
from cacheblend_rag.config import DEFAULT_MODEL, DEFAULT_NEW_TOKENS
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import CacheBlendError, ConfigError
from cacheblend_rag.prompt.registry import ChunkRegistry, WrittenForms
from cacheblend_rag.prompt.repeated import RepeatedTexts
from cacheblend_rag.report import BlendReport
from cacheblend_rag.retrieval.index import IndexReport
from cacheblend_rag.retrieval.words import fused, scores_by_words
from cacheblend_rag.store.base import KVStore, StoreStats

_T = TypeVar("_T")
_KNOWN = 16_000_000  # characters of chunk texts that are remembered of one tenant
_CONCURRENT = 4  # answers under way at once, where nothing else is said
# Seconds in which a thread must be free for the server to be ready.
_THREAD_SECONDS = 3.0
# For which KV that waits is still stored when the server ends.
_STORING_AT_END = 10.0
_log = logging.getLogger(__name__)


def open_service(
    settings: ServerSettings, wrapped: Callable[[KVStore], KVStore] | None = None, ids: str = ""
) -> Service:
    """Load the models, index the documents, and build all objects that the routes use.

    Parameters
    ----------
    settings : ServerSettings
    wrapped : callable, optional
        Puts a store of its own around the KV store.
    ids : str
        Prefix of answer ids; it identifies the replica that gave the answer.

    Raises
    ------
    CacheBlendError
        If a model, the embedder, the documents or the store cannot be used.
    """
    reader = FileReader(settings.limits)
    try:
        rag = FolderRAG(settings.rag, wrapped=wrapped, read=reader.parse, may_be_empty=True)
        try:
            # On a GPU steps of several have not been measured.
            concurrent = settings.concurrent or (_CONCURRENT if rag.engine.adapter.device.type == "cpu" else 1)
            models: dict[str, ServedModel] = {}
            for name, model in settings.models.items():  # the first is loaded already
                engine = (rag.also(model) if models else rag.engine).with_config(max_concurrent=concurrent)
                if settings.find_repeated:
                    engine = engine.of_tenant(engine.config.salt, RepeatedTexts())
                models[name] = ServedModel(name, engine, settings.limits, model == DEFAULT_MODEL)
            return Service(settings, rag, reader, models, concurrent, ids)
        except BaseException:
            rag.close()
            raise
    except BaseException:
        reader.close()
        raise


class Service:
    """Everything behind the routes; `open_service` makes it."""

    def __init__(
        self,
        settings: ServerSettings,
        rag: FolderRAG,
        reader: FileReader,
        models: dict[str, ServedModel],
        concurrent: int,
        ids: str,
    ) -> None:
        self.settings, self.limits, self.ids, self.started = settings, settings.limits, ids, int(time.time())
        self.rag, self.models, self.embeddings, self._reader = rag, models, rag.embeddings, reader
        self.stopping = False
        """Whether the server is about to end."""
        self.keys, self.quota = Keys(settings), TokenQuota(settings.limits.tokens_per_minute)
        self.sessions: dict[str, Session] = {}
        self._joining = threading.Lock()
        self.queue = AdmissionQueue(
            concurrent, self.limits.queue, self.limits.queue_seconds, lambda: len(self.sessions)
        )
        for model in models.values():
            for part in (model.engine.prompts, model.engine.verifications):
                part.tenants = lambda: max(1, len(self.sessions))
        self.metrics = Metrics(lambda: self.queue.waiting, lambda: self.queue.served, self.store_stats)
        _log.info("reading the documents; the server listens once they are indexed")
        self.base = Folder(rag.index, self.longest, self._changed)
        while self.base.update():
            pass
        if not self.base.counts()[0]:
            _log.warning("the folder %r holds no document yet", os.fspath(settings.rag.docs))
        for name in self.keys.tenants:
            self.session(name)
        self.watcher = Watcher(self._folders)

    def session(self, name: str) -> Session:
        """The server as a tenant sees it, whose key may have been made while the server runs."""
        with self._joining:
            if name not in self.sessions:
                # Made anew: others may be looking through it.
                self.sessions = {**self.sessions, name: Session(self, name)}
            return self.sessions[name]

    def _folders(self) -> list[tuple[Folder, Callable[[], BlendEngine] | None]]:
        """All folders, with the engine that stores KV of their passages ahead."""
        model = self.model_of()
        found: dict[int, tuple[Folder, Callable[[], BlendEngine] | None]] = {id(self.base): (self.base, None)}
        for one in self.sessions.values():
            if one.own is not None:
                found[id(one.own)] = one.own, partial(one.engine, model)
        if not self.settings.guarded:
            found[id(self.base)] = self.base, lambda: model.engine
        # With keys, the KV of the base folder is stored for each tenant when it asks.
        return list(found.values())

    def _changed(self, report: IndexReport, failed: int) -> None:
        self.count(report, failed)
        for one in self.sessions.values():
            one.changed(report)

    def count(self, report: IndexReport, failed: int) -> None:
        """Count what an update of a folder read."""
        self.metrics.ingested.labels("ready").inc(report.added + report.changed)
        self.metrics.ingested.labels("failed").inc(failed)

    @property
    def engine(self) -> BlendEngine:
        """The engine of the first model."""
        return self.model_of().engine

    @property
    def bundled(self) -> bool:
        """Whether the base documents are the bundled articles."""
        return is_bundled(Path(self.settings.rag.docs))

    @property
    def folder_name(self) -> str:
        """Name of the base folder."""
        return "Bundled articles" if self.bundled else shown_name(Path(self.settings.rag.docs).resolve().name)

    @property
    def model_name(self) -> str:
        """Public name of the first model, which answers requests that name no model."""
        return next(iter(self.models))

    def model_of(self, name: str | None = None) -> ServedModel:
        """A model by its name; by default the first.

        Raises
        ------
        Problem
            404 if there is none of this name.
        """
        name = self.model_name if name is None else name
        check_model(name, list(self.models))
        return self.models[name]

    @property
    def embedder_name(self) -> str:
        """Public name of the embedder."""
        return without_folders(os.fspath(self.settings.rag.embedder))

    @property
    def longest(self) -> float:
        """Seconds after which a stream is cut, whether its client has read it or not."""
        return self.limits.answer_seconds + 30.0

    def answer_tokens(self, requested: int | None, field: str = "max_tokens") -> int:
        """Most tokens of an answer, by what a request asks for.

        Raises
        ------
        ConfigError
            If that is more than this server allows; it names the field.
        """
        most = self.limits.answer_tokens
        if requested is not None and requested > most:
            raise ConfigError(field, requested, f"an answer may have {most:,} tokens here")
        return requested or min(self.rag.options.max_new_tokens or DEFAULT_NEW_TOKENS, most)

    def required_tokens(self, requested: int | None, field: str = "max_tokens") -> int | None:
        """`answer_tokens`; None if neither request nor settings give a number: then the window is the limit."""
        most = self.answer_tokens(requested, field)
        named = requested or self.rag.options.max_new_tokens
        return None if named is None and most == DEFAULT_NEW_TOKENS else most

    def embedder_tokens(self, texts: Sequence[str]) -> int:
        """Tokens of texts as the embedder counts them; 0 if it does not tell."""
        tokenizer: Any = getattr(getattr(self.embeddings.inner, "model", None), "tokenizer", None)
        if not callable(getattr(tokenizer, "encode", None)):
            return 0
        encoded = [tokenizer.encode(text) for text in texts]
        return sum(len(getattr(one, "ids", one)) for one in encoded)

    def ended(self, one: ServedRequest) -> None:
        """Count a request, and give back what it was charged too much."""
        self.metrics.request(one)
        if one.caller is not None and one.caller.tenant is not None and one.unused > 0:
            self.quota.give_back(one.caller.tenant, one.unused)

    def store_stats(self) -> StoreStats | None:
        """Statistics of the KV store; None if it has none."""
        try:
            return self.engine.store.stats()
        except CacheBlendError:
            return None

    async def check_working(self) -> None:
        """Whether requests are answered; if not, starting this process again may help.

        Raises
        ------
        Problem
            503 if the server stops, its threads do not get to anything, or nobody is let in at the model.
        """
        why = ""
        try:
            async with asyncio.timeout(_THREAD_SECONDS):
                await asyncio.to_thread(int)
        except TimeoutError:
            why = "all threads are busy"
        if self.stopping:
            why = "the server is stopping"
        elif self.queue.still > self.limits.queue_seconds:
            why = "no request got the model for a long time"
        elif not self.watcher.alive:
            why = "the documents are not watched any more"
        if why:
            raise Problem(503, "not_ready", why, retry_after=10)

    def begin_stop(self) -> None:
        """Let what runs in the background end soon."""
        self.stopping = True
        self.watcher.stop()
        self._reader.stop()

    def close(self) -> None:
        """Finish the step in hand, store what waits, release the models."""
        self.begin_stop()
        self.watcher.close()
        self._reader.close()
        self.rag.close(seconds=_STORING_AT_END)


class Session:
    """The server as one tenant sees it.

    Everyone reads the base folder. Uploads go into a folder of the tenant's own; without keys that is the base folder
    itself, unless it cannot be written.

    Parameters
    ----------
    service : Service
    name : str
        The tenant's, as in the settings; only its letters, digits, _ and - are ever part of a path.
    """

    def __init__(self, service: Service, name: str) -> None:
        self.service, self.name, settings = service, name, service.settings
        self.folder, self.salt = settings.documents_path, service.engine.config.salt
        if settings.guarded:
            self.folder = self.folder / "tenants" / name
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.salt = secret_kept(self.folder / "salt", 16)
        self._forms, self._lock = WrittenForms(_KNOWN), threading.Lock()
        self._known: ChunkRegistry | None = None
        self.verifications = AnswerVerifications(
            service.ids, lambda found: service.metrics.verification(found), lambda: service.stopping
        )
        self.schemas = SchemaCheck(service.limits)
        self._thread = asyncio.Lock()
        self.own = self._own_folder()
        """The folder that this tenant may change; None if none can be written."""
        self.folders = [service.base] if self.own in (None, service.base) else [service.base, self.own]

    @property
    def known(self) -> ChunkRegistry:
        """Texts of the tenant's documents, read when they are first wanted.

        Those of another tenant must not show in how a prompt is split.
        """
        with self._lock:
            if self._known is None:
                texts = [text for one in self.folders for text in one.texts()]
                self._known = ChunkRegistry(_KNOWN, texts, self._forms)
            return self._known

    def _own_folder(self) -> Folder | None:
        service = self.service
        guarded, docs = service.settings.guarded, service.settings.rag.docs
        if not guarded and not service.bundled and os.access(docs, os.W_OK):
            return service.base
        folder = self.folder / "documents"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            _log.warning("nothing can be uploaded: %s", error)
            return None

        def changed(report: IndexReport, failed: int) -> None:
            service.count(report, failed)
            self.changed(report)

        return Folder(service.rag.index_of(folder, self._forget), service.longest, changed)

    def _forget(self, texts: Sequence[str]) -> None:
        """Erase the KV of texts that are in no file of this tenant's any more."""
        written = [*texts, *self._forms.find(texts)]
        for model in self.service.models.values():
            self.engine(model).chunks.forget(written)

    def changed(self, report: IndexReport) -> None:
        """Take note of a folder that changed."""
        with self._lock:
            self._known = None
        if report.forgotten:  # answers may be made from what is gone
            self.verifications.forget_texts()

    async def in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Run a short function that needs no slot in a thread, one at a time for each tenant.

        Threads that run Python take the interpreter from the model.
        """
        async with self._thread:
            return await asyncio.to_thread(work, *arguments)

    def check_quota(self, tokens: int) -> None:
        """Refuse a request before it waits, if the tenant's quota has too few tokens left.

        Raises
        ------
        Problem
            429 with the time until there are so many, or 400 if there never are.
        """
        self.service.quota.check(self.name, tokens)

    def charge(self, answers: Sequence[int]) -> None:
        """Take the tokens of a request from the tenant's quota; unused tokens are returned when it ends.

        Parameters
        ----------
        answers : sequence of int
            For each answer, the tokens of its prompt plus the most tokens that it may have.

        Raises
        ------
        Problem
            As of `check_quota`.
        """
        self.service.quota.charge(self.name, sum(answers))
        one = served.get()
        one.charged += sum(answers)
        one.unfinished += len(answers)

    def answered(self, engine: BlendEngine, report: BlendReport) -> BlendReport:
        """Count an answer that came to its end; its report as clients see it."""
        self.took(report)
        served.get().unfinished -= 1
        return self.verifications.note(engine, report)

    def took(self, report: BlendReport) -> None:
        """Count what an answer of the request that is served here took, once, whether it came to its end or not."""
        if served.get().note(report):
            self.service.metrics.answered(report)

    def engine(self, model: ServedModel, ratio: float | None = None, rule: str | None = None) -> BlendEngine:
        """A model's engine with this tenant's salt."""
        return model.engine_for(self.salt, ratio, rule)

    def documents(self) -> list[DocumentEntry]:
        """All documents, and files on their way."""
        return [replace(one, own=folder is self.own) for folder in self.folders for one in folder.documents()]

    def check_holds(self, documents: Sequence[str]) -> None:
        """Refuse a choice of documents that are not all here.

        Raises
        ------
        Problem
            404 if one is not.
        """
        if not all(any(folder.holds(id) for folder in self.folders) for id in documents):
            raise Problem(404, "no_document", "documents: one of them no longer exists", field="documents")

    def search(self, query: str, k: int, documents: Sequence[str] | None = None) -> list[SearchHit]:
        """The passages that fit a question best, of all documents or of some."""
        vector = self.service.embeddings.embed_query(query)
        scores = scores_by_words(query, [folder.store for folder in self.folders])
        found = [one for folder in self.folders for one in folder.candidates(vector, k, documents, scores)]
        return [hit for hit, _, _ in fused(found, k)]

    def passage(self, document: str, number: int) -> SearchHit:
        """One passage of a document.

        Raises
        ------
        Problem
            404 if there is none.
        """
        for folder in self.folders:
            if folder.holds(document):
                return folder.chunk(document, number)
        raise Problem(404, "no_document", "there is no such document")

    def writable(self) -> Folder:
        """The folder that takes uploads.

        Raises
        ------
        Problem
            403 if there is none.
        """
        if self.own is None:
            raise Problem(403, "read_only", "no folder of this server can be written")
        return self.own
