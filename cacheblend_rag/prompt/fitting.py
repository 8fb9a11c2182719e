"""Prompts and a model's context window: a prompt that is too long is refused, or loses its last chunks."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from cacheblend_rag.errors import ContextLengthError, PromptError
from cacheblend_rag.prompt.prompt import ImagePrompt, Prompt
from cacheblend_rag.prompt.tokenizer import PromptTokenizer, TokenizedPrompt


@dataclass(frozen=True)
class Fitted:
    """A prompt that fits.

    Parameters
    ----------
    prompt : Prompt
        As it was given, or without its last chunks.
    split : TokenizedPrompt
        Its ids.
    left_out : tuple of int
        Chunks that were left out, by their number in the prompt as it was given, from 0.
    seconds : float
        What it took to split the prompt and to see that it fits.
    """

    prompt: Prompt
    split: TokenizedPrompt
    left_out: tuple[int, ...] = ()
    seconds: float = 0.0


def fitted(
    tokenizer: PromptTokenizer,
    prompt: Prompt,
    window: int | None,
    needed: int = 0,
    wanted: int | None = None,
    drops_chunks: bool = False,
) -> Fitted:
    """Tokenise a prompt and see to it that it fits.

    Parameters
    ----------
    tokenizer : PromptTokenizer
    prompt : Prompt
    window : int or None
        Most tokens of prompt and answer; None for no limit.
    needed : int
        Tokens of an answer that must fit.
    wanted : int, optional
        Tokens of an answer that room is made for where chunks are left out; by default those that must fit.
    drops_chunks : bool
        Leave out whole chunks from the end of a prompt that is too long. At least one chunk stays.

    Raises
    ------
    ContextLengthError
        If it does not fit.
    """
    started = time.perf_counter()
    split = tokenizer.tokenize(prompt)
    if window is None or len(split.input_ids) + needed <= window:
        return Fitted(prompt, split, seconds=time.perf_counter() - started)
    count, room = len(prompt.chunks), window - (needed if wanted is None else wanted)
    if drops_chunks and count > 1:
        kept = bisect_right(
            range(1, count), room, key=lambda first: len(tokenizer.tokenize(prompt.first_chunks(first)).input_ids)
        )
        if kept:
            shorter = prompt.first_chunks(kept)
            split, left_out = tokenizer.tokenize(shorter), tuple(range(kept, count))
            return Fitted(shorter, split, left_out, time.perf_counter() - started)
    raise ContextLengthError(len(split.input_ids), needed, window, _remedy(count, needed, drops_chunks))


def _remedy(chunks: int, needed: int, drops_chunks: bool) -> str:
    ways = ["ask for fewer new tokens"] if needed > 1 else []
    if not chunks:
        ways.append("shorten the prompt")
    elif drops_chunks:
        ways.append("use shorter chunks (not even the first one alone fits)")
    else:
        ways += ["retrieve fewer or shorter chunks", "let the last ones be left out with overflow='drop_chunks'"]
    return ", ".join([*ways, "or take a model with a longer window"])


def check_all_fit(
    tokenizer: PromptTokenizer, prompts: Sequence[Prompt], window: int | None, needed: int, drops_chunks: bool
) -> None:
    """Refuse several prompts if one of them does not fit, before any is answered.

    Raises
    ------
    ContextLengthError
        It names the first that does not fit.
    """
    if window is None:
        return
    for number, prompt in enumerate(prompts):
        # No tokenizer makes more tokens than there are bytes.
        size = len(prompt.written(tokenizer.separator).text.encode()) + len(tokenizer.start_ids)
        if size + needed <= window and not isinstance(prompt, ImagePrompt):
            continue
        try:
            fitted(tokenizer, prompt, window, needed, drops_chunks=drops_chunks)
        except ContextLengthError as error:
            what = f"prompt {number + 1} of {len(prompts)}"
            raise ContextLengthError(error.tokens, needed, window, error.remedy, what) from None
        except PromptError:  # an error of its own, which shows when its turn comes
            continue
