"""Parts of known texts within another text, which LlamaIndex makes when it splits a node again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from cacheblend_rag.prompt.matching import Match

# Known texts are indexed every few characters by so many; a part of both together is always seen.
_STEP, _SEED = 16, 32
# Shorter parts are not worth a chunk of their own.
_SHORTEST = 64


def find_parts(
    text: str, known: Iterable[str], gaps: Sequence[tuple[int, int]] | None = None
) -> Iterator[tuple[Match, str]]:
    """Stretches of a text that also stand in one of the known texts.

    Parameters
    ----------
    text : str
        Where to look.
    known : iterable of str
        Texts that were cut; of equal stretches, those of the first win.
    gaps : sequence of (int, int), optional
        Within which characters to look; by default everywhere.

    Yields
    ------
    (Match, str)
        The stretch, as long as it can be and without the white space around it, in the order in
        which they stand, not overlapping; and the known text it is part of. Those of fewer than
        64 characters are left out.
    """
    gaps = [gap for gap in gaps or [(0, len(text))] if gap[1] - gap[0] >= _SHORTEST]
    if not gaps:
        return
    seeds: dict[str, tuple[str, int]] = {}
    for one in known:
        for at in range(0, len(one) - _SEED + 1, _STEP):
            seeds.setdefault(one[at : at + _SEED], (one, at))
    for start, stop in gaps:
        at = start
        while at + _SEED <= stop:
            found = seeds.get(text[at : at + _SEED])
            if found is None:
                at += 1
                continue
            match = _extend(text, at, start, stop, *found)
            at = start = match.stop
            match = _strip(text, match)
            if match.stop - match.start >= _SHORTEST:
                yield match, found[0]


def _extend(text: str, at: int, start: int, stop: int, known: str, place: int) -> Match:
    """The longest stretch around an equal seed within which both texts are equal."""
    begin, end, other = at, at + _SEED, place + _SEED
    while begin > start and place > 0 and text[begin - 1] == known[place - 1]:
        begin, place = begin - 1, place - 1
    while end < stop and other < len(known) and text[end] == known[other]:
        end, other = end + 1, other + 1
    return Match(begin, end)


def _strip(text: str, match: Match) -> Match:
    part = text[match.start : match.stop]
    begin = match.start + len(part) - len(part.lstrip())
    return Match(begin, begin + len(part.strip()))
