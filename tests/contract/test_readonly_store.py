"""A store in a folder that cannot be written: it serves hits, keeps nothing new, and says so once."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendEngine, Prompt
from cacheblend_rag.errors import StoreError
from cacheblend_rag.store import DiskStore
from tests import tiny
from tests.contract.store_contract import make
from tests.probes import engine_of

pytestmark = pytest.mark.skipif(sys.platform != "linux" and os.geteuid() == 0, reason="root may write everything")
CHUNKS = [tiny.text(40, 61), tiny.text(40, 62)]
NEW = tiny.text(40, 63)


def bound_by_modes(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test on a thread that has lost, for itself and those it starts, what lets root write all files."""

    def drop() -> None:
        libc, version = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0)
        sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, each of 64 bits
        assert libc.capget(version, sets) == 0
        for at in range(2):
            sets[at] &= ~2  # CAP_DAC_OVERRIDE
        assert libc.capset(version, sets) == 0

    @functools.wraps(test)
    def run(**given: Any) -> None:
        with ThreadPoolExecutor(1, initializer=drop if os.geteuid() == 0 else None) as pool:
            pool.submit(test, **given).result()

    return run


def files_of(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with two chunks' KV that nobody can write."""
    with engine_of(store=tmp_path / "kv") as engine:
        engine.warm(CHUNKS, progress=False)
    paths = [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield tmp_path / "kv"
    for path in paths:
        path.chmod(0o755)


def hits_of(engine: BlendEngine, *chunks: str) -> tuple[int, int]:
    report = engine.generate(Prompt("", chunks, "What fell?"), max_new_tokens=2).report
    engine.flush()
    return report.hits, report.misses


@bound_by_modes
def test_unwritable_folder_serves_hits(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = files_of(folder)
    with engine_of(store=folder, write_back="background", memory_limit="0") as engine:
        for _ in range(2):
            assert hits_of(engine, *CHUNKS) == (2, 0)
            assert hits_of(engine, *CHUNKS, NEW) == (2, 1)
        warmed = engine.warm([*CHUNKS, NEW], progress=False)
        assert (warmed.computed, warmed.present, warmed.skipped) == (0, 2, 1)
        with pytest.raises(StoreError, match=r"not all could be forgotten.*cannot be erased"):
            engine.forget([CHUNKS[0]])
    store = DiskStore(folder)
    assert store.stats().records == len(list(store.entries())) == len(list(store.infos(""))) == 2
    assert store.volume() >= store.stats().bytes > 0
    with pytest.raises(StoreError, match="cannot be written"):
        store.put("key", make())
    store.close()
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert ["nothing is added" in text for text in warned] == [True] * 2, "one a store, and two were opened"
    assert files_of(folder) == before


@bound_by_modes
def test_memory_above_such_a_folder_keeps_what_is_new(folder: Path) -> None:
    with engine_of(store=folder, memory_limit="1GB") as engine:
        found = [hits_of(engine, *chunks) for chunks in (CHUNKS, [*CHUNKS, NEW], [*CHUNKS, NEW])]
    assert found == [(2, 0), (2, 1), (3, 0)]
