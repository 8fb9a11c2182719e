"""The RAG API: collections, uploads, questions with sources, and the comparison of methods."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from fastapi import File, Request, Response, UploadFile
from fastapi.responses import StreamingResponse

from cacheblend_rag.app import collection as articles
from cacheblend_rag.app.server.api.bodies import bounded_router
from cacheblend_rag.app.server.api.completions import COLDEST
from cacheblend_rag.app.server.api.kept import going_on
from cacheblend_rag.app.server.api.rag_bodies import (
    Among,
    AskAmong,
    AskBody,
    ChunkNumber,
    ChunkText,
    CollectionInfo,
    CompareAmong,
    CompareBody,
    DiskInfo,
    DocumentInfo,
    FoundChunk,
    JobInfo,
    KVEstimate,
    LimitsInfo,
    ModelInfo,
    Name,
    NewCollection,
    PageState,
    SearchAmong,
    SearchBody,
    SettingsInfo,
    StoreInfo,
    Suggestion,
    WholeAnswer,
)
from cacheblend_rag.app.server.api.requests import Here
from cacheblend_rag.app.server.api.streams import EventStream, event, unless_gone
from cacheblend_rag.app.server.problems import Problem, noted_problem
from cacheblend_rag.app.server.security.file_reader import suffix_of
from cacheblend_rag.app.server.services.admission_queue import Slot
from cacheblend_rag.app.server.services.collection import Collection, OwnCollection, SearchHit, shown_name
from cacheblend_rag.app.server.services.logs import served
from cacheblend_rag.app.server.services.questions import EarlierTurn, compare_all, report_of, rule_name, search
from cacheblend_rag.app.server.services.served_model import ServedModel
from cacheblend_rag.app.server.services.service import Session, required_tokens
from cacheblend_rag.app.server.services.under_way import Told
from cacheblend_rag.app.server.settings import MOST_PASSAGES
from cacheblend_rag.app.server.storage.catalogue import PendingFile
from cacheblend_rag.calibration.comparison import COMPARED_TOKENS
from cacheblend_rag.config import Reasoning
from cacheblend_rag.engine.decode import DecodeArguments
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.engine.streaming import TextStream
from cacheblend_rag.errors import ConfigError, ContextLengthError, DatasetError, DocumentError
from cacheblend_rag.fusor.selection import RULES
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.thoughts import Thought, check_reasoning
from cacheblend_rag.report import Generation
from cacheblend_rag.retrieval.documents import SUFFIXES

router = bounded_router("/api", "RAG")
_COPIED_AT_ONCE = 2**20
_SAMPLED = 64  # passages by which the KV of a collection is estimated
_COMPARED = 4  # answers that a comparison counts as, one of each method


@router.get("/state")
async def state(here: Here) -> PageState:
    """Models, collections and settings."""
    service, config = here.service, here.service.engine.config
    stats = await here.in_thread(service.store_stats)
    alone = len(service.sessions) == 1  # sizes would tell one tenant what another does
    rule = rule_name(service.engine)
    return PageState(
        models=[_model_info(one) for one in service.models.values()],
        embedder=service.embedder_name,
        collections=await here.in_thread(lambda: [_collection_info(here, one) for one in here.collections()]),
        settings=SettingsInfo(
            ratio=_shown_ratio(config.recompute_ratio),
            rule=rule,
            rules=list(RULES),
            passages=service.settings.rag.top_k,
            answer_tokens=service.answer_tokens(None),
            verify=config.verify,
            reasoning=service.settings.rag.reasoning,
            keep_conversations=service.settings.keeps_conversations,
        ),
        suggestions=[Suggestion(**one) for one in suggestions_for(Path(service.settings.rag.docs))],
        store=StoreInfo(
            bytes=stats.volume if stats and alone else None,
            limit_bytes=stats.size_limit if stats else service.engine.store.traits.size_limit,
            records=stats.records if stats and alone else None,
        ),
        disk=DiskInfo(
            bytes=await here.in_thread(here.library.catalogue.bytes_used), limit_bytes=service.limits.disk_bytes
        ),
        limits=LimitsInfo(
            upload_bytes=service.limits.upload_bytes,
            upload_suffixes=list(SUFFIXES),
            question_chars=service.limits.question_chars,
            passages=MOST_PASSAGES,
            answer_tokens=service.limits.answer_tokens,
        ),
    )


def suggestions_for(documents: Path) -> list[dict[str, str]]:
    """Suggested questions for a folder of documents; none but for the bundled articles.

    Raises
    ------
    DatasetError
        If the file of questions is there and cannot be read.
    """
    if not articles.is_bundled(documents) or not articles.QUESTIONS_PATH.exists():
        return []
    found = []
    try:
        for line in articles.QUESTIONS_PATH.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            if one["suggested"]:
                several = len(one["files"]) > 1
                note = {"note": "The answer needs more than one document."} if several else {}
                found.append({"question": one["question"], **note})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{str(articles.QUESTIONS_PATH)!r} is no file of questions: {error}") from error
    return found


def _shown_ratio(ratio: float | str) -> float | Literal["auto"]:
    return "auto" if isinstance(ratio, str) else ratio


def _model_info(one: ServedModel) -> ModelInfo:
    layers, instructions = one.engine.adapter.num_layers, one.question_prompt.instructions
    return ModelInfo(name=one.name, layers=layers, starter=one.starter, instructions=instructions, thinks=one.thinks)


def _collection_info(here: Session, collection: Collection) -> CollectionInfo:
    documents, chunks = collection.counts()
    return CollectionInfo(
        id=collection.id,
        name=collection.name,
        documents=documents,
        chunks=chunks,
        bundled=not collection.writable and here.service.bundled,
        writable=collection.writable,
    )


# Collections and documents ------------------------------------------------------------------


@router.post("/collections", status_code=201)
async def create_collection(here: Here, body: NewCollection) -> CollectionInfo:
    """Make an empty collection."""
    if not (name := shown_name(body.name)):
        raise Problem(422, "invalid", "name: nothing of it can be seen; give it letters", field="name")
    made = await here.in_thread(here.library.create, name, here.service.limits.collections)
    return await here.in_thread(_collection_info, here, made)


@router.delete("/collections/{id}", status_code=204)
async def delete_collection(here: Here, request: Request, id: str) -> Response:
    """Delete a collection, its documents and their KV."""
    here.own(id)
    async with await unless_gone(request, here.service.queue.slot(here.tenant.name, alone="tenant")) as slot:
        await slot.in_thread(here.library.delete, id)
    here.service.ingestion.wake()
    return Response(status_code=204)


@router.get("/collections/{id}/documents")
async def documents(here: Here, id: str) -> list[DocumentInfo]:
    """Documents of a collection, and files on their way into it."""
    collection = here.collection(id)
    return await here.in_thread(_listed, here, collection)


@router.get("/collections/{id}/estimate")
async def estimate(here: Here, id: str, model: Name | None = None) -> KVEstimate:
    """How large the KV of all passages is, by default the first model's.

    Nothing is computed for it, and none of it need be stored.
    """
    return await here.in_thread(_estimated, here, here.service.model_of(model), here.collection(id))


def _estimated(here: Session, model: ServedModel, collection: Collection) -> KVEstimate:
    passages, texts = collection.counts()[1], collection.sample(_SAMPLED)
    if not texts:
        return KVEstimate(passages=passages, kv_bytes=0)
    engine = here.engine(model)
    sampled = sum(engine.chunks.estimate_bytes([text]) for text in texts)
    return KVEstimate(passages=passages, kv_bytes=round(sampled * passages / len(texts)))


def _listed(here: Session, collection: Collection) -> list[DocumentInfo]:
    # Asked for first: one that arrives in between is in both rather than in neither.
    coming = here.library.catalogue.uploads.files(collection=collection.id) if collection.writable else []
    ready = [
        DocumentInfo(id=one.id, name=one.name, chunks=one.chunks, bytes=one.bytes, state="ready")
        for one in collection.documents()
    ]
    known = {one.id for one in ready}
    return ready + [
        DocumentInfo(
            id=one.id,
            name=one.name,
            chunks=0,
            bytes=one.bytes,
            state="failed" if one.error else "indexing",
            error=one.error or None,
        )
        for one in coming
        if one.id not in known
    ]


@router.post("/collections/{id}/documents", status_code=202)
async def upload(here: Here, id: str, files: Annotated[list[UploadFile], File()]) -> JobInfo:
    """Take files in; they are read and indexed in the background. One of a name already there replaces it.

    Once this is answered the files are on the disk, and are indexed whatever becomes of the server meanwhile.
    """
    collection, limits = here.own(id), here.service.limits
    if len(files) > limits.upload_files:
        raise Problem(413, "too_many_files", f"upload {limits.upload_files} files at a time")
    names = [_document_name(one.filename) for one in files]
    return JobInfo(job=await here.in_thread(_taken_in, here, collection, names, files))


def _taken_in(here: Session, collection: OwnCollection, names: list[str], files: list[UploadFile]) -> str:
    """Copy uploads to files whose names the server draws, and take them in; the id of the job."""
    library, limits, job = here.library, here.service.limits, secrets.token_hex(8)
    library.incoming.check_room(collection.id, [], limits)
    taken: list[PendingFile] = []
    try:
        for one, name in zip(files, names, strict=True):
            file = PendingFile(secrets.token_hex(8), name, 0, "", job, collection.id)
            taken.append(file)
            taken[-1] = _copied(one, file, library.incoming.part_of(file.id), limits.upload_bytes)
        library.accept(job, collection, taken, limits)
    except OSError as error:
        library.incoming.discard(taken)
        raise Problem(507, "disk_full", "the server's disk is full, or fails; nothing was taken in") from error
    except BaseException:
        library.incoming.discard(taken)
        raise
    here.service.ingestion.accepted(here.tenant.name, job, taken)
    return job


def _copied(upload: UploadFile, file: PendingFile, path: Path, most: int) -> PendingFile:
    """An upload written to a file, and on the disk."""
    size, digest = 0, hashlib.sha256()
    with path.open("xb") as target:
        while piece := upload.file.read(_COPIED_AT_ONCE):
            size += len(piece)
            if size > most:
                raise Problem(413, "file_too_large", f"a file may have {most:,} bytes", field="files")
            digest.update(piece)
            target.write(piece)
        target.flush()
        os.fsync(target.fileno())
    return replace(file, bytes=size, sha256=digest.hexdigest())


@router.get(
    "/jobs/{job}/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}, "description": "Events `progress`."}},
)
async def job_events(here: Here, job: str) -> EventStream:
    """How far an upload is, from its beginning; ends with the stage ``done`` or ``failed``."""
    found = await here.in_thread(here.service.ingestion.job, job, here.tenant.name)

    async def progress() -> AsyncIterator[str]:
        async for one in found.events():
            yield event("progress", one)

    return EventStream(progress())


@router.delete("/collections/{id}/documents/{document}", status_code=204)
async def delete_document(here: Here, request: Request, id: str, document: str) -> Response:
    """Delete a document and its KV."""
    collection = here.own(id)
    if not await here.in_thread(here.service.ingestion.dismiss, here.library, collection.id, document):
        await here.in_thread(here.library.check_holds, collection, document)  # nobody waits for what is not here
        # Alone, for an answer under way would store the KV of what is deleted again.
        async with await unless_gone(request, here.service.queue.slot(here.tenant.name, alone="tenant")) as slot:
            await slot.in_thread(here.library.remove, collection, document)
        here.service.ingestion.wake()
    return Response(status_code=204)


@router.get("/collections/{id}/documents/{document}/chunks/{number}")
async def chunk(here: Here, id: str, document: str, number: ChunkNumber) -> ChunkText:
    """The text of one passage, and of those before and after it in the document."""
    return await here.in_thread(_shown, here.collection(id), document, number)


def _shown(collection: Collection, document: str, number: int) -> ChunkText:
    def text_of(neighbour: int) -> str | None:
        try:
            return collection.chunk(document, neighbour).text
        except Problem:  # the document ends here
            return None

    found = collection.chunk(document, number)
    title = found.text.strip().splitlines()[0] if found.text.strip() else ""
    return ChunkText(
        text=found.text,
        document=found.document,
        title=title[:200],
        before=text_of(number - 1),
        after=text_of(number + 1),
        page=found.page,
    )


# Questions ----------------------------------------------------------------------------------


@router.post("/collections/{id}/search")
async def find(here: Here, request: Request, id: str, body: SearchBody) -> list[FoundChunk]:
    """The passages nearest to a question."""
    return await _found_in(here, request, here.collection(id), body)


@router.post("/search")
async def find_among(here: Here, request: Request, body: SearchAmong) -> list[FoundChunk]:
    """The passages of several collections and documents that are nearest to a question."""
    return await _found_in(here, request, await _among(here, body), body)


async def _among(here: Session, body: Among) -> Collection:
    return await here.in_thread(here.among, body.collections, body.documents)


async def _found_in(here: Session, request: Request, collection: Collection, body: SearchBody) -> list[FoundChunk]:
    _check_question(here, body.query, "query")
    async with await unless_gone(request, here.service.queue.slot(here.tenant.name)) as slot:
        found = await slot.in_thread(here.search, collection, body.query, body.k)
    return [FoundChunk(**asdict(one)) for one in found]


_ASKED: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {}},
        "description": "Events `sources`, `thought`, `token`, `report`, `error` and `done`, or one answer.",
    }
}


@router.post("/collections/{id}/ask", response_model=WholeAnswer, responses=_ASKED)
async def ask(here: Here, request: Request, id: str, body: AskBody) -> Any:
    """Answer a question from a collection, with sources."""
    return await _answered(here, request, here.collection(id), body)


@router.post("/ask", response_model=WholeAnswer, responses=_ASKED)
async def ask_among(here: Here, request: Request, body: AskAmong) -> Any:
    """Answer a question from several collections, and from single documents, with sources."""
    return await _answered(here, request, await _among(here, body), body)


async def _answered(here: Session, request: Request, collection: Collection, body: AskBody) -> Any:
    model = here.service.model_of(body.model)
    _check_texts(here, body)
    engine = _engine(here, model, body, sessions=True).named(model.name, "chat")
    most, required = here.service.answer_tokens(body.max_tokens), required_tokens(here.service, body.max_tokens)
    here.check_quota(most)
    level, thought_most = _thinking(here, model, body)
    arguments = DecodeArguments(
        max_new_tokens=required,
        temperature=_temperature(body),
        verify=body.verify,
        reasoning=level,
        reasoning_tokens=thought_most,
        stop_repetition=body.stop_repetition,
    )

    async def prepared(slot: Slot) -> _Answering:
        question = await _retrieved(here, model, collection, body, slot, required, level)
        here.charge([question.tokens + most + (thought_most or 0)])
        return _Answering(here, question, model, engine, slot, arguments, body.show_prompt)

    if body.conversation is not None or body.resume:
        return await going_on(here, request, collection, body, partial(_in_a_slot, here, prepared))
    slot = await unless_gone(request, here.service.queue.slot(here.tenant.name))
    async with slot.kept():
        answering = await unless_gone(request, prepared(slot))
    if body.stream:
        return EventStream(_to_the_end(event(*one) async for one in answering.told()), slot, here.service.longest)
    async with slot:
        return await unless_gone(request, answering.whole())


def _temperature(body: AskBody) -> float:
    """The temperature of an answer; next to none is none, as in `/v1`."""
    return 0.0 if body.temperature is None or body.temperature < COLDEST else body.temperature


async def _in_a_slot(
    here: Session,
    prepared: Callable[[Slot], Awaitable[_Answering]],
    noted: Callable[[Sequence[tuple[str, str]]], Awaitable[None]],
) -> AsyncGenerator[Told]:
    """Events of an answer that waits for its slot itself; ``noted`` is told collection and document of passages."""
    with served.get().held():
        async with await here.service.queue.slot(here.tenant.name) as slot:
            answering = await prepared(slot)
            await noted([(one.collection, one.document_id) for one in answering.found])
            async with aclosing(answering.told()) as told:
                async for one in told:
                    yield one


class _Answering:
    """One question on its way."""

    def __init__(
        self,
        here: Session,
        question: _Question,
        model: ServedModel,
        engine: BlendEngine,
        slot: Slot,
        arguments: DecodeArguments,
        show_prompt: bool,
    ) -> None:
        self._here, self._question, self._model, self._engine, self._slot = here, question, model, engine, slot
        self._arguments, self._show_prompt = arguments, show_prompt

    def _begin(self) -> TextStream:
        timeout, prompt = self._here.service.limits.answer_seconds, self._question.prompt
        stream = self._engine.stream(prompt, timeout=timeout, **self._arguments)
        return self._slot.holds(stream, self._here.took)

    async def _report(self, answer: Generation) -> dict[str, Any]:
        answer = replace(answer, report=self._here.answered(self._model, self._engine, answer.report))
        await self._slot.leave()  # the model is not needed for what follows
        question = self._question
        answered = question.prompt, answer, question.turns, question.stands_alone, self._show_prompt
        return await asyncio.to_thread(report_of, self._engine, *answered)

    @property
    def found(self) -> list[SearchHit]:
        """The passages in the prompt."""
        return self._question.found

    async def told(self) -> AsyncGenerator[Told]:
        """The answer as events."""
        stream = self._begin()
        yield "sources", [asdict(one) for one in self._question.found]
        stream.with_thoughts = True
        async for piece in stream:
            yield "thought" if isinstance(piece, Thought) else "token", {"text": str(piece)}
        if stream.result is not None:
            yield "report", await self._report(stream.result)

    async def whole(self) -> WholeAnswer:
        """The answer at once."""
        answer = await self._begin().acomplete()
        report = await self._report(answer)
        sources = [FoundChunk(**asdict(one)) for one in self._question.found]
        return WholeAnswer(answer=answer.text, thought=answer.thought, sources=sources, report=report)


_COMPARED_AS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {}},
        "description": "Events `row`, `error` and `done`. A `row` has `method`, `answer`, `same_as_full`, `kl`, "
        "`order_kl`, `nearness`, `ttft_s` and `rounds`. `kl` is the mean KL divergence from full recompute, in "
        "nats a token of its answer; `order_kl` is that of full recompute over the same passages in another order, "
        "or null; `nearness` says both in words. A row comes with the answer, then again after each round: "
        "`ttft_s` is the median of so many `rounds`, or that of the one pass that gave the answer while `rounds` "
        "is 0.",
    }
}


@router.post("/collections/{id}/compare", response_class=StreamingResponse, responses=_COMPARED_AS)
async def compare(here: Here, request: Request, id: str, body: CompareBody) -> EventStream:
    """Answer a question by full recompute, prefix caching, full KV reuse and blending, then time all in rounds."""
    return await _compared(here, request, here.collection(id), body)


@router.post("/compare", response_class=StreamingResponse, responses=_COMPARED_AS)
async def compare_among(here: Here, request: Request, body: CompareAmong) -> EventStream:
    """The same from several collections, and from single documents."""
    return await _compared(here, request, await _among(here, body), body)


async def _compared(here: Session, request: Request, collection: Collection, body: CompareBody) -> EventStream:
    service = here.service
    model = service.model_of(body.model)
    _check_texts(here, body)
    engine = _engine(here, model, body)
    most = service.answer_tokens(body.max_tokens)
    if body.max_tokens is None:  # every method gives all of it
        most = min(most, COMPARED_TOKENS)
    here.check_quota(_COMPARED * most)
    slot = await unless_gone(request, service.queue.slot(here.tenant.name, alone="server"))
    async with slot.kept():
        question = await unless_gone(request, _retrieved(here, model, collection, body, slot, most))
        here.charge([question.tokens + most] * _COMPARED)

    async def rows() -> AsyncIterator[str]:
        compared = compare_all(engine, question.prompt, most, service.limits.answer_seconds)
        while (known := await slot.in_thread(next, compared, None)) is not None:
            for row in known:
                yield event("row", row)
            if await slot.give_way():  # nobody waits for more than one pass of one method
                await asyncio.to_thread(_check_there, here, question.found)

    return EventStream(_to_the_end(rows()), slot, service.longest)


def _check_there(here: Session, found: list[SearchHit]) -> None:
    """Refuse to go on with passages that were deleted meanwhile: their KV would be stored again.

    Raises
    ------
    Problem
        404 if one is gone.
    """
    for one in found:
        here.collection(one.collection).chunk(one.document_id, one.chunk)


@dataclass(frozen=True)
class _Question:
    """A question as the engine is asked it.

    Parameters
    ----------
    found : list of SearchHit
        The passages in the prompt.
    prompt : Prompt
    tokens : int
        Of the prompt.
    turns : int
        Earlier turns of the conversation in it.
    stands_alone : bool
        Whether it begins with passages of its own, not with those of the turns before it.
    """

    found: list[SearchHit]
    prompt: Prompt
    tokens: int
    turns: int
    stands_alone: bool = True


def _thinking(here: Session, model: ServedModel, body: AskBody) -> tuple[Reasoning, int | None]:
    """Whether the model shall think, and the most tokens of its thought.

    Raises
    ------
    ConfigError
        If it is asked to and cannot.
    """
    own = here.service.settings.rag
    level = (own.reasoning and model.thinks and own.reasoning) if body.reasoning is None else body.reasoning
    check_reasoning(model.engine.tokenizer, level)
    return level, model.thought_tokens(level, own.reasoning_tokens)


async def _retrieved(
    here: Session,
    model: ServedModel,
    collection: Collection,
    body: CompareBody,
    slot: Slot,
    most: int | None,
    level: Reasoning = False,
) -> _Question:
    """The passages that a question is answered from, and the prompt; it has room for so many tokens more."""
    earlier = [EarlierTurn(one.question, one.answer) for one in body.history]
    k = body.k or here.service.settings.rag.top_k
    found, alone = await slot.in_thread(search, partial(here.search, collection), body.question, earlier, k)
    if not alone and (continued := await asyncio.to_thread(_continued, model, collection, body, found, most, level)):
        return continued
    return await asyncio.to_thread(_fitting, model, body, found, earlier, most, level)


def _continued(
    model: ServedModel,
    collection: Collection,
    body: CompareBody,
    found: list[SearchHit],
    most: int | None,
    level: Reasoning,
) -> _Question | None:
    """A prompt that begins as that of the turn before did, so that its KV is there; None if it cannot.

    Passages that the conversation has already are not repeated; new ones stand with the question.
    """
    history, refs = body.history, dict[tuple[str, int], SearchHit]()
    began = max((at for at, turn in enumerate(history) if turn.stands_alone), default=0)
    turns, first = list[EarlierTurn](), list[SearchHit]()
    try:
        for at, turn in enumerate(history):
            new = dict.fromkeys((one.document_id, one.chunk) for one in turn.sources if at >= began)
            passages = {one: collection.chunk(*one) for one in new if one not in refs}
            refs |= passages
            behind = tuple(one.text for one in passages.values()) if at > began else ()
            turns.append(EarlierTurn(turn.question, turn.answer, behind))
            first += passages.values() if at == began else ()
    except Problem:  # a passage was deleted
        return None
    more = {(one.document_id, one.chunk): one for one in found if (one.document_id, one.chunk) not in refs}
    shown = [*refs.values(), *more.values()]
    if not first:  # the client does not say what the turns before were answered from
        return None
    texts = [one.text for one in more.values()]
    prompt = model.question_prompt.ask(
        body.question, [one.text for one in first], turns, texts, body.instructions, level
    )
    try:
        fit = model.check_length(prompt, most)
    except (Problem, ContextLengthError):
        return None
    if len(fit.prompt.chunks) < len(shown):
        return None
    return _Question(shown, fit.prompt, len(fit.split.input_ids), len(turns), stands_alone=False)


def _fitting(
    model: ServedModel,
    body: CompareBody,
    found: list[SearchHit],
    earlier: list[EarlierTurn],
    most: int | None,
    level: Reasoning,
) -> _Question:
    """The prompt with as many of the latest turns as there is room for beside the passages."""
    passages = [one.text for one in found]
    prompt = model.question_prompt.ask(
        body.question, passages, earlier, instructions=body.instructions, reasoning=level
    )
    try:
        fit = model.check_length(prompt, most)
    except (Problem, ContextLengthError):
        if not earlier:
            raise
        return _fitting(model, body, found, earlier[1:], most, level)
    if earlier and len(fit.prompt.chunks) < len(found):
        return _fitting(model, body, found, earlier[1:], most, level)
    return _Question(found[: len(fit.prompt.chunks)], fit.prompt, len(fit.split.input_ids), len(earlier))


async def _to_the_end(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Events with the last one behind them; an error becomes an event too."""
    try:
        async for one in events:
            yield one
    except Exception as error:
        problem = noted_problem(error)
        yield event("error", {"code": problem.code, "message": problem.message})
    yield event("done", {})


def _engine(here: Session, model: ServedModel, body: CompareBody, sessions: bool = False) -> BlendEngine:
    if body.rule is not None and body.rule not in RULES:
        raise ConfigError("rule", body.rule, "use one of " + ", ".join(RULES))
    return here.engine(model, body.ratio, body.rule, sessions)


def _check_texts(here: Session, body: CompareBody) -> None:
    _check_question(here, body.question, "question")
    _check_question(here, body.instructions or "", "instructions")


def _check_question(here: Session, text: str, field: str) -> None:
    most = here.service.limits.question_chars
    if len(text) > most:
        raise Problem(413, "too_long", f"{field} may have {most:,} characters", field=field)


def _document_name(given: str | None) -> str:
    """The name a document is shown by: no path, nothing that cannot be seen.

    Raises
    ------
    Problem
        415 if files of this kind are not read.
    """
    name = shown_name(PurePosixPath((given or "").replace("\\", "/")).name)[-200:]
    try:
        suffix_of(name)
    except DocumentError as error:
        raise Problem(415, "unknown_kind", f"{name}: {error}", field="files") from None
    return name
