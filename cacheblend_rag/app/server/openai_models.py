"""What the OpenAI-compatible API takes; a field that is not named here is refused, unless it is null."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

__all__ = [
    "ChatBody",
    "ChatMessage",
    "CompletionBody",
    "DocumentText",
    "EmbeddingBody",
    "Sampling",
    "document_texts",
]

_Count = Annotated[int, Field(ge=1, le=16)]
_Tokens = Annotated[int, Field(ge=1, le=1_000_000)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_CHOICES = 64
_TokenId = Annotated[int, Field(ge=0)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Stop = Annotated[str, StringConstraints(min_length=1, max_length=200)]
_Text = Annotated[str, StringConstraints(max_length=4_000_000)]
_Argument = Annotated[str, StringConstraints(max_length=200)]


class _Taken(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Leave out what is null: clients send it for fields that they do not use."""
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class DocumentText(_Taken):
    """A document as some clients write it: its text, and perhaps a title that stands before it."""

    text: _Text
    title: str | None = None


class StreamOptions(_Taken):
    """What a stream tells at its end."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Sampling(_Taken):
    """What completions and conversations have in common.

    Decoding is greedy unless ``temperature``, ``top_p``, ``top_k`` or ``n`` asks for sampling. What stands last has no
    part in an answer: labels, and fields that say of something this server does not do that it need not be done.
    """

    model: Annotated[str, StringConstraints(max_length=500)]
    documents: Annotated[list[_Text | DocumentText], Field(max_length=1_000)] = Field(default_factory=list)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    max_tokens: _Tokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    seed: Annotated[int, Field(ge=-(2**62), le=2**62)] | None = None
    n: _Count = 1
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[_TokenId, _Bias], Field(max_length=1_024)] = Field(default_factory=dict)
    recompute_ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    selection: Annotated[str, StringConstraints(max_length=40)] | None = None
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"

    @property
    def stops(self) -> list[str]:
        """Texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def top_of_each(self) -> int | None:
        """How many of the likeliest tokens go with the log-probability of each; None if none are asked for."""
        raise NotImplementedError

    @field_validator("stream_options")
    @classmethod
    def _of_a_stream(cls, options: StreamOptions, others: ValidationInfo) -> StreamOptions:
        if not others.data.get("stream"):
            raise ValueError("it stands beside stream=true only")
        return options


class CompletionBody(Sampling):
    """A text to be gone on with, or several."""

    prompt: _Text | Annotated[list[_Text], Field(min_length=1, max_length=64)]
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] = False
    suffix: Literal[""] = ""

    @property
    def top_of_each(self) -> int | None:
        """See `Sampling.top_of_each`."""
        return self.logprobs

    @field_validator("best_of")
    @classmethod
    def _all_come_back(cls, best_of: int, others: ValidationInfo) -> int:
        if best_of != others.data.get("n"):
            raise ValueError("all n answers come back here, none is chosen; leave it out")
        return best_of

    @field_validator("prompt")
    @classmethod
    def _not_too_many(cls, prompt: str | list[str], others: ValidationInfo) -> str | list[str]:
        if isinstance(prompt, list) and len(prompt) * int(others.data.get("n", 1)) > _CHOICES:
            raise ValueError(f"a request has {_CHOICES} answers at most; send fewer prompts, or a smaller n")
        return prompt


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
    annotations: Annotated[list[Any], Field(max_length=0, exclude=True)] = []


class FunctionDefinition(_Taken):
    """A function the model may call."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: Literal[False] = Field(default=False, exclude=True)  # no template has a place for it


class ToolDefinition(_Taken):
    """A tool the model may call."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class PlainText(_Taken):
    """An answer is text."""

    type: Literal["text"]


class AnyObject(_Taken):
    """An answer is a JSON object."""

    type: Literal["json_object"]


class NamedSchema(_Taken):
    """A JSON schema with its name."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    description: str = ""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool = False


class BySchema(_Taken):
    """An answer is JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class ChatBody(Sampling):
    """A conversation."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: _Tokens | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: Annotated[PlainText | AnyObject | BySchema, Field(discriminator="type")] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    parallel_tool_calls: bool = True
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: Annotated[dict[str, bool | int | float | _Argument], Field(max_length=16)] = Field(
        default_factory=dict
    )

    @property
    def top_of_each(self) -> int | None:
        """See `Sampling.top_of_each`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @field_validator("top_logprobs")
    @classmethod
    def _beside_the_others(cls, top: int, others: ValidationInfo) -> int:
        if not others.data.get("logprobs"):
            raise ValueError("it stands beside logprobs=true only")
        return top

    @field_validator("max_completion_tokens")
    @classmethod
    def _agrees(cls, most: int, others: ValidationInfo) -> int:
        if others.data.get("max_tokens") not in (None, most):
            raise ValueError("max_tokens says something else; give one of the two")
        return most


class EmbeddingBody(_Taken):
    """Texts to be embedded."""

    model: Annotated[str, StringConstraints(max_length=500)]
    input: _Text | Annotated[list[_Text], Field(min_length=1, max_length=2_048)]
    encoding_format: Literal["float", "base64"] = "float"
    user: Any = None


def document_texts(body: Sampling) -> list[str]:
    """The texts of a request's documents, as they are stored."""
    texts = [
        one if isinstance(one, str) else f"{one.title}\n{one.text}" if one.title else one.text for one in body.documents
    ]
    return [text.strip() for text in texts if text.strip()]
