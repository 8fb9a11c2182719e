"""Questions the page offers for the bundled archive; `cacheblend_rag.evaluation.telling` finds such."""

from __future__ import annotations

from pathlib import Path

from cacheblend_rag.reference import DOCUMENTS_PATH
from cacheblend_rag.reference.bundle import read_questions

__all__ = ["SUGGESTED", "suggestions_for"]

_TELLING = "The answer needs two passages. Compare: full KV reuse gets this wrong."
# By their wording, each with a note or none. Those that are not in the archive's question file any more are
# left out; questions of the kind below, which the model answers best, fill up to the number offered.
SUGGESTED: tuple[tuple[str, str | None], ...] = (
    ("Which street does Selma Bramdorf live on?", _TELLING),
    ("Which company does Lars Mardahl work for?", None),
    ("What did Felix Zanford speak about at Damsonweek?", _TELLING),
    ("Which company is older, Ethbar or Hulwyn?", None),
)
_FILLING = "within"
_OFFERED = 5


def suggestions_for(documents: Path) -> list[dict[str, str]]:
    """Suggested questions for a folder of documents; none but for the bundled archive."""
    if documents.resolve() != DOCUMENTS_PATH:
        return []
    kinds = {one.question: one.kind for one in read_questions()}
    notes = {text: note for text, note in SUGGESTED if text in kinds}
    filling = [text for text, kind in kinds.items() if kind == _FILLING and text not in notes]
    notes |= dict.fromkeys(filling[: max(0, _OFFERED - len(notes))])
    return [{"question": text, "note": note} if note else {"question": text} for text, note in notes.items()]
