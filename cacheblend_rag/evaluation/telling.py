"""Find questions that tell the methods apart: ``python -m cacheblend_rag.evaluation.telling``.

Prints the questions of the bundled archive that full recompute and blending answer rightly and full
KV reuse does not; some of them belong into ``SUGGESTED`` of `cacheblend_rag.server.suggestions`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.decode import DecodeOptions
from cacheblend_rag.evaluation.baselines import answer_all
from cacheblend_rag.folder_rag import FolderRAG, FolderRAGOptions
from cacheblend_rag.reference.bundle import BundledQuestion, read_questions

__all__ = ["main", "telling_questions"]


def telling_questions(rag: FolderRAG, questions: Iterable[BundledQuestion]) -> Iterator[BundledQuestion]:
    """Questions that only full KV reuse gets wrong; prefix caching is exact and not asked about.

    Parameters
    ----------
    rag : FolderRAG
        Over the bundled archive, brought up to date.
    questions : iterable of BundledQuestion
    """
    options = DecodeOptions(max_new_tokens=rag.options.max_new_tokens, temperature=0.0)
    for one in questions:
        prompt = rag.ask(one.question).prompt
        rag.engine.flush()  # what was missing is stored, so that reuse has all there is to reuse
        texts = {result.name: result.text for result in answer_all(rag.engine, prompt, rounds=1, options=options)}
        right = {name for name, text in texts.items() if any(answer in text for answer in one.answers)}
        if {"full recompute", "blended"} <= right and "full reuse" not in right:
            yield one


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one question a line as it is found."""
    parser = argparse.ArgumentParser(prog="python -m cacheblend_rag.evaluation.telling", description=__doc__)
    parser.add_argument("--kind", action="append", help="of question; by default all but those within a passage")
    parser.add_argument("--top-k", type=int, default=6, metavar="N", help="chunks in the prompt (default 6)")
    parsed = parser.parse_args(arguments)
    questions = [one for one in read_questions() if one.kind in (parsed.kind or ("reference", "bridge"))]
    with tempfile.TemporaryDirectory() as folder:
        options = FolderRAGOptions(data_dir=folder, top_k=parsed.top_k, config=BlendConfig())
        with FolderRAG(options) as rag:
            rag.update()
            for one in telling_questions(rag, questions):
                print(f"{one.kind}: {one.question} ({', '.join(one.answers)})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
