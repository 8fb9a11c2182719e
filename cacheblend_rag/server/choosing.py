"""Find questions for the page: ``python -m cacheblend_rag.server.choosing``.

Prints the questions of the bundled archive that full recompute and blending answer rightly and full
KV reuse does not; some of them belong into `cacheblend_rag.server.suggestions`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.folder_rag import FolderRAG, FolderRAGOptions
from cacheblend_rag.reference.bundle import BundledQuestion, read_questions
from cacheblend_rag.server.asking import QuestionPrompt
from cacheblend_rag.server.comparing import compare_all

__all__ = ["main", "telling_questions"]


def telling_questions(rag: FolderRAG, questions: Sequence[BundledQuestion], k: int) -> Iterator[BundledQuestion]:
    """Questions on which the methods differ as they should.

    Parameters
    ----------
    rag : FolderRAG
        Brought up to date.
    questions : sequence of BundledQuestion
    k : int
        Chunks in the prompt, as the page asks for them.
    """
    asking = QuestionPrompt.of(rag.engine.tokenizer, getattr(rag.engine.tokenizer, "chat_template", None))
    for one in questions:
        found = rag.index.store.similarity_search(one.question, k)
        prompt = asking.ask(one.question, [chunk.page_content for chunk in found])
        rows = {row["method"]: row["answer"] for row in compare_all(rag.engine, prompt, rag.options.max_new_tokens)}
        right = {method: any(answer in text for answer in one.answers) for method, text in rows.items()}
        if right["full"] and right["blend"] and not right["reuse"]:
            yield one


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m cacheblend_rag.server.choosing", description=__doc__)
    parser.add_argument("--kind", action="append", help="of question; by default all but those within a passage")
    parser.add_argument("--top-k", type=int, default=6)
    args = parser.parse_args(argv)
    questions = [one for one in read_questions() if one.kind in (args.kind or ("reference", "bridge"))]
    with tempfile.TemporaryDirectory() as folder:
        options = FolderRAGOptions(data_dir=folder, top_k=args.top_k, config=BlendConfig())
        with FolderRAG(options) as rag:
            rag.update()
            for one in telling_questions(rag, questions, args.top_k):
                print(f"{one.kind}: {one.question} ({', '.join(one.answers)})", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
