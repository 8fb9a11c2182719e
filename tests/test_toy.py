"""The toy is a fixture: its weights and vocabularies stay as they are."""

from __future__ import annotations

import hashlib

import pytest

from tests.toy import MODEL_PATH

FOLDER = MODEL_PATH.parent
SUMS = [line.split() for line in (FOLDER / "SHA256SUMS").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(("digest", "name"), SUMS, ids=[name for _, name in SUMS])
def test_weights_are_those_that_were_measured(digest: str, name: str) -> None:
    assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest
