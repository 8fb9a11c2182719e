"""Chunks computed behind contexts: the mean of plain passes, and the same key wherever they stand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendEngine, Prompt
from cacheblend_rag.models.adapter import ContextKV, ModelAdapter
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.prompt import PromptTokenizer
from cacheblend_rag.prompt.contexts import Contexts, finder, ids_digest
from tests import tiny
from tests.pairwise import others_slow
from tests.probes import engine_of
from tests.tolerance import assert_close, assert_logits_close, terms_of

TEXTS = [tiny.text(words, seed) for seed, words in enumerate((23, 31, 17, 28))]
PROMPT = Prompt("Read this:", TEXTS[:3], "What fell in the end?")
CONTEXTS = ((5, 6, 7, 8, 9, 10, 11), (30, 31, 32, 33))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.model(num_hidden_layers=4)


def engine_with(model: Any, **options: Any) -> BlendEngine:
    return engine_of(model, **{"condition": "context", "selection": "boundary"} | options)


def ids_of(length: int, seed: int = 0) -> list[int]:
    return [int(one) for one in torch.randint(40, 400, (length,), generator=torch.Generator().manual_seed(seed))]


def twin(adapter: ModelAdapter, contexts: Any, own: list[int], regime: int = 0) -> SegmentKV:
    """The mean of what one plain pass over context and segment gives, context by context."""
    found = [adapter.segments_kv(context, [own], regime)[0] for context in contexts]
    keys = tuple(torch.stack([kv.keys[at].float() for kv in found]).mean(dim=0) for at in range(adapter.num_layers))
    values = tuple(torch.stack([kv.values[at].float() for kv in found]).mean(dim=0) for at in range(adapter.num_layers))
    return SegmentKV(keys, values, rotated=False)


def assert_same_kv(ours: SegmentKV, theirs: SegmentKV, model: Any) -> None:
    for mine, other in zip(ours.keys + ours.values, theirs.keys + theirs.values, strict=True):
        assert_close(mine, other, terms_of(model, 100))


# The mean over contexts -----------------------------------------------------------------------


@pytest.mark.parametrize("family", others_slow(tiny.ARCHITECTURES, ("gpt_oss", "llama", "phi3")))
def test_kv_is_the_mean_of_plain_passes(family: str) -> None:
    for rope in tiny.rope_types(family):
        adapter = ModelAdapter(tiny.model(family, rope))
        segments = [ids_of(9, 1), ids_of(14, 2)]
        found = ContextKV(adapter, CONTEXTS).segments_kv(segments)
        for own, kv in zip(segments, found, strict=True):
            assert_same_kv(kv, twin(adapter, CONTEXTS, own), adapter.model)


def test_context_that_would_change_the_frequencies_is_left_out() -> None:
    adapter = ModelAdapter(tiny.model("phi3", "longrope"))
    edge = next(tokens for tokens in range(1, 5000) if adapter.regime(tokens) != adapter.regime(1))
    own = ids_of(edge - 3)
    found = ContextKV(adapter, CONTEXTS[:1]).segments_kv([own])[0]
    assert_same_kv(found, adapter.segments_kv((), [own])[0], adapter.model)


# Making contexts ----------------------------------------------------------------------------


def contexts(chunks: list[str], count: int = 2, tokens: int = 60) -> Contexts:
    return Contexts(PromptTokenizer(tiny.tokenizer(), "\n\n"), chunks, count, tokens)


def test_contexts_hold_chunks_whatever_their_order_and_each_in_one_only() -> None:
    tokenizer = PromptTokenizer(tiny.tokenizer(), "\n\n")
    made = contexts(TEXTS)
    assert [len(ids) for ids in made.ids] == [60, 60]
    for order in itertools.permutations(TEXTS):
        assert contexts(list(order)).ids == made.ids
    for text in TEXTS:
        within = [finder([tokenizer.chunk(text).ids])(ids) for ids in made.ids]
        assert sum(within) <= 1
        assert made.numbers_for(tokenizer.chunk(text).ids) == tuple(at for at, held in enumerate(within) if not held)


def test_every_chunk_in_a_context_can_be_found_there() -> None:
    """A chunk to be erased must be found wherever other chunks were computed behind it."""
    tokenizer = PromptTokenizer(tiny.tokenizer(), "\n\n")
    texts = [tiny.text(words, seed) for seed, words in enumerate((23, 31, 17, 28, 40, 35, 26, 33, 29, 38))]
    for tokens in range(60, 200, 20):
        for ids in contexts(texts, 2, tokens).ids:
            for text in texts:
                known = tokenizer.chunk(text).ids
                part = any(finder([known[at : at + 6]])(ids) for at in range(0, len(known) - 6, 6))
                assert not part or finder([known])(ids)


# In the engine --------------------------------------------------------------------------------


def test_ratio_one_is_a_full_prefill_behind_contexts_too(model: Any) -> None:
    with engine_with(model, recompute_ratio=1.0) as engine:
        engine.warm(PROMPT.chunks)
        fused = engine.fuse(PROMPT)
    assert fused.report.hits == 3
    plain = tiny.full_prefill(model, fused.input_ids)
    assert_logits_close(fused.logits, plain.logits[0, -1], model, len(fused.input_ids))


def test_chunk_at_the_start_of_a_prompt_is_not_taken_for_exact(model: Any) -> None:
    prompt = Prompt("", [TEXTS[0]], "And?")
    with engine_with(model, selection="none") as engine:
        engine.warm([TEXTS[0]])
        reused = engine.fuse(prompt)
        assert reused.report.reused_tokens
        whole = engine.with_config(recompute_ratio=1.0, selection="boundary").fuse(prompt)
    plain = tiny.full_prefill(model, whole.input_ids).logits[0, -1]
    assert_logits_close(whole.logits, plain, model, len(whole.input_ids))
    assert not torch.allclose(reused.logits, plain, atol=1e-3), "it was computed behind something else"


def test_missed_chunk_is_computed_behind_chunks_of_its_prompt(model: Any) -> None:
    with engine_with(model, condition="context") as engine:
        assert engine.fuse(PROMPT).report.misses == 3
        stored = {info.token_ids: info for _, info in engine.store.infos("") if info.kind == "chunk"}
        assert len(stored) == 3
        others = [finder([ids]) for ids in stored]
        for ids, info in stored.items():
            held = [begins(info.behind) for begins in others]
            assert not finder([ids])(info.behind) or all(held)
        again = engine.fuse(PROMPT)
        assert again.report.hits == 3


def test_report_says_why_a_chunk_was_missed(model: Any) -> None:
    with engine_with(model, write_back="off") as engine:
        engine.warm(TEXTS[:1])
        assert engine.fuse(PROMPT).report.missed == ("", "not stored", "not stored")
        assert engine.with_config(condition="sink").fuse(PROMPT).report.missed == (
            "stored otherwise",
            *["not stored"] * 2,
        )
        engine.forget(TEXTS)
        assert engine.fuse(PROMPT).report.missed == ("not stored",) * 3


def test_forgetting_a_chunk_leaves_those_alone_that_begin_alike(model: Any) -> None:
    head = tiny.text(30, 99)
    texts = [f"{head} {tiny.text(40, seed)}" for seed in range(6)]
    for forget in ("forget", "forget_for_all"):
        with engine_with(model, min_tokens=0) as engine:
            for half in (texts[:3], texts[3:]):
                engine.warm(half)
                engine.generate(Prompt("Read:", half, "And?"), max_new_tokens=1, verify="always")
            before = {key for key, _ in engine.store.infos("")}
            assert getattr(engine.chunks, forget)([f"{head} {tiny.text(40, 7)}"]) == 0
            assert {key for key, _ in engine.store.infos("")} == before
            getattr(engine.chunks, forget)([texts[0]])
            gone = ids_digest(PromptTokenizer(engine.tokenizer, "\n\n").chunk(texts[0]).ids)
            assert not any(gone in info.before for _, info in engine.store.infos(""))
            assert engine.fuse(Prompt("Read:", [texts[0], *texts[3:]], "And?")).report.misses == 1


def test_forgetting_a_chunk_forgets_what_was_computed_behind_it(model: Any) -> None:
    with engine_with(model) as engine:
        engine.warm(TEXTS)
        tokenizer = PromptTokenizer(engine.tokenizer, "\n\n")
        gone = finder([tokenizer.chunk(TEXTS[1]).ids])
        behind = [key for key, info in engine.store.infos("") if gone(info.behind)]
        assert behind, "otherwise nothing is shown here"
        assert engine.forget([TEXTS[1]]) == 1 + len(behind)
        assert not any(gone(info.behind) or gone(info.token_ids) for _, info in engine.store.infos(""))
        left = engine.fuse(Prompt("Read this:", TEXTS, "And?")).report
        assert left.hits == len(TEXTS) - 1 - len(behind)
