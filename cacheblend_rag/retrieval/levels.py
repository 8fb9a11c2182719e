"""Raised and lowered text of HTML, written so that its meaning stays in plain text.

Text of which each character has a raised or lowered form becomes these characters: ``m²``, ``H₂O``. Other text stands
after a mark: ``x^n``, ``a_(i,j)``. Endings of numbers, signs and marks of notes stay as they are: ``1st``, ``[4]``.
"""

from __future__ import annotations

import re
from typing import Any

_FORMS = {
    "sup": str.maketrans("0123456789+-−=()", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾"),
    "sub": str.maketrans("0123456789+-−=()", "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎"),
}
_MARKS = {"sup": "^", "sub": "_"}
_BY_STYLE = re.compile(r"vertical-align\s*:\s*(super|sub)\b", re.IGNORECASE)
_AS_IT_IS = re.compile(r"st|nd|rd|th|[™℠®©*]|(\[[^\[\]]*\][\s,–-]*)+")
# Endings of numbers in other languages: 4e, 1er, 2ème.
_ENDING = re.compile(r"(e|ers?|res?|i?ème|es|de|s?te|[rdtmvn][oa]|[ao]s?|è|nds?)\.?")


def write_levels(soup: Any) -> None:
    """Write all raised and lowered text of a page anew, in its place."""
    for element in soup.find_all(style=_BY_STYLE):
        lowered = re.search(r"vertical-align\s*:\s*sub\b", element["style"], re.IGNORECASE)
        element.name = "sub" if lowered else "sup"
    for element in reversed(soup.find_all(("sup", "sub"))):  # the innermost first
        text, before, after = element.get_text().strip(), element.previous_sibling, element.next_sibling
        if element.parent.name == element.name and element.parent.get_text().strip() == text:
            element.unwrap()
        elif text and all(ord(one) in _FORMS[element.name] for one in text):
            for part in list(element.strings):
                part.replace_with(part.translate(_FORMS[element.name]))
        elif text and not _is_plain(str(before or ""), text):
            alone = len(text) == 1 and not str(after or "")[:1].isalnum()
            bare = alone or (text[0] == "(" and text.find(")") == len(text) - 1)
            element.insert(0, _MARKS[element.name] if bare else f"{_MARKS[element.name]}(")
            element.append("" if bare else ")")


def _is_plain(before: str, text: str) -> bool:
    """Whether text needs no mark: it ends a number, is a sign or a note's number, or begins a line of small print."""
    return bool(
        _AS_IT_IS.fullmatch(text) or not before.strip() or (before[-1:].isdecimal() and _ENDING.fullmatch(text))
    )
