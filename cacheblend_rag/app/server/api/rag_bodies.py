"""Bodies and responses of the RAG API, as pydantic models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from cacheblend_rag.app.server.api.bodies import NO_FLAG, Flag
from cacheblend_rag.app.server.services.folders import DocumentEntry, SearchHit
from cacheblend_rag.app.server.services.questions import EarlierTurn
from cacheblend_rag.app.server.settings import MOST_PASSAGES
from cacheblend_rag.config import Reasoning, Verify, read_reasoning
from cacheblend_rag.errors import ConfigError

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


class ModelInfo(BaseModel):
    """A model that answers; ``instructions`` is what it is told before the passages unless a request says otherwise.

    ``thinks`` says whether it can be asked to think first.
    """

    name: str
    layers: int
    starter: bool
    instructions: str
    thinks: bool


class FolderInfo(BaseModel):
    """The folder that is served; ``writable`` says whether this tenant can upload."""

    name: str
    writable: bool
    bundled: bool


class SettingsInfo(BaseModel):
    """How answers are made unless a request says otherwise."""

    top_k: int
    max_new_tokens: int
    recompute_ratio: float | Literal["auto"]
    selection: str
    rules: list[str]
    verify: str
    reasoning: Reasoning


class Suggestion(BaseModel):
    """A question to begin with."""

    question: str
    note: str | None = None


class LimitsInfo(BaseModel):
    """Limits that the page respects."""

    suffixes: list[str]
    upload_bytes: int
    upload_files: int
    question_chars: int
    top_k: int
    max_tokens: int


class PageState(BaseModel):
    """Everything the page needs to begin; the first model answers requests that name no model.

    ``tenant`` is the one that the key is of; null without keys.
    """

    models: list[ModelInfo]
    embedder: str
    folder: FolderInfo
    documents: int
    passages: int
    settings: SettingsInfo
    limits: LimitsInfo
    suggested: list[Suggestion]
    tenant: str | None
    version: str


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
