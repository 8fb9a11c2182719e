"""Nothing that runs here reaches a model hub, or leaves anything but the starter models in the home folder."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.pairwise import mark_the_rest

os.environ["HF_HUB_OFFLINE"] = "1"
_CACHE_HOME = os.environ.get("XDG_CACHE_HOME")  # before any test sets another
if "PYTEST_XDIST_WORKER" in os.environ:
    # Processes that share the cores take one thread each; set before torch is imported, and for their children.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Every process that a test starts would compile all modules anew, wherever the environment forbids compiled files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"  # kernels for GPUs run on the CPU; read when Triton is imported


_seconds: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-json", metavar="PATH", help="write the seconds that each file of tests took")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid.partition("::")[0]] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--durations-json")
    if path and "PYTEST_XDIST_WORKER" not in os.environ:
        rounded = {name: round(seconds, 1) for name, seconds in _seconds.most_common()}
        Path(path).write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_the_rest(items)
    # Tests that start programs come first. So one worker has them all, and torch is imported once for their forks.
    starts = ("run_program", "start_program", "run")
    items.sort(key=lambda item: not any(hasattr(item.module, name) for name in starts))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """No garbage is collected while tests are: modules that they import stay, and are not looked through later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def fingerprints_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fingerprints of the models that tests load are kept for the run only."""
    path = tmp_path_factory.mktemp("fingerprints") / "fingerprints.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cacheblend_rag.models.identity.cache_file", lambda: path)
        yield


@pytest.fixture(autouse=True)
def levels_stay() -> Iterator[None]:
    """A test that left a logger quieter than before would hide what a later one looks for."""
    loggers = [logging.getLogger(), logging.getLogger("cacheblend_rag")]
    before = [(one.level, one.disabled) for one in loggers]
    yield
    assert [(one.level, one.disabled) for one in loggers] == before


def _starter(name: str) -> Path:
    """Folder of a starter in the real cache of whoever runs the tests, fetched once a machine as a user does."""
    from cacheblend_rag.models.starters import starter_folder

    with pytest.MonkeyPatch.context() as patch:
        if _CACHE_HOME is None:
            patch.delenv("XDG_CACHE_HOME", raising=False)
        else:
            patch.setenv("XDG_CACHE_HOME", _CACHE_HOME)
        return starter_folder(name)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The file of the starter language model, for tests marked ``pretrained``."""
    from cacheblend_rag.models.starters import STARTERS

    return _starter("smollm2") / STARTERS["smollm2"].weights


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The file of the starter that commands use unless another model is named."""
    from cacheblend_rag.config import DEFAULT_MODEL
    from cacheblend_rag.models.starters import STARTERS

    return _starter(DEFAULT_MODEL) / STARTERS[DEFAULT_MODEL].weights


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """Folder of the starter embedder, for tests marked ``pretrained``."""
    return _starter("minilm")


@pytest.fixture(scope="session")
def toy_chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy model with a chat template, for documents that name a starter model."""
    from tests.integrations.langchain.models import TEMPLATE
    from tests.toy import MODEL_PATH

    folder = shutil.copytree(MODEL_PATH, tmp_path_factory.mktemp("toy") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape of a small model under the name ``"tiny"``, for benchmarks."""
    from docs.benchmarks.scripts.common import SHAPES

    shape = SHAPES["smollm2-135m"] | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    monkeypatch.setitem(SHAPES, "tiny", shape | {"num_attention_heads": 4, "num_key_value_heads": 2})


@pytest.fixture
def deep_shape(tiny_shape: None, tmp_path: Path) -> str:
    """A ``config.json`` of a small model with layers enough for every rule that benchmarks measure."""
    from docs.benchmarks.scripts.common import SHAPES

    path = tmp_path / "deep.json"
    path.write_text(json.dumps(SHAPES["tiny"] | {"num_hidden_layers": 6}), encoding="utf-8")
    return str(path)


@pytest.fixture
def even_small_records_are_prefetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of records of any size are read ahead on a thread."""
    from cacheblend_rag.engine import pipeline
    from cacheblend_rag.loading import loader

    monkeypatch.setattr(pipeline, "_WORTH_A_THREAD", 0)
    monkeypatch.setattr(loader, "_FAST", float("inf"))


@pytest.fixture
def no_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test verified brings no answer of another nearer to full prefill."""
    from cacheblend_rag.engine.variants import Variants

    monkeypatch.setattr(Variants, "jobs", lambda *given: {})
