"""The bundled embedder finds the passages that name what is asked about; training it is short and seeded."""

from __future__ import annotations

from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

from cacheblend_rag.errors import ConfigError
from tests.toy import EMBEDDER_PATH
from tests.toy.measure import retrieved_cases
from tests.toy.train_embedder import EmbedderOptions, measure_recall, train

pytestmark = pytest.mark.slow


def test_recall_of_passages_that_name_what_is_asked() -> None:
    model = SentenceTransformer(str(EMBEDDER_PATH), device="cpu")
    for result in measure_recall(model, towns=2):
        assert result.questions > 50
        assert result.naming >= 0.95, result


def test_embedder_takes_less_than_a_megabyte() -> None:
    assert sum(path.stat().st_size for path in EMBEDDER_PATH.rglob("*") if path.is_file()) < 1_000_000


def test_bundled_questions_mostly_find_their_passages() -> None:
    cases = retrieved_cases()
    for kind in ("within", "comparison"):
        found = [case.complete for case in cases if case.kind == kind]
        assert sum(found) / len(found) >= 0.95


def test_short_training_run_loads(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    train(EmbedderOptions(tmp_path, towns=2, triplets_a_town=40, epochs=1, vocab_size=600, dimension=8))
    model = SentenceTransformer(str(tmp_path), device="cpu")
    vectors = model.encode(["A question?", "日本語"])
    assert vectors.shape == (2, 8)


def test_bad_options_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="towns"):
        EmbedderOptions(tmp_path, towns=0)
