"""Long prompts: questions with the six chunks that ``cacheblend-rag ask`` would retrieve for them.

``python -m docs.benchmarks.scripts.retrieved --data squad.jsonl --titles "Victoria (Australia)" --out long.jsonl``

The bundled articles and the passages of ``--data``, joined to articles by their titles, are split and indexed as
``ask`` does it: the starter embedder, FAISS, but 2,000 characters a chunk. Each question gets the nearest six chunks.
Questions none of whose chunks has a gold answer in it are left out. ``--titles`` names the articles whose questions
are taken; without it they are those of the bundled articles. ``--corpus`` writes all chunks, in the order of their
articles. The yardstick reads both files.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from langchain_core.documents import Document

from cacheblend_rag.app.collection import ARTICLES_PATH, QUESTIONS_PATH
from cacheblend_rag.calibration.datasets import EvalCase, Passage, load_cases
from cacheblend_rag.config import DEFAULT_EMBEDDER
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.index import FolderIndex, build_index
from cacheblend_rag.retrieval.splitting import SplitSettings
from docs.benchmarks.scripts.common import script_parser
from docs.benchmarks.scripts.yardstick import is_right

__all__ = ["joined_articles", "main", "with_retrieved"]

CHUNKS = 6


def joined_articles(cases: Sequence[EvalCase]) -> dict[str, str]:
    """The passages of questions as articles by their titles, each passage once.

    Passages that a question needs stand in the order of their groups, ``NAME-NUMBER``; others follow.
    """
    articles: dict[str, list[str]] = {}
    for case in sorted(cases, key=_paragraph):
        for passage in case.passages:
            if passage.support:
                articles.setdefault(passage.title, []).append(passage.text)
    for case in cases:
        for passage in case.passages:
            articles.setdefault(passage.title, []).append(passage.text)
    return {title: "\n\n".join(dict.fromkeys(texts)) for title, texts in articles.items()}


def _paragraph(case: EvalCase) -> tuple[str, int]:
    name, _, number = case.group.rpartition("-")
    return name, int(number) if number.isdigit() else 0


def with_retrieved(cases: Sequence[EvalCase], index: FolderIndex, count: int = CHUNKS) -> Iterator[EvalCase]:
    """Questions with the chunks that are nearest to them, where one of these has an answer in it."""
    for case in cases:
        found: list[Document] = index.store.similarity_search(case.question, k=count)
        passages = tuple(Passage("", one.page_content, is_right(one.page_content, case.answers)) for one in found)
        if any(passage.support for passage in passages):
            yield replace(case, passages=passages)


def _bundled_questions() -> list[EvalCase]:
    found = []
    for number, line in enumerate(QUESTIONS_PATH.read_text(encoding="utf-8").splitlines()):
        one = json.loads(line)
        answers = (one["answer"], *one["aliases"])
        found.append(EvalCase(f"bundled-{number}", one["question"], answers, (), "bundled", group=one["files"][0]))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = script_parser("retrieved", __doc__)
    parser.add_argument("--data", required=True, metavar="FILE", help="questions with passages")
    parser.add_argument("--titles", nargs="*", default=[], help="articles of it whose questions are taken")
    parser.add_argument("--out", required=True, metavar="FILE", help="questions with their chunks")
    parser.add_argument("--corpus", metavar="FILE", help="all chunks, one JSON string a line")
    options = parser.parse_args(arguments)
    cases = load_cases(options.data)
    with tempfile.TemporaryDirectory() as folder:
        documents = Path(folder, "documents")
        documents.mkdir()
        for title, text in joined_articles(cases).items():
            documents.joinpath(title.replace("/", "-") + ".txt").write_text(text, encoding="utf-8")
        for article in ARTICLES_PATH.iterdir():
            documents.joinpath(article.name).write_bytes(article.read_bytes())
        embedder = SentenceTransformerEmbeddings(DEFAULT_EMBEDDER)
        sizes = SplitSettings(chunk_size=2_000)
        index = build_index(documents, embedder=embedder, index_dir=Path(folder, "index"), settings=sizes).index
        wanted = [case for case in cases if any(p.support and p.title in options.titles for p in case.passages)]
        found = list(with_retrieved(wanted if options.titles else _bundled_questions(), index))
        chunks = [chunk.page_content for chunk in index.chunks()]
    with Path(options.out).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(case)) + "\n" for case in found)
    if options.corpus:
        Path(options.corpus).write_text("".join(json.dumps(text) + "\n" for text in chunks), encoding="utf-8")
    print(f"{len(found)} questions, {len(chunks)} chunks")
    return 0


if __name__ == "__main__":
    sys.exit(main())
