"""Calibration: within its tolerance, different for different models, and read by ``recompute_ratio="auto"``."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document

from cacheblend_rag import BlendConfig, Prompt
from cacheblend_rag.app.cli import main
from cacheblend_rag.calibration.calibrate import Calibration, Finding, Search, TrialSet, TriedRule, report, settings_of
from cacheblend_rag.calibration.profiler import keep_profile
from cacheblend_rag.calibration.prompts import chunk_prompts, question_prompts
from cacheblend_rag.calibration.quality import Methods, ReferenceAnswer
from cacheblend_rag.calibration.statistics import interval
from cacheblend_rag.engine.decode import DecodeOptions
from cacheblend_rag.engine.ratio_policy import RatioPolicy
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.selection import SelectBoundary, SelectHKVD, SelectionRule, SelectNone
from cacheblend_rag.loading import BlendSettings, ChunkKV, Device, LoadingController, MachineProfile, PrefillProfile
from docs.benchmarks.evaluation.runner import variants
from tests import tiny
from tests.probes import engine_of

TOLERANCE = 0.05
COUNT = 6  # prompts that models are calibrated on


def prompts(first: int, count: int) -> list[Prompt]:
    return [
        Prompt("Read this:", [tiny.text(20, 10 * n + k) for k in range(4)], f"What fell {tiny.text(3, n)}?")
        for n in range(first, first + count)
    ]


MODELS: dict[str, dict[str, Any]] = {
    # The wider the weights, the sharper attention, and the more it matters what a chunk cannot see.
    "calm": {"seed": 1, "initializer_range": 0.05, "num_hidden_layers": 6},
    "wild": {"seed": 0, "initializer_range": 1.0, "num_hidden_layers": 2},
}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: tiny.model(**made) for name, made in MODELS.items()}


def test_different_models_get_different_settings(models: dict[str, Any]) -> None:
    found = {}
    for name, model in models.items():
        with engine_of(model) as engine:
            calibration = Calibration(tolerance=TOLERANCE, answer_tokens=4)
            found[name] = calibration.run(engine, prompts(0, COUNT), progress=False)
    (calm, finding), (wild, _) = found["calm"], found["wild"]
    assert calm.tolerates
    assert calm.least_ratio == 0, "full reuse is within the tolerance"
    assert calm.divergence <= calm.highest <= calm.tolerance == TOLERANCE
    assert finding.checked is not None
    assert len(finding.checked.divergences) == COUNT * 2 // 3
    assert not wild.tolerates
    assert wild.selection == "all"
    words = {name: report(*one) for name, one in found.items()}
    assert "nothing recomputed" in words["calm"]
    assert "does not tolerate blending" in words["wild"]
    assert all("full KV reuse, chunks computed behind" in one for one in words.values())


class Said(TrialSet):
    """Prompts of which each rule's share says how far its answers are."""

    def __init__(self, *divergences: float, least: float = 0.0, reuse: float = 1.0) -> None:
        self.divergences, self.least, self.reuse = divergences, least, reuse
        self.tried: list[SelectionRule] = []

    def try_rule(self, rule: SelectionRule, tolerance: float = 1.0, below: float = 1.0) -> TriedRule:
        self.tried.append(rule)
        share = rule.recompute_ratio if isinstance(rule, SelectBoundary) else 0.0
        far = (self.reuse,) * 6 if isinstance(rule, SelectNone) or share < self.least else self.divergences
        return TriedRule(rule, far, 0.1 + share, True)


def searched(trials: Said, checks: Said) -> Finding:
    return Search({"sink": trials}, lambda condition: checks, 6, TOLERANCE).run()


def test_mean_within_the_tolerance_is_not_enough() -> None:
    few_bad, even = (0.01, 0.01, 0.01, 0.01, 0.01, 0.2), (0.03,) * 6
    assert sum(few_bad) / 6 < TOLERANCE < interval(few_bad).high

    class Checks(Said):
        def try_rule(self, rule: SelectionRule, tolerance: float = 1.0, below: float = 1.0) -> TriedRule:
            good = isinstance(rule, SelectBoundary) and rule.recompute_ratio >= 0.15
            return replace(super().try_rule(rule), divergences=even if good else few_bad)

    found = searched(Said(*(0.02,) * 6, least=0.05), Checks())
    assert found.chosen is not None
    assert found.chosen.rule == SelectBoundary(0.15), "with less, one prompt of the six held back is far beyond"
    assert found.checked is not None
    assert found.checked.divergences == even


