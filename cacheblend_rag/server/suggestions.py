"""Questions the page offers for the bundled archive: the one place where they are chosen."""

from __future__ import annotations

from pathlib import Path

from cacheblend_rag.reference import DOCUMENTS_PATH, QUESTIONS_PATH
from cacheblend_rag.reference.bundle import BundledQuestion, read_questions

__all__ = ["SUGGESTED", "suggestions_for"]

_TELLING = "The answer needs two passages. Compare: full KV reuse gets this wrong."
# Questions of the bundled archive by their wording, each with a note or none. Those that are not in the
# archive's question file any more are left out, and the kinds below, which the model answers best, fill up.
SUGGESTED: tuple[tuple[str, str | None], ...] = (
    ("Which street does Selma Bramdorf live on?", _TELLING),
    ("Which company does Lars Mardahl work for?", None),
    ("What did Felix Zanford speak about at Damsonweek?", _TELLING),
)
# Kinds that fill up what is missing of the number offered, with their notes.
_FILLING: tuple[tuple[str, str | None], ...] = (("within", None),)
_OFFERED = 5


def suggestions_for(documents: Path) -> list[dict[str, str]]:
    """Suggested questions for a folder of documents; none but for the bundled archive."""
    if documents.resolve() != DOCUMENTS_PATH:
        return []
    known = {question.question: question for question in read_questions(QUESTIONS_PATH)}
    chosen = [(text, note) for text, note in SUGGESTED if text in known]
    by_kind = {kind: _of_kind(list(known.values()), kind) for kind, _ in _FILLING}
    for number in range(_OFFERED):
        for kind, note in _FILLING:
            fresh = by_kind[kind][number] if number < len(by_kind[kind]) else None
            if fresh is not None and len(chosen) < _OFFERED and fresh not in [text for text, _ in chosen]:
                chosen.append((fresh, note))
    return [{"question": text, "note": note} if note else {"question": text} for text, note in chosen]


def _of_kind(questions: list[BundledQuestion], kind: str) -> list[str]:
    return [question.question for question in questions if question.kind == kind]
