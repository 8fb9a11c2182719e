"""The bundled embedder finds the passages that name what is asked about."""

from __future__ import annotations

import pytest

from tests.toy import EMBEDDER_PATH
from tests.toy.measure import retrieved_cases

pytestmark = pytest.mark.slow


def test_embedder_takes_less_than_a_megabyte() -> None:
    assert sum(path.stat().st_size for path in EMBEDDER_PATH.rglob("*") if path.is_file()) < 1_000_000


def test_bundled_questions_mostly_find_their_passages() -> None:
    cases = retrieved_cases()
    for kind in ("within", "comparison"):
        found = [case.complete for case in cases if case.kind == kind]
        assert sum(found) / len(found) >= 0.95
