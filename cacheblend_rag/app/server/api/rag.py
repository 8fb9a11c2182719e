"""The RAG API: documents, questions with sources, and the comparison of methods."""

from __future__ import annotations

import asyncio
import json
import unicodedata
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from fastapi import File, Query, Request, Response, UploadFile
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from cacheblend_rag import __version__
from cacheblend_rag.app import collection as articles
from cacheblend_rag.app.server.api.bodies import NO_FLAG, Flag, bounded_router
from cacheblend_rag.app.server.api.completions import COLDEST
from cacheblend_rag.app.server.api.requests import Here
from cacheblend_rag.app.server.api.streams import EventStream, event, unless_gone
from cacheblend_rag.app.server.problems import Problem, noted_problem
from cacheblend_rag.app.server.services.admission_queue import Slot
from cacheblend_rag.app.server.services.folders import DocumentEntry, SearchHit, shown_name
from cacheblend_rag.app.server.services.questions import EarlierTurn, compared_row, report_of, rule_name, search
from cacheblend_rag.app.server.services.served_model import ServedModel
from cacheblend_rag.app.server.services.service import Session
from cacheblend_rag.app.server.settings import MOST_PASSAGES
from cacheblend_rag.calibration.quality import COMPARED_TOKENS, Methods
from cacheblend_rag.config import Reasoning, Verify, read_reasoning
from cacheblend_rag.engine.decode import DecodeArguments
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.engine.streaming import Progress, TextStream
from cacheblend_rag.errors import ConfigError, ContextLengthError
from cacheblend_rag.fusor.selection import RULES
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.thoughts import Thought, check_reasoning
from cacheblend_rag.report import BlendReport, Generation, Verification
from cacheblend_rag.retrieval.documents import SUFFIXES

router = bounded_router("/api", "RAG")
# The answer to a question for which there are no passages.
_NO_DOCUMENTS = "There are no documents to answer from."
_NAME_BYTES = 200  # of a file; systems take 255
_MOST_SECONDS = 30  # that a request waits for a verification
_COMPARED = 4  # answers that a comparison counts as, one of each method


Name = Annotated[str, StringConstraints(max_length=500)]
PassageNumber = Annotated[int, NO_FLAG, Field(ge=0)]
Question = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
"""A text that a person writes; requests hold it to ``question_chars`` of the server's limits."""


def _reasoning(given: Any) -> Any:
    """Whether the model thinks, in the words of options and commands; no number says it."""
    try:
        return None if given is None else read_reasoning("reasoning", given)
    except ConfigError:
        words = "use true, false, 'low', 'medium' or 'high'"
        raise PydanticCustomError("unknown_word", "{words}", {"words": words}) from None


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SearchBody(_Body):
    """A question, and the ``documents`` that are searched, by their ids; by default all are."""

    question: Question
    top_k: Annotated[int, NO_FLAG, Field(ge=1, le=MOST_PASSAGES)] | None = None
    documents: Annotated[list[Name], Field(min_length=1, max_length=1_000)] | None = None


class CompareBody(SearchBody):
    """A question to be answered by every method.

    ``model`` is the name of one of the models, by default of the first.
    ``history`` is its conversation, the first turn first. ``instructions`` is what the model is told before the
    passages.
    """

    history: Annotated[list[EarlierTurn], Field(max_length=50)] = Field(default_factory=list)
    recompute_ratio: Annotated[float, NO_FLAG, Field(ge=0, le=1)] | None = None
    selection: Annotated[str, StringConstraints(max_length=40)] | None = None
    max_tokens: Annotated[int, NO_FLAG, Field(ge=1, le=1_000_000)] | None = None
    instructions: Question | None = None
    model: Name | None = None


