"""The last prompts in memory: what begins as one of them goes on from it, and gets what full prefill gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cacheblend_rag import BlendEngine, Prompt
from cacheblend_rag.engine.grammar import Form, Grammar
from cacheblend_rag.engine.prompt_cache import PromptCache, PromptKind
from cacheblend_rag.prompt.tokenizer import common_length
from tests import tiny
from tests.pairwise import others_slow
from tests.probes import CHUNKS, PROMPT, engine_of
from tests.tolerance import assert_layers_close, assert_logits_close

TEXT = tiny.text(90, 7)
LIMIT = "50MB"


def remembering(model: Any = None, **options: Any) -> BlendEngine:
    """An engine that keeps its last prompts."""
    return engine_of(model, **{"prompt_cache": LIMIT, "recompute_ratio": 0.2} | options)


def assert_is_full_prefill(found: Any, model: Any) -> None:
    plain = tiny.full_prefill(model, found.input_ids)
    assert_logits_close(found.logits, plain.logits[0, -1], model, len(found.input_ids))
    assert_layers_close(found.cache.layers, tiny.cache_of(plain).layers, model)


@pytest.mark.parametrize("family", others_slow(tiny.DIFFERENT, ("deepseek_v3", "gemma3", "gpt_oss", "llama")))
def test_plain_prompt_goes_on_from_the_last_one(family: str) -> None:
    model = tiny.model(family)
    with remembering(model) as engine:
        first = engine.generate(TEXT, max_new_tokens=1)
        assert first.report.resumed_tokens == 0
        following = engine.fuse(TEXT + " And what then?")
        report = following.report
        assert report.resumed_tokens == first.report.prompt_tokens
        assert report.plain
        assert report.reused_tokens == report.cached_tokens == report.resumed_tokens
        assert report.computed_tokens == (report.prompt_tokens - report.resumed_tokens,) * 4
        assert 0 < report.work < 0.5
        assert_is_full_prefill(following, model)


def test_answer_is_gone_on_from_too() -> None:
    model = tiny.model()
    with remembering(model) as engine:
        words = Grammar(engine.tokenizer, [Form({"enum": ["an answer of some words"]})])
        first = engine.generate(TEXT, max_new_tokens=20, grammar=words)
        following = engine.fuse(TEXT + first.text + " And what then?")
        common = common_length(following.input_ids, [*first.report.input_ids, *first.token_ids[:-1]])
        assert following.report.resumed_tokens == common > first.report.prompt_tokens + 4
        assert_is_full_prefill(following, model)
        first = engine.generate(TEXT, max_new_tokens=6)
        asked_again = engine.generate(TEXT, max_new_tokens=6)
        assert asked_again.report.computed_tokens == (1,) * 4
        assert asked_again.token_ids == first.token_ids


@pytest.mark.parametrize("chunks_at", ["behind", "within"])
def test_kv_of_a_full_prefill_serves_blended_prompts(chunks_at: str) -> None:
    model, prefix = tiny.model(), TEXT if chunks_at == "behind" else "Read this:"
    prompt = Prompt(prefix, CHUNKS, "What fell in the end?")
    text = prompt.written("\n\n").text
    opening = text[: text.index(CHUNKS[1]) + 20] if chunks_at == "within" else TEXT
    with remembering(model, recompute_ratio=1.0) as engine:
        engine.warm(CHUNKS)
        engine.generate(opening, max_new_tokens=1)
        fused = engine.fuse(prompt)
        split = engine.tokenize(prompt)
        border = split.chunks[1].start if chunks_at == "within" else len(engine.tokenize(opening).input_ids)
        assert border - 3 <= fused.report.resumed_tokens <= border
        assert (fused.report.plain, fused.report.hits) == (False, 3)
        assert fused.report.chunk_tiers[0] == "memory"
        assert fused.report.cached_tokens == fused.report.resumed_tokens
        assert not set(range(fused.report.resumed_tokens)) & set(fused.recomputed[0].tolist())
        assert_is_full_prefill(fused, model)


def test_blended_prompt_is_gone_on_from_under_its_own_rule_alone() -> None:
    with remembering() as engine:
        engine.warm(CHUNKS)
        first = engine.generate(PROMPT, max_new_tokens=6)
        again = engine.generate(PROMPT, max_new_tokens=6)
        assert again.report.computed_tokens == (1,) * 4
        assert again.token_ids == first.token_ids
        turn = Prompt(PROMPT.prefix, CHUNKS, PROMPT.suffix + first.text + " And then?")
        assert engine.fuse(turn).report.resumed_tokens >= first.report.prompt_tokens - 2
        for changes in ({"recompute_ratio": 0.5}, {"selection": "boundary"}, {"selection": "all"}, {"prompt_cache": 0}):
            other = engine.with_config(**changes).fuse(PROMPT).report
            tier = "" if changes == {"selection": "all"} else "memory"
            assert (other.resumed_tokens, other.chunk_tiers[0]) == (0, tier), changes
        other = engine.fuse(Prompt(PROMPT.prefix, CHUNKS, "Who was there?")).report
        assert (other.resumed_tokens, other.hits) == (0, 3), "another question gets a choice of its own"
        assert (other.cached_tokens, other.blended_tokens > 0) == (0, True)
        assert other.recomputed_tokens[-1] > 0
        exact = engine.with_config(min_tokens=10**6).fuse(PROMPT).report
        assert (exact.plain, exact.resumed_tokens) == (True, 0)


def test_window_that_forgets_is_gone_on_from_whole_and_never_cut() -> None:
    model = tiny.model("mistral", sliding_window=16)
    with remembering(model) as engine:
        engine.generate(TEXT, max_new_tokens=1)
        cut = engine.fuse(TEXT[: len(TEXT) // 2] + " And then?")
        whole = engine.fuse(TEXT + " And then?")
        blended = engine.fuse(Prompt(TEXT, CHUNKS, "And then?"))
        assert (cut.report.resumed_tokens, blended.report.resumed_tokens) == (0, 0)
        assert whole.report.resumed_tokens == len(engine.tokenize(TEXT).input_ids)
        for one in (cut, whole):
            assert_logits_close(
                one.logits, tiny.full_prefill(model, one.input_ids).logits[0, -1], model, len(one.input_ids)
            )


def test_kv_of_one_frequency_regime_serves_no_other() -> None:
    """Positions beyond a length change the frequencies of all."""
    length, model = tiny.LONG, tiny.model("phi3", "longrope")
    words, tokens = 1, 0
    with remembering(model) as engine:
        while tokens < length - 12:
            words += 1
            tokens = len(engine.tokenize(tiny.text(words)).input_ids)
        short, long = tiny.text(words - 4), tiny.text(words + 20)
        engine.generate(short, max_new_tokens=1)
        within, beyond = engine.fuse(tiny.text(words)), engine.fuse(long)
        assert within.report.resumed_tokens > 0
        assert beyond.report.resumed_tokens == 0
        for one in (within, beyond):
            assert_is_full_prefill(one, model)
        kept = len(engine.prompts)
        engine.generate(tiny.text(words), max_new_tokens=40, seed=1, do_sample=True, temperature=5.0)
        assert len(engine.prompts) == kept, "the answer went on into the next regime"


def test_tenants_share_no_prompt() -> None:
    with remembering() as engine:
        engine.generate(TEXT, max_new_tokens=2)
        other = engine.with_config(salt="another tenant")
        assert other.fuse(TEXT).report.resumed_tokens == 0
        other.generate(TEXT, max_new_tokens=2)
        other.forget([TEXT])
        assert other.fuse(TEXT).report.resumed_tokens == 0
        assert engine.fuse(TEXT).report.resumed_tokens > 0


def test_forgetting_a_chunk_drops_the_prompts_that_hold_it() -> None:
    with remembering() as engine:
        engine.generate(PROMPT, max_new_tokens=2)
        engine.generate(f"{TEXT} {CHUNKS[1]} What is this?", max_new_tokens=2)
        engine.generate(TEXT, max_new_tokens=2)
        engine.forget(["something else", CHUNKS[1]])
        (kept,) = engine.prompts._kept
        assert kept.token_ids[: kept.prompt_tokens] == engine.tokenize(TEXT).input_ids


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT.written("\n\n").text], ids=["chunks", "text"])
def test_answer_under_way_does_not_put_back_what_was_forgotten(prompt: Prompt | str) -> None:
    def forget(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        engine.forget([CHUNKS[0]])
        return scores

    with remembering() as engine:
        engine.generate(prompt, max_new_tokens=2, logits_processor=[forget])
        assert len(engine.prompts) == 0
        engine.generate(prompt, max_new_tokens=2)
        assert len(engine.prompts) == 1


def test_limit_drops_what_was_used_least_recently() -> None:
    texts = [tiny.text(60, seed) for seed in range(4)]
    with remembering() as engine:
        engine.generate(texts[0], max_new_tokens=2)
        size = engine.prompts.nbytes
        small = engine.with_config(prompt_cache=int(2.5 * size))
        small.generate(texts[1], max_new_tokens=2)
        small.fuse(texts[0])
        small.generate(texts[2], max_new_tokens=2)
        assert small.prompts.nbytes <= 2.5 * size
        assert [small.fuse(text).report.resumed_tokens > 0 for text in texts] == [True, False, True, False]
        tiny_one = engine.with_config(prompt_cache=size // 2)
        tiny_one.generate(texts[3], max_new_tokens=2)
        assert tiny_one.fuse(texts[3]).report.resumed_tokens == 0
        assert small.fuse(texts[2]).report.resumed_tokens > 0, "for one that is too large, no other is dropped"


def test_tenants_drop_none_of_the_prompts_that_others_are_compared_with() -> None:
    prompts, kinds = PromptCache(), [PromptKind(f"tenant {number}", "model", "rule") for number in range(40)]
    prompts.tenants = lambda: len(kinds)
    assert [prompts.repeated(kind, [1, 2, 3]) for kind in kinds * 2] == [0] * 40 + [3] * 40


def test_check_begins_with_exact_kv_and_leaves_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model(num_hidden_layers=4)
    opening = Prompt(TEXT, CHUNKS, "What fell in the end?")
    with remembering(model, recompute_ratio=0.0, selection="boundary") as engine:
        engine.warm(CHUNKS)
        engine.generate(TEXT, max_new_tokens=1)
        begun: list[int] = []
        prefill = engine.adapter.prefill

        def watched(ids: Any, between: Any, each_layer: Any, cache: Any) -> Any:
            begun.append(0 if cache is None else cache.get_seq_length())
            return prefill(ids, between, each_layer, cache)

        monkeypatch.setattr(engine.adapter, "prefill", watched)
        checked = engine.generate(opening, max_new_tokens=40, verify="always")
        assert checked.verification.status == "corrected"
        assert begun == [checked.report.resumed_tokens]
        assert begun[0] >= len(engine.tokenize(TEXT).input_ids) - 2
        kept = engine.prompts._kept[-1]
        assert kept.token_ids == (*checked.report.input_ids, *checked.token_ids[:-1])
        assert kept.exact_tokens == len(kept.token_ids)
        plain = tiny.full_prefill(model, list(kept.token_ids))
        assert_layers_close(kept.cache.layers, tiny.cache_of(plain).layers, model)
        again = engine.generate(opening, max_new_tokens=40, verify="always")
        assert again.token_ids == checked.token_ids
        reused = again.report.reused_tokens
        assert reused == again.report.resumed_tokens == again.report.prompt_tokens - 1
        said = f"exact KV of {reused} tokens of its beginning was reused, and the rest of the prompt was prefilled"
        assert (again.verification.status, again.verification.reason) == ("verified", said)
        assert again.report.computed_tokens == (1,) * 4
