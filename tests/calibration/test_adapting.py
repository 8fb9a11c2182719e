"""The script that adapts and calibrates on few prompts: prompts that judge are not learned from."""

from __future__ import annotations

from argparse import Namespace

from cacheblend_rag import Prompt
from cacheblend_rag.calibration.calibrate import _divide
from docs.benchmarks.scripts import adapting
from tests import tiny
from tests.probes import engine_of

PROMPTS = [
    Prompt("Read this:", [tiny.text(9, 10 * n + k) for k in range(2)], f"What fell {tiny.text(2, n)}?")
    for n in range(9)
]


def test_prompts_are_held_back_as_calibrate_divides_them() -> None:
    searched, judged = PROMPTS[:6], PROMPTS[6:]
    share = len(judged) / 9
    assert _divide(adapting._mixed(searched, judged, share), share) == (searched, judged)


def test_seconds_memory_and_divergence_are_told_of_both() -> None:
    options = Namespace(steps=2, searched=6, answer_tokens=2)
    with engine_of(tiny.model(num_hidden_layers=2), condition="context", recompute_ratio=0.15) as engine:
        adapted = adapting._adapt(engine, options, PROMPTS[:6], PROMPTS[6:])
        calibrated = adapting._calibrate(engine, options, PROMPTS[:6], PROMPTS[6:])
    assert len(adapted["losses"]) == 2
    for found in (adapted["neighbours, the default"], adapted["learned, nothing recomputed"]):
        assert 0 <= found["low"] <= found["mean"] <= found["high"]
    for one in (adapted, calibrated):
        assert one["seconds"] > 0
        assert one["peak_gb"] > 0.1
    assert 0 < calibrated["work"] <= 1
    assert set(calibrated["searched, nothing recomputed"]) == {"context", "sink"}
