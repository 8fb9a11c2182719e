"""RoPE types whose frequencies change with the length of the prompt, on both sides of the threshold."""

from __future__ import annotations

from typing import Any

import pytest

from cacheblend_rag import BlendEngine, Prompt
from cacheblend_rag.models.adapter import ModelAdapter
from tests import tiny
from tests.pairwise import others_slow
from tests.parity.test_families import assert_equals_plain, engine_of, plain_tokens
from tests.tolerance import assert_logits_close

LONG_FAMILIES = [family for family in tiny.ARCHITECTURES if "longrope" in tiny.rope_types(family)]
DYNAMIC_FAMILIES = ["llama", "gemma3_text", "cohere2", "glm4", "gpt_oss"]
CHUNK = tiny.text(60, 3)
SHORT = Prompt("Read this:", [CHUNK], "What fell?")
LONG = Prompt("Read this:", [CHUNK], tiny.text(260, 4))


def prompt_of(engine: BlendEngine, tokens: int) -> Prompt:
    """A prompt of exactly this many tokens, with two chunks."""
    chunks = [tiny.text(40, 1), tiny.text(50, 2)]
    start = len(engine.tokenize(Prompt("Read:", chunks, "a")).input_ids)
    prompt = Prompt("Read:", chunks, "a" + " the" * (tokens - start))
    assert len(engine.tokenize(prompt).input_ids) == tokens
    return prompt


def test_regimes_of_a_model() -> None:
    longrope = ModelAdapter(tiny.model("llama", "longrope"))
    assert [longrope.regime(tokens) for tokens in (1, 256, 257, 5000)] == [0, 0, 256, 256]
    assert longrope.regimes == (0, 256)
    dynamic = ModelAdapter(tiny.model("llama", "dynamic", max_position_embeddings=256))
    assert [dynamic.regime(tokens) for tokens in (1, 256, 257)] == [0, 0, None]
    assert [dynamic.reusable(tokens) for tokens in (256, 257)] == [True, False]
    for rope in tiny.ROPE_TYPES:
        adapter = ModelAdapter(tiny.model("llama", rope, max_position_embeddings=256))
        assert (adapter.regime(5000), adapter.regimes) == (0, (0,))


@pytest.mark.parametrize("family", others_slow(LONG_FAMILIES, ("phi3",)))
def test_longrope_on_both_sides(family: str) -> None:
    model = tiny.model(family, "longrope")
    with engine_of(model, recompute_ratio=0.0, condition="prefix") as engine:
        engine.warm(SHORT.chunks, prefix=SHORT.prefix)
        short = engine.fuse(SHORT)
        assert (len(short.input_ids) < tiny.LONG, short.report.hits) == (True, 1)
        assert_equals_plain(short, model)

        missed = engine.fuse(LONG)  # warmed in the other regime
        assert (len(missed.input_ids) > tiny.LONG, missed.report.hits) == (True, 0)
        assert_equals_plain(missed, model)
        hit = engine.fuse(LONG)
        assert (hit.report.hits, hit.report.prefix_hit, hit.report.plain) == (1, True, False)
        assert_equals_plain(hit, model)

        assert engine.fuse(SHORT).report.hits == 1
        assert_equals_plain(engine.fuse(SHORT), model)


@pytest.mark.parametrize("family", others_slow(LONG_FAMILIES, ("phi3",)))
def test_longrope_generates_as_the_plain_model_beyond_and_across(family: str) -> None:
    model = tiny.model(family, "longrope")
    with engine_of(model, recompute_ratio=1.0) as engine:
        for prompt in (LONG, prompt_of(engine, tiny.LONG - 5)):
            fused = engine.fuse(prompt)
            answer = engine.generate(prompt, max_new_tokens=10)
            assert answer.report.hits == len(prompt.chunks)
            assert answer.token_ids == plain_tokens(model, fused.input_ids, 10)


@pytest.mark.parametrize("verify", ["always", "idle"])
@pytest.mark.parametrize("kind", ["llama longrope", "phi3 longrope", "phi3 default", "llama dynamic"])
def test_verified_answer_across_the_threshold_is_the_plain_models(kind: str, verify: str) -> None:
    family, rope = kind.split()
    window = {"max_position_embeddings": tiny.LONG} if rope == "dynamic" else {}
    room = 8 if window else 60
    with engine_of(tiny.model(family, rope, **window), recompute_ratio=1.0, verify=verify) as engine:
        prompt = prompt_of(engine, tiny.LONG - room)
        engine.warm(prompt.chunks)
        answer = engine.generate(prompt, max_new_tokens=room + 10)
        found = engine.verifications.result(answer.verification.id, wait=60) or answer.verification
        expected = plain_tokens(tiny.model(family, rope, **window), answer.report.input_ids, room + 10)
        text = tiny.tokenizer().decode(expected)
        assert (found.done, answer.text[: found.position] + found.after) == (True, text)
        assert answer.report.reused_tokens


def test_longrope_has_the_same_kv_in_slices_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_rag.models.adapter._SLICE", 100)
    model, ids = tiny.model("llama", "longrope"), [(7 * number) % 390 + 3 for number in range(300)]
    sliced = ModelAdapter(model).prefill(ids, lambda seconds: None)
    assert_logits_close(sliced.logits, tiny.full_prefill(model, ids).logits[0, -1], model, len(ids))


@pytest.mark.parametrize("tokens", [tiny.LONG - 1, tiny.LONG, tiny.LONG + 1])
def test_longrope_at_the_threshold(tokens: int) -> None:
    model = tiny.model("phi3", "longrope")
    with engine_of(model, recompute_ratio=1.0) as engine:
        prompt = prompt_of(engine, tokens)
        engine.warm(prompt.chunks)
        assert engine.fuse(prompt).report.hits == (2 if tokens <= tiny.LONG else 0)
        fused = engine.fuse(prompt)
        assert fused.report.hits == 2
        assert_equals_plain(fused, model)


@pytest.mark.parametrize("family", others_slow(DYNAMIC_FAMILIES, ("llama", "gemma3_text")))
def test_dynamic_ntk_on_both_sides(family: str) -> None:
    def fresh() -> Any:
        return tiny.model(family, "dynamic", max_position_embeddings=tiny.LONG)

    with engine_of(fresh(), recompute_ratio=1.0) as engine:
        for tokens in (tiny.LONG - 5, tiny.LONG + 40, tiny.LONG):
            prompt = prompt_of(engine, tokens)
            engine.warm(prompt.chunks)
            fused = engine.fuse(prompt)
            beyond = tokens > tiny.LONG
            assert (fused.report.plain, fused.report.hits) == ((True, 0) if beyond else (False, 2))
            # Compared with a model that has seen no other prompt: what it saw must not matter.
            assert_equals_plain(fused, fresh())
            assert engine.generate(prompt, max_new_tokens=8).token_ids == plain_tokens(fresh(), fused.input_ids, 8)
