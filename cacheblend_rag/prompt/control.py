"""Control tokens in messages: text, and no marks of a chat template.

A chat template writes marks such as ``<|im_end|>``, which a tokenizer reads as one token each. In a prompt that is
written here, the same characters in a message are text. So where a message holds some, `OWN` stands before each mark
that the template has written, and all others are read as text. A prompt that a chain has written never holds it.
"""

from __future__ import annotations

import re
import secrets
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cacheblend_rag.prompt.thoughts import added_tokens, hidden_ids, marks_of

# Of characters that no text has; another one in each process, so that no document can hold it.
OWN = "".join(chr(0xFDD0 + secrets.randbelow(32)) for _ in range(24))
"""Stands before a control token that is meant as one."""


class ControlTokens:
    """The control tokens of a model: its special tokens, and others that its chat template writes as marks.

    Parameters
    ----------
    tokenizer : transformers tokenizer
    template : str
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        hidden, found = hidden_ids(tokenizer, marks_of(tokenizer)), dict[str, bool]()
        for number, token in added_tokens(tokenizer).items():
            text, special = str(token), getattr(token, "special", False)
            if special or (text in template and re.fullmatch(r"[^\w\s]\S+[^\w\s]", text)):
                found[text] = special and (hidden is None or number in hidden)
        self._of_model = _one_of(text for text, unsaid in found.items() if unsaid)  # a model's own answer has others
        self.any = _one_of(found)
        """Any of them."""

    def owned(self, text: str) -> str:
        """A template's text with each control token marked. The beginning is marked, too, in case it has none."""
        return OWN + self.any.sub(lambda found: OWN + found[0], text)

    def apart(self, text: str) -> list[tuple[int, str]]:
        """Pieces of a text, each with its first character's place: control tokens that are text are cut in two."""
        pieces, at = list[tuple[int, str]](), 0
        for found in re.finditer(f"{OWN}(?:{self.any.pattern})?|{self.any.pattern}", text):
            own = found[0].startswith(OWN)
            stop = found.start() if own else found.end() - 1
            pieces.append((at, text[at:stop]))
            at = stop + len(OWN) * own
        return [one for one in (*pieces, (at, text[at:])) if one[1]]

    def quoted(self, turns: Iterable[Mapping[str, Any]], write: Callable[[Sequence[Mapping[str, Any]]], str]) -> str:
        """Messages as a template writes them, which sees names in place of control tokens in them.

        Marks of thoughts and calls in an answer stay.
        """
        names = dict[str, str]()

        def hide(said: Any, tokens: re.Pattern[str]) -> Any:
            if isinstance(said, str):
                return tokens.sub(lambda found: names.setdefault(found[0], f"q{secrets.token_hex(8)}q"), said)
            if isinstance(said, Mapping):
                return {name: hide(value, tokens) for name, value in said.items()}
            return [hide(one, tokens) for one in said] if isinstance(said, (list, tuple)) else said

        written = write([hide(turn, self._of_model if turn["role"] == "assistant" else self.any) for turn in turns])
        written = self.owned(written) if names else written
        for token, name in names.items():
            written = written.replace(name, token)
        return written


def _one_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted((one for one in texts if len(one) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


# Of each tokenizer, the template for which they were found last, and these.
_found: weakref.WeakKeyDictionary[Any, tuple[str, ControlTokens]] = weakref.WeakKeyDictionary()


def control_tokens(tokenizer: Any) -> ControlTokens:
    """The control tokens of a tokenizer of transformers."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    if (seen := _found.get(tokenizer)) is None or seen[0] != template:
        _found[tokenizer] = seen = template, ControlTokens(tokenizer, template)
    return seen[1]
