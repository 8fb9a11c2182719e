"""Many documents uploaded to a server: ``python -m docs.benchmarks.scripts.ingestion --documents 10000``."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from cacheblend_rag.app.collection import ARTICLES_PATH
from docs.benchmarks.scripts.measuring import machine
from docs.benchmarks.scripts.served import metric_of, served

__all__ = ["main", "measured"]

KEY = "ada-0123456789abcdef"
_AT_ONCE = 50  # files of one upload
_SEARCHES = 20


def document(number: int, characters: int) -> str:
    """A text of its own: sentences of the bundled articles in another order."""
    chosen = random.Random(number)
    sentences = [one for path in sorted(ARTICLES_PATH.glob("*.md")) for one in path.read_text().split(". ")]
    text = f"Document {number}. "
    while len(text) < characters:
        text += chosen.choice(sentences) + ". "
    return text


def measured(folder: Path, documents: int, characters: int, more: Sequence[str]) -> dict[str, Any]:
    """Seconds until all are indexed, start-up with and without them, memory, searches.

    Parameters
    ----------
    folder : Path
        For the server's data.
    documents : int
    characters : int
        Of each document, about.
    more : sequence of str
        Arguments of the server.
    """
    texts = [document(number, characters) for number in range(documents)]
    keys, found = {"ada": KEY}, dict[str, Any]()
    with served(folder, keys, more) as url, _client(url) as client:  # the folder that it serves is indexed once
        found["memory_mb_before"] = _memory(client)
    began = time.monotonic()
    with served(folder, keys, more) as url, _client(url) as client:
        found["start_s_empty"] = time.monotonic() - began
        id = client.post("/api/collections", json={"name": "Many"}).json()["id"]
        began = time.monotonic()
        for start in range(0, documents, _AT_ONCE):
            some = enumerate(texts[start : start + _AT_ONCE], start)
            files = [("files", (f"{number}.txt", text)) for number, text in some]
            while client.post(f"/api/collections/{id}/documents", files=files).status_code == 429:
                time.sleep(0.5)
        while _count(client, id) < documents:
            time.sleep(0.5)
        found["indexed_s"] = time.monotonic() - began
        found["memory_mb_after"] = _memory(client)
    began = time.monotonic()
    with served(folder, keys, more) as url, _client(url) as client:
        found["start_s_full"] = time.monotonic() - began
        times, right = [], 0
        for number in random.Random(0).sample(range(documents), min(_SEARCHES, documents)):
            began = time.monotonic()
            nearest = client.post(f"/api/collections/{id}/search", json={"query": texts[number][:300], "k": 3}).json()
            times.append(time.monotonic() - began)
            right += any(one["document"] == f"{number}.txt" for one in nearest)
        found |= {"first_search_s": times[0], "search_s": statistics.median(times[1:] or times), "found": right}
        found["memory_mb_searched"] = _memory(client)
    return found | {"documents_a_second": documents / found["indexed_s"]}


def _client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=300)


def _count(client: httpx.Client, id: str) -> int:
    collections = client.get("/api/state").json()["collections"]
    return int(next(one["documents"] for one in collections if one["id"] == id))


def _memory(client: httpx.Client) -> int:
    return (metric_of(client.get("/metrics").text, "process_resident_memory_bytes") or 0) // 10**6


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was measured as JSON."""
    parser = argparse.ArgumentParser(prog="python -m docs.benchmarks.scripts.ingestion", description=__doc__)
    parser.add_argument("--documents", type=int, default=10_000)
    parser.add_argument("--characters", type=int, default=1_000, help="of each document")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="more options of the server")
    parsed = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), parsed.documents, parsed.characters, parsed.serve)
    told = {"documents": parsed.documents, "characters": parsed.characters, "machine": machine(), **found}
    print(json.dumps(told, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
