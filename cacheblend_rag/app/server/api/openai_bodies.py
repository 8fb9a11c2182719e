"""Bodies of the OpenAI-compatible API; a field that is not named here is refused, unless it is null."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cacheblend_rag.app.server.api.bodies import NO_FLAG, Flag
from cacheblend_rag.config import Reasoning, Verify, read_reasoning
from cacheblend_rag.engine.decode import LEAST_PENALTY

_Count = Annotated[int, NO_FLAG, Field(ge=1, le=16)]
_Tokens = Annotated[int, NO_FLAG, Field(ge=1, le=1_000_000)]
_Penalty = Annotated[float, NO_FLAG, Field(ge=-2, le=2)]
_CHOICES = 64
_TokenId = Annotated[int, NO_FLAG, Field(ge=0)]
_Bias = Annotated[float, NO_FLAG, Field(ge=-100, le=100)]
_Stop = Annotated[str, StringConstraints(min_length=1, max_length=200)]
_Text = Annotated[str, StringConstraints(max_length=4_000_000)]
_Argument = Annotated[str, StringConstraints(max_length=200)]
_TemplateArguments = Annotated[dict[str, bool | int | float | _Argument], Field(max_length=16)]
_Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
_TopLogProbs = Annotated[int, NO_FLAG, Field(ge=0, le=20)]
_T = TypeVar("_T")
# The first element that is wrong is the only one that is told.
_List = Annotated[list[_T], Field(max_length=1_000, fail_fast=True)]
_Messages = Annotated[list[_T], Field(min_length=1, max_length=10_000, fail_fast=True)]


class _OpenAIBody(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)
    ignored: ClassVar[tuple[str, ...]] = ()
    """Fields that clients send back as they came, or as a hint, and that change nothing here."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Leave out what is ignored, and what is null: clients send it for fields that they do not use."""
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None and name not in cls.ignored}


class DocumentText(_OpenAIBody):
    """A document as some clients write it: its text, and perhaps a title that stands before it."""

    text: _Text
    title: str | None = None


class StreamOptions(_OpenAIBody):
    """Contents of a stream besides the answer."""

    include_obfuscation: Literal[False] = False


class UsageOptions(StreamOptions):
    """Contents of a stream's end."""

    include_usage: Flag = False


class AnswerBody(_OpenAIBody):
    """The common fields of requests for answers.

    Decoding is greedy unless ``temperature``, ``top_p``, ``top_k``, ``min_p`` or ``n`` asks for sampling. The last
    fields have no part in an answer: they are labels, or they decline what this server does not do.
    """

    model: Annotated[str, StringConstraints(max_length=500)]
    documents: _List[_Text | DocumentText] = Field(default_factory=list)
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, NO_FLAG, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, NO_FLAG, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, NO_FLAG, Field(ge=0, le=1_000_000)] | None = None
    min_p: Annotated[float, NO_FLAG, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, NO_FLAG, Field(ge=LEAST_PENALTY, le=10)] | None = None
    stop_repetition: Flag | None = None
    recompute_ratio: Annotated[float, NO_FLAG, Field(ge=0, le=1)] | None = None
    selection: Annotated[str, StringConstraints(max_length=40)] | None = None
    verify: Verify | None = None
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    client_metadata: Any = None
    store: Literal[False] = False
    service_tier: Any = None

    @field_validator("stream_options")
    @classmethod
    def _of_a_stream(cls, options: StreamOptions, others: ValidationInfo) -> StreamOptions:
        if not others.data.get("stream"):
            raise ValueError("it needs stream=true")
        return options


