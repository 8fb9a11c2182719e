"""Passages found by vectors, by words and by both: of questions in files, and of numbers and names in a made-up folder.

``python -m docs.benchmarks.scripts.retrieval squad_dev.jsonl …`` writes ``docs/benchmarks/retrieval.json``, of which
it reads the folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.words import FolderStore, fused, scores_by_words

RESULT = Path(__file__).parents[1] / "retrieval.json"


def places(passages: dict[str, str], asked: list[tuple[str, list[str]]]) -> dict[str, list[int]]:
    """By way of search, the places at which the passages of all questions are found."""
    store = FolderStore(SentenceTransformerEmbeddings("minilm"))
    store.add_texts(list(passages.values()), ids=list(passages))
    ways: dict[str, list[int]] = {"vectors": [], "words": [], "both": []}
    for question, right in asked:
        vector, scores = store.embeddings.embed_query(question), scores_by_words(question, [store])
        found = store.candidates(vector, len(passages), None, scores)
        by_words = sorted(found, key=lambda one: -one[2])
        for way, order in zip(ways.values(), (found, by_words, fused(found, len(found))), strict=True):
            way += [place for place, one in enumerate(order, 1) if one[0].id in right]
    return ways


if __name__ == "__main__":
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    firms, folder = result["firms"], dict[str, str]()
    for n in range(60):
        about = {"firm": firms[n % 6], "order": 7000 + 13 * n, "customer": 40000 + n, "sum": 50 * n, "days": 10 + n}
        folder |= {f"{kind} {1000 + n}": text.format(1000 + n, **about) for kind, text in result["texts"].items()}
    result["places"] = places(folder, result["asked"])
    found = {"made up": result["places"]}
    for path in map(Path, sys.argv[1:]):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        texts = {one["text"]: one["text"] for row in rows for one in row["passages"]}
        right = [(row["question"], [one["text"] for one in row["passages"] if one["support"]]) for row in rows]
        found[path.stem], result["passages"][path.stem] = places(texts, right), len(texts)
    for name, ways in found.items():
        result["recall@4"][name] = {way: round(sum(one <= 4 for one in at) / len(at), 3) for way, at in ways.items()}
    RESULT.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
