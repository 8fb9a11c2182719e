"""Which records are found again, and by whom; which are computed and stored."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import Prompt
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.prompt import Span
from cacheblend_rag.store import DiskStore
from tests import tiny
from tests.probes import CHUNKS, PROMPT, Hooked, assert_same, engine_of, segments_of
from tests.tolerance import assert_layers_close, assert_logits_close

pytestmark = pytest.mark.usefixtures("even_small_records_are_prefetched")


# Hits ---------------------------------------------------------------------------------------


def test_warmed_in_any_order_all_hit_with_one_result() -> None:
    order = (2, 0, 1)
    with engine_of(recompute_ratio=0.2) as first, engine_of(recompute_ratio=0.2) as second:
        first.warm(CHUNKS)
        second.warm([CHUNKS[n] for n in order])
        for arrangement in (order, (0, 1, 2), (2, 2, 0)):
            prompt = Prompt("Read this:", [CHUNKS[n] for n in arrangement], "What fell?")
            one, two = first.fuse(prompt), second.fuse(prompt)
            assert one.report.hits == two.report.hits == len(prompt.chunks)
            assert one.report.misses == 0
            assert_same(one, two)


def test_the_same_input_gives_the_same_output() -> None:
    with engine_of(recompute_ratio=0.2, write_back="off") as engine:
        for chunks in ((), CHUNKS):
            engine.warm(chunks)
            first = engine.fuse(PROMPT)
            engine.fuse(Prompt("Other:", CHUNKS[:2], "Else?"))
            assert_same(engine.fuse(PROMPT), first)


def test_changed_prefix_keeps_the_hits_and_a_known_one_is_reused_exactly() -> None:
    model = tiny.model()
    with engine_of(model, recompute_ratio=0.2) as engine:
        first = engine.fuse(PROMPT)
        assert (first.report.hits, first.report.prefix_hit) == (0, False)
        for prefix in ("Today is Monday. Read this:", ""):
            other = engine.fuse(Prompt(prefix, CHUNKS, PROMPT.suffix))
            assert (other.report.hits, other.report.prefix_hit) == (3, False)
        again = engine.fuse(PROMPT)
        assert (again.report.hits, again.report.prefix_hit) == (3, True)
        tokens = again.report.prefix_tokens
        assert again.report.reused_tokens == again.report.chunk_tokens + tokens
        plain = tiny.cache_of(tiny.full_prefill(model, again.input_ids[:tokens]))
        reused = [LayerKV(one.keys[:, :, :tokens], one.values[:, :, :tokens]) for one in again.cache.layers]
        assert_layers_close(reused, plain.layers, model)
        for ours, theirs in zip(again.cache.layers, first.cache.layers, strict=True):
            assert torch.equal(ours.keys[:, :, :tokens], theirs.keys[:, :, :tokens])
        for rows in again.recomputed:
            assert not set(rows.tolist()) & set(range(tokens))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_chunk_right_behind_its_prefix_is_exact_without_recompute(family: str) -> None:
    model = tiny.model(family)
    one = Prompt("Read this with care:", CHUNKS[:1], "What fell?")
    with engine_of(model, condition="prefix", recompute_ratio=0.0) as engine:
        engine.warm(CHUNKS, prefix=one.prefix)
        fused = engine.fuse(one)
        assert fused.report.hits == 1
        assert fused.report.recomputed_tokens == (0,) * 4
        plain = tiny.full_prefill(model, fused.input_ids)
        assert_logits_close(fused.logits, plain.logits[0, -1], model, len(fused.input_ids))
        assert_layers_close(fused.cache.layers, tiny.cache_of(plain).layers, model)
        assert engine.fuse(Prompt("Another prefix:", CHUNKS[:1], "What fell?")).report.hits == 0
        assert engine.fuse(Prompt("", CHUNKS[:1], "What fell?")).report.hits == 0
        second = engine.fuse(Prompt(one.prefix, CHUNKS[1:], "What fell?"))
        assert second.report.hits == 2


# Computing and storing -------------------------------------------------------------------


def test_missing_chunks_and_the_suffix_are_always_computed() -> None:
    with engine_of(selection="none", write_back="off") as engine:
        engine.warm([CHUNKS[0], CHUNKS[2]])
        fused = engine.fuse(PROMPT)
        split = engine.tokenize(PROMPT)
    assert (fused.report.hits, fused.report.misses) == (2, 1)
    computed = [at for at in range(len(split.input_ids)) if not _within(at, split.chunks[0], split.chunks[2])]
    assert [rows.tolist() for rows in fused.recomputed] == [computed] * 4


def _within(at: int, *spans: Span) -> bool:
    return any(span.start <= at < span.stop for span in spans)


def test_texts_between_chunks_are_always_computed_and_never_stored() -> None:
    store = Hooked()
    prompt = Prompt("Read this: ", CHUNKS, " What fell?", ["\nContext: ", "\nMore: "])
    with engine_of(store=store, selection="none") as engine:
        engine.fuse(prompt)
        fused = engine.fuse(prompt)
        split = engine.tokenize(prompt)
        text = engine.tokenizer.decode(split.input_ids[split.chunks[0].stop : split.chunks[1].start])
    assert (fused.report.hits, fused.report.misses) == (3, 0)
    assert "Context:" in text
    expected = [at for at in range(len(split.input_ids)) if not _within(at, split.prefix, *split.chunks)]
    assert fused.recomputed[-1].tolist() == expected
    assert sorted(store.stored_ids()) == sorted([split.ids(split.prefix), *map(split.ids, split.chunks)])


def test_nothing_of_the_question_is_stored() -> None:
    store = Hooked()
    with engine_of(store=store) as engine:
        prompt = Prompt("Read # # this:", ["a # # b", "c # d"], "What # # fell # # ?")
        engine.generate(prompt, max_new_tokens=3)
        split = engine.tokenize(prompt)
        expected = [split.ids(span) for span in (split.prefix, *split.chunks)]
    assert sorted(store.stored_ids()) == sorted(expected)


def test_chunk_with_other_ids_in_a_prompt_is_stored_in_that_form_too() -> None:
    """A tokenizer that merges pieces across an edge that no usual prompt has."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<<" + CHUNKS[0][:12]])
    usual, merged = Prompt("", CHUNKS[:1], "Why?"), Prompt("<<", CHUNKS[:1], " Why?", [])
    with engine_of(tiny.model(vocab_size=500), tokenizer) as engine:
        assert engine.tokenize(usual).located[0].usual
        assert not engine.tokenize(merged).located[0].usual
        assert engine.tokenize(merged).input_ids == tuple(tokenizer.encode("<<" + CHUNKS[0] + " Why?"))
        engine.warm(CHUNKS[:1])
        assert engine.fuse(merged).report.misses == 1
        assert engine.fuse(merged).report.hits == 1
        assert engine.forget(CHUNKS[:1]) == 2
        assert engine.fuse(merged).report.misses == 1
        assert engine.fuse(usual).report.misses == 1