class Sampling(AnswerBody):
    """The common fields of completions and conversations."""

    stream_options: UsageOptions | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] | None = None
    max_tokens: _Tokens | None = None
    seed: Annotated[int, NO_FLAG, Field(ge=-(2**62), le=2**62)] | None = None
    n: _Count = 1
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    logit_bias: Annotated[dict[_TokenId, _Bias], Field(max_length=1_024)] = Field(default_factory=dict)

    @property
    def stops(self) -> list[str]:
        """Texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def top_of_each(self) -> int | None:
        """Number of alternatives to each token; None if log-probabilities are not requested."""
        raise NotImplementedError


class CompletionBody(Sampling):
    """A text to be gone on with, or several."""

    prompt: _Text | Annotated[list[_Text], Field(min_length=1, max_length=64)]
    best_of: Annotated[int, NO_FLAG] | None = None
    logprobs: _TopLogProbs | None = None
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
            raise ValueError("all n answers are returned, so there is nothing to choose; leave it out")
        return best_of

    @field_validator("prompt")
    @classmethod
    def _not_too_many(cls, prompt: str | list[str], others: ValidationInfo) -> str | list[str]:
        if isinstance(prompt, list) and len(prompt) * int(others.data.get("n", 1)) > _CHOICES:
            raise ValueError(f"a request has {_CHOICES} answers at most; send fewer prompts, or a smaller n")
        return prompt


class TextPart(_OpenAIBody):
    """A piece of a message."""

    ignored = ("cache_control", "prompt_cache_breakpoint")
    type: Literal["text"]
    text: _Text

    @field_validator("type", mode="before")
    @classmethod
    def _no_image(cls, kind: Any) -> Any:
        if kind != "text":
            raise ValueError("use pieces of the type text; images are not read here")
        return kind


class FunctionCall(_OpenAIBody):
    """A call the model made in an earlier turn."""

    ignored = ("parsed_arguments",)
    name: str
    arguments: _Text = "{}"


class ToolCall(_OpenAIBody):
    """A call with its id; a client that has put it together from a stream may send its index back, too."""

    ignored = ("index", "provider_specific_fields", "extra_content")
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(_OpenAIBody):
    """A message of a conversation. Only chat templates that read thoughts use its thought."""

    ignored = ("annotations", "parsed", "reasoning_details", "provider_specific_fields", "thinking_blocks", "images")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Text | _List[TextPart] | None = None
    name: str | None = None
    tool_calls: _List[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: _Text | None = None
    reasoning: Any = Field(default=None, exclude=True)
    reasoning_content: Any = Field(default=None, exclude=True)


class FunctionDefinition(_OpenAIBody):
    """A function the model may call."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: Flag = False


class ToolDefinition(_OpenAIBody):
    """A tool the model may call."""

    ignored = ("cache_control",)
    type: Literal["function"] = "function"
    function: FunctionDefinition


class PlainText(_OpenAIBody):
    """An answer is text."""

    type: Literal["text"]


class AnyObject(_OpenAIBody):
    """An answer is a JSON object."""

    type: Literal["json_object"]


class NamedSchema(_OpenAIBody):
    """A JSON schema with its name."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    description: str = ""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: Flag = False


class BySchema(_OpenAIBody):
    """An answer is JSON by a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class ReasoningOptions(_OpenAIBody):
    """Whether the model thinks before it answers, and how much. A thought is given as it is, never summed up."""

    effort: _Effort | None = None
    max_tokens: Annotated[int, NO_FLAG, Field(ge=0, le=1_000_000)] | None = None
    enabled: Flag | None = None
    exclude: Literal[False] = False
    summary: Any = None
    generate_summary: Any = None

    @property
    def level(self) -> Reasoning | None:
        """How much; None if that is not said."""
        if self.effort is not None:
            return read_reasoning("effort", self.effort)
        return True if self.enabled is None and self.max_tokens else self.enabled


class ChatBody(Sampling):
    """A conversation."""

    messages: _Messages[ChatMessage]
    max_completion_tokens: _Tokens | None = None
    tools: _List[ToolDefinition] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: Annotated[PlainText | AnyObject | BySchema, Field(discriminator="type")] | None = None
    logprobs: Flag = False
    top_logprobs: _TopLogProbs | None = None
    parallel_tool_calls: Flag = True
    modalities: _List[Literal["text"]] | None = None
    chat_template_kwargs: _TemplateArguments = Field(default_factory=dict)
    reasoning_effort: _Effort | None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    return_progress: Flag | None = None

    @property
    def level(self) -> Reasoning | None:
        """Whether the model shall think; None if the request does not say."""
        if self.reasoning_effort is None:
            return self.reasoning.level
        return read_reasoning("reasoning_effort", self.reasoning_effort)

    @property
    def top_of_each(self) -> int | None:
        """See `Sampling.top_of_each`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @field_validator("top_logprobs")
    @classmethod
    def _beside_the_others(cls, top: int, others: ValidationInfo) -> int:
        if not others.data.get("logprobs"):
            raise ValueError("it needs logprobs=true")
        return top

    @field_validator("max_completion_tokens")
    @classmethod
    def _agrees(cls, most: int, others: ValidationInfo) -> int:
        if others.data.get("max_tokens") not in (None, most):
            raise ValueError("it contradicts max_tokens; give only one of them")
        return most


class TextItem(_OpenAIBody):
    """A piece of a message's content, or of what a function gave."""

    ignored = ("annotations", "logprobs", "parsed", "prompt_cache_breakpoint")
    type: Literal["input_text", "output_text"]
    text: _Text