class AskBody(CompareBody):
    """A question; ``stream`` chooses between events and one answer.

    With ``show_prompt``, the report has the prompt token by token. With ``return_progress``, events say how much of
    the prompt is read. With ``verify``, the answer is compared with full prefill's, and the report says whether it was
    corrected. ``reasoning`` says whether the model thinks first. Unless ``stop_repetition`` is false, an answer that
    only repeats itself is ended.

    ``temperature`` above 0 samples; by default the likeliest token is taken each time.
    """

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    stream: Flag = True
    show_prompt: Flag = False
    return_progress: Flag = False
    verify: Verify | None = None
    reasoning: Annotated[Reasoning | None, BeforeValidator(_reasoning)] = None
    stop_repetition: Flag | None = None


class DocumentList(BaseModel):
    """Documents by name."""

    documents: list[DocumentEntry]


class PassageText(BaseModel):
    """A passage of a document."""

    text: str
    document: str
    page: int | None = None


class FoundPassages(BaseModel):
    """Passages, the nearest first."""

    passages: list[SearchHit]


class WholeAnswer(BaseModel):
    """An answer that was not streamed; ``report`` has the same content as the event ``report``."""

    answer: str
    thought: str
    sources: list[SearchHit]
    report: dict[str, object]


@router.get("/state")
async def state(here: Here) -> dict[str, Any]:
    """Models, of which the first answers where a request names none, documents, settings and limits.

    ``tenant`` is the one that the key is of; null without keys.
    """
    service, config = here.service, here.service.engine.config
    own, ratio = service.settings.rag, config.recompute_ratio
    counts = await here.in_thread(lambda: [one.counts() for one in here.folders])
    models = [
        {
            "name": one.name,
            "layers": one.engine.adapter.num_layers,
            "starter": one.starter,
            "instructions": one.question_prompt.instructions,
            "thinks": one.thinks,
        }
        for one in service.models.values()
    ]
    return {
        "models": models,
        "embedder": service.embedder_name,
        "folder": {"name": service.folder_name, "writable": here.own is not None, "bundled": service.bundled},
        "documents": sum(documents for documents, _ in counts),
        "passages": sum(passages for _, passages in counts),
        "settings": {
            "top_k": own.top_k,
            "max_new_tokens": service.answer_tokens(None),
            "recompute_ratio": ratio,
            "selection": rule_name(config.selection),
            "rules": list(RULES),
            "verify": config.verify,
            "reasoning": own.reasoning,
        },
        "limits": {
            "suffixes": list(SUFFIXES),
            "upload_bytes": service.limits.upload_bytes,
            "upload_files": service.limits.upload_files,
            "question_chars": service.limits.question_chars,
            "top_k": MOST_PASSAGES,
            "max_tokens": service.limits.answer_tokens,
        },
        "suggested": suggestions_for(Path(own.docs)),
        "tenant": here.name if service.settings.guarded else None,
        "version": __version__,
    }


def suggestions_for(documents: Path) -> list[dict[str, str | None]]:
    """Suggested questions for the bundled articles; an empty list for any other folder."""
    if not articles.is_bundled(documents) or not articles.QUESTIONS_PATH.exists():
        return []
    asked = [json.loads(line) for line in articles.QUESTIONS_PATH.read_text(encoding="utf-8").splitlines()]
    several = "The answer needs more than one document."
    return [
        {"question": one["question"], "note": several if len(one["files"]) > 1 else None}
        for one in asked
        if one["suggested"]
    ]


# Documents ----------------------------------------------------------------------------------


@router.get("/documents")
async def documents(here: Here) -> DocumentList:
    """All documents, and files on their way."""
    return DocumentList(documents=await here.in_thread(here.documents))


@router.post("/documents", status_code=201)
async def upload(here: Here, files: Annotated[list[UploadFile], File()]) -> DocumentList:
    """Put files into the folder, where they are read in the background. A file replaces another of the same name.

    After the answer, the files are on disk and will be indexed even if the server is restarted.
    """
    if len(files) > here.service.limits.upload_files:
        raise Problem(413, "too_many_files", f"upload {here.service.limits.upload_files} files at a time")
    names = [_document_name(one.filename) for one in files]
    taken = await here.in_thread(_taken_in, here, names, files)
    here.service.watcher.wake()
    return DocumentList(documents=taken)


