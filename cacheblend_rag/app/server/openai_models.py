"""What the OpenAI-compatible API takes; fields that are not named here are passed over."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

__all__ = [
    "ChatBody",
    "ChatMessage",
    "CompletionBody",
    "DocumentText",
    "EmbeddingBody",
    "Sampling",
    "document_texts",
]

_Zero = Annotated[float, Field(ge=0, le=0)]
_One = Annotated[int, Field(ge=1, le=1)]
_Stop = Annotated[str, StringConstraints(min_length=1, max_length=200)]
_Text = Annotated[str, StringConstraints(max_length=4_000_000)]
_Argument = Annotated[str, StringConstraints(max_length=200)]


class _Taken(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class DocumentText(_Taken):
    """A document as some clients write it: its text, and perhaps a title that stands before it."""

    text: _Text
    title: str | None = None


class StreamOptions(_Taken):
    """What a stream tells at its end."""

    include_usage: bool = False


class Sampling(_Taken):
    """What completions and conversations have in common.

    Without ``temperature`` decoding is greedy. What cannot be done here is refused unless it says
    "do not": more than one answer, log-probabilities, penalties.
    """

    model: Annotated[str, StringConstraints(max_length=500)]
    documents: Annotated[list[_Text | DocumentText], Field(max_length=1_000)] = Field(default_factory=list)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    recompute_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    selection: Annotated[str, StringConstraints(max_length=40)] | None = None
    n: _One | None = None
    frequency_penalty: _Zero | None = None
    presence_penalty: _Zero | None = None
    user: Any = None

    @property
    def stops(self) -> list[str]:
        """Texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class CompletionBody(Sampling):
    """A text to be gone on with, or several."""

    prompt: _Text | Annotated[list[_Text], Field(min_length=1, max_length=64)]
    best_of: _One | None = None
    logprobs: _Zero | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None


class TextPart(_Taken):
    """A piece of a message."""

    type: Literal["text"]
    text: _Text


class FunctionCall(_Taken):
    """A call the model made in an earlier turn."""

    name: str
    arguments: _Text = "{}"


class ToolCall(_Taken):
    """A call with its id."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(_Taken):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Text | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(_Taken):
    """A function the model may call."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)


class ToolDefinition(_Taken):
    """A tool the model may call."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class PlainText(_Taken):
    """The only form of answers there is."""

    type: Literal["text"]


class ChatBody(Sampling):
    """A conversation."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: PlainText | None = None
    logprobs: Literal[False] | None = None
    chat_template_kwargs: Annotated[dict[str, bool | int | float | _Argument], Field(max_length=16)] = Field(
        default_factory=dict
    )


class EmbeddingBody(_Taken):
    """Texts to be embedded."""

    model: Annotated[str, StringConstraints(max_length=500)]
    input: _Text | Annotated[list[_Text], Field(min_length=1, max_length=2_048)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: None = None


def document_texts(body: Sampling) -> list[str]:
    """The texts of a request's documents, as they are stored."""
    texts = [
        one if isinstance(one, str) else f"{one.title}\n{one.text}" if one.title else one.text for one in body.documents
    ]
    return [text.strip() for text in texts if text.strip()]
