"""Passages found by vectors, by words and by both: of questions of SQuAD, and of numbers and names in a made-up folder.

``python -m docs.benchmarks.scripts.retrieval squad_dev.jsonl`` writes ``docs/benchmarks/retrieval.json``, of which
it reads the folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.words import FolderStore, fused

RESULT = Path(__file__).parents[1] / "retrieval.json"


def places(passages: dict[str, str], asked: list[tuple[str, str]]) -> dict[str, list[int]]:
    """By way of search, the place at which each question's passage is found."""
    store = FolderStore(SentenceTransformerEmbeddings("minilm"))
    store.add_texts(list(passages.values()), ids=list(passages))
    ways: dict[str, list[int]] = {"vectors": [], "words": [], "both": []}
    for question, right in asked:
        found = store.candidates(question, store.embeddings.embed_query(question), len(passages))
        by_words = sorted(found, key=lambda one: -one[2])
        for way, order in zip(ways.values(), (found, by_words, fused(found, len(found))), strict=True):
            way.append([one[0].id for one in order].index(right) + 1)
    return ways


if __name__ == "__main__":
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    firms, folder = result["firms"], dict[str, str]()
    for n in range(60):
        about = {"firm": firms[n % 6], "order": 7000 + 13 * n, "customer": 40000 + n, "sum": 50 * n, "days": 10 + n}
        folder |= {f"{kind} {1000 + n}": text.format(1000 + n, **about) for kind, text in result["texts"].items()}
    squad = {one["text"]: one["text"] for row in rows for one in row["passages"]}
    found = places(squad, [(row["question"], row["passages"][0]["text"]) for row in rows])
    result["places"] = places(folder, result["asked"])
    for name, ways in (("squad", found), ("made up", result["places"])):
        result["recall@4"][name] = {
            way: round(sum(one <= 4 for one in all_) / len(all_), 3) for way, all_ in ways.items()
        }
    RESULT.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