def _taken_in(here: Session, names: list[str], files: list[UploadFile]) -> list[DocumentEntry]:
    folder, limits = here.writable(), here.service.limits
    if here.service.settings.guarded:
        used, more = folder.bytes_used(), sum(one.size or 0 for one in files)
        if len(folder.documents()) + len(files) > limits.documents:
            raise Problem(409, "too_many_documents", f"you may have {limits.documents:,} documents")
        if used + more > limits.disk_bytes:
            message = f"your documents take {used:,} bytes and may take {limits.disk_bytes:,}; you send {more:,} more"
            raise Problem(507, "disk_quota", message, field="files")
    return [folder.put(name, one.file, limits.upload_bytes) for one, name in zip(files, names, strict=True)]


@router.delete("/documents/{id}", status_code=204)
async def delete_document(here: Here, request: Request, id: str) -> Response:
    """Delete a file. Once this is answered, nothing of it is found and its KV is erased."""
    folder = here.writable()
    if not folder.holds(id):  # nobody waits for what is not here
        await here.in_thread(here.check_holds, [id])
        raise Problem(403, "read_only", "this document belongs to the folder that the server was started with")
    # Alone, for an answer under way would store the KV of what is deleted again.
    async with await unless_gone(request, here.service.queue.slot(here.name, alone=True)) as slot:
        await slot.in_thread(folder.remove, id)
    here.service.watcher.wake()
    return Response(status_code=204)


@router.get("/documents/{id}/passages/{number}")
async def passage(here: Here, id: str, number: PassageNumber) -> PassageText:
    """The text of one passage."""
    found = await here.in_thread(here.passage, id, number)
    return PassageText(text=found.text, document=found.document, page=found.page)


# Questions ----------------------------------------------------------------------------------


@router.post("/search")
async def find(here: Here, request: Request, body: SearchBody) -> FoundPassages:
    """The passages nearest to a question."""
    await _check(here, body)
    async with await unless_gone(request, here.service.queue.slot(here.name)) as slot:
        k = body.top_k or here.service.settings.rag.top_k
        return FoundPassages(passages=await slot.in_thread(here.search, body.question, k, body.documents))


async def _check(here: Session, body: SearchBody) -> None:
    """Refuse texts that are too long, and documents that are not here."""
    most = here.service.limits.question_chars
    for field in ("question", "instructions"):
        if len(getattr(body, field, None) or "") > most:
            raise Problem(413, "too_long", f"{field} may have {most:,} characters", field=field)
    if body.documents is not None:
        await here.in_thread(here.check_holds, body.documents)


