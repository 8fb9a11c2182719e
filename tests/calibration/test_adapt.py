"""A learned context: it begins as plain prose, training brings answers nearer, and engines compute chunks behind it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.app.cli import main
from cacheblend_rag.calibration.adapt import AdaptOptions, AdaptResult, ContextTraining, adapt, adapt_report
from cacheblend_rag.calibration.calibrate import CalibrationOptions, calibrate, keep_settings
from cacheblend_rag.calibration.prompts import Corpus
from cacheblend_rag.calibration.trials import FullAnswers, PreparedPrompt, TrialSet
from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.fusor.selection import SelectNone
from cacheblend_rag.fusor.teacher_forcing import prefill_layerwise
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.contexts import ContextKV, LearnedContext
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.prompt import PromptTokenizer
from cacheblend_rag.prompt.contexts import Contexts
from cacheblend_rag.store.learned import keep_context, kept_context
from tests import probes, tiny
from tests.pairwise import others_slow
from tests.tolerance import assert_close, assert_logits_close, terms_of

DEFAULTS = {"condition": "auto", "selection": "query"}
OPTIONS = AdaptOptions(steps=24, tokens=32, rate=0.02, answer_tokens=6, held_back=2)


def engine_of(model: Any, **options: Any) -> BlendEngine:
    """An engine to which what chunks are computed behind is left."""
    return probes.engine_of(model, **DEFAULTS | options)


def prompts(first: int, count: int) -> list[Prompt]:
    return [
        Prompt("Read this:", [tiny.text(20, 10 * n + k) for k in range(3)], f"What fell {tiny.text(3, n)}?")
        for n in range(first, first + count)
    ]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.model(num_hidden_layers=4, initializer_range=0.1)


@pytest.fixture(scope="module")
def adapted(model: Any) -> AdaptResult:
    with engine_of(model) as engine:
        return adapt(engine, prompts(0, 8), OPTIONS, progress=False)


PROMPT = prompts(90, 1)[0]


SEGMENTS = PromptTokenizer(tiny.tokenizer(), BlendConfig().separator)


def other_context(context: LearnedContext) -> LearnedContext:
    return LearnedContext(SegmentKV(tuple(2 * keys for keys in context.kv.keys), context.kv.values, rotated=False))


# Training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", others_slow(tiny.ARCHITECTURES, tiny.DIFFERENT))
def test_untrained_context_equals_the_prose_it_begins_with(family: str) -> None:
    for rope in tiny.rope_types(family):
        adapter = ModelAdapter(tiny.model(family, rope))
        context, (ids,) = (
            ContextTraining(adapter, SEGMENTS, OPTIONS, [2]).context(),
            Contexts(SEGMENTS, (), 1, OPTIONS.tokens).ids,
        )
        chunks = [list(range(40, 52)), list(range(60, 67))]
        ours = ContextKV(adapter, [context]).segments_kv(chunks, heads=[2, 0])
        theirs = ContextKV(adapter, [ids]).segments_kv(chunks, heads=[2, 0])
        for mine, other in zip(ours, theirs, strict=True):
            for found, wanted in zip(mine.keys + mine.values, other.keys + other.values, strict=True):
                assert_close(found, wanted, terms_of(adapter.model, 64))


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere2", "qwen3"])
def test_the_divergence_that_is_learned_from_is_that_of_full_reuse(family: str) -> None:
    """The pass through which gradients flow against the blended pass that users get."""
    # Of one chunk: what stands between several is taken from full prefill in training.
    prompt = Prompt("Read this:", [tiny.text(40, 1)], "What fell in the end?")
    adapter = ModelAdapter(tiny.model(family))
    training = ContextTraining(adapter, SEGMENTS, OPTIONS, [2])
    compute = Corpus(adapter, SEGMENTS, prompt.chunks, 0, training.context()).compute
    trials = TrialSet(
        adapter, SEGMENTS, [prompt], full=FullAnswers(adapter, OPTIONS.answer_tokens, [2]), compute=compute
    )
    divergence, question = training.divergence(prompt)
    expected = trials.try_rule(SelectNone()).divergence.mean
    assert expected > 1e-5
    assert float(divergence[question:].mean().detach()) == pytest.approx(expected, rel=1e-3)


def test_chunk_starts_may_be_right_already(model: Any) -> None:
    training = ContextTraining(ModelAdapter(model), SEGMENTS, OPTIONS, [2])
    found = [float(training.divergence(PROMPT, share)[0].mean().detach()) for share in (0.0, 0.5, 1.0)]
    assert found[0] > found[1] > found[2]
    assert found[2] < 1e-6, "with all tokens of all chunks right, it is full prefill"


def test_training_brings_answers_nearer_and_leaves_the_model_as_it_is(model: Any) -> None:
    frozen = model.model.embed_tokens.weight.requires_grad_(False)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    try:
        with engine_of(model) as engine:
            made = adapt(engine, prompts(0, 6), replace(OPTIONS, steps=32), progress=False)
    finally:
        wanting = {name for name, weight in model.named_parameters() if not weight.requires_grad}
        frozen.requires_grad_()
    assert sum(made.losses[-4:]) < 0.8 * sum(made.losses[:4])
    assert wanting == {"model.embed_tokens.weight"}
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())
    assert all(weight.grad is None for weight in model.parameters())


def test_adapted_context_is_judged_on_held_back_prompts(adapted: AdaptResult) -> None:
    for seen in (adapted.neighbours, adapted.learned):
        assert len(seen.reuse.divergences) == len(seen.blended.divergences) == OPTIONS.held_back
    said = adapt_report(adapted)
    assert f"{adapted.learned.blended.divergence.mean:.4f}" in said
    assert f"{adapted.neighbours.reuse.divergence.mean:.4f}" in said
    nearer = adapted.learned.blended.divergence.mean < adapted.neighbours.blended.divergence.mean
    assert adapted.nearer == nearer


@pytest.mark.parametrize(
    ("count", "changes", "name"),
    [(2, {}, "prompts"), (8, {"steps": 0}, "steps"), (8, {"rate": 0.0}, "rate"), (8, {"tokens": 1.5}, "tokens")],
)
def test_adapt_names_options_it_cannot_learn_from(model: Any, count: int, changes: dict[str, Any], name: str) -> None:
    with engine_of(model) as engine, pytest.raises(ConfigError, match=f"{name}="):
        adapt(engine, prompts(0, count), replace(OPTIONS, **changes), progress=False)


# Engines over it -------------------------------------------------------------------------------


def test_engine_computes_chunks_behind_the_learned_context(model: Any, adapted: AdaptResult, tmp_path: Path) -> None:
    prompt = prompts(50, 1)[0]
    with engine_of(model, store=tmp_path, selection="none") as engine:
        assert (engine.condition, engine.learned) == ("context", None)
        keep_context(engine.store, engine.fingerprint, adapted.context)
        neighbours = engine.warm(prompt.chunks).computed
    with engine_of(model, store=tmp_path, selection="none", codec="raw") as engine:
        assert engine.condition == "learned"
        assert engine.learned is not None
        assert engine.learned.digest == adapted.context.digest
        assert engine.warm(prompt.chunks).computed == neighbours == len(prompt.chunks), "not those behind neighbours"
        fused = engine.fuse(prompt)
        assert fused.report.hits == len(prompt.chunks)
        beside = Corpus(engine.adapter, SEGMENTS, prompt.chunks, 2, adapted.context)
        twin = PreparedPrompt(engine.adapter, SEGMENTS, prompt, beside.compute)
        assert_logits_close(fused.logits, twin.fuse(SelectNone()).fusion.logits, model, len(fused.input_ids))
    with engine_of(model, store=tmp_path, selection="none", condition="context") as engine:
        assert engine.warm(prompt.chunks).present == len(prompt.chunks)


def test_recomputing_everything_is_full_prefill(model: Any, adapted: AdaptResult) -> None:
    for prompt in (prompts(60, 1)[0], Prompt("", prompts(61, 1)[0].chunks, "What fell?")):
        with engine_of(model, selection="boundary", recompute_ratio=1.0) as engine:
            engine = engine.with_learned(adapted.context)
            engine.warm(prompt.chunks)
            fused = engine.fuse(prompt)
            assert fused.report.hits == len(prompt.chunks)
            full = prefill_layerwise(engine.adapter, fused.input_ids)
            assert_logits_close(fused.logits, full.logits, model, len(fused.input_ids))


def test_chunk_that_opens_a_prompt_is_not_taken_for_exact(model: Any, adapted: AdaptResult) -> None:
    prompt = Prompt("", [tiny.text(20, 3)], "What fell?")
    with engine_of(model, selection="none") as engine:
        engine = engine.with_learned(adapted.context)
        engine.warm(prompt.chunks)
        fused = engine.fuse(prompt)
        full = prefill_layerwise(engine.adapter, fused.input_ids)
        assert fused.report.hits == 1
        assert not torch.allclose(fused.logits, full.logits, atol=1e-3), "it is KV of another text before it"


def test_another_context_is_another_record(model: Any, adapted: AdaptResult) -> None:
    chunks = prompts(70, 1)[0].chunks
    with engine_of(model) as engine:
        engine = engine.with_learned(adapted.context)
        assert engine.warm(chunks).computed == len(chunks)
        engine = engine.with_learned(other_context(adapted.context))
        assert engine.warm(chunks).computed == len(chunks)
        engine = engine.with_learned(adapted.context)
        assert engine.warm(chunks).present == len(chunks)


def test_forgetting_a_chunk_erases_what_was_computed_behind_it_before(model: Any, adapted: AdaptResult) -> None:
    chunks = [tiny.text(40, seed) for seed in range(4)]
    with engine_of(model, contexts=2) as engine:
        engine.warm(chunks)
        behind = len(engine.chunks.records_of(chunks[:1]))
        assert behind > 2, "its own, and those of others that were computed behind it"
        engine = engine.with_learned(adapted.context)
        alone = engine.with_config(contexts=0)
        assert alone.warm(chunks).computed == len(chunks)
        assert alone.forget(chunks[:1]) == behind, "its own record here, and what depends on it there"
        assert alone.warm(chunks).computed == 1, "behind a learned context alone no chunk depends on another"


def test_without_neighbours_it_is_computed_behind_the_context_alone(model: Any, adapted: AdaptResult) -> None:
    with pytest.raises(ConfigError, match="contexts=0"):
        engine_of(model, contexts=0)
    with engine_of(model, selection="none") as engine:
        engine = engine.with_learned(adapted.context)
        alone = engine.with_config(contexts=0)
        alone.warm(PROMPT.chunks)
        fused = alone.fuse(PROMPT)
        assert fused.report.hits == len(PROMPT.chunks)
        twin = PreparedPrompt(
            engine.adapter,
            SEGMENTS,
            PROMPT,
            Corpus(engine.adapter, SEGMENTS, PROMPT.chunks, 0, adapted.context).compute,
        )
        assert_logits_close(fused.logits, twin.fuse(SelectNone()).fusion.logits, model, len(fused.input_ids))


def test_learned_without_a_context_is_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"condition='learned'.*cacheblend-rag adapt"):
        engine_of(model, store=tmp_path, condition="learned")
    with engine_of(model) as engine, pytest.raises(ConfigError, match="condition='learned'"):
        engine.with_config(condition="learned")


# Keeping it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="])
def test_learned_context_is_kept_unchanged_and_encrypted_like_records(
    model: Any, adapted: AdaptResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    if key:
        monkeypatch.setenv("CACHEBLEND_RAG_ENCRYPTION_KEY", key)
    with engine_of(model, store=tmp_path) as engine:
        path = keep_context(engine.store, engine.fingerprint, adapted.context)
        found = kept_context(engine.store.traits.folder, engine.fingerprint, engine.adapter)
    assert found is not None
    assert found.digest == adapted.context.digest
    assert path.stat().st_mode & 0o777 == 0o600
    plain = adapted.context.kv.values[0].contiguous().view(torch.uint8).numpy().tobytes()
    assert (plain[:256] in path.read_bytes()) == (key is None)


@pytest.mark.parametrize("damage", ["cut", "altered", "another model"])
def test_damaged_context_is_logged_and_neighbours_stand_in(
    model: Any, adapted: AdaptResult, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    with engine_of(model, store=tmp_path) as engine:
        path = keep_context(engine.store, engine.fingerprint, adapted.context)
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "altered":
        content[-100] ^= 1
        path.write_bytes(content)
    else:
        model = tiny.model(num_hidden_layers=3)
        with engine_of(model) as engine:
            path.rename(path.with_name(f"{engine.fingerprint}.kv"))
    with caplog.at_level(logging.WARNING), engine_of(model, store=tmp_path) as engine:
        assert engine.condition == "context"
        with pytest.raises(StoreError, match="learned context"):
            kept_context(engine.store.traits.folder, engine.fingerprint, engine.adapter)
    assert "learned context" in caplog.text


# Calibration -----------------------------------------------------------------------------------


def test_calibration_tries_it_and_what_it_finds_holds_for_this_one_alone(
    model: Any, adapted: AdaptResult, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(model, store=tmp_path) as engine:
        keep_context(engine.store, engine.fingerprint, adapted.context)
    with engine_of(model, store=tmp_path) as engine:
        settings, finding = calibrate(
            engine, prompts(0, 12), CalibrationOptions(tolerance=5.0, answer_tokens=4), progress=False
        )
        assert set(finding.reuse) == {"context", "sink", "learned"}
        assert (settings.learned == adapted.context.digest) == (settings.condition == "learned")
        settings = replace(settings, condition="learned", learned=adapted.context.digest, recompute_ratio=0.07)
        keep_settings(engine, settings)
    with engine_of(model, store=tmp_path) as engine:
        assert engine.condition == "learned"
        assert engine.fuse(PROMPT).report.recompute_ratio == 0.07
        named = engine.with_config(condition="context")
        assert named.fuse(PROMPT).report.recompute_ratio == 0.15, "the share was found for another condition"
        keep_context(engine.store, engine.fingerprint, other_context(adapted.context))
    with caplog.at_level(logging.WARNING), engine_of(model, store=tmp_path) as engine:
        assert engine.condition == "learned"
        assert engine.fuse(PROMPT).report.recompute_ratio == 0.15
    assert "calibrated with another learned context" in caplog.text


# The command -----------------------------------------------------------------------------------


def test_the_command_adapts_and_engines_use_it(
    adapted: AdaptResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, docs = tmp_path / "model", tmp_path / "docs"
    tiny.model(num_hidden_layers=4, initializer_range=0.1).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    docs.mkdir()
    for seed in range(6):
        (docs / f"{seed}.txt").write_text("\n\n".join(tiny.text(60, 10 * seed + part) for part in range(4)))
    arguments = ["--model", str(folder), "--docs", str(docs), "--data-dir", str(tmp_path / "data"), "--steps", "6"]
    assert main(["adapt", *arguments]) == 0
    said, told = capsys.readouterr()
    assert "adapting on 22 prompts: 6 are learned from in 6 steps, 16 held back\nadapting: the first pass took" in told
    assert "in all, for 102 passes\n" in told
    assert "on 16 prompts that were held back" in said
    with BlendEngine.from_pretrained(folder, store=tmp_path / "data" / "kv") as engine:
        assert (engine.condition == "learned") == ("kept in" in said)
        assert ("nothing was kept" in said) == (engine.condition == "context")
        keep_context(engine.store, engine.fingerprint, adapted.context)
    assert main(["cache", "clear", "--data-dir", str(tmp_path / "data")]) == 0
    said = capsys.readouterr().out
    assert "learned contexts stay" in said
    assert str(tmp_path / "data" / "kv" / "contexts") in said
