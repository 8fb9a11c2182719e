"""Nothing that runs here reaches a model hub or leaves anything in the home folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    # Processes that share the cores take one thread each; set before torch is imported, and for their children.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def fingerprints_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fingerprints of the models that tests load are kept for the run only."""
    path = tmp_path_factory.mktemp("fingerprints") / "fingerprints.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cacheblend_rag.models.identity._cache_file", lambda: path)
        yield