@router.post(
    "/ask",
    response_model=WholeAnswer,
    responses={
        200: {
            "content": {"text/event-stream": {}},
            "description": "Events `sources`, `progress`, `thought`, `token`, `report`, `error` and `done`, or a body.",
        }
    },
)
async def ask(here: Here, request: Request, body: AskBody) -> Any:
    """Answer a question from the documents, with sources."""
    service = here.service
    model = service.model_of(body.model)
    await _check(here, body)
    engine = _engine(here, model, body).named(model.name, "chat")
    most, required = service.answer_tokens(body.max_tokens), service.required_tokens(body.max_tokens)
    here.check_quota(most)
    own = service.settings.rag
    level = (own.reasoning and model.thinks and own.reasoning) if body.reasoning is None else body.reasoning
    check_reasoning(model.engine.tokenizer, level)
    thought_most = model.thought_tokens(level, own.reasoning_tokens)
    cold = body.temperature is None or body.temperature < COLDEST  # below that decoding is greedy, as in `/v1`
    arguments = DecodeArguments(
        max_new_tokens=required,
        temperature=0.0 if cold else body.temperature,
        verify=body.verify,
        reasoning=level,
        reasoning_tokens=thought_most,
        stop_repetition=body.stop_repetition,
    )
    slot = await unless_gone(request, service.queue.slot(here.name))
    async with slot.kept():
        question = await unless_gone(request, _retrieved(here, model, body, slot, required, level))
        if question is not None:
            here.charge([question.tokens + most + (thought_most or 0)])
    if question is None:
        await slot.leave()
        return _without_documents(body.stream, engine)

    def begin() -> TextStream:
        timeout = service.limits.answer_seconds
        return slot.holds(engine.stream(question.prompt, timeout=timeout, **arguments), here.took)

    async def report(answer: Generation) -> dict[str, Any]:
        answer = replace(answer, report=here.answered(engine, answer.report))
        await slot.leave()  # the model is not needed for what follows
        return await asyncio.to_thread(report_of, engine, question.prompt, answer, question.turns, body.show_prompt)

    async def events() -> AsyncIterator[str]:
        stream = begin()
        yield event("sources", [asdict(one) for one in question.found])
        stream.with_thoughts, stream.with_progress = True, body.return_progress
        async for piece in stream:
            kind = {Thought: "thought", Progress: "progress"}.get(type(piece), "token")
            yield event(kind, piece.counts if isinstance(piece, Progress) else {"text": str(piece)})
        if stream.result is not None:
            yield event("report", await report(stream.result))

    async def whole() -> WholeAnswer:
        answer = await begin().acomplete()
        told = await report(answer)
        return WholeAnswer(answer=answer.text, thought=answer.thought, sources=question.found, report=told)

    if body.stream:
        return EventStream(_to_the_end(events()), slot, service.longest)
    async with slot:
        return await unless_gone(request, whole())


@router.post(
    "/compare",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {"text/event-stream": {}},
            "description": "Events `row`, `error` and `done`. A `row` has `method`, `answer`, `same_as_full`, `kl`, "
            "`order_kl`, `nearness`, `ttft_s` and `rounds`. `kl` is the mean KL divergence from full recompute, in "
            "nats a token of its answer; `order_kl` is that of full recompute over the same passages in another "
            "order, or null; `nearness` says both in words. A row comes with the answer, then again after each "
            "round: `ttft_s` is the median of so many `rounds`, or that of the one pass that gave the answer while "
            "`rounds` is 0.",
        }
    },
)
async def compare(here: Here, request: Request, body: CompareBody) -> EventStream:
    """Answer a question by full recompute, prefix caching, full KV reuse and blending, then time all in rounds."""
    service = here.service
    model = service.model_of(body.model)
    await _check(here, body)
    engine = _engine(here, model, body)
    most = service.answer_tokens(body.max_tokens)
    if body.max_tokens is None:  # every method gives all of it
        most = min(most, COMPARED_TOKENS)
    here.check_quota(most * _COMPARED)
    slot = await unless_gone(request, service.queue.slot(here.name))
    async with slot.kept():
        question = await unless_gone(request, _retrieved(here, model, body, slot, most))
        if question is None:
            raise Problem(409, "no_documents", _NO_DOCUMENTS)
        here.charge([question.tokens + most] * _COMPARED)

    async def rows() -> AsyncIterator[str]:
        compared = Methods(engine, question.prompt).compare(most, service.limits.answer_seconds)
        while (known := await slot.in_thread(next, compared, None)) is not None:
            for result in known:
                yield event("row", compared_row(result))
            if await slot.give_way():  # nobody waits for more than one pass of one method
                for one in question.found:  # what was deleted meanwhile must not be stored again
                    await asyncio.to_thread(here.passage, one.document_id, one.chunk)

    return EventStream(_to_the_end(rows()), slot, service.longest)


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
    """

    found: list[SearchHit]
    prompt: Prompt
    tokens: int
    turns: int


async def _retrieved(
    here: Session, model: ServedModel, body: CompareBody, slot: Slot, most: int | None, level: Reasoning = False
) -> _Question | None:
    """The passages of an answer and its prompt, with room for ``most`` more tokens; None if there are no passages."""
    k = body.top_k or here.service.settings.rag.top_k
    find = partial(here.search, documents=body.documents)
    found = await slot.in_thread(search, find, body.question, body.history, k)
    return await asyncio.to_thread(_fitting, model, body, found, body.history, most, level) if found else None


def _fitting(
    model: ServedModel,
    body: CompareBody,
    found: list[SearchHit],
    earlier: list[EarlierTurn],
    most: int | None,
    level: Reasoning,
) -> _Question:
    """The prompt with the latest turns that fit into the window together with the passages."""
    passages = [one.text for one in found]
    prompt = model.question_prompt.ask(body.question, passages, earlier, body.instructions, level)
    try:
        fit = model.check_length(prompt, most)
    except (Problem, ContextLengthError):
        if not earlier:
            raise
        return _fitting(model, body, found, earlier[1:], most, level)
    if earlier and len(fit.prompt.chunks) < len(found):
        return _fitting(model, body, found, earlier[1:], most, level)
    return _Question(found[: len(fit.prompt.chunks)], fit.prompt, len(fit.split.input_ids), len(earlier))


def _without_documents(stream: bool, engine: BlendEngine) -> WholeAnswer | EventStream:
    """The answer to a question for which there are no passages."""
    none = Generation(_NO_DOCUMENTS, [], BlendReport((), finish_reason="no_documents"))
    told = {**report_of(engine, Prompt(), none), "fidelity": None}
    if stream:
        said: dict[str, Any] = {"sources": [], "token": {"text": none.text}, "report": told, "done": {}}
        return EventStream([event(name, data) for name, data in said.items()])
    return WholeAnswer(answer=none.text, thought="", sources=[], report=told)


async def _to_the_end(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Events followed by the final event ``done``; an error becomes an event, too."""
    try:
        async for one in events:
            yield one
    except Exception as error:
        problem = noted_problem(error)
        yield event("error", {"code": problem.code, "message": problem.message})
    yield event("done", {})