def test_search_tries_the_next_share_where_a_rule_fails() -> None:
    """The search halves, and so passes over most shares; those that only other prompts tell apart must not be lost."""
    finding = searched(Said(*(0.0,) * 6, least=0.05), Said(*(0.0,) * 6, least=0.2))
    assert finding.chosen is not None
    assert finding.chosen.rule == SelectBoundary(0.2)
    tried = [(kind, one.rule) for kind, one in finding.candidates]
    assert tried == [("chunk starts", SelectBoundary(share)) for share in (0.05, 0.075, 0.1, 0.15, 0.2)]


def test_rules_are_tried_where_reuse_is_nearer() -> None:
    for nearer in ("context", "sink"):
        sets = {name: Said(*(0.0,) * 6, reuse=0.1 if name == nearer else 0.3) for name in ("context", "sink")}
        checks = {name: Said(*(0.0,) * 6) for name in sets}
        finding = Search(sets, checks.__getitem__, 6, TOLERANCE).run()
        settings = settings_of(finding, TOLERANCE)
        assert finding.condition == settings.condition == nearer
        assert [name for name, of in sets.items() if len(of.tried) > 1] == [nearer]
        said = report(settings, finding)
        assert "behind contexts: " in said
        assert "behind the start of a text alone: " in said


def test_nothing_that_saves_work_is_no_blending() -> None:
    finding = searched(Said(*(1.0,) * 6), Said())
    assert (finding.chosen, finding.checked, finding.candidates) == (None, None, [])
    assert settings_of(finding, TOLERANCE).selection == "all"


def test_rules_are_tried_on_the_hardest_prompts_and_on_some_that_stand_for_the_rest(models: dict[str, Any]) -> None:
    options = DecodeOptions(max_new_tokens=4, temperature=0.0)
    with engine_of(models["wild"]) as engine:

        def answer(prompt: Prompt) -> ReferenceAnswer:
            methods = Methods(engine, prompt)
            return ReferenceAnswer(methods, methods.full_recompute(), options)

        trials = TrialSet(engine, prompts(0, 4), answer, 2)
        assert [count for _, count in trials._trials] == [1, 3]
        reused = trials.try_rule(SelectNone())
        assert len(reused.divergences) == 4
        assert reused.divergence.mean > 0
        assert trials.try_rule(SelectHKVD((1,), 1.0)).divergence.mean == pytest.approx(0, abs=1e-4)
        dear = trials.try_rule(SelectBoundary(0.5), below=0.2)
        assert not dear.whole, "with too much work it is left after one prompt"


# Prompts ------------------------------------------------------------------------------------


def test_prompts_of_ones_own_chunks() -> None:
    chunks = [
        Document(page_content=f"In town {n} the mill of Ebba Lund{n} burned.", metadata={"source": f"{n // 2}.md"})
        for n in range(8)
    ]
    made = chunk_prompts(chunks, 20, 4, seed=3)
    assert made == chunk_prompts(chunks, 20, 4, seed=3) != chunk_prompts(chunks, 20, 4, seed=4)
    assert len(made) == 20
    for prompt in made:
        assert len(set(prompt.chunks)) == 4
        assert "Lund" in prompt.suffix
    neighbours = [f"Lund{n}" for n in range(8)]
    first = made[0]
    here = [n for n, name in enumerate(neighbours) if any(f"{name} " in chunk for chunk in first.chunks)]
    assert any(n ^ 1 in here for n in here), "chunks of one file stand together"
    asked = question_prompts(chunks, ["Which mill of Ebba Lund5 burned?", " "], 2)
    assert len(asked) == 1
    assert "Lund5" in asked[0].chunks[0]
    with pytest.raises(ConfigError, match="docs"):
        chunk_prompts(chunks[:1], 4)
    with pytest.raises(ConfigError, match="questions"):
        question_prompts(chunks, [""])


# The profile, and who reads it ---------------------------------------------------------------

SETTINGS = BlendSettings(
    "gradual",
    recompute_ratio=0.05,
    selection_options={"check_layers": (1,), "recompute_ratios": (0.5, 0.4, 0.05)},
    tolerance=0.01,
    divergence=0.004,
    highest=0.008,
    work=0.1,
    prompts=24,
)


def test_settings_are_kept_in_the_profile_and_old_profiles_still_read(tmp_path: Path) -> None:
    old = {"prefill": {"m": {"constant": 0, "linear": 1, "quadratic": 0}}, "devices": {}}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(old), encoding="utf-8")
    before = MachineProfile.load(path)
    assert before is not None
    assert before.blends == {}
    joined = before.merge(MachineProfile(blends={"m": SETTINGS}))
    joined.save(path)
    assert MachineProfile.load(path) == joined
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["prefill"]["m"].items() >= old["prefill"]["m"].items()
    content["blends"]["m"]["of_a_later_version"] = 1
    path.write_text(json.dumps(content), encoding="utf-8")
    assert MachineProfile.load(path) == joined


