"""Objects that all requests share: the models and their store, tenants, the queue, ingestion, counts."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cacheblend_rag import config
from cacheblend_rag.app.collection import MANUAL_FOLDERS, is_bundled, manual_path
from cacheblend_rag.app.folder_rag import FolderRAG
from cacheblend_rag.app.server.problems import Problem, no_collection, no_document_of_choice
from cacheblend_rag.app.server.security.grammars import SchemaCheck
from cacheblend_rag.app.server.security.tenants import Keys, Tenant, TokenQuota
from cacheblend_rag.app.server.services.admission_queue import AdmissionQueue
from cacheblend_rag.app.server.services.collection import (
    BaseCollection,
    Collection,
    OwnCollection,
    SearchHit,
    shown_name,
)
from cacheblend_rag.app.server.services.conversations import Conversations
from cacheblend_rag.app.server.services.following import Follower, Following
from cacheblend_rag.app.server.services.ingestion import Ingestion
from cacheblend_rag.app.server.services.library import Library
from cacheblend_rag.app.server.services.logs import ServedRequest, served
from cacheblend_rag.app.server.services.metrics import Metrics
from cacheblend_rag.app.server.services.served_model import ServedModel, check_model
from cacheblend_rag.app.server.services.several import Part, SeveralCollections, parts_of, search_all
from cacheblend_rag.app.server.services.shared_kv import SharedKV
from cacheblend_rag.app.server.services.shares import SharedConversations
from cacheblend_rag.app.server.services.under_way import AnswersUnderWay
from cacheblend_rag.app.server.services.verifications import AnswerVerifications
from cacheblend_rag.app.server.settings import ServerSettings, without_folders
from cacheblend_rag.app.server.storage.tables import DatabaseFault
from cacheblend_rag.config import DEFAULT_NEW_TOKENS
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import CacheBlendError, ConfigError
from cacheblend_rag.report import BlendReport
from cacheblend_rag.retrieval.documents import by_suffix
from cacheblend_rag.retrieval.embedder import SharedEmbeddings
from cacheblend_rag.store.base import KVStore, StoreStats
from cacheblend_rag.store.tombstones import TombstonedStore

if TYPE_CHECKING:
    from cacheblend_rag.app.server.storage.postgres import Database, Peers

_BASE_ID = "archive"
_MANUAL_ID = "documentation"
"""Id of the collection over the folder the server was started with."""

_T = TypeVar("_T")
_CONCURRENT = 4  # answers under way at once, where nothing else is said
# Seconds after its last request in which a tenant may have something under way.
_IDLE_SECONDS = 3_600.0
# Seconds in which a thread must be free for the server to be ready.
_THREAD_SECONDS = 3.0
# For which KV that waits is still stored when the server ends.
_STORING_AT_END = 10.0
_log = logging.getLogger(__name__)


class Service:
    """Everything behind the routes.

    Parameters
    ----------
    settings : ServerSettings
    wrapped : callable, optional
        Puts a store of its own around the KV store.
    ids : str
        Beginning of the ids of answers, by which one of several replicas is found.

    Raises
    ------
    CacheBlendError
        If a model, the embedder, the documents or the store cannot be used.
    """

    def __init__(
        self, settings: ServerSettings, wrapped: Callable[[KVStore], KVStore] | None = None, ids: str = ""
    ) -> None:
        self.ids = ids
        self.settings, self.limits, self.started = settings, settings.limits, int(time.time())
        self._stopping, self._wrapped, self.keys = False, wrapped, Keys(settings)
        self.rag = FolderRAG(settings.rag, wrapped=self._tombstoned)
        # On a GPU steps of several have not been measured.
        concurrent = settings.concurrent or (_CONCURRENT if self.rag.engine.adapter.device.type == "cpu" else 1)
        try:
            self.models = self._served_models(concurrent)
            self.database = self._shared_database()  # the folder is ours by now, and an id of the server is kept there
        except BaseException:
            self.rag.close()
            raise
        self.engine = self.model_of().engine
        _log.info("reading the documents; the server listens once they are indexed")
        if others := self.rag.update().others:
            _log.info("%d files of other kinds left out (%s)", len(others), by_suffix(others))
        self.embeddings = SharedEmbeddings(self.rag.index.store.embeddings, self.engine.turns.in_turn)
        name = "Bundled articles" if self.bundled else shown_name(Path(settings.rag.docs).name)
        self.base = BaseCollection(_BASE_ID, name, self.rag.index)
        self.fixed = [self.base, *self._manual()]
        self._joining = threading.Lock()
        # With keys every tenant has a salt of its own, and nothing is shared.
        fixed = [] if settings.guarded else self.fixed
        self._shared = frozenset(text for one in fixed for text in one.texts())
        if self.database is not None:
            self.database.register()
        self.sessions = {name: self._session(name) for name in self.keys.tenants}
        self.queue = AdmissionQueue(
            concurrent, self.limits.queue, self.limits.queue_seconds, lambda: len(self.sessions)
        )
        self.quota = TokenQuota(self.limits.tokens_per_minute)
        self.metrics = Metrics(
            lambda: self.queue.waiting,
            lambda: self.queue.served,
            self.store_stats,
            self._disk_bytes,
            lambda: {name: (model.least_ratio, float(model.in_memory)) for name, model in self.models.items()},
        )
        # Without keys the first model's KV of the served folder is stored ahead, and the rest when it is asked for.
        models, stored = (
            (list(self.models.values()), self.fixed) if settings.guarded else ([self.model_of()], [self.base])
        )
        texts = [text for one in stored for text in one.texts()]
        self.shared_kv = SharedKV(models, texts, lambda: self.ingestion.wake(), whole=settings.guarded)
        self.ingestion = Ingestion(
            self.limits,
            self.metrics,
            self.embeddings,
            {name: session.library for name, session in self.sessions.items()},
            lambda name: self.joined(name).engine(self.model_of()),
            self.engine.turns,
            self.shared_kv,
        )
        self.follower: Follower | None = None
        if self.database is not None:
            tell = self.ingestion.follow_jobs
            self.follower = Follower(self.database, self._followed, self.ingestion.wake, tell)

    def _served_models(self, concurrent: int) -> dict[str, ServedModel]:
        """All models by their names; the first is loaded already."""
        made: dict[str, ServedModel] = {}
        for name, model in self.settings.models.items():
            engine = self.rag.also(model) if made else self.rag.engine
            found = engine.config.find_repeated in ("auto", True)
            engine = engine.with_config(max_concurrent=concurrent, find_repeated=found)
            made[name] = ServedModel(name, engine, self.limits, starter=model == config.DEFAULT_MODEL)
        return made

    def _shared_database(self) -> Database | None:
        if self.settings.database is None:
            return None
        from cacheblend_rag.app.server.storage.postgres import Database

        # Local KV of a server that the database does not know may be of what was deleted.
        return Database(self.settings.database, self.settings.rag.data_path, self.tombstones.clear_near)

    def _peers(self, tenant: str) -> Peers | None:
        """The servers that share the catalogue of a tenant."""
        if self.database is None:
            return None
        from cacheblend_rag.app.server.storage.postgres import Peers, PostgresBackend

        return Peers(PostgresBackend(self.database, tenant))

    def _followed(self) -> list[Following]:
        return [one.library.following for one in self.sessions.values() if one.library.following is not None]

    def joined(self, name: str) -> Session:
        """The session of a tenant, whose key may have been made while the server runs; those that have left are closed.

        A tenant has left that has no key any more, once nothing of it is left to be done.
        """
        with self._joining:
            if name not in self.sessions:
                known = self.keys.tenants
                left = {
                    one: session for one, session in self.sessions.items() if one not in known and session.is_idle()
                }
                for one, gone in left.items():
                    self.ingestion.leave(one)
                    gone.library.close()
                session = self._session(name)
                self.ingestion.join(name, session.library)
                # Made anew: others may be looking through it.
                self.sessions = {one: its for one, its in self.sessions.items() if one not in left} | {name: session}
            return self.sessions[name]

    def _tombstoned(self, store: KVStore) -> KVStore:
        self.tombstones = TombstonedStore(self._wrapped(store) if self._wrapped else store, self.longest)
        return self.tombstones

    def shared(self, salt: str) -> Container[str]:
        """Texts that all may read, if their KV is stored under this salt."""
        return self._shared if salt == self.engine.config.salt else ()

    def _manual(self) -> list[BaseCollection]:
        """The project's own documentation, beside the bundled articles."""
        manual = manual_path()
        if not self.bundled or manual is None:
            return []
        _log.info("indexing the documentation, too: a minute or more at the first start")
        index = self.rag.index_of(manual, self.embeddings, only=MANUAL_FOLDERS)
        index.update()
        return [BaseCollection(_MANUAL_ID, "cacheblend_rag documentation", index)]

    def _session(self, name: str) -> Session:
        peers = self._peers(name)
        salt = None if peers is None else peers.backend.salt
        if not self.settings.guarded:
            salt = self.engine.config.salt
        tenant = Tenant(name, self.settings.rag.data_path / "tenants" / name, salt)
        return Session(self, tenant, peers)

    @property
    def bundled(self) -> bool:
        """Whether the base documents are the bundled articles."""
        return is_bundled(Path(self.settings.rag.docs))

    @property
    def model_name(self) -> str:
        """Public name of the first model, which answers where a request names none."""
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

    def _disk_bytes(self, tenant: str) -> float:
        try:
            return self.sessions[tenant].library.catalogue.bytes_used() if tenant in self.sessions else 0
        except (Problem, DatabaseFault):  # the database is away, or fails
            return math.nan

    def store_stats(self) -> StoreStats | None:
        """Statistics of the KV store; None if it has none."""
        try:
            return self.engine.store.stats()
        except CacheBlendError:
            return None

    @property
    def stopping(self) -> bool:
        """Whether the server is about to end."""
        return self._stopping

    async def check_ready(self) -> None:
        """Whether requests are answered.

        Raises
        ------
        Problem
            503 as of `check_working`, or if the database is away.
        """
        await self.check_working()
        if self.database is not None:
            await asyncio.to_thread(self.database.register)

    async def check_working(self) -> None:
        """Whether this process does its work; if not, starting it again may help.

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
        if self._stopping:
            why = "the server is stopping"
        elif self.queue.still > self.limits.queue_seconds:
            why = "nobody was let in at the model for a long time"
        elif not self.ingestion.alive:
            why = "uploads are not read any more"
        if why:
            raise Problem(503, "not_ready", why, retry_after=10)

    def begin_stop(self) -> None:
        """Let what runs in the background end soon."""
        self._stopping = True
        self.ingestion.stop()

    def close(self) -> None:
        """Finish the document in hand, store what waits, release the models."""
        if self.follower is not None:
            self.follower.stop()
        self.ingestion.close()
        for session in self.sessions.values():
            session.library.close()
        self.rag.close(seconds=_STORING_AT_END)
        if self.database is not None:
            self.database.close()


class Session:
    """The server as one tenant sees it."""

    def __init__(self, service: Service, tenant: Tenant, peers: Peers | None = None) -> None:
        self.service, self.tenant = service, tenant
        shared = service.shared(tenant.salt)
        self.verifications = AnswerVerifications(
            service.ids, lambda found: service.metrics.verification(found), lambda: service.stopping
        )
        self.library = Library(
            tenant,
            service.embeddings,
            self.engines,
            service.tombstones,
            shared,
            peers,
        )
        self.library.erasing.forget_answers = self.verifications.forget_texts
        self.conversations = Conversations(
            self.library,
            service.limits,
            service.settings.keeps_conversations,
            self.has_key,
        )
        self.shares = SharedConversations(self.library, self.conversations, service.limits)
        self.under_way = AnswersUnderWay(service.ids)
        self.schemas = SchemaCheck(service.limits)
        self.used = time.monotonic()
        """When its last request came."""
        self._thread = asyncio.Lock()

    def has_key(self) -> bool:
        """Whether the tenant has a key now."""
        return self.tenant.name in self.service.keys.tenants

    def is_idle(self) -> bool:
        """Whether no request can be under way, and no upload or deletion waits."""
        try:
            waits = self.library.erasing.unfinished or self.library.catalogue.uploads.jobs()
        except (Problem, DatabaseFault):  # the database is away
            return False
        return not waits and time.monotonic() - self.used > _IDLE_SECONDS

    async def in_thread(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """Run something short that needs no slot at the model in a thread; one at a time of each tenant.

        Threads that run Python take the interpreter from the model.
        """
        async with self._thread:
            return await asyncio.to_thread(work, *arguments)

    def check_quota(self, tokens: int) -> None:
        """Refuse a request before it waits, if so many tokens are not left of the tenant's quota.

        Raises
        ------
        Problem
            429 with the time until there are so many, or 400 if there never are.
        """
        self.service.quota.check(self.tenant.name, tokens)

    def charge(self, answers: Sequence[int]) -> None:
        """Take the tokens of a request from the tenant's quota; those that are not used come back when it ends.

        Parameters
        ----------
        answers : sequence of int
            Of each answer, the tokens of its prompt and the most that it may have itself.

        Raises
        ------
        Problem
            As of `check_quota`.
        """
        self.service.quota.charge(self.tenant.name, sum(answers))
        one = served.get()
        one.charged += sum(answers)
        one.unfinished += len(answers)

    def answered(self, model: ServedModel, engine: BlendEngine, report: BlendReport) -> BlendReport:
        """Count an answer that came to its end; its report as clients see it."""
        self.took(report)
        served.get().unfinished -= 1
        return self.verifications.note(model.name, engine, report)

    def took(self, report: BlendReport) -> None:
        """Count what an answer of the request that is served here took, once, whether it came to its end or not."""
        if served.get().note(report):
            self.service.metrics.answered(report)

    def engine(
        self, model: ServedModel, ratio: float | None = None, rule: str | None = None, sessions: bool = False
    ) -> BlendEngine:
        """A model's engine with this tenant's salt. It reads what was stored for all tenants, too."""
        return model.engine_for(self.tenant.salt, ratio, rule, sessions)

    def engines(self) -> list[BlendEngine]:
        """Those of all models: each has KV of its own of this tenant's texts."""
        return [self.engine(model) for model in self.service.models.values()]

    def collections(self) -> list[Collection]:
        """All that this tenant may read."""
        return [*self.service.fixed, *self.library.collections()]

    def search(self, collection: Collection, query: str, k: int) -> list[SearchHit]:
        """The passages of a collection that are nearest to a question."""
        vector = self.service.embeddings.embed_query(query)

        def find(part: Part) -> list[SearchHit]:
            if isinstance(part.collection, OwnCollection):
                return self.library.nearest(part.collection, vector, k, part.documents)
            return part.collection.nearest(vector, k, part.documents)

        if isinstance(collection, SeveralCollections):
            return search_all(find, collection.parts, k)
        return find(Part(collection))

    def among(self, collections: Sequence[str], documents: Sequence[str]) -> Collection:
        """Whole collections, and single documents beside them.

        Raises
        ------
        Problem
            404 if this tenant has no such collection or document, 422 if none is named.
        """
        whole = [self.collection(id) for id in dict.fromkeys(collections)]
        places = [(of, id) for id in dict.fromkeys(documents) for of in self.collections() if of.holds(id)]
        if len({id for _, id in places}) < len(set(documents)):
            raise no_document_of_choice()
        parts = parts_of(whole, places)
        if not parts:
            raise Problem(422, "invalid", "collections: name one, or a document", field="collections")
        return whole[0] if len(parts) == 1 and whole else SeveralCollections(parts)

    def collection(self, id: str) -> Collection:
        """A collection by its id.

        Raises
        ------
        Problem
            404 if this tenant has none.
        """
        found = next((one for one in self.service.fixed if one.id == id), None) or self.library.get(id)
        if found is None:
            raise no_collection()
        return found

    def own(self, id: str) -> OwnCollection:
        """A collection this tenant may change.

        Raises
        ------
        Problem
            403 for the base collection, 404 if there is none.
        """
        found = self.collection(id)
        if not isinstance(found, OwnCollection):
            raise Problem(403, "read_only", "this collection is the folder the server was started with")
        return found


def session_if_usable(service: Service, name: str) -> Session | None:
    """The session of a tenant; None where its folder or database cannot be opened now, which others do not feel."""
    try:
        return service.joined(name)
    except (Problem, OSError, DatabaseFault) as error:
        _log.warning("what a tenant has cannot be opened now (%s)", type(error).__name__)
        return None


def required_tokens(service: Service, requested: int | None, field: str = "max_tokens") -> int | None:
    """`Service.answer_tokens`; None where nobody named a number, so that they are as many as the window has left."""
    most = service.answer_tokens(requested, field)
    named = requested or service.rag.options.max_new_tokens
    return None if named is None and most == DEFAULT_NEW_TOKENS else most
