"""Variants of chunks: what verified prompts leave behind, which of them a later prompt takes, and how they go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from cacheblend_rag import BlendEngine, Prompt
from cacheblend_rag.engine.segments import Kind
from cacheblend_rag.engine.variants import Variants
from cacheblend_rag.errors import StoreError
from cacheblend_rag.report import FusedKV
from cacheblend_rag.store import DiskStore, KVStore, MemoryStore
from cacheblend_rag.store.base import RecordInfo
from tests import tiny
from tests.probes import CountingStore, engine_of, record_files
from tests.tolerance import assert_close, assert_logits_close

TEXTS = [tiny.text(20 + 3 * number, number) for number in range(6)]


def prompt(*numbers: int, prefix: str = "Read this:", question: str = "What fell in the end?") -> Prompt:
    return Prompt(prefix, [TEXTS[number] for number in numbers], question)


def engine_with(*asked: Sequence[int], model: Any = None, store: Any = None, **options: Any) -> BlendEngine:
    """An engine whose chunks are stored, and that has verified some prompts, by the numbers of their chunks."""
    engine = engine_of(model, store=store, **{"selection": "none", "verify": "always", **options})
    engine.warm(TEXTS)
    engine.generate(prompt(0), max_new_tokens=1, verify="off")  # from now on the prefix is known
    for numbers in asked:
        engine.generate(prompt(*numbers), max_new_tokens=2)
    engine.flush()
    return engine


def kept(store: KVStore) -> dict[str, RecordInfo]:
    return dict(store.infos(Kind.VARIANT))


def usually(engine: BlendEngine, asked: Prompt) -> FusedKV:
    """The prompt as it is fused where there are no variants."""
    with mock.patch.object(Variants, "instead_of", lambda self, usual, *given: tuple(usual)):
        return engine.fuse(asked)


def used(engine: BlendEngine, *numbers: int, **more: Any) -> tuple[int, ...]:
    """The chunks of a prompt that are read from variants."""
    return engine.fuse(prompt(*numbers, **more)).report.variants


def assert_exact(engine: BlendEngine, found: torch.Tensor, asked: Prompt) -> None:
    """Logits are those of full prefill."""
    assert_logits_close(found, exact(engine, asked), engine.model, len(engine.tokenize(asked).input_ids))


def exact(engine: BlendEngine, asked: Prompt) -> torch.Tensor:
    return engine.adapter.prefill(engine.tokenize(asked).input_ids).logits


# What is kept, and what is taken ------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "write_back"), [("always", "inline"), ("idle", "background")])
def test_verified_prompt_leaves_its_chunks_behind_what_stood_before_them(mode: str, write_back: str) -> None:
    with engine_with(write_back=write_back, verify=mode) as engine:
        engine.flush()
        assert kept(engine.store) == {}
        asked = prompt(2, 0, 1)
        ids = engine.tokenize(asked).input_ids
        report = engine.generate(asked, max_new_tokens=5).report
        assert report.variants == ()
        engine.flush()
        infos = list(kept(engine.store).values())
        assert len(infos) == 3
        for info in infos:
            before = len(info.context_ids)
            assert info.context_ids + info.token_ids == ids[: before + info.tokens]
            assert (info.kind, info.rotated, info.contexts) == ("variant", False, 0)
            key = next(key for key, one in kept(engine.store).items() if one == info)
            record = engine.store.open(key)
            assert record is not None
            twin = engine.adapter.segments_kv(info.context_ids, [info.token_ids])[0]
            for layer, pair in enumerate(zip(twin.keys, twin.values, strict=True)):
                for ours, theirs in zip(record.read_layer(layer), pair, strict=True):
                    assert_close(ours, theirs, 1000)
        assert used(engine, 2, 0, 1) == (0, 1, 2)


def test_nothing_is_kept_of_an_answer_that_was_not_verified() -> None:
    with engine_with() as engine:
        for mode in ("off", "held"):
            engine.generate(prompt(0, 1), max_new_tokens=2, verify=mode)
        for options in ({"write_back": "off"}, {"selection": "all"}, {"min_tokens": 10**4}):
            engine.with_config(**options).generate(prompt(0, 1), max_new_tokens=2)
        assert kept(engine.store) == {}


def test_nothing_is_kept_or_used_behind_a_prefix_of_one_conversation() -> None:
    """What was said in it must not come into another answer, nor be stored because it was said once."""
    with engine_with() as engine:
        engine.generate(prompt(0, 1, prefix="Anna asked for her PIN."), max_new_tokens=2)
        engine.generate(Prompt("", prompt(0, 1).chunks, "What fell?", preamble="a b"), max_new_tokens=2)
        assert kept(engine.store) == {}, "its prefix was never there before"
        engine.generate(prompt(0, 1), max_new_tokens=2)
        assert used(engine, 0, 1) == (0, 1)
        assert used(engine, 0, 1, prefix="Anna asked for her PIN.") == ()


def test_nothing_is_kept_behind_a_message_between_two_chunks() -> None:
    texts = TEXTS[:3]
    turn = "\n\nAnna said that her secret number is one two three four five six seven.\n\n"
    asked = Prompt("Read this:\n\n", texts, "\n\nWhat fell?", between=("\n\n", turn))
    with engine_with() as engine:
        engine.generate(asked, max_new_tokens=2, verify="off")  # its prefix is known from now on
        engine.generate(asked, max_new_tokens=2)
        assert [len(info.before) - 1 for info in kept(engine.store).values()] in ([0, 1], [1, 0])


def test_variant_must_fit() -> None:
    with engine_with((1, 2, 3)) as engine:
        for asked, taken in (
            ((1, 2, 3), (0, 1, 2)),  # as it was
            ((2, 1, 3), (2,)),  # the same before the last one, in another order
            ((2, 3), (1,)),  # half of what stood before it
            ((5, 4, 3), ()),
            ((4, 5, 2, 3), ()),
            ((3, 2, 1), ()),
        ):
            assert used(engine, *asked) == taken, asked


def test_variant_in_the_same_order_wins_and_is_exact() -> None:
    with engine_with((1, 0, 2, 3), (0, 1, 2, 3)) as engine:
        fused = engine.fuse(prompt(0, 1, 2, 3))
        assert fused.report.variants == (0, 1, 2, 3)
        assert_exact(engine, fused.logits, prompt(0, 1, 2, 3))
        assert fused.report.recomputed_tokens == (0,) * engine.adapter.num_layers


@pytest.mark.parametrize(("family", "selection"), [("llama", "query"), ("gpt_oss", "hkvd")])
def test_ratio_one_is_full_prefill(family: str, selection: str) -> None:
    with engine_with((0, 1, 2), (2, 1, 3), model=tiny.model(family)) as engine:
        whole = engine.with_config(selection=selection, recompute_ratio=1.0, verify="off")
        for numbers in ((0, 1, 2), (1, 2, 3), (2, 1, 0, 3), (4, 2, 1, 3)):
            fused = whole.fuse(prompt(*numbers))
            assert_exact(engine, fused.logits, prompt(*numbers))
        if not any(window for window in engine.adapter.windows):
            assert used(engine, 0, 1, 2) == (0, 1, 2)


# What it costs ------------------------------------------------------------------------------------


def test_variants_are_found_again_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_with((0, 1, 2), (3, 2), store=tmp_path):
        pass
    store, asked = DiskStore(tmp_path), list[str]()
    infos = store.infos
    monkeypatch.setattr(store, "infos", lambda beginning: asked.append(beginning) or infos(beginning))
    with closing(store), engine_of(store=store, selection="none") as engine:
        assert used(engine, 0, 1, 2) == (0, 1, 2)
        assert len(asked) == 4, "whether there are any, and those of each chunk"
        assert used(engine, 3, 2) == (0, 1)
        assert used(engine, 0, 1, 2) == (0, 1, 2)
        assert len(asked) == 5


# Variants that are not there any more --------------------------------------------------------------


def test_variant_that_is_damaged_or_gone_is_a_miss_and_the_usual_record_is_read(tmp_path: Path) -> None:
    with engine_with(store=tmp_path) as engine:
        before = set(record_files(tmp_path))
        engine.generate(prompt(0, 1, 2), max_new_tokens=1)
        expected = usually(engine, prompt(0, 1, 2))
        cut, altered, gone = sorted(set(record_files(tmp_path)) - before)
        cut.write_bytes(cut.read_bytes()[:-4096])
        content = bytearray(altered.read_bytes())
        content[-4096] ^= 1  # the first byte of the last layer
        altered.write_bytes(content)
        gone.unlink()
        found = engine.fuse(prompt(0, 1, 2))
        assert (found.report.hits, found.report.variants) == (3, ())
        assert torch.equal(found.logits, expected.logits)
        assert kept(engine.store) == {}


# Erasing ------------------------------------------------------------------------------------------


def test_forgetting_a_chunk_erases_its_variants_and_those_behind_it() -> None:
    with engine_with((0, 1, 2), (3, 4), (4, 1)) as engine:
        assert len(kept(engine.store)) == 7
        engine.forget([TEXTS[1]])
        left = kept(engine.store).values()
        tokenizer = engine._parts.pipeline.segments.tokenizer
        gone = tokenizer.chunk(TEXTS[1]).ids
        assert len(left) == 4
        for info in left:
            ids = info.context_ids + info.token_ids
            assert not any(ids[at : at + len(gone)] == gone for at in range(len(ids)))
        assert used(engine, 3, 4) == (0, 1)


def test_forgetting_leaves_another_tenants_variants_alone() -> None:
    with engine_with((0, 1, 2)) as engine:
        other = engine.with_config(salt="another tenant")
        assert used(other, 0, 1, 2) == (), "tenants share nothing"
        for _ in range(2):
            other.generate(prompt(0, 1, 2), max_new_tokens=1)
        assert len(kept(engine.store)) == 6
        engine.forget(TEXTS)
        assert len(kept(engine.store)) == 3
        assert used(other, 0, 1, 2) == (0, 1, 2)
        assert used(engine, 0, 1, 2) == ()


@pytest.mark.parametrize(("write_back", "verify"), [("inline", "always"), ("background", "off")])
def test_answer_under_way_stores_nothing_of_what_is_forgotten(write_back: str, verify: str) -> None:
    def forget(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        engine.forget(TEXTS[:1])
        return scores

    with engine_with(verify="off", write_back=write_back) as engine:
        engine.forget(TEXTS[:2])
        before = {key for key, _ in engine.store.infos("")}
        engine.generate(prompt(2, 0, 1), max_new_tokens=2, verify=verify, logits_processor=[forget])
        engine.flush()
        gone = engine._parts.pipeline.segments.tokenizer.chunk(TEXTS[0]).ids
        stored = {key: info.context_ids + info.token_ids for key, info in engine.store.infos("")}
        for ids in stored.values():
            assert not any(ids[at : at + len(gone)] == gone for at in range(len(ids)))
        assert stored.keys() > before, "the other chunk that was missing is"


@pytest.mark.parametrize("when", ["stored", "under way"])
def test_prefix_that_holds_what_is_forgotten_goes_too(when: str) -> None:
    def forget(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        engine.forget(TEXTS[:1])
        return scores

    with engine_of(salt="a") as engine:
        asked, other = prompt(1, prefix=f"Earlier: {TEXTS[0]} And now:"), engine.with_config(salt="b")
        other.generate(asked, max_new_tokens=1)
        engine.generate(asked, max_new_tokens=1, logits_processor=[forget] if when == "under way" else [])
        if when == "stored":
            engine.forget(TEXTS[:1])
        assert (engine.fuse(asked).report.prefix_hit, other.fuse(asked).report.prefix_hit) == (False, True)


# Other ways of keeping KV --------------------------------------------------------------------------


def test_variants_lie_in_any_codec_and_tier_and_behind_contexts(tmp_path: Path) -> None:
    options: dict[str, Any] = {"codec": "int8", "memory_limit": "1GB", "condition": "context"}
    with engine_with((0, 1, 2), store=tmp_path, **options) as engine:
        target, usual = exact(engine, prompt(0, 1, 2)), usually(engine, prompt(0, 1, 2))
        fused = engine.fuse(prompt(0, 1, 2))
        assert fused.report.variants == (0, 1, 2)
        assert (fused.logits - target).norm() < (usual.logits - target).norm()


def test_layers_that_forget_their_first_rows_leave_no_variants() -> None:
    model = tiny.model("gemma3_text", layer_types=tiny.LAYER_TYPES, sliding_window=24)
    with engine_with((0, 1, 2), model=model) as engine:
        assert kept(engine.store) == {}


def test_store_that_cannot_be_looked_through_has_no_variants() -> None:
    class Broken(CountingStore):
        def infos(self, beginning: str) -> Iterator[tuple[str, RecordInfo]]:
            raise StoreError("away")

    with engine_of(store=Broken(MemoryStore()), selection="none") as engine:
        assert engine.fuse(prompt(0, 1)).report.variants == ()