def policy_of(settings: BlendSettings, prefill: bool = False, **options: Any) -> RatioPolicy:
    measured = {"m": PrefillProfile(1.0, 0.0, 0.0)} if prefill else {}
    profile = MachineProfile(measured, {"disk": Device("disk", 1e6)}, {"m": settings})
    return RatioPolicy(BlendConfig(**options), 24, "m", LoadingController(profile))


def test_auto_is_what_was_calibrated_unless_a_rule_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, ratio, _ = policy_of(SETTINGS).choose([ChunkKV(100, 1000)], 120, 20, "disk")
    assert rule == SelectHKVD((1, 2, 3), 0.5, (0.5, 0.4, 0.05))
    assert ratio == 0.05
    for options in ({"recompute_ratio": 0.3}, {"selection": "hkvd"}, {"selection_options": {"score_layers": (1,)}}):
        assert policy_of(SETTINGS, **options).settings is None
    monkeypatch.setenv("CACHEBLEND_RAG_SELECTION", "boundary")
    assert policy_of(SETTINGS).settings is None


def test_slow_loading_raises_what_was_calibrated_and_never_lowers_it() -> None:
    fast = policy_of(SETTINGS, prefill=True)
    assert fast.choose([ChunkKV(100, 1000)], 120, 20, "disk")[1] == 0.05
    slow = policy_of(SETTINGS, prefill=True)
    rule, ratio, plan = slow.choose([ChunkKV(900, 500_000)], 1000, 100, "disk")
    assert plan is not None
    assert 0.3 < ratio <= 0.5
    assert rule.recompute_ratios == (0.5, max(0.4, ratio), ratio)  # type: ignore[attr-defined]
    # Work of the first layers beyond the last share counts as done at any ratio: of 24 layers
    # 1 + 0.5 + 0.4 + 21 * 0.05 are computed.
    head = policy_of(SETTINGS).head_share()
    assert head + 0.05 * (1 - head) == pytest.approx((1 + 0.5 + 0.4 + 21 * 0.05) / 24)
    flat = replace(SETTINGS, selection="hkvd", selection_options={"check_layers": (2,)})
    assert policy_of(flat).head_share() == pytest.approx(2 / 24)


def test_model_that_does_not_tolerate_blending_is_prefilled_in_full(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = policy_of(BlendSettings("all", recompute_ratio=1.0, tolerance=0.01))
    assert "does not tolerate blending within 0.01 nats" in caplog.text
    assert not found.rule.reads_store
    assert not found.free


def test_the_next_engine_uses_what_was_kept(models: dict[str, Any], tmp_path: Path) -> None:
    (prompt,) = prompts(7, 1)
    settings = replace(SETTINGS, selection_options={"recompute_ratios": (0.5, 0.1)})
    with engine_of(models["calm"], store=str(tmp_path), selection="query") as engine:
        engine.warm(prompt.chunks, progress=False)
        _, path = keep_profile(engine.store, MachineProfile(blends={engine.fingerprint: settings}))
        assert path == tmp_path / "profile.json"
        assert engine.fuse(prompt).report.recompute_ratio == 0.15
    with engine_of(models["calm"], store=str(tmp_path), selection="query") as engine:
        report = engine.fuse(prompt).report
        reused = report.chunk_tokens
        assert report.recompute_ratio == 0.1
        assert report.recomputed_tokens == (reused, reused // 2, *[reused // 10] * 4)
        (found,) = [one for one in variants(["calibrated"], (), 6, settings) if one.method == "calibrated"]
        assert found.rule == SelectHKVD((1, 2), 0.5, (0.5, 0.1))
    with engine_of(models["calm"]) as engine, pytest.raises(ConfigError, match="store"):
        keep_profile(engine.store, MachineProfile(blends={engine.fingerprint: settings}))


def test_the_command(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    for number in range(8):
        (docs / f"{number}.md").write_text(f"Town {number}\n\n{tiny.text(30, number)}", encoding="utf-8")
    given = ["calibrate", "--model", str(model_folder), "--docs", str(docs), "--data-dir", str(tmp_path / "data")]
    small = ["--prompts", "6", "--chunks", "3", "--answer-tokens", "3", "--device", "cpu"]
    assert main([*given, *small, "--tolerance", "5"]) == 0
    told = capsys.readouterr()
    assert "chosen: chunks behind" in told.out
    assert "Loading weights" not in told.err
    path = tmp_path / "data" / "kv" / "profile.json"
    assert f"kept in {path}" in told.out
    (kept,) = json.loads(path.read_text(encoding="utf-8"))["blends"].values()
    assert kept["tolerance"] == 5
    assert main([*given, "--data", "questions.jsonl"]) == 2
    assert "without --docs" in capsys.readouterr().err
