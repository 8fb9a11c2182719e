"""Search of a folder's passages by vectors and by words, since a vector hardly tells numbers and names apart."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

from cacheblend_rag.config import check_whole
from cacheblend_rag.retrieval.vectorstore import FaissVectorStore, Filter, allowed_keys

T = TypeVar("T")
_Counts: TypeAlias = npt.NDArray[np.int64]  # [2, words]: the CRC-32 of each word of a text, and its count
Found = tuple[T, float, float]
"""A passage, its L2 distance, and the BM25 score of the words that it shares with a question."""
# Letters of scripts whose words stand together: Thai, Lao, Tibetan, Burmese, Khmer, Han, kana and Hangul. Of these, any
# two that follow one another count as a word. In scripts of India, marks are parts of words.
_TIGHT = "\u0e01-\u0f00\u0f40-\u109f\u1780-\u17ff\u3005-\u3007\u3041-\u30fa\u30fc-\u30ff\u3400-\u9fff\uac00-\ud7a3"
_WORD = re.compile(rf"([{_TIGHT}])(?=([{_TIGHT}]?))|((?:[^\W{_TIGHT}]|[\u0900-\u0963\u0966-\u0ddf])+)")
# Constants of BM25: how soon more of a word counts no more, and how much shorter texts are preferred.
_SOON, _SHORT = 1.5, 0.75
_BY_WORDS = 0.4
# Passages that each of the two searches finds.
_CANDIDATES = 50


def fused(found: Sequence[Found[T]], k: int) -> list[Found[T]]:
    """The best ``k``: each counts 1 / its rank by distance + 0.4 / its rank by words.

    Reciprocal rank fusion commonly adds 60 to a rank. Without it, the first by words stays among the first
    (``docs/decisions`` has the trial).
    """
    far, shared = (np.array([one[column] for one in found]) for column in (1, 2))
    points, weights = np.zeros(len(found)), 1 / np.arange(1, len(found) + 1)
    points[np.argsort(far, kind="stable")] = weights
    points[np.lexsort((far, -shared))] += _BY_WORDS * weights * (np.sort(shared)[::-1] > 0)
    return [found[at] for at in np.lexsort((far, -points))[:k]]


class FolderStore(FaissVectorStore):
    """Passages of a folder, found by their vectors and by their words.

    The best of both searches come first. Searches with scores, for a vector, or with
    ``search_type="similarity_score_threshold"`` know no words: nearness alone counts there.
    """

    def __init__(self, embedding: Embeddings) -> None:
        super().__init__(embedding)
        self._words: dict[str, _Counts] = {}  # of each text

    def similarity_search(self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any) -> list[Document]:
        """Return the documents that fit a question best; see `FaissVectorStore.similarity_search`."""
        found = self.candidates(self.embeddings.embed_query(query), k, filter, scores_by_words(query, [self]))
        return [document for document, _, _ in fused(found, k)]

    def candidates(
        self, vector: Sequence[float], k: int, filter: Filter | None, scores: Mapping[str, float]
    ) -> list[Found[Document]]:
        """All documents that either search finds, the nearest first; ``scores`` are those of `scores_by_words`."""
        check_whole("k", k, 1)
        count = max(k, _CANDIDATES)
        with self._lock:
            allowed = allowed_keys(self._items, filter)
            among = self._items if allowed is None else allowed
            shared = {key: scores.get(self._items[key].page_content, 0.0) for key in among}
            least = sorted((one for one in shared.values() if one > 0), reverse=True)[:count][-1:]
            named = [key for key, one in shared.items() if least and one >= least[0]]
            hits = self._search(vector, count, allowed) + self._search(vector, len(named) or 1, named)
        found = {key: (document, far, shared[key]) for document, key, far in hits}
        return sorted(found.values(), key=lambda one: (one[1], one[0].page_content, one[0].id))

    def _counts(self) -> list[tuple[str, _Counts]]:
        """All texts and their words. Those of new ones are counted, and those of others are dropped."""
        with self._lock:
            texts = [one.page_content for one in self._items.values()]
            self._words = {text: self._words[text] if text in self._words else _counted(text) for text in texts}
            return [(text, self._words[text]) for text in texts]


def scores_by_words(query: str, stores: Iterable[FolderStore]) -> dict[str, float]:
    """BM25 scores of all texts of some stores. Words count by their rarity in all of them."""
    found = [one for store in stores for one in store._counts()] or [("", _counted(""))]
    texts, held = zip(*found, strict=True)
    words, counts = np.concatenate(held, axis=1)  # [words of all documents] each
    rows = np.repeat(np.arange(len(held)), [one.shape[1] for one in held])
    long = np.bincount(rows, counts, len(held))
    long = 1 - _SHORT + _SHORT * long / max(long.mean(), 1)
    shared = np.isin(words, _counted(query)[0])
    words, counts, rows = words[shared], counts[shared], rows[shared]
    _, which, frequencies = np.unique(words, return_inverse=True, return_counts=True)
    rarity = np.log(1 + (len(held) - frequencies + 0.5) / (frequencies + 0.5))[which]
    scores = np.bincount(rows, rarity * counts * (_SOON + 1) / (counts + _SOON * long[rows]), len(held))
    return dict(zip(texts, scores.tolist(), strict=True))


def _counted(text: str) -> _Counts:
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    counts = Counter(crc32("".join(one).encode()) for one in words)
    return np.array([[*counts], [*counts.values()]], dtype=np.int64)
