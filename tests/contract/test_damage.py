"""A record that was found and cannot be read after all is a miss, and nothing else changes."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.errors import RecordError
from cacheblend_rag.report import FusedKV
from cacheblend_rag.store import DiskStore
from tests.probes import CHUNKS, PROMPT, Hooked, assert_same, engine_of, reading, record_files, segments_of

pytestmark = pytest.mark.usefixtures("even_small_records_are_prefetched")


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def _cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "deleted": Path.unlink,
    "emptied": lambda path: _cut(path, 0),
    "cut in the header": lambda path: _cut(path, 100),
    "cut in layer 2": lambda path: _cut(path, path.stat().st_size // 2),
    "cut by a byte": lambda path: _cut(path, path.stat().st_size - 1),
    "flipped in the header": lambda path: _flip(path, 40),
    "flipped in layer 0": lambda path: _flip(path, 4096 + 10),
    "flipped in the last layer": lambda path: _flip(path, path.stat().st_size - 4096 + 10),
}


def never_stored(missing: int, **options: Any) -> FusedKV:
    """The result of a run in which one chunk is not stored; the others were computed in the same pass as everywhere."""
    with engine_of(recompute_ratio=0.2, **options) as engine:
        engine.warm(CHUNKS)
        assert engine.forget([CHUNKS[missing]]) == 1
        return engine.with_config(write_back="off").fuse(PROMPT)


def file_of(folder: Path, chunk: str) -> Path:
    ids = json.dumps(list(segments_of(engine_of()).chunk(chunk).ids), separators=(",", ":")).encode()
    (found,) = [path for path in record_files(folder) if b'"token_ids":' + ids in path.read_bytes()]
    return found


@pytest.mark.parametrize("prefetch", [True, False])
def test_record_damaged_before_look_up_is_a_logged_miss(
    prefetch: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = never_stored(1)
    with engine_of(store=tmp_path, codec="raw", recompute_ratio=0.2, write_back="off") as engine, reading(prefetch):
        for damage, harm in DAMAGE.items():
            engine.forget(CHUNKS)
            engine.warm(CHUNKS)  # in one pass, as in the run that is compared
            harm(file_of(tmp_path, CHUNKS[1]))
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                fused = engine.fuse(PROMPT)
            assert len(caplog.records) == 1, damage
            assert "miss" in caplog.text or "lost while loading" in caplog.text
            assert (fused.report.hits, fused.report.misses) == (2, 1), damage
            assert fused.report.lost == (1 if "layer" in damage and "cut" not in damage else 0)
            assert_same(fused, expected)
        caplog.clear()
        again = engine.with_config(write_back="inline").fuse(PROMPT)  # stores it anew
        assert again.report.misses == 1
        assert engine.fuse(PROMPT).report.hits == 3
        assert caplog.records == []


@pytest.mark.pairwise
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("layer", [None, 0, 3])
@pytest.mark.parametrize("victim", [0, 2])
def test_record_damaged_while_it_is_loaded_is_dropped(
    victim: int, layer: int | None, prefetch: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Cut between look-up and load (no layer), or just before a layer is read, after others were fused."""
    store = Hooked(DiskStore(tmp_path))
    with engine_of(store=store, recompute_ratio=0.2, write_back="off") as engine, reading(prefetch):
        engine.warm(CHUNKS)
        path = file_of(tmp_path, CHUNKS[victim])
        ids = segments_of(engine).chunk(CHUNKS[victim]).ids
        (key,) = [key for key, record in store.kept.items() if record.info.token_ids == ids]
        if layer is None:
            store.opened = lambda opened: _cut(path, 4096 + 5) if opened == key and path.exists() else None
        else:
            store.reading = lambda read, at: _cut(path, 4096) if (read, at) == (key, layer) else None
        with caplog.at_level(logging.WARNING):
            fused = engine.fuse(PROMPT)
        assert (fused.report.hits, fused.report.misses, fused.report.lost) == (2, 1, 1)
        assert key in caplog.text
        assert "lost while loading" in caplog.text
        assert store.still_open == []
        assert not store.contains(key)
    assert_same(fused, never_stored(victim))
    store.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-loader")]


@pytest.mark.parametrize("prefetch", [True, False])
def test_every_record_lost_one_after_another_gives_a_cold_run(prefetch: bool, caplog: pytest.LogCaptureFixture) -> None:
    store = Hooked()
    with engine_of(store=store, recompute_ratio=0.2, write_back="off") as engine, reading(prefetch):
        cold = engine.fuse(PROMPT)
        engine.with_config(write_back="inline").fuse(PROMPT)

        def fail(key: str, layer: int) -> None:
            if layer == 2:
                raise RecordError("gone")

        store.reading = fail
        with caplog.at_level(logging.WARNING):
            fused = engine.fuse(PROMPT)
    assert (fused.report.hits, fused.report.misses, fused.report.lost) == (0, 3, 4)
    assert not fused.report.prefix_hit
    assert store.still_open == []
    assert_same(fused, cold)
