"""Pieces of a text: what ingress and replicas call chunks by, without a tokenizer.

A prompt that arrives as one text does not say where its chunks are. Paragraphs can be told apart by everyone, and a
chunk is one or several of them. So a replica says which paragraphs its records hold, and a request is looked at
paragraph by paragraph.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from cacheblend_rag.app.fleet.routing import chunk_digest
from cacheblend_rag.prompt.forms import squeeze

_BLANK_LINE = re.compile(r"\n\s*\n")
# Shorter pieces are too common to say anything of a chunk, and cheap to compute.
_SHORTEST = 32
_MOST = 2_000  # of one request
_CHARS_A_TOKEN = 4


def _pieces(text: str, separator: str = "") -> Iterator[str]:
    mark = separator.strip()  # tokenizers may lose the space before it
    for part in text.split(mark) if mark else [text]:
        for paragraph in _BLANK_LINE.split(part):
            if len(piece := squeeze(paragraph)) >= _SHORTEST:
                yield piece


def piece_digests(text: str, separator: str = "") -> tuple[int, ...]:
    """Digests of a chunk's pieces; it is split where prompts are."""
    return tuple(dict.fromkeys(map(chunk_digest, _pieces(text, separator))))


def weighed_pieces(texts: Iterable[str], separator: str = "") -> dict[int, int]:
    """About how many tokens each piece of some texts has, by its digest.

    Parameters
    ----------
    texts : iterable of str
    separator : str
        Text between chunks, if it is not a blank line.
    """
    found = (piece for text in texts for piece in _pieces(text, separator))
    return {chunk_digest(piece): len(piece) // _CHARS_A_TOKEN for piece in islice(found, _MOST)}


def texts_in(body: Any) -> Iterator[str]:
    """All texts in a body of JSON, in their order."""
    if isinstance(body, str):
        yield body
    elif isinstance(body, list | dict):
        for one in body.values() if isinstance(body, dict) else body:
            yield from texts_in(one)
