"""Whatever happens to the folder, a request ends in the result of a run where the record was never stored."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import json
import logging
import os
import resource
import shutil
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diskcache
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend_rag.errors import StoreError
from cacheblend_rag.report import FusedKV
from cacheblend_rag.store import DiskStore
from tests import tiny
from tests.contract.faults import (
    DamageTrials,
    crowd,
    kill_while_writing,
    record_of,
    truncations,
    wrong_records,
)
from tests.contract.test_store import alter, files
from tests.probes import CHUNKS, PROMPT, Hooked, assert_same, engine_of


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DamageTrials]:
    made = DamageTrials(tmp_path_factory.mktemp("trials") / "kv")
    yield made
    made.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_flipped_bit_gives_the_result_without_the_record(trials: DamageTrials, where: float, bit: int) -> None:
    at = int(where * len(trials.data))
    damaged = bytearray(trials.data)
    damaged[at] ^= 1 << bit
    outcome = trials.run(bytes(damaged))
    assert outcome.right
    header = int.from_bytes(trials.data[8:12], "little")
    table = json.loads(trials.data[16 : 16 + header])["table"]
    content = at < 16 + header or any(offset <= at < offset + size for offset, size, _ in table)
    assert outcome.hits == (2 if content else 3)


def test_every_class_of_truncation_gives_the_result_without_the_record(trials: DamageTrials) -> None:
    for name, length in truncations(trials.data).items():
        outcome = trials.run(trials.data[:length])
        assert outcome.as_never_stored, name
        assert outcome.hits == 2, name
    assert trials.run(None).as_never_stored
    untouched = trials.run(trials.data)
    assert untouched.as_undamaged
    assert not untouched.as_never_stored, "nothing would show the difference"


# The folder ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cold() -> FusedKV:
    """The result of a run in which nothing was ever stored."""
    with engine_of(recompute_ratio=0.2, write_back="off") as engine:
        return engine.fuse(PROMPT)


@pytest.mark.parametrize("write_back", ["inline", "background"])
def test_removing_the_folder_in_use_costs_only_hits(
    write_back: str, tmp_path: Path, cold: FusedKV, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "kv"
    with engine_of(store=folder, recompute_ratio=0.2, write_back=write_back) as engine:
        engine.warm(CHUNKS)
        shutil.rmtree(folder)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert_same(engine.fuse(PROMPT), cold)
                engine.flush()
        assert "could not store" in caplog.text
    assert not folder.exists(), "nothing is written into a folder that was taken away"


def test_removing_the_folder_between_two_layers_changes_nothing(tmp_path: Path) -> None:
    """Records that are open stay readable."""
    folder = tmp_path / "kv"
    store = Hooked(DiskStore(folder))
    with engine_of(store=store, recompute_ratio=0.2, write_back="off") as engine:
        engine.warm(CHUNKS)
        warm = engine.fuse(PROMPT)
        store.reading = lambda key, layer: shutil.rmtree(folder, ignore_errors=True) if layer == 2 else None
        fused = engine.fuse(PROMPT)
        assert fused.report.hits == 3
        assert_same(fused, warm)
    store.close()


BIND, REMOUNT, READ_ONLY = 4096, 32, 1


def _libc() -> Any:
    return ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)


def _mount(path: Path, kind: str, flags: int = 0, options: str = "") -> bool:
    where = str(path).encode()
    return _libc().mount(where, where, kind.encode(), flags, options.encode()) == 0


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Mounts something at ``tmp_path``; the test is skipped where that is not allowed."""
    mounted = []

    def try_it(kind: str, flags: int = 0, options: str = "") -> None:
        if not _mount(tmp_path, kind, flags, options):
            pytest.skip("nothing can be mounted here")
        mounted.append(tmp_path)

    yield try_it
    for path in mounted:
        _libc().umount2(str(path).encode(), 2)


def test_full_disk_costs_only_storing(
    tmp_path: Path, mount: Callable[..., None], cold: FusedKV, caplog: pytest.LogCaptureFixture
) -> None:
    mount("tmpfs", options="size=1m")
    with engine_of(store=tmp_path / "kv", recompute_ratio=0.2) as engine, caplog.at_level(logging.WARNING):
        store = engine.store
        assert isinstance(store, DiskStore)
        disk = os.statvfs(tmp_path)
        (tmp_path / "ballast").write_bytes(b"\0" * ((disk.f_bavail - 9) * disk.f_frsize))
        assert_same(engine.fuse(PROMPT), cold)
        assert "could not store" in caplog.text
        assert "No space left" in caplog.text or "disk is full" in caplog.text
        assert engine.fuse(PROMPT).report.hits < 3
        assert len(files(store.folder)) <= len(list(store.entries())) + 1, "what could not be written whole is gone"
        (tmp_path / "ballast").unlink()
        engine.fuse(PROMPT)
        assert engine.fuse(PROMPT).report.hits == 3
        for entry in store.entries():
            record = store.read(entry)
            record.verify()
            record.close()