class _Item(_OpenAIBody):
    """One item of a conversation; clients send back what an answer had, with its labels."""

    ignored: ClassVar[tuple[str, ...]] = ("id", "status", "phase", "caller", "namespace", "parsed_arguments")


class MessageItem(_Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Text | _List[TextItem]


class CallItem(_Item):
    """A call that the model made in an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: _Text = "{}"


class CallOutputItem(_Item):
    """The output of a function that was called."""

    type: Literal["function_call_output"]
    call_id: str
    output: _Text | _List[TextItem]


class ReasoningItem(_Item):
    """A thought of an earlier turn, for chat templates that read it; what is summed up or encrypted is passed over."""

    ignored = (*_Item.ignored, "summary", "encrypted_content")
    type: Literal["reasoning"]
    content: Any = None


# No name of a field, so that errors do not name it.
_KINDS = {
    "message": "a message",
    "function_call": "a call",
    "function_call_output": "an output",
    "reasoning": "a thought",
}


def _kind(item: Any) -> str | None:
    """The kind of an item; an item without a type is a message."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return _KINDS.get(kind or "message") if isinstance(kind, str | None) else None


_AnyItem = Annotated[
    Annotated[MessageItem, Tag("a message")]
    | Annotated[CallItem, Tag("a call")]
    | Annotated[CallOutputItem, Tag("an output")]
    | Annotated[ReasoningItem, Tag("a thought")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="use items of the type message, function_call or function_call_output",
    ),
]


class _Function(_OpenAIBody):
    type: Literal["function"]


class FlatTool(FunctionDefinition, _Function):
    """A function the model may call, as responses write it."""


class NamedTool(_Function):
    """The function that the model must call."""

    name: str


class FlatSchema(NamedSchema):
    """An answer is JSON by a schema, as responses write it."""

    type: Literal["json_schema"]


class TextOptions(_OpenAIBody):
    """Which form an answer has."""

    format: Annotated[PlainText | AnyObject | FlatSchema, Field(discriminator="type")] = PlainText(type="text")
    verbosity: Literal["low", "medium", "high"] = "medium"


class ResponsesBody(AnswerBody):
    """A conversation that is to be answered by a response."""

    input: _Text | _Messages[_AnyItem]
    instructions: _Text | None = None
    max_output_tokens: _Tokens | None = None
    tools: _List[FlatTool] = Field(default_factory=list)
    tool_choice: Literal["auto", "none", "required"] | NamedTool = "auto"
    parallel_tool_calls: Flag = True
    text: TextOptions = TextOptions()
    top_logprobs: _TopLogProbs | None = None
    include: _List[str] = Field(default_factory=list)
    chat_template_kwargs: _TemplateArguments = Field(default_factory=dict)
    reasoning: ReasoningOptions = ReasoningOptions()
    metadata: Annotated[dict[str, str], Field(max_length=16)] = Field(default_factory=dict)
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    previous_response_id: None = None
    conversation: None = None

    @field_validator("tools", mode="before")
    @classmethod
    def _functions(cls, given: Any) -> Any:
        """Leave out tools of other kinds, which a model is not offered here."""
        if not isinstance(given, list):
            return given
        return [one for one in given if not isinstance(one, dict) or one.get("type", "function") == "function"]

    @field_validator("store", "previous_response_id", "conversation", mode="before")
    @classmethod
    def _nothing_is_kept(cls, given: Any) -> Any:
        if given is not False:
            raise ValueError("responses are not stored here; leave it out, and send earlier turns in input")
        return given


class EmbeddingBody(_OpenAIBody):
    """Texts to be embedded."""

    model: Annotated[str, StringConstraints(max_length=500)]
    input: _Text | Annotated[list[_Text], Field(min_length=1, max_length=2_048)]
    encoding_format: Literal["float", "base64"] = "float"
    user: Any = None


def document_texts(body: AnswerBody) -> list[str]:
    """The texts of a request's documents, as they are stored."""
    texts = [
        one if isinstance(one, str) else f"{one.title}\n{one.text}" if one.title else one.text for one in body.documents
    ]
    return [text.strip() for text in texts if text.strip()]
