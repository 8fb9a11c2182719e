"""Conversations that hold images: their bytes, and the prompt that a model's processor makes of them."""

from __future__ import annotations

import base64
import binascii
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.config import Reasoning
from cacheblend_rag.errors import ContextLengthError, ImageError, MissingExtraError, PromptError
from cacheblend_rag.prompt.chat import render_turns
from cacheblend_rag.prompt.prompt import ImagePrompt, Prompt
from cacheblend_rag.prompt.tokenizer import FittedPrompt, Span, TokenizedPrompt, remedy_for_length

IMAGE = "image"
"""The type of a block with an image. Beside it stands ``bytes``, ``base64`` or ``url``."""

# Formats that are read. Others of Pillow run other programs, or are rarely sent.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_NOT_FETCHED = "no image is fetched from an address: send its bytes, as a URL that begins data:image/png;base64,"
# The errors of processors that cannot read a conversation have no narrower base.
_REFUSALS = (ValueError, TypeError, LookupError, RuntimeError, AttributeError, StopIteration)


@dataclass(frozen=True)
class ImageLimits:
    """How much the images of one conversation may take.

    Parameters
    ----------
    images : int
        How many there may be.
    pixels : int
        Of all together.
    """

    images: int
    pixels: int


def holds_image(turns: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message holds an image."""
    return any(True for _ in _blocks(turns))


def image_prompt(
    processor: Any,
    tokenizer: Any,
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    reasoning: Reasoning = False,
    limits: ImageLimits | None = None,
) -> ImagePrompt:
    """The prompt of a conversation with images, made as transformers' ``apply_chat_template`` makes it.

    Parameters
    ----------
    processor : transformers processor
        The model's own.
    tokenizer : transformers tokenizer
        Its chat template is used where the processor has none.
    turns : sequence of dict
        Messages. The content of each is a text, or a list of blocks ``{"type": "text", "text": …}`` and
        ``{"type": "image", …}`` with ``bytes``, ``base64``, or a ``url`` that begins ``data:``.
    tools, options
        As for `render_turns`.
    reasoning : bool or str
        As for `render_turns`.
    limits : ImageLimits, optional
        By default Pillow's own, which is on the pixels of each image.

    Raises
    ------
    ImageError
        If an image cannot be read, lies elsewhere, or is too large.
    PromptError
        If the template or the processor cannot use the conversation.
    MissingExtraError
        If Pillow is not installed.
    """
    started = time.perf_counter()
    images = _decode_all(turns, limits)
    own = getattr(processor, "chat_template", None)
    template = {"chat_template": own} if isinstance(own, str) else {}
    shown = [{**turn, "content": _show(turn["content"])} for turn in turns]
    _check_marks(processor, shown)
    text = render_turns(tokenizer, shown, tools, {**template, **(options or {})}, reasoning)
    begins = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    try:
        made = processor(
            text=text, images=[images], return_tensors="pt", **({"add_special_tokens": False} if begins else {})
        )
    except _REFUSALS as error:
        raise PromptError(f"the model's processor cannot use this conversation: {error}") from error
    place = getattr(processor, "image_token_id", None)
    if place is not None and place not in made["input_ids"]:
        raise PromptError(
            "the model's chat template leaves images out: use the template of its processor, and send images in the "
            "messages of the user"
        )
    return ImagePrompt(text, made, time.perf_counter() - started)


def fitted_images(prompt: ImagePrompt, window: int | None, needed: int) -> FittedPrompt:
    """The ids of a prompt that holds images. All of them are its suffix.

    Parameters
    ----------
    prompt : ImagePrompt
    window : int or None
        Most tokens of prompt and answer; None for no limit.
    needed : int
        Tokens of an answer that must fit.

    Raises
    ------
    ContextLengthError
        If it does not fit.
    """
    started, ids = time.perf_counter(), prompt.input_ids
    if window is not None and len(ids) + needed > window:
        raise ContextLengthError(len(ids), needed, window, remedy_for_length(0, needed, False))
    split = TokenizedPrompt(ids, Span(0, 0), (), Span(0, len(ids)))
    return FittedPrompt(Prompt(suffix=prompt.text), split, seconds=time.perf_counter() - started)


def _blocks(turns: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The images of a conversation, each with the number of its message."""
    for number, turn in enumerate(turns):
        if not isinstance(turn["content"], str):
            yield from ((number, block) for block in turn["content"] if block["type"] == IMAGE)


def _show(content: str | Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    """A content as a chat template gets it: of an image, that there is one."""
    if isinstance(content, str):
        return content
    return [{"type": IMAGE} if block["type"] == IMAGE else block for block in content]


def _check_marks(processor: Any, turns: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a text that says what a processor puts an image in the place of."""
    marks = {str(mark) for name in ("image_token", "boi_token") if (mark := getattr(processor, name, None))}
    for number, turn in enumerate(turns):
        content = turn["content"]
        texts = [content] if isinstance(content, str) else [block.get("text", "") for block in content]
        for mark in marks:
            if any(mark in text for text in texts):
                raise PromptError(
                    f"messages[{number}]: its text holds {mark!r}, which stands for an image here: leave it out"
                )


def _decode_all(turns: Sequence[Mapping[str, Any]], limits: ImageLimits | None) -> list[Any]:
    """The images of a conversation, in their order."""
    found, images, pixels = list(_blocks(turns)), [], 0
    if limits is not None and len(found) > limits.images:
        raise ImageError(found[limits.images][0], f"a conversation may have {limits.images} images: send fewer")
    for number, block in found:
        opened = _open_image(number, _bytes_of(number, block))
        pixels += opened.width * opened.height  # the header says it; nothing is unpacked yet
        if limits is not None and pixels > limits.pixels:
            raise ImageError(
                number, f"the images of a conversation may have {limits.pixels:,} pixels together: send smaller ones"
            )
        images.append(_decode_image(number, opened))
    return images


def _bytes_of(number: int, block: Mapping[str, Any]) -> bytes:
    """The file that a block holds."""
    if "bytes" in block:
        return bytes(block["bytes"])
    text = block.get("base64")
    if text is None:
        head, comma, text = str(block.get("url") or "").partition(",")
        if not (comma and head.startswith("data:") and head.endswith(";base64")):
            raise ImageError(number, _NOT_FETCHED)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise ImageError(number, f"its image is not base64 ({error}): encode the bytes of the file anew") from error


def _open_image(number: int, data: bytes) -> Any:
    """An image whose size is known."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pillow", "images") from error
    try:
        return Image.open(io.BytesIO(data), formats=_FORMATS)
    except Exception as error:  # what a damaged file raises has no common base
        raise _damage_error(number, error) from error


def _decode_image(number: int, image: Any) -> Any:
    """The image as transformers' own ``load_image`` gives it: upright, in RGB."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # as above
        raise _damage_error(number, error) from error


def _damage_error(number: int, error: Exception) -> ImageError:
    from PIL import Image

    if isinstance(error, Image.DecompressionBombError):
        return ImageError(number, f"its image has too many pixels: send a smaller one ({error})")
    formats = ", ".join(_FORMATS)
    return ImageError(number, f"its image cannot be read ({type(error).__name__}): send a whole file, one of {formats}")
