"""A chat model's profile: its limits and abilities, as LangChain's agents and middleware read them."""

from __future__ import annotations

from typing import Any, cast

from langchain_core.language_models import ModelProfile

from cacheblend_rag.engine.grammar import can_follow
from cacheblend_rag.prompt.chat import offers_tools, writes_marked_calls
from cacheblend_rag.prompt.thoughts import BUDGETS, marks_of

_TEXT = ("text_inputs", "text_outputs")
_NOT_TEXT = (
    *("image_inputs", "image_url_inputs", "pdf_inputs", "audio_inputs", "video_inputs", "attachment"),
    *("image_tool_message", "pdf_tool_message", "image_outputs", "audio_outputs", "video_outputs"),
)


def profile_of(
    model_name: str, tokenizer: Any, window: int | None, max_new_tokens: int | None, *, streams_calls: bool
) -> ModelProfile:
    """The profile of a chat model.

    Parameters
    ----------
    model_name : str
    tokenizer : transformers tokenizer
    window : int or None
        Tokens of the context window, if the model's config says it.
    max_new_tokens : int or None
        Most tokens of an answer, if a number was given. A prompt has the rest of the context window.
    streams_calls : bool
        Whether tool calls are handed out before the answer has ended.
    """
    tools, marks = offers_tools(tokenizer), marks_of(tokenizer)
    profile = {
        "name": model_name,
        "open_weights": True,
        **dict.fromkeys(_TEXT, True),
        **dict.fromkeys(_NOT_TEXT, False),
        "reasoning_output": marks.known,
        "tool_calling": tools,
        "tool_choice": tools,
        "tool_call_streaming": tools and writes_marked_calls(tokenizer) and streams_calls,
        "structured_output": can_follow(tokenizer),
        "temperature": True,
    }
    if marks.known:
        profile["reasoning_effort_levels"] = [level for level in BUDGETS if isinstance(level, str)]
    if window is not None:
        profile["max_input_tokens"] = max(1, window - (max_new_tokens or 0))
        profile["max_output_tokens"] = max_new_tokens or window
    declared = ModelProfile.__annotations__  # earlier versions of langchain-core lack some
    return cast(ModelProfile, {name: value for name, value in profile.items() if name in declared})
