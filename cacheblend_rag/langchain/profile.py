"""A chat model's profile: its limits and abilities, as LangChain's agents and middleware read them."""

from __future__ import annotations

from typing import Any, cast

from langchain_core.language_models import ModelProfile

from cacheblend_rag.engine.grammar import can_follow
from cacheblend_rag.prompt.chat import offers_tools, writes_marked_calls
from cacheblend_rag.prompt.thoughts import marks_of


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
    tools = offers_tools(tokenizer)
    profile = ModelProfile(
        name=model_name,
        open_weights=True,
        text_inputs=True,
        image_inputs=False,
        image_url_inputs=False,
        pdf_inputs=False,
        audio_inputs=False,
        video_inputs=False,
        text_outputs=True,
        image_outputs=False,
        audio_outputs=False,
        video_outputs=False,
        reasoning_output=marks_of(tokenizer).known,
        tool_calling=tools,
        tool_choice=tools,
        tool_call_streaming=tools and writes_marked_calls(tokenizer) and streams_calls,
        structured_output=can_follow(tokenizer),
        temperature=True,
    )
    if window is not None:
        profile["max_input_tokens"] = max(1, window - (max_new_tokens or 0))
        profile["max_output_tokens"] = max_new_tokens or window
    declared = ModelProfile.__annotations__  # earlier versions of langchain-core lack some
    return cast(ModelProfile, {name: value for name, value in profile.items() if name in declared})
