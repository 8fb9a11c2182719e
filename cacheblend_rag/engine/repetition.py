"""A repeating answer: its newest tokens are one stretch of tokens, again and again."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence

_TIMES = 4
"""So often a stretch stands directly behind itself before an answer counts as repeating."""
PROSE_TOKENS, OTHER_TOKENS = 128, 512
"""So many tokens all its copies have together, if it is prose and if it is not."""
# Share of letters and white space in prose. Rows of a table, of numbers or of JSON, rules and code have fewer.
_LETTERS = 0.875


def repeats(ids: Sequence[int], text_of: Callable[[list[int]], str]) -> bool:
    """Whether a text does nothing but repeat itself at its end.

    The text ends with the same tokens four times or more, over at least 128 tokens of prose or 512 of anything else: a
    table, a matrix, a rule or JSON may well repeat a line.

    Parameters
    ----------
    ids : sequence of int
        Token ids of the text.
    text_of : callable
        Converts ids to text.
    """
    period = shortest_period(ids, PROSE_TOKENS)
    if not period:
        return False
    text = text_of(list(ids[-2 * period :]))
    letters = sum(one.isspace() or unicodedata.category(one)[0] in "LM" for one in text)
    is_prose = not text.isspace() and letters >= _LETTERS * max(len(text), 1)
    return is_prose or bool(shortest_period(ids, OTHER_TOKENS))


def shortest_period(ids: Sequence[int], least: int) -> int:
    """Length of the shortest sequence that ends ids four times, over ``least`` tokens; 0 if none does."""
    count, last = len(ids), ids[-1] if ids else None
    if count < least:
        return 0
    for period in range(1, count // _TIMES + 1):
        span = max(_TIMES * period, least)
        if ids[-1 - period] == last and ids[count - span : count - period] == ids[count - span + period :]:
            return period
    return 0
