"""Control tokens in messages: text, and no marks of a chat template.

A chat template writes marks such as ``<|im_end|>``, which a tokenizer reads as one token each. In a prompt that is
written here, the same characters in a message are text. So where a message holds some, `OWN` begins the prompt and
stands twice before each mark that the template has written, and all others are read as text. A prompt that a chain has
written never holds it.
"""

from __future__ import annotations

import re
import secrets
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cacheblend_rag.prompt.thoughts import added_tokens, hidden_ids, marks_of

# Of characters that no text has; another one in each process, so that no document can hold it.
OWN = "".join(chr(0xFDD0 + secrets.randbelow(32)) for _ in range(24))
"""Begins a text whose control tokens are text, and stands twice before one that is meant as one."""


class ControlTokens:
    """The control tokens of a model: its special tokens, and others that its chat template writes as marks.

    Parameters
    ----------
    tokenizer : transformers tokenizer
    template : str
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        marks, found = marks_of(tokenizer), dict[str, bool]()
        hidden, said = hidden_ids(tokenizer, marks), "".join((*marks.begin, *marks.end, *marks.answer))
        for number, token in added_tokens(tokenizer).items():
            text, special = str(token), getattr(token, "special", False)
            if special:
                found[text] = hidden is None or number in hidden
            elif re.fullmatch(r"[^\w\s]\S+[^\w\s]", text) and (text in template or text.startswith(("<|", "<\uff5c"))):
                found[text] = text not in said and re.search("tool|call|func|arg", text) is None
        self._of_model = _one_of(text for text, unsaid in found.items() if unsaid)  # a model's own answer has others
        self.any = _one_of(found)
        """Any of them."""

    def owned(self, text: str) -> str:
        """A template's text with each control token marked. The beginning is marked, too, in case it has none."""
        return OWN + self.any.sub(lambda found: OWN + OWN + found[0], text)

    def apart(self, text: str) -> list[tuple[int, str]]:
        """Pieces of a text, each with its first character's place: control tokens that are text are cut in two."""
        pieces, at, looked = list[tuple[int, str]](), 0, 0
        marks = re.compile(f"{OWN}(?:{OWN}(?:{self.any.pattern}))?|{self.any.pattern}")
        while (found := marks.search(text, looked)) is not None:
            own = found[0].startswith(OWN)
            stop = found.start() if own else found.end() - 1
            pieces.append((at, text[at:stop]))
            at, looked = stop + len(OWN) * found[0].count(OWN), found.end() if own else stop  # where another may begin
        return [one for one in (*pieces, (at, text[at:])) if one[1]]

    def quoted(self, turns: Iterable[Mapping[str, Any]], tools: Any, write: Callable[[Any, Any], str]) -> str:
        """Messages and tools as a template writes them, which sees names in place of control tokens in them.

        Marks of thoughts and calls in an answer stay.
        """
        names = dict[str, str]()

        def hide(said: Any, tokens: re.Pattern[str] = self.any) -> Any:
            if isinstance(said, str):
                return tokens.sub(lambda found: names.setdefault(found[0], f"q{secrets.token_hex(8)}q"), said)
            if isinstance(said, Mapping):
                return {hide(name, tokens): hide(value, tokens) for name, value in said.items()}
            return [hide(one, tokens) for one in said] if isinstance(said, (list, tuple)) else said

        hidden = [hide(one, self._of_model) if one["role"] == "assistant" else hide(one) for one in turns]
        written = write(hidden, hide(tools))
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