def test_full_disk_keeps_no_store_from_opening(
    tmp_path: Path, mount: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Records give way. Without any, the error says that there is no room."""
    mount("tmpfs", options="size=40m")
    store, keys = DiskStore(tmp_path / "kv"), [f"key {number}" for number in range(120)]
    for number, key in enumerate(keys):
        store.put(key, record_of(number))
    store.close()
    fill(tmp_path)
    with caplog.at_level(logging.WARNING):
        store = DiskStore(tmp_path / "kv")
    assert "gave way" in caplog.text
    there = store.open_all(keys)
    for record in there.values():
        record.close()
    assert 0 < len(there) < len(keys), "the oldest are gone, and no more than need be"
    assert keys[-1] in there
    store.put(keys[0], record_of(0))
    assert store.contains(keys[0])
    store.close()
    shutil.rmtree(tmp_path / "kv")
    fill(tmp_path)
    with pytest.raises(StoreError, match="make room on its disk"):
        DiskStore(tmp_path / "kv")


def fill(folder: Path) -> None:
    """Leave not a byte on the disk of a folder."""
    path = folder / f"ballast {len(list(folder.iterdir()))}"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * 4096):
            pass


def test_file_size_limit_costs_only_storing(tmp_path: Path, cold: FusedKV, caplog: pytest.LogCaptureFixture) -> None:
    """A quota: files of this process may have no more than so many bytes."""
    old, heard = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with engine_of(store=tmp_path / "kv", recompute_ratio=0.2) as engine:
        store = engine.store
        assert isinstance(store, DiskStore)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, old[1]))
            with caplog.at_level(logging.WARNING):
                assert_same(engine.fuse(PROMPT), cold)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)
            signal.signal(signal.SIGXFSZ, heard)
        assert "could not store" in caplog.text
        assert files(store.folder) == []
        engine.fuse(PROMPT)
        assert engine.fuse(PROMPT).report.hits == 3


def test_folder_turned_read_only_costs_only_storing(
    tmp_path: Path, mount: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(store=tmp_path / "kv", recompute_ratio=0.2) as engine:
        engine.warm(CHUNKS[:1])
        before = engine.with_config(write_back="off").fuse(PROMPT)
        mount("none", BIND)
        assert _mount(tmp_path, "none", BIND | REMOUNT | READ_ONLY)
        with caplog.at_level(logging.WARNING):
            fused = engine.fuse(PROMPT)
        assert_same(fused, before)
        assert "could not store" in caplog.text
        assert "Read-only" in caplog.text
        store = DiskStore(tmp_path / "kv")  # while another has it open, and its journal cannot be made anew
        assert store.traits.read_only
        with pytest.raises(StoreError, match="cannot be written"):
            store.put("key", record_of(1))
        assert [len(list(store.entries())), store.stats().records] == [1, 1]
        (entry,) = store.entries()
        record = store.open(entry.key)
        assert record is not None
        record.close()
        store.close()
        with pytest.raises(StoreError, match="name a folder that can be written"):
            DiskStore(tmp_path / "other")


def test_clock_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records do not age, whatever the clock says; the order of eviction may suffer, no more."""
    size = 4096 * 5
    store = DiskStore(tmp_path, 4 * size + 100_000)
    now = time.time()
    jumps = iter([0, 10**9, -(10**9), 5, 10**10, -now, 3, 2, 1] * 20)
    clock = type("Clock", (), {"time": staticmethod(lambda: now + next(jumps)), "sleep": time.sleep})
    monkeypatch.setattr(diskcache.core, "time", clock)
    for number in range(12):
        store.put(str(number), record_of(number))
        opened = store.open(str(number))
        if opened is not None:  # when the clock was back, the newest looked the oldest
            opened.close()
    assert store.volume() <= store.traits.size_limit
    assert list(store.entries())
    assert list(wrong_records(store)) == []
    store.close()


def test_two_models_in_one_folder_keep_to_their_own(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    models = [tiny.model(), tiny.model(seed=1), tiny.model("qwen3")]
    alone = []
    for model in models:
        with engine_of(model, recompute_ratio=0.2) as engine:
            engine.warm(CHUNKS)
            alone.append(engine.fuse(PROMPT))
    engines = [engine_of(model, store=store, recompute_ratio=0.2) for model in models]
    for engine in engines:
        engine.warm(CHUNKS)
    for engine, expected in zip(engines, alone, strict=True):
        fused = engine.fuse(PROMPT)
        assert fused.report.hits == 3
        assert_same(fused, expected)
        engine.close()
    store.close()


# Foreign files -----------------------------------------------------------------------------


def test_files_and_folders_are_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = DiskStore(tmp_path / "kv")
        store.put("a", record_of(1))
        with store.claim("a"):
            for path in (tmp_path / "kv").rglob("*"):
                assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
        store.close()
    finally:
        os.umask(old)


@pytest.mark.parametrize("kind", ["pipe", "link", "socket folder"])
def test_record_that_is_no_plain_file_is_a_miss(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = DiskStore(tmp_path / "kv")
    store.put("a", record_of(1))
    (path,) = files(tmp_path / "kv")
    if kind == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.unlink()
        os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with caplog.at_level(logging.WARNING):
        assert store.open("a") is None
    assert "counts as a miss" in caplog.text
    assert not store.prefetch("a")
    store.close()


@pytest.mark.parametrize("key", ["../../outside", "/etc/passwd", "a/b", "\0", "x" * 5000, "..", "'; DROP TABLE Cache"])
def test_path_in_a_key_leads_nowhere(key: str, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    store = DiskStore(folder)
    store.put(key, record_of(3))
    with store.claim(key) as mine:
        assert mine
    opened = store.open(key)
    assert opened is not None
    assert opened.info == record_of(3).info
    opened.close()
    assert len(files(folder)) == 1
    assert store.delete(key)
    assert sorted(tmp_path.iterdir()) == [folder]
    store.close()


@pytest.mark.parametrize(
    "name", ["../../outside", "/etc/passwd", "\0", "x" * 5000, 5, None, b"bytes", "cache.db/../../outside"], ids=repr
)
def test_path_in_the_index_leads_nowhere(name: Any, tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "kv")
    store.put("a", record_of(3))
    (tmp_path / "outside").write_bytes(files(tmp_path / "kv")[0].read_bytes())
    alter(tmp_path / "kv", "UPDATE Cache SET filename = ?", name)
    assert store.open("a") is None
    store.put("b", record_of(4))
    assert [entry.key for entry in store.entries() if entry.key == "b"] == ["b"]
    assert (tmp_path / "outside").exists()
    store.close()


def test_settings_someone_left_in_the_data_base_are_an_error_of_ours_or_nothing(tmp_path: Path) -> None:
    DiskStore(tmp_path / "kv").close()
    for key, value in (("disk_evil", "1"), ("disk_pickle_protocol", "x"), ("size_limit", "x"), ("unknown", "x")):
        alter(tmp_path / "kv", "INSERT OR REPLACE INTO Settings VALUES (?, ?)", key, value)
        try:
            store = DiskStore(tmp_path / "kv", 5_000_000)
        except StoreError:
            alter(tmp_path / "kv", "DELETE FROM Settings WHERE key = ?", key)
            continue
        assert store.traits.size_limit == 5_000_000
        store.put("a", record_of(1))
        store.close()


# Other processes ----------------------------------------------------------------------------


def test_kill_9_while_writing_leaves_whole_records_only(tmp_path: Path) -> None:
    written = kill_while_writing(tmp_path / "kv", rounds=4)
    assert all(written)
    store = DiskStore(tmp_path / "kv", 20_000_000)
    assert list(store.entries())
    assert list(wrong_records(store)) == []
    known = {entry.filename for entry in store.entries()}
    left = {str(path.relative_to(store.folder)) for path in files(store.folder)} - known
    assert store.sweep() == 0, "young files may belong to a process that is just writing them"
    assert store.sweep(grace=0) == len([name for name in left if name.endswith(".val")])
    assert list(wrong_records(store)) == []
    store.close()


@pytest.mark.parametrize("error", [FileExistsError, FileNotFoundError])
def test_folder_removed_by_another_process_is_made_again(
    error: type[OSError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, make, failed = DiskStore(tmp_path), Path.mkdir, list[Path]()

    def removed(path: Path, *args: Any, **kwargs: Any) -> None:
        if len(failed) < 3:
            failed.append(path)
            raise error(str(path))
        make(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", removed)
    store.put("a", record_of(1))
    assert len(failed) == 3
    assert store.contains("a")
    store.close()


def test_processes_share_a_folder(tmp_path: Path) -> None:
    seen = crowd(tmp_path / "kv", processes=3, seconds=1.5, size_limit=600_000)
    assert (seen.wrong, seen.crashed, seen.refused) == (0, 0, 0)
    assert seen.hits
    assert seen.writes
    store = DiskStore(tmp_path / "kv", 600_000)
    assert list(wrong_records(store)) == []
    assert store.stats().evictions > 0
    store.close()
