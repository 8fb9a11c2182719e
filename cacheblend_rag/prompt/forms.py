"""The forms in which chains write a document: escaped, normalised, wrapped, cut off.

A document that is not in a prompt as it was retrieved is looked for in these forms. White space is left
out on both sides, so a form may be wrapped anywhere.
"""

from __future__ import annotations

import html
import json
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

CUT_LEAST = 64
"""Characters besides white space that must be left of a document that was cut off; fewer could be a quotation."""

# Characters besides white space that two texts which hold the same must have in common; twice as many always show.
_SHARED = 48
# Places of a form in the prompt that are looked at.
_PLACES = 8
# A form is looked for by so many of its first and of its last characters, and compared only where these stand.
_PROBE = 20
# A stretch of a document that nearly always holds more than that besides white space.
_PROBE_ROOM = 96
_NORMAL_FORMS: tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...] = ("NFC", "NFD", "NFKC", "NFKD")

# As Jinja's ``tojson`` writes it.
_IN_HTML = {ord(one): f"\\u{ord(one):04x}" for one in "<>&'"}
_ESCAPES: tuple[tuple[str, Callable[[str], str]], ...] = (
    ("json-escaped", lambda text: json.dumps(text, ensure_ascii=False)[1:-1]),
    ("json-escaped", lambda text: json.dumps(text)[1:-1]),
    ("json-escaped", lambda text: json.dumps(text)[1:-1].translate(_IN_HTML)),
    ("html-escaped", html.escape),
    ("html-escaped", lambda text: html.escape(text, quote=False)),
    # As Jinja's automatic escaping writes it.
    ("html-escaped", lambda text: html.escape(text, quote=False).replace('"', "&#34;").replace("'", "&#39;")),
    ("python-escaped", lambda text: repr(text)[1:-1]),
    ("python-escaped", lambda text: repr('"' + text)[2:-1]),  # beginnings of texts that hold quotes of both kinds
)


def squeeze(text: str) -> str:
    """A text with each run of white space replaced by one space, and stripped at both ends."""
    return " ".join(text.split())


def solid(text: str) -> str:
    """A text without any white space."""
    return "".join(text.split())


