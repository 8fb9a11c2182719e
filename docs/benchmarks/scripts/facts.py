"""Facts at the start, in the middle and at the end of passages: how many are among the six that are retrieved.

``python -m docs.benchmarks.scripts.facts --data squad.jsonl``

Passages are those of the bundled articles, and 100 that paragraphs of ``--data`` make up. Each gets one of 25 invented
facts, and its question is asked of ``build_index``; of 25 passages also of ``ask``'s index, of a server and of what was
uploaded to it. Then the recall of the questions of ``--data`` is measured over its articles and the bundled ones, and
how long the index takes and how large it is; and how long six passages are, by the size of chunks. ``cut`` is the
embedder without parts, which leaves out ends of passages.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import httpx
from langchain_core.embeddings import Embeddings

from cacheblend_rag.app.collection import ARTICLES_PATH, QUESTIONS_PATH
from cacheblend_rag.app.folder_rag import FolderRAG
from cacheblend_rag.app.options import FolderRAGOptions
from cacheblend_rag.calibration.datasets import EvalCase, load_cases
from cacheblend_rag.config import DEFAULT_EMBEDDER, BlendConfig
from cacheblend_rag.retrieval.documents import read_folder
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.index import FolderIndex, build_index
from cacheblend_rag.retrieval.splitting import SplitSettings, split
from docs.benchmarks.scripts.common import script_parser
from docs.benchmarks.scripts.measuring import machine, table
from docs.benchmarks.scripts.retrieved import joined_articles
from docs.benchmarks.scripts.served import served
from docs.benchmarks.scripts.yardstick import is_right

__all__ = ["FACTS", "main", "planted"]

FACTS = (
    ("The lighthouse keeper's parrot was called Bosun.", "What was the lighthouse keeper's parrot called?"),
    ("The bakery in Elm Street closed on Tuesdays.", "On which day did the bakery in Elm Street close?"),
    ("Mrs Ottaway won the raffle with ticket 417.", "Which ticket won Mrs Ottaway the raffle?"),
    ("The tram to Kirkby costs two florins.", "How much does the tram to Kirkby cost?"),
    ("The choir rehearses in the old tannery.", "Where does the choir rehearse?"),
    ("Dr Pemberton is allergic to walnuts.", "What is Dr Pemberton allergic to?"),
    ("The chess club was founded by a dentist.", "Who founded the chess club?"),
    ("The spare key hangs behind the barometer.", "Where does the spare key hang?"),
    ("The football team plays in orange shirts.", "In what colour of shirts does the football team play?"),
    ("The rent for the cellar is ninety euros.", "What is the rent for the cellar?"),
    ("The violin was repaired with fish glue.", "With what was the violin repaired?"),
    ("The school caretaker keeps bees on the roof.", "What does the school caretaker keep on the roof?"),
    ("The password of the wireless network is marzipan.", "What is the password of the wireless network?"),
    ("The dentist moved to Harbour Lane in May.", "Where did the dentist move in May?"),
    ("The wedding cake had seven tiers.", "How many tiers had the wedding cake?"),
    ("The night train stops at Ulverby at four.", "When does the night train stop at Ulverby?"),
    ("The cinema's projector was sold to a monastery.", "To whom was the cinema's projector sold?"),
    ("The recipe for the soup needs three leeks.", "How many leeks does the recipe for the soup need?"),
    ("The plumber's invoice was paid in March.", "When was the plumber's invoice paid?"),
    ("The library fines are ten cents a day.", "How much are the library fines?"),
    ("The goalkeeper studied veterinary medicine.", "What did the goalkeeper study?"),
    ("The elevator in the town hall is broken.", "What is broken in the town hall?"),
    ("The tax office opens at half past eight.", "When does the tax office open?"),
    ("The nurse speaks fluent Estonian.", "Which language does the nurse speak?"),
    ("The carnival queen rode a white donkey.", "What did the carnival queen ride?"),
)
PLACES = ("start", "middle", "end")
CHUNKS = 6
_PASSAGES, _LONGEST, _SHORTEST = 100, 1_920, 1_500
# The passages that are longest; by default they are shorter.
_LARGE = SplitSettings(chunk_size=2_000)
_KEY = "ada-0123456789abcdef"
_Search = Callable[[str], Sequence[str]]


class _Cut(Embeddings):
    """The starter embedder as it is without parts: what is too long is cut off."""

    def __init__(self, inner: SentenceTransformerEmbeddings) -> None:
        self._inner = inner

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [row.tolist() for row in self._inner.model.encode_document(texts, show_progress_bar=False)]

    def embed_query(self, text: str) -> list[float]:
        return self._inner.embed_query(text)


def planted(text: str, fact: str, place: str) -> str:
    """A passage with a sentence more: at its ``"start"``, behind a sentence near its middle, or at its end."""
    if place == "start":
        return f"{fact} {text}"
    if place == "end":
        return f"{text} {fact}"
    ends = [one.end() for one in re.finditer(r"[.!?]\s", text)]
    at = min(ends, key=lambda end: abs(end - len(text) / 2), default=len(text))
    return f"{text[:at]}{fact} {text[at:]}"


def _passages(cases: Sequence[EvalCase]) -> list[str]:
    """Paragraphs put together by chance to passages of the default size, each with others beside it."""
    paragraphs = list(dict.fromkeys(passage.text for case in cases for passage in case.passages))
    chance, found = Random(0), list[str]()
    while len(found) < _PASSAGES:
        chance.shuffle(paragraphs)
        text = ""
        for one in paragraphs:
            text = f"{text}\n\n{one}".strip()
            if len(text) > _SHORTEST:
                found += [text] if len(text) <= _LONGEST else []
                text = ""
    return found[:_PASSAGES]


def _write(folder: Path, texts: Sequence[str], place: str = "", first: int = 0) -> None:
    """A file a passage, of which 25 have a fact."""
    for number, text in enumerate(texts):
        fact = FACTS[number - first][0] if place and 0 <= number - first < len(FACTS) else None
        path, text = folder / f"{number:03}.txt", planted(text, fact, place) if fact else text
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _found(search: _Search, texts: Sequence[str], first: int = 0) -> tuple[int, int]:
    """Of how many facts the passage was retrieved, and of how many it was asked."""
    asked = min(len(FACTS), len(texts) - first)
    return sum(any(fact in text for text in search(question)) for fact, question in FACTS[:asked]), asked


def _in_index(index: FolderIndex) -> _Search:
    return lambda question: [one.page_content for one in index.store.similarity_search(question, CHUNKS)]


def _by_index(texts: Sequence[str], embedder: Embeddings, folder: Path) -> dict[str, Any]:
    """Facts that ``build_index`` finds, at each place of each passage."""
    docs = folder / "docs"
    docs.mkdir(parents=True)
    _write(docs, texts)
    index = build_index(docs, embedder=embedder, index_dir=folder / "index", settings=_LARGE).index
    found: dict[str, Any] = {"passages": len(texts)}
    for place in PLACES:
        counts = []
        for first in range(0, len(texts), len(FACTS)):
            _write(docs, texts, place, first)
            index.update()
            counts.append(_found(_in_index(index), texts, first))
        found[place] = sum(one for one, _ in counts)
    return found


def _by_programs(texts: Sequence[str], place: str, folder: Path) -> dict[str, int]:
    """Facts that ``ask``, a server and uploads find, of 25 at a place of the first passages."""
    docs = folder / "docs"
    docs.mkdir(parents=True)
    _write(docs, texts, place)
    options = FolderRAGOptions(docs=docs, data_dir=folder / "ask", max_new_tokens=1, config=BlendConfig(prompt_cache=0))
    with FolderRAG(options) as rag:
        rag.update()
        found = {"ask": _found(_in_index(rag.index), texts)[0]}
    (folder / "serve").mkdir()
    with (
        served(folder / "serve", {"ada": _KEY}, ["--docs", str(docs)]) as url,
        httpx.Client(base_url=url, headers={"Authorization": f"Bearer {_KEY}"}, timeout=600) as client,
    ):

        def search(id: str) -> _Search:
            def ask(question: str) -> list[str]:
                body = {"query": question, "k": CHUNKS}
                return [one["text"] for one in client.post(f"/api/collections/{id}/search", json=body).json()]

            return ask

        (base,) = [one["id"] for one in client.get("/api/state").json()["collections"]]
        own = client.post("/api/collections", json={"name": "Own"}).json()["id"]
        files = [("files", (path.name, path.read_bytes())) for path in sorted(docs.iterdir())]
        for start in range(0, len(files), 50):
            client.post(f"/api/collections/{own}/documents", files=files[start : start + 50]).raise_for_status()
        while any(one["state"] != "ready" for one in client.get(f"/api/collections/{own}/documents").json()):
            time.sleep(1)
        found["serve"], found["uploads"] = _found(search(base), texts)[0], _found(search(own), texts)[0]
    return found


def _recall(
    cases: Sequence[EvalCase], embedder: Embeddings, folder: Path, rounds: int, sizes: SplitSettings
) -> dict[str, Any]:
    """Questions whose answer is in a retrieved chunk; seconds to embed all chunks anew, and size of the index."""
    docs = folder / "docs"
    docs.mkdir(parents=True)
    for title, text in joined_articles(cases).items():
        docs.joinpath(title.replace("/", "-") + ".txt").write_text(text, encoding="utf-8")
    for article in ARTICLES_PATH.iterdir():
        docs.joinpath(article.name).write_bytes(article.read_bytes())
    seconds = []
    for number in range(rounds):
        began = time.perf_counter()
        index = build_index(docs, embedder=embedder, index_dir=folder / f"index{number}", settings=sizes).index
        seconds.append(time.perf_counter() - began)
    search, found, characters = _in_index(index), {1: 0, CHUNKS: 0}, list[int]()
    for case in cases:
        # The sentences of the answer, for the answer alone may stand elsewhere, too.
        support = " ".join(passage.text for passage in case.passages if passage.support)
        wanted = [one for one in re.split(r"(?<=[.!?])\s+", support) if is_right(one, case.answers)] or [support]
        texts = search(case.question)
        characters.append(sum(map(len, texts)))
        for count in found:
            found[count] += any(sentence in text for sentence in wanted for text in texts[:count])
    return {
        "chunks": len(index.store),
        "vectors": index.store.vectors,
        "index_s": statistics.median(seconds),
        "index_bytes": sum(path.stat().st_size for path in (folder / "index0").iterdir()),
        "questions": len(cases),
        "characters_of_six": round(statistics.mean(characters)),
        **{f"recall_at_{count}": hits for count, hits in found.items()},
    }


def _bundled(embedder: Embeddings, folder: Path, sizes: SplitSettings) -> dict[str, Any]:
    """How long six chunks of the bundled articles are, and in how many an answer of a bundled question is."""
    index = build_index(ARTICLES_PATH, embedder=embedder, index_dir=folder, settings=sizes).index
    questions = [json.loads(line) for line in QUESTIONS_PATH.read_text(encoding="utf-8").splitlines()]
    characters, answered = list[int](), 0
    for one in questions:
        found = index.store.similarity_search(one["question"], CHUNKS)
        characters.append(sum(len(chunk.page_content) for chunk in found))
        texts = [chunk.page_content for chunk in found if chunk.metadata["source"] in one["files"]]
        answered += any(is_right(text, [one["answer"], *one["aliases"]]) for text in texts)
    return {
        "questions": len(questions),
        "characters_of_six": round(statistics.mean(characters)),
        "recall_at_6": answered,
    }


def _rows(found: Mapping[str, Any]) -> Iterator[list[str]]:
    for way in ("cut", "parts"):
        for corpus in ("articles", "squad"):
            one = found[way][corpus]
            yield [f"{corpus}, {way}", *(f"{one[place]} of {one['passages']}" for place in PLACES)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = script_parser("facts", __doc__)
    parser.add_argument("--data", required=True, metavar="FILE", help="questions with passages")
    parser.add_argument("--rounds", type=int, default=3, help="of making the index")
    options = parser.parse_args(arguments)
    cases = load_cases(options.data)
    articles = [one.page_content[:_LONGEST] for one in split(read_folder(ARTICLES_PATH), _LARGE)]
    texts = {"articles": articles, "squad": _passages(cases)}
    parts = SentenceTransformerEmbeddings(DEFAULT_EMBEDDER)
    found: dict[str, Any] = {"machine": machine("cpu")}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for way, embedder in (("cut", _Cut(parts)), ("parts", parts)):
            found[way] = {corpus: _by_index(some, embedder, folder / way / corpus) for corpus, some in texts.items()}
            found[way]["index"] = _recall(cases, embedder, folder / way / "recall", options.rounds, _LARGE)
            found[way]["bundled"] = _bundled(embedder, folder / way / "bundled", _LARGE)
        for name, sizes in (("default", SplitSettings()), ("small", SplitSettings(chunk_size=1_000))):
            found[name] = {"index": _recall(cases, parts, folder / name, options.rounds, sizes)}
            found[name]["bundled"] = _bundled(parts, folder / f"{name}-bundled", sizes)
        for corpus, some in texts.items():
            for place in ("start", "end"):
                programs = _by_programs(some, place, folder / "programs" / corpus / place)
                found["parts"][corpus].setdefault("of_25", {})[place] = programs
    print(table(["passages", *PLACES], list(_rows(found))))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