@pytest.mark.parametrize("prompt", ["What fell?", Prompt("Read this:", [], "What fell?")], ids=str)
def test_text_without_chunks_is_plain_and_leaves_no_trace(prompt: Any) -> None:
    store = Hooked()
    with engine_of(store=store) as engine:
        answer = engine.generate(prompt, max_new_tokens=2)
        fused = engine.fuse(prompt)
        expected = tiny.full_prefill(engine.model, fused.input_ids).logits[0, -1]
    assert answer.report.plain
    assert fused.deviation is None
    assert (answer.report.hits, answer.report.misses) == (0, 0)
    assert_logits_close(fused.logits, expected, engine.model, len(fused.input_ids))
    assert store.kept == {}


# Identity -----------------------------------------------------------------------------------


def hits_over(folder: Path, model: Any, **options: Any) -> tuple[int, bool]:
    with engine_of(model, store=folder, write_back="off", **options) as engine:
        report = engine.fuse(PROMPT).report
        return report.hits, report.prefix_hit


def test_fine_tune_of_a_single_weight_gets_no_hits(tmp_path: Path) -> None:
    with engine_of(tiny.model(vocab_size=4000), store=tmp_path) as engine:
        engine.fuse(PROMPT)
    tuned = tiny.model(vocab_size=4000)
    flat = tuned.model.layers[3].mlp.down_proj.weight.data.view(-1)
    before = flat[len(flat) // 2].item()
    flat[len(flat) // 2] += 1e-7
    assert flat[len(flat) // 2].item() != before
    assert hits_over(tmp_path, tuned) == (0, False)


def test_two_tenants_share_nothing_and_keep_their_own(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    with engine_of(store=store, salt="one") as one, engine_of(store=store, salt="two") as two:
        one.warm(CHUNKS)
        assert two.fuse(PROMPT).report.hits == 0  # and stores its own
        assert two.fuse(PROMPT).report.hits == 3
        assert one.forget(CHUNKS) == 3
        assert two.fuse(PROMPT).report.hits == 3
    store.close()


def test_record_put_under_a_foreign_key_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """A hash that happens to match is not enough: ids and model are compared."""
    store = Hooked()
    with engine_of(store=store, write_back="off") as engine:
        never = engine.fuse(PROMPT)
        engine.warm([CHUNKS[0], "something else"])
        keys = {record.info.token_ids: key for key, record in store.kept.items()}
        tokenizer = segments_of(engine)
        foreign = store.kept[keys[tokenizer.chunk("something else").ids]]
        store.put(keys[tokenizer.chunk(CHUNKS[0]).ids], foreign)
        with caplog.at_level(logging.WARNING):
            fused = engine.fuse(PROMPT)
    assert fused.report.hits == 0
    assert "another segment or model" in caplog.text
    assert_same(fused, never)
