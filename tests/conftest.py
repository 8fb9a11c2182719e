"""Nothing that runs here leaves anything in the home folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def fingerprints_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fingerprints of the models that tests load are kept for the run only."""
    path = tmp_path_factory.mktemp("fingerprints") / "fingerprints.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cacheblend_rag.models.identity._cache_file", lambda: path)
        yield