def _engine(here: Session, model: ServedModel, body: CompareBody) -> BlendEngine:
    if body.selection is not None and body.selection not in RULES:
        raise ConfigError("selection", body.selection, "use one of " + ", ".join(RULES))
    return here.engine(model, body.recompute_ratio, body.selection)


def _document_name(given: str | None) -> str:
    """The name a file gets: no path, nothing that cannot be seen.

    Raises
    ------
    Problem
        415 if files of this kind are not read, 422 if nothing of the name before its kind can be seen.
    """
    path = PurePosixPath((given or "").replace("\\", "/"))
    if all(unicodedata.category(one).startswith("M") for one in shown_name(path.stem)):
        message = "the name of a file holds nothing that can be seen: rename it"
        raise Problem(422, "bad_name", message, field="files")
    name = shown_name(path.name).lstrip(".~$ ")
    while len(name.encode()) > _NAME_BYTES:
        name = name[1:]
    if Path(name).suffix.lower() not in SUFFIXES:
        message = f"{name}: files of this kind cannot be read; upload {', '.join(SUFFIXES)}"
        raise Problem(415, "unknown_kind", message, field="files")
    return name


# Verification -------------------------------------------------------------------------------


@router.get("/answers/{id}/verification")
async def verification(
    here: Here, request: Request, id: str, wait: Annotated[float, Query(ge=0, le=_MOST_SECONDS)] = 0
) -> Verification:
    """How an answer with ``"verify": "idle"`` was verified; waits at most ``wait`` seconds.

    ``waiting``: not checked yet. ``verified``: full prefill gives the same answer. ``corrected``: full prefill gives a
    different answer; the first ``position`` characters stay, and ``after`` replaces ``before``. ``given up``: the check
    failed for the ``reason`` given.
    """
    return await unless_gone(request, here.verifications.result(id, wait))
