"""The loading controller: section 5 of the paper as arithmetic, and what it does to requests."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest
import torch

from cacheblend_rag import Prompt
from cacheblend_rag.calibration.profiler import fit_prefill, profile_machine
from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.loading import (
    ChunkKV,
    Device,
    LoadingController,
    MachineProfile,
    PrefillProfile,
    RatioBounds,
    load_devices,
)
from cacheblend_rag.store import DiskStore
from tests import tiny
from tests.probes import engine_of

CHUNKS = [tiny.text(60, 1), tiny.text(60, 2), tiny.text(60, 3)]
PROMPT = Prompt("Read this:", CHUNKS, "What fell in the end?")
# One second of prefill for 1,000 tokens, 100 MB of KV for them.
PREFILL = PrefillProfile(0.0, 1e-3, 0.0)
SIX = [ChunkKV(150, 15_000_000)] * 6
WIDE = RatioBounds(0.15, 1.0, 0.05)


def controller(**throughputs: float) -> LoadingController:
    devices = {name: Device(name, throughput) for name, throughput in throughputs.items()}
    return LoadingController(MachineProfile({"m": PREFILL}, devices))


def test_the_ratio_is_where_recompute_takes_as_long_as_loading() -> None:
    for load, ratio in ((0.01, 0.15), (0.149, 0.15), (0.201, 0.20), (0.249, 0.20), (0.5, 0.5), (0.86, 0.85)):
        plan = controller(disk=90e6 / load).plan("m", SIX, 1000, device="disk", bounds=WIDE)
        assert plan.recompute_ratio == pytest.approx(ratio), load
        assert plan.load_seconds == pytest.approx(load)
        assert plan.recompute_seconds == pytest.approx(ratio * 1.0), "T_recompute = r * Prefill(L)"
        assert plan.prefill_seconds == pytest.approx(1.0)
        assert plan.recomputed_chunks == ()


def test_bounds_hold() -> None:
    for load, ratio in ((0.01, 0.1), (0.8, 0.3)):
        plan = controller(disk=90e6 / load).plan("m", SIX, 1000, device="disk", bounds=RatioBounds(0.1, 0.3))
        assert plan.recompute_ratio == pytest.approx(ratio)
    for bad in ((0.5, 0.2), (-0.1, 0.5), (0.1, 1.5)):
        with pytest.raises(ConfigError):
            RatioBounds(*bad)
    with pytest.raises(ConfigError):
        RatioBounds(step=0)


def test_chunks_that_load_slower_than_they_compute_are_computed() -> None:
    chunks = [ChunkKV(100, 10), ChunkKV(400, 10), ChunkKV(400, 60_000_000)]
    plan = controller(disk=100e6).plan("m", chunks, 1000, device="disk", bounds=WIDE)
    assert plan.recomputed_chunks == (2,)
    assert plan.load_seconds == pytest.approx(2e-7)
    assert plan.recompute_seconds == pytest.approx(0.4 + 0.15 * 0.6), "the chunk, and the ratio of the rest"
    every = controller(disk=10e6).plan("m", SIX, 1000, device="disk")
    assert every.recomputed_chunks == tuple(range(6))
    assert every.recompute_seconds == every.prefill_seconds


def test_the_cheapest_device_that_hides_is_chosen() -> None:
    devices = load_devices()
    assert list(devices) == ["ram", "nvme", "sata-ssd", "network-disk", "object-store"]
    known = LoadingController(MachineProfile({"m": PREFILL}), devices)
    # 90 MB in 0.15 s take 600 MB/s; in 0.25 s 360 MB/s; in 0.95 s less than 100 MB/s.
    assert known.plan("m", SIX, 1000, ratio=0.15).device == "nvme"
    assert known.plan("m", SIX, 1000, ratio=0.25).device == "sata-ssd"
    assert known.plan("m", SIX, 1000, ratio=0.95).device == "object-store"
    assert known.plan("m", SIX, 1000, ratio=0.001).device == "ram", "nothing hides: the fastest"
    assert known.plan("m", SIX, 1000, ratio=0.25).recompute_ratio == 0.25


def test_controller_names_unknown_models_and_devices() -> None:
    with pytest.raises(ConfigError, match="cacheblend-rag profile"):
        controller(disk=1e9).plan("other", SIX, 1000, device="disk")
    with pytest.raises(ConfigError, match="use one of 'disk'"):
        controller(disk=1e9).plan("m", SIX, 1000, device="tape")


def test_only_a_large_drift_is_logged_and_corrected(caplog: pytest.LogCaptureFixture) -> None:
    known = controller(disk=1e9)
    with caplog.at_level(logging.INFO):
        for actual in (0.5, 3.0, 1.0, 0.9, 1.9, 1.5, 1.2, 1.0, 1.9, 1.4):
            known.note("disk", 1.0, actual)
        assert known.devices["disk"].throughput == 1e9
        assert caplog.text == ""
        for _ in range(8):
            known.note("disk", 1.0, 4.0)
        assert caplog.text.count("times what the profile says") == 1
        assert 2e8 < known.devices["disk"].throughput < 5e8
        known.note("tape", 1.0, 50.0)
        known.note("disk", 0.0, 50.0)


# Files --------------------------------------------------------------------------------------


def test_profile_is_kept_and_read(tmp_path: Path) -> None:
    profile = MachineProfile({"m": PrefillProfile(0.1, 2e-3, 3e-7)}, {"disk": Device("disk", 1e9, 1e-4, 0.1)})
    path = tmp_path / "profile.json"
    assert MachineProfile.load(path) is None
    profile.save(path)
    assert MachineProfile.load(path) == profile
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    later = MachineProfile({"n": PREFILL}, {"disk": Device("disk", 2e9)})
    assert set(profile.merge(later).prefill) == {"m", "n"}
    assert profile.merge(later).devices["disk"].throughput == 2e9
    with pytest.raises(StoreError, match="cannot write"):
        profile.save(tmp_path / "nowhere" / "profile.json")


@pytest.mark.parametrize("text", ['{"prefill": {"m": {"x": 1}}, "devices": {}}', "[" * 100_000], ids=["other", "deep"])
def test_damaged_profile_is_an_error_of_ours_and_costs_no_request(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kv" / "profile.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises((StoreError, ConfigError)):
        MachineProfile.load(path)
    with caplog.at_level(logging.WARNING), engine_of(store=tmp_path / "kv") as engine:
        engine.warm(CHUNKS)
        assert engine.fuse(PROMPT).report.recompute_ratio == 0.15
    assert "profile" in caplog.text


# Measuring ----------------------------------------------------------------------------------


def test_the_fit_finds_what_made_the_times() -> None:
    made = PrefillProfile(0.02, 1e-3, 4e-7)
    found = fit_prefill({length: made.seconds(length) for length in (128, 512, 1024, 4096)})
    for length in (64, 700, 8000):
        assert found.seconds(length) == pytest.approx(made.seconds(length), rel=1e-6)
    linear = fit_prefill({100: 0.1, 200: 0.2, 400: 0.3999, 800: 0.79})
    assert min(linear.constant, linear.linear, linear.quadratic) >= 0
    assert linear.seconds(1600) == pytest.approx(1.6, rel=0.05)
    assert fit_prefill({500: 2.0}).seconds(1000) == pytest.approx(4.0)
    with pytest.raises(ConfigError, match="lengths"):
        fit_prefill({})


def test_profile_of_this_machine_steers_the_next_engine(tmp_path: Path) -> None:
    model = tiny.model()
    with engine_of(model, store=tmp_path) as engine:
        found, path = profile_machine(engine.store, engine.turns.segments.model, lengths=(16, 32, 64), size=2 * 10**6)
        assert engine.fuse(PROMPT).report.expected is None, "an engine keeps what it was made with"
        assert path == tmp_path / "profile.json"
        measured = found.prefill[engine.fingerprint]
        # A tiny model's passes can take the same time whatever they compute: a slope of zero is a fair fit.
        assert measured.blended_seconds(64, 0.1, 0.5) >= measured.blended_seconds(64, 0.1, 0.15) > 0
    with engine_of(model, store=tmp_path) as engine:
        report = engine.fuse(PROMPT).report
        assert report.expected is not None
        assert report.expected.prefill > 0
    with engine_of(model) as engine, pytest.raises(ConfigError, match="store"):
        profile_machine(engine.store, engine.turns.segments.model)


# Requests -----------------------------------------------------------------------------------


def profiled(folder: Path, fingerprint: str, prefill: float, disk: float) -> None:
    """A profile by which a prefill takes so many seconds and the disk gives so many bytes a second."""
    profile = MachineProfile({fingerprint: PrefillProfile(prefill, 0, 0)}, {"disk": Device("disk", disk)})
    profile.save(folder / "profile.json")


def test_the_controller_chooses_the_ratio_and_the_report_says_what_it_expected(tmp_path: Path) -> None:
    model = tiny.model()
    with engine_of(model, store=tmp_path) as engine:
        engine.warm(CHUNKS)
        unsteered = engine.fuse(PROMPT)
        size = sum(entry.bytes for entry in engine.store.entries())  # type: ignore[attr-defined]
        name = engine.fingerprint
    assert (unsteered.report.recompute_ratio, unsteered.report.expected) == (0.15, None)
    profiled(tmp_path, name, prefill=1.0, disk=size / 0.8)
    with engine_of(model, store=tmp_path) as engine:
        fused = engine.fuse(PROMPT)
        report = fused.report
        assert 0.2 <= report.recompute_ratio <= 0.5
        assert report.hits == 3
        assert report.expected is not None
        assert 0.4 < report.expected.read < 0.8, "the prefix is not counted"
        assert report.expected.fuse <= report.expected.read + 1e-9
        assert report.recomputed_tokens[-1] == int(report.recompute_ratio * report.chunk_tokens + 1e-9)
        assert report.seconds.read > 0
        assert torch.equal(engine.fuse(PROMPT).logits, fused.logits), "requests alike get one ratio"
        scoring = engine.with_config(selection="query").fuse(PROMPT).report
        assert 0.15 <= scoring.recompute_ratio < report.recompute_ratio, "half of the layers are read before the first"
        fixed = engine.with_config(recompute_ratio=0.1).fuse(PROMPT).report
        assert fixed.recompute_ratio == 0.1
        assert fixed.expected is not None
        assert engine.with_config(selection="none").fuse(PROMPT).report.recomputed_tokens == (0,) * 4


def test_chunk_slower_to_load_than_to_compute_is_computed(tmp_path: Path) -> None:
    model = tiny.model()
    with engine_of(model, store=tmp_path, write_back="off") as engine:
        cold = engine.fuse(PROMPT)
        engine.warm(CHUNKS)
        profiled(tmp_path, engine.fingerprint, prefill=1e-6, disk=1.0)
    with engine_of(model, store=tmp_path, write_back="off") as engine:
        fused = engine.fuse(PROMPT)
        assert (fused.report.hits, fused.report.misses, fused.report.lost) == (0, 3, 0)
        assert torch.equal(fused.logits, cold.logits)
        fixed = engine.with_config(recompute_ratio=0.2).fuse(PROMPT)
        assert fixed.report.hits == 3, "a ratio the user fixed is the user's choice"
        assert isinstance(engine.store, DiskStore)
        assert engine.store.stats().records == 3
