"""Passages ranked as the paper ranks them, and passages cut to a length."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cacheblend_rag.calibration.datasets import EvalCase, Passage
from cacheblend_rag.config import check_whole


class VectorRanker:
    """By L2 distance of embeddings, as the paper retrieves.

    Parameters
    ----------
    embedder : LangChain Embeddings
    """

    def __init__(self, embedder: Any) -> None:
        self._embedder = embedder
        self._known: dict[str, list[float]] = {}

    def rank(self, question: str, texts: Sequence[str]) -> list[int]:
        """See `Ranker.rank`."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            self._known.update(zip(new, self._embedder.embed_documents(new), strict=True))
        query = self._embedder.embed_query(question)
        return sorted(range(len(texts)), key=lambda number: math.dist(query, self._known[texts[number]]))


def repacked(case: EvalCase, tokenizer: Any, tokens: int) -> EvalCase:
    """A question whose passages are cut, or joined with their neighbours, to about so many tokens.

    Parameters
    ----------
    case : EvalCase
    tokenizer : transformers tokenizer
    tokens : int
        Most tokens of a passage.
    """
    check_whole("chunk_tokens", tokens, 8)
    packed: list[Passage] = []
    room = 0
    for passage in case.passages:
        for text, size in _pieces(passage.chunk, tokenizer, tokens):
            if packed and size <= room:
                before = packed[-1]
                packed[-1] = Passage("", f"{before.text}\n\n{text}", before.support or passage.support)
                room -= size
            else:
                packed.append(Passage("", text, passage.support))
                room = tokens - size
    return replace(case, passages=tuple(packed))


def _pieces(text: str, tokenizer: Any, tokens: int) -> list[tuple[str, int]]:
    """A text cut between words, with the tokens of each piece; a word counts what it counts by itself."""
    found: list[tuple[str, int]] = []
    piece, size = "", 0
    for word in re.findall(r"\s*\S+", text):
        need = len(tokenizer.encode(word, add_special_tokens=False))
        if piece and size + need > tokens - 2:  # room for what joins it to the next
            found.append((piece.strip(), size + 2))
            piece, size = "", 0
        piece, size = piece + word, size + need
    return [*found, (piece.strip(), size + 2)] if piece.strip() else found
