"""Bodies and responses of the RAG API, as pydantic models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from cacheblend_rag.app.server.api.bodies import NO_FLAG, Flag
from cacheblend_rag.app.server.settings import MOST_PASSAGES
from cacheblend_rag.config import Reasoning, Verify, read_reasoning
from cacheblend_rag.errors import ConfigError

Name = Annotated[str, StringConstraints(max_length=500, pattern=r"^[^\x00]*$")]
"""A name or an id; PostgreSQL takes no NUL."""
ChunkNumber = Annotated[int, NO_FLAG, Field(ge=0, le=2**31 - 1)]
"""The number of a passage in its document; databases take none that is larger by far."""
TurnId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
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


class NewCollection(_Body):
    """A collection to be made."""

    name: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=200)]


class SearchBody(_Body):
    """A search."""

    query: Question
    k: Annotated[int, NO_FLAG, Field(ge=1, le=MOST_PASSAGES)] = 6


class PassageRef(_Body):
    """Which passage of the collection it is."""

    document_id: Name
    chunk: ChunkNumber


class HistoryTurn(_Body):
    """A question that was asked before in the conversation, and its answer.

    With its ``sources``, and ``stands_alone`` of its report, the prompt can go on from the one that it had.
    ``turn`` is its id in a conversation that the server keeps.
    """

    question: Annotated[Question, Field(max_length=100_000)]
    answer: Annotated[str, StringConstraints(max_length=100_000)]
    sources: Annotated[list[PassageRef], Field(max_length=200)] = Field(default_factory=list)
    stands_alone: Flag = True
    turn: TurnId | None = None


class CompareBody(_Body):
    """A question to be answered by every method.

    ``model`` is the name of one of the models, by default of the first.
    ``history`` is its conversation, the first turn first. ``instructions`` is what the model is told before the
    passages.
    """

    question: Question
    history: Annotated[list[HistoryTurn], Field(max_length=50)] = Field(default_factory=list)
    k: Annotated[int, NO_FLAG, Field(ge=1, le=MOST_PASSAGES)] | None = None
    ratio: Annotated[float, NO_FLAG, Field(ge=0, le=1)] | None = None
    rule: Annotated[str, StringConstraints(max_length=40)] | None = None
    max_tokens: Annotated[int, NO_FLAG, Field(ge=1, le=1_000_000)] | None = None
    instructions: Question | None = None
    model: Name | None = None


class AskBody(CompareBody):
    """A question; ``stream`` chooses between events and one answer.

    With ``show_prompt``, the report has the prompt token by token. With ``verify``, the answer is held against full
    prefill, and the report says whether it was corrected. ``reasoning`` says whether the model thinks first. Unless
    ``stop_repetition`` is false, an answer that only repeats itself is ended.

    ``temperature`` above 0 samples; by default the likeliest token is taken each time.

    With ``conversation``, the id of one that the server keeps, question and answer are kept there, and the answer goes
    on if the client goes away. ``turn`` is an id that the client draws for it. With ``resume``, an answer that is kept
    nowhere goes on, too, for 20 seconds. Both begin with an event `answer`, which has the id by which it is read again.
    If it cannot be kept, as on a full disk, it is given all the same, with an event `not_kept` that says why.
    """

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    conversation: TurnId | None = None
    turn: TurnId | None = None
    resume: Flag = False
    stream: Flag = True
    show_prompt: Flag = False
    verify: Verify | None = None
    reasoning: Annotated[Reasoning | None, BeforeValidator(_reasoning)] = None
    stop_repetition: Flag | None = None


class Among(_Body):
    """Ids of ``collections``, and of single ``documents`` of others, that are searched together."""

    collections: Annotated[list[Name], Field(max_length=50)] = Field(default_factory=list)
    documents: Annotated[list[Name], Field(max_length=100)] = Field(default_factory=list)


class SearchAmong(SearchBody, Among):
    """A search of several collections and documents."""


class CompareAmong(CompareBody, Among):
    """A question to several collections and documents, to be answered by every method; see `CompareBody`."""


class AskAmong(AskBody, Among):
    """A question to several collections and documents; see `AskBody`."""


class ModelInfo(BaseModel):
    """A model that answers; ``instructions`` is what it is told before the passages unless a request says otherwise.

    ``thinks`` says whether it can be asked to think first.
    """

    name: str
    layers: int
    starter: bool
    instructions: str
    thinks: bool


class CollectionInfo(BaseModel):
    """A collection as it is listed."""

    id: str
    name: str
    documents: int
    chunks: int
    bundled: bool
    writable: bool


class SettingsInfo(BaseModel):
    """How answers are made unless a request says otherwise."""

    ratio: float | Literal["auto"]
    rule: str
    rules: list[str]
    passages: int
    answer_tokens: int
    verify: str
    reasoning: Reasoning
    keep_conversations: bool


class Suggestion(BaseModel):
    """A question to begin with."""

    question: str
    note: str | None = None


class StoreInfo(BaseModel):
    """The KV store; null where it would tell one tenant of another."""

    bytes: int | None
    limit_bytes: int
    records: int | None


class DiskInfo(BaseModel):
    """Disk space of the tenant's documents: uploads that wait, passages and vectors."""

    bytes: int
    limit_bytes: int


class LimitsInfo(BaseModel):
    """Limits that the page respects."""

    upload_bytes: int
    upload_suffixes: list[str]
    question_chars: int
    passages: int
    answer_tokens: int


class PageState(BaseModel):
    """Everything the page needs to begin; the first model answers where a request names none."""

    models: list[ModelInfo]
    embedder: str
    collections: list[CollectionInfo]
    settings: SettingsInfo
    suggestions: list[Suggestion]
    store: StoreInfo
    disk: DiskInfo
    limits: LimitsInfo


class DocumentInfo(BaseModel):
    """A document of a collection, or a file on its way into it."""

    id: str
    name: str
    chunks: int
    bytes: int
    state: Literal["ready", "indexing", "failed"]
    error: str | None = None


class KVEstimate(BaseModel):
    """Size of the KV of all passages of a collection, stored or not; of many passages, estimated from a sample."""

    passages: int
    kv_bytes: int


class JobInfo(BaseModel):
    """An upload that was taken in."""

    job: str


class ChunkText(BaseModel):
    """A passage, and those before and after it; null where the document begins or ends."""

    text: str
    document: str
    title: str
    before: str | None
    after: str | None
    page: int | None = None


class FoundChunk(BaseModel):
    """A passage that a search found; the score is its L2 distance, smaller is nearer. PDFs have pages, from 1.

    ``collection`` is the id of the collection that has it.
    """

    document_id: str
    document: str
    chunk: int
    text: str
    score: float
    page: int | None = None
    collection: str = ""


class WholeAnswer(BaseModel):
    """An answer that was not streamed; ``report`` is that of the event of this name.

    ``not_kept`` says why its conversation does not have it, if it was to be kept.
    """

    answer: str
    thought: str
    sources: list[FoundChunk]
    report: dict[str, object]
    not_kept: str | None = None
