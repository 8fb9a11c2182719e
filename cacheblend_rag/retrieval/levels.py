"""Raised and lowered text of HTML, written so that its meaning stays in plain text.

Text of which each character is raised or lowered by itself becomes these characters: ``m²``, ``H₂O``. Other text stands
behind a mark: ``x^n``, ``a_(i,j)``. Raised endings of words and marks of notes stay as they are: ``1st``, ``[4]``.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Any

_FORMS = {
    "sup": str.maketrans("0123456789+-−=()", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾"),
    "sub": str.maketrans("0123456789+-−=()", "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎"),
}
_MARKS = {"sup": "^", "sub": "_"}
_BY_STYLE = re.compile(r"vertical-align\s*:\s*(super|sub)\b", re.IGNORECASE)
_SIGNS = {"tm": "™", "sm": "℠"}
# Raised text that is an ending: anywhere, behind Roman numerals, behind digits, and with the letters before it.
_ANYWHERE = re.compile("st|nd|rd|th")
_BEHIND_ROMANS = re.compile("e|ers?|res?|me|i?ème|es|ndes?|nds")
_BEHIND_DIGITS = re.compile(_BEHIND_ROMANS.pattern + "|as|os|d|r|[rdtmvn][oa]|s?te|de|è")
_ABBREVIATIONS = re.compile(
    "mmes?|mlles?|mrs?|mgr|me|drs?|dre|pr|prof|ste?s?|sra?s?|srta|st[ao]|cie|vve|bl?v?d|nos?|jr|sgt|capt|col|gen|rev",
    re.IGNORECASE,
)
_DIGITS = re.compile(r"\d\.?\s?$")
_ROMANS = re.compile(r"\b[IVXLCDM]+$")
_WORD = re.compile(r"[^\W\d_]+\Z")
# Such as [4], [a][b], [citation needed].
_NOTES = re.compile(r"(\[[^\[\]]*\][\s,–-]*)+")
_INLINE = re.compile(
    "a|abbr|acronym|b|bdi|bdo|big|cite|code|data|del|dfn|em|font|i|ins|kbd|label|mark|q|rb|rt|ruby|s|samp|small|span|"
    "strike|strong|sub|sup|time|tt|u|var|wbr"
)


def write_levels(soup: Any) -> None:
    """Write all raised and lowered text of a page anew, in its place."""
    for element in soup.find_all(style=_BY_STYLE):
        lowered = re.search(r"vertical-align\s*:\s*sub\b", element["style"], re.IGNORECASE)
        element.name = "sub" if lowered else "sup"
        del element["style"]
    for element in soup.find_all(("sup", "sub")):
        text = element.get_text().strip()
        # One in another that holds nothing else is that other one.
        if element.parent.name == element.name and element.parent.get_text().strip() == text:
            element.name = "span"
    for element in soup.find_all(("sup", "sub")):
        if text := element.get_text().strip():
            _write(element, text)


def _write(element: Any, text: str) -> None:
    before, after = _beside(element, element.previous_elements), _beside(element, element.next_elements, behind=True)
    mark, forms, plain = _MARKS[element.name], _FORMS[element.name], element.find(("sup", "sub")) is None
    if plain and all(ord(one) in forms for one in text):
        for part in list(element.strings):
            part.replace_with(part.translate(forms))
    elif mark == "^" and plain and (ending := _ending(before, text)):
        if ending != text:
            element.string = ending
    elif _of_fraction(before, after):
        if not text.isalnum():
            _around(element, "(", ")")
    elif before or after[:1].isalnum():  # else it is small print
        in_one = text[0] == "(" and text.find(")") == len(text) - 1
        alone = in_one or (len(text) == 1 and not after[:1].isalnum())
        _around(element, mark if alone else f"{mark}(", "" if alone else ")")


def _around(element: Any, begin: str, end: str) -> None:
    element.insert(0, begin)
    element.append(end)


def _of_fraction(before: str, after: str) -> bool:
    """Whether raised text without a base stands above a stroke, or lowered text below one."""
    above = after[:1] in ("/", "⁄") and not before[-1:].strip()
    return above or (before[-1:] in ("/", "⁄") and not after[:1].isalnum())


def _ending(before: str, text: str) -> str:
    """Raised text as it stays without a mark: an ending, a sign, marks of notes; empty if it is none of these."""
    if _NOTES.fullmatch(text) or not any(one.isalnum() or _is_maths(one) for one in text):
        return text
    if before and text.lower() in _SIGNS:
        return _SIGNS[text.lower()]
    ending, found = text.lower().removesuffix("."), _WORD.search(before)
    word = found[0] if found else ""
    if (_DIGITS.search(before) or word.lower() == "n") and ending in ("o", "a"):
        return text.replace(text[0], "º" if ending == "o" else "ª")
    is_one = (
        (_ANYWHERE.fullmatch(ending) and before)
        or (_BEHIND_DIGITS.fullmatch(ending) and _DIGITS.search(before))
        or (_BEHIND_ROMANS.fullmatch(ending) and _ROMANS.search(before))
        or (word and _ABBREVIATIONS.fullmatch(word + ending))
    )
    return text if is_one else ""


def _is_maths(one: str) -> bool:
    return unicodedata.category(one) == "Sm" and one != "∗"


def _beside(element: Any, others: Iterable[Any], *, behind: bool = False) -> str:
    """The nearest text before or behind an element in its block; behind it, raised or lowered text is none."""
    from bs4.element import Comment, NavigableString

    block = _block(element)
    for one in others:
        if any(up is element for up in one.parents):
            continue
        if one.name in ("br", "hr") or (one.name in ("sup", "sub") and behind):
            return ""
        if isinstance(one, NavigableString) and one and not isinstance(one, Comment):
            return str(one) if _block(one) is block else ""
    return ""


def _block(element: Any) -> Any:
    return next((up for up in element.parents if not _INLINE.fullmatch(up.name)), None)