class SqueezedText:
    """A text whose white space is squeezed to one space or to nothing, and the place of each character in the original.

    Parameters
    ----------
    text : str
    between : str
        Replaces white space: a space, or nothing.
    """

    def __init__(self, text: str, between: str = " ") -> None:
        self.original = text
        words, self._starts, self._origins = [], list[int](), list[int]()
        at = 0
        for word in re.finditer(r"\S+", text):
            self._starts.append(at)
            self._origins.append(word.start())
            words.append(word.group())
            at += len(word.group()) + len(between)
        self.text = between.join(words)

    def origin(self, at: int) -> int:
        """Place in the original of a character that is no white space."""
        word = bisect_right(self._starts, at) - 1
        return self._origins[word] + at - self._starts[word]

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Place in the original of some characters, of which neither the first nor the last is white space."""
        return self.origin(start), self.origin(stop - 1) + 1

    def splits_word(self, at: int) -> bool:
        """Whether a word goes on at this place."""
        inside = 0 < at < len(self.text) and self.text[at - 1].isalnum() and self.text[at].isalnum()
        return inside and self.origin(at) == self.origin(at - 1) + 1

    def word_start(self, at: int) -> int:
        """Start of the word that contains a character."""
        return self._starts[bisect_right(self._starts, at) - 1]

    def next_word(self, at: int) -> int:
        """Where the next such stretch begins."""
        word = bisect_right(self._starts, at)
        return self._starts[word] if word < len(self._starts) else len(self.text)


def solid_forms(text: str) -> dict[str, str]:
    """The forms in which a text may be written, without white space, and what each is called."""
    solid_text: dict[str, str] = {}
    for form, name in _forms(text).items():
        solid_text.setdefault(solid(form), name)
    return solid_text


def _forms(text: str) -> dict[str, str]:
    forms = {text: ""}
    if not text.isascii():
        for kind in _NORMAL_FORMS:
            forms.setdefault(unicodedata.normalize(kind, text), f"unicode normal form {kind}")
    for form, normal in [*forms.items()]:
        for name, write in _ESCAPES:
            forms.setdefault(write(form), f"{normal}, {name}" if normal else name)
    return forms


def written_forms(text: str) -> list[str]:
    """The forms in which messages may hold a text, which is the first.

    Those of `solid_forms`, and JSON within JSON, or around HTML; with slashes escaped, as PHP writes JSON; with other
    line ends, or white space squeezed, before they were escaped.
    """
    lines = text.replace("\r\n", "\n")
    forms: dict[str, str] = {}
    for one in dict.fromkeys((text, lines, lines.replace("\n", "\r\n"), squeeze(text))):
        for form, name in _forms(one).items():
            forms.setdefault(form, name)
    for form, name in [*forms.items()]:
        if not name.endswith("python-escaped"):
            for twice, write in _ESCAPES:
                if twice == "json-escaped":
                    forms.setdefault(write(form), twice)
    for form, name in [*forms.items()]:
        if "/" in form and (not name or name.endswith("json-escaped")):
            forms.setdefault(form.replace("/", "\\/"), name)
    return [*forms]


def form_sharer(texts: Iterable[str]) -> Callable[[str], bool]:
    """Says of a text whether it holds one of some texts, or has a long stretch in common with one, in whatever form.

    White space does not count. Some 96 characters in common are always found, and never fewer than 48. A shorter text
    must be there whole.
    """
    parts, short = set[str](), set[str]()
    for form in {solid(form) for text in texts for form in written_forms(text)} - {""}:
        parts.update(form[at : at + _SHARED] for at in range(0, len(form) - _SHARED + 1, _SHARED))
        if len(form) < 2 * _SHARED:
            short.add(form)

    def shares(text: str) -> bool:
        whole = solid(text)
        stretches = (whole[at : at + _SHARED] for at in range(len(whole) - _SHARED + 1))
        return any(one in parts for one in stretches) or any(one in whole for one in short)

    return shares


def may_hold(text: SqueezedText, document: str) -> bool:
    """Whether the beginning or the end of a document stands in a prompt in any form; quickly, and rarely yes in vain.

    Parameters
    ----------
    text : SqueezedText
        The prompt, without white space.
    document : str
        Without white space around it.
    """
    room = _PROBE_ROOM if len(solid(document[:_PROBE_ROOM])) > _PROBE < len(solid(document[-_PROBE_ROOM:])) else None
    begin, end = document[:room], document[-room:] if room else document
    probes = {form[:_PROBE] for form in solid_forms(begin)} | {form[-_PROBE:] for form in solid_forms(end)}
    return any(probe in text.text for probe in probes)


def find_whole(text: SqueezedText, forms: dict[str, str], free: Callable[[int, int], bool]) -> tuple[int, int] | None:
    """Where a document stands whole, in any of its forms.

    Parameters
    ----------
    text : SqueezedText
        The prompt, without white space.
    forms : dict
        Of the document, from `solid_forms`.
    free : callable
        Whether no other chunk was found within a range of characters of the prompt.

    Returns
    -------
    (int, int) or None
        First character in the prompt, and the one after the last.
    """
    for form in forms:
        for at in _places(text.text, form[:_PROBE]):
            if text.text.startswith(form, at) and free(*(span := text.span(at, at + len(form)))):
                return span
    return None


def find_cut(text: SqueezedText, forms: dict[str, str], free: Callable[[int, int], bool]) -> tuple[int, int] | None:
    """Where the longest beginning or end of a document stands; as `find_whole`.

    Of its characters besides white space at least `CUT_LEAST` must be there. A word that goes on otherwise in
    the prompt is left out: it may belong to what comes next.
    """
    best: tuple[int, int] | None = None
    for form in forms:
        if len(form) <= CUT_LEAST:
            continue
        for start, stop in (*_beginnings(text, form), *_ends(text, form)):
            if stop - start < CUT_LEAST or (best is not None and stop - start <= best[1] - best[0]):
                continue
            if free(*text.span(start, stop)):
                best = start, stop
    return text.span(*best) if best else None


def change_of(document: str, written: str, forms: dict[str, str] | None = None) -> str:
    """How a document in a prompt differs from the retrieved document; empty if they are equal.

    Parameters
    ----------
    document : str
        The retrieved text.
    written : str
        The text in the prompt.
    forms : dict, optional
        Forms of the document from `solid_forms`, if already computed.
    """
    if written.strip() == document.strip():
        return ""
    if squeeze(written) == squeeze(document):
        return "line-wrapped" if written.count("\n") > document.count("\n") else "white space"
    forms, part = forms or solid_forms(document), solid(written)
    if part in forms:
        return forms[part] or "line-wrapped"
    for form, name in forms.items():
        if part in form:
            cut = "truncated at the " + ("end" if form.startswith(part) else "start" if form.endswith(part) else "ends")
            return f"{name}, {cut}" if name else cut
    return "rewritten"


def _places(text: str, part: str) -> Iterator[int]:
    """The first places of a part in a text."""
    at = text.find(part) if part else -1
    for _ in range(_PLACES):
        if at < 0:
            return
        yield at
        at = text.find(part, at + 1)


def _beginnings(text: SqueezedText, form: str) -> Iterator[tuple[int, int]]:
    """Stretches of the prompt with which a form begins, as long as they can be."""
    for at in _places(text.text, form[:CUT_LEAST]):
        stop = at + _common(text.text[at : at + len(form)], form)
        yield at, text.word_start(stop - 1) if text.splits_word(stop) else stop


def _ends(text: SqueezedText, form: str) -> Iterator[tuple[int, int]]:
    """Stretches of the prompt with which a form ends."""
    for at in _places(text.text, form[-CUT_LEAST:]):
        stop = at + CUT_LEAST
        start = stop - _common(text.text[max(0, stop - len(form)) : stop][::-1], form[::-1])
        yield text.next_word(start) if text.splits_word(start) else start, stop


def _common(one: str, other: str) -> int:
    """How many characters are the same at the beginning of both."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
