"""Several chunks in one pass: the same KV as one by one, and nothing of what warming promises is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import Prompt
from cacheblend_rag.engine.chunks import in_batches
from cacheblend_rag.engine.segments import Segment
from cacheblend_rag.errors import StoreError
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.store import DiskStore, KVRecord, MemoryStore
from tests import tiny
from tests.pairwise import others_slow
from tests.parity.test_families import WINDOWS, kernels
from tests.probes import Hooked, engine_of, key_of
from tests.tolerance import assert_close, terms_of
from tests.waiting import until

# Lengths that share batches, and some that do not.
TEXTS = [tiny.text(words, seed) for seed, words in enumerate((40, 8, 41, 90, 39, 9, 38, 91))]
LENGTHS = (50, 3, 49, 1, 44)


def ids_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return [int(one) for one in torch.randint(3, 400, (length,), generator=generator)]


def assert_same_kv(ours: SegmentKV, theirs: SegmentKV, model: Any) -> None:
    assert ours.rotated == theirs.rotated
    for mine, other in zip(ours.keys + ours.values, theirs.keys + theirs.values, strict=True):
        assert mine.is_contiguous()
        assert_close(mine, other, terms_of(model, 100))


def check_together(adapter: ModelAdapter, lengths: Sequence[int] = LENGTHS, context: int = 2, regime: int = 0) -> None:
    """One pass over several segments gives each the KV it gets alone."""
    before, segments = ids_of(context), [ids_of(length) for length in lengths]
    together = adapter.segments_kv(before, segments, regime)
    for ids, kv in zip(segments, together, strict=True):
        assert kv.keys[0].shape == (adapter.kv_heads, len(ids), adapter.head_dim)
        assert_same_kv(kv, adapter.segments_kv(before, [ids], regime)[0], adapter.model)


# One pass -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", others_slow(tiny.ARCHITECTURES, ("deepseek_v3", "gpt_oss", "llama", "phi3")))
def test_segments_in_one_pass_are_as_alone(family: str) -> None:
    for rope in tiny.rope_types(family):
        check_together(ModelAdapter(tiny.model(family, rope)))
    check_together(ModelAdapter(tiny.model(family)), context=0)


@pytest.mark.parametrize(("family", "attention"), kernels(["ministral3", "gemma3", "gpt_oss"]))
def test_padding_changes_nothing_behind_windows(family: str, attention: str) -> None:
    model = tiny.model(family, **WINDOWS.get(family, {}))
    model.set_attn_implementation(attention)
    adapter = ModelAdapter(model)
    assert any(window is not None and window < max(LENGTHS) for window in adapter.windows)
    check_together(adapter, context=7)


def test_segments_of_a_regime_in_one_pass() -> None:
    adapter = ModelAdapter(tiny.model("phi3", "longrope"))
    check_together(adapter, regime=tiny.LONG)
    check_together(adapter, (tiny.LONG + 3, 20, tiny.LONG - 2))  # lengths on both sides of the threshold


# Which ones together ------------------------------------------------------------------------


def segment(tokens: int, number: int = 0, context: int = 1, regime: int = 0) -> Segment:
    return Segment("chunk", (1,) * context, (number,) * tokens, f"{number}", regime)


def test_batches_hold_everything_once_with_little_padding() -> None:
    lengths = torch.randint(1, 700, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    numbered = enumerate([*lengths, 5000])
    segments = [segment(tokens, number, context=1 + number % 2, regime=number % 3) for number, tokens in numbered]
    batches = list(in_batches(segments, 1024))
    assert sorted((one.key for batch in batches for one in batch), key=int) == [one.key for one in segments]
    for batch in batches:
        assert len({(one.context_ids, one.regime) for one in batch}) == 1
        rows = [len(one.context_ids) + len(one.token_ids) for one in batch]
        assert rows == sorted(rows, reverse=True)
        assert len(rows) * rows[0] <= 1024 or len(rows) == 1
        assert len(rows) * rows[0] <= 1.1 * sum(rows)
    assert len(batches) < 0.7 * len(segments)


# Warming ------------------------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch, before: Callable[[Any], None] = lambda segments: None) -> list[int]:
    """Notes the number of segments of every pass."""
    sizes: list[int] = []
    compute = ModelAdapter.segments_kv

    def noted(self: ModelAdapter, context: Any, segments: Any, *others: Any) -> Any:
        sizes.append(len(segments))
        before(segments)
        return compute(self, context, segments, *others)

    monkeypatch.setattr(ModelAdapter, "segments_kv", noted)
    return sizes


def test_warming_many_stores_what_warming_each_does(monkeypatch: pytest.MonkeyPatch) -> None:
    one, many = Hooked(), Hooked()
    prompt = Prompt("Read this:", TEXTS, "What fell?")
    with engine_of(store=one, condition="prefix") as alone, engine_of(store=many, condition="prefix") as together:
        for text in TEXTS:
            alone.warm([text], prefix=prompt.prefix)
        sizes = counted(monkeypatch)
        report = together.warm([*TEXTS, TEXTS[2], TEXTS[0]], prefix=prompt.prefix)
        assert (report.computed, report.present, report.skipped) == (len(TEXTS), 2, 0)
        assert report.tokens == sum(record.info.tokens for record in many.kept.values())
        assert sum(sizes) == len(TEXTS)
        assert len(sizes) < len(TEXTS)
        assert many.kept.keys() == one.kept.keys()
        for key, record in many.kept.items():
            assert record.info == one.kept[key].info
            assert_same_kv(record.kv, one.kept[key].kv, together.model)
        assert together.fuse(prompt).report.hits == len(TEXTS)
        sizes.clear()
        again = together.warm(TEXTS, prefix=prompt.prefix)
        assert (again.computed, again.present, again.tokens, again.bytes, sizes) == (0, len(TEXTS), 0, 0, [])


def test_warming_stores_first_chunks_as_far_as_there_is_room(tmp_path: Path) -> None:
    texts = [tiny.text(200 + 40 * (seed % 3), seed) for seed in range(8)]
    with engine_of() as sizer:
        limit = sizer.chunks.estimate_bytes(texts[:5])
    with engine_of(store=tmp_path, size_limit=limit, codec="raw") as engine:
        report = engine.warm(texts)
        assert 2 <= report.computed <= 5
        assert (report.present, report.skipped) == (0, len(texts) - report.computed)
        present = [engine.store.contains(key_of(engine, text)) for text in texts]
        assert present == [True] * report.computed + [False] * report.skipped
        assert engine.store.volume() <= limit


# Errors -------------------------------------------------------------------------------------


def test_chunk_that_cannot_be_stored_does_not_cost_its_batch() -> None:
    class Choosy(MemoryStore):
        refused: Sequence[str] = ()

        def put(self, key: str, record: KVRecord) -> None:
            if key in self.refused:
                raise StoreError(f"no room for {key}")
            super().put(key, record)

    texts, store = [tiny.text(40, seed) for seed in range(5)], Choosy()
    with engine_of(store=store) as engine:
        store.refused = [key_of(engine, texts[1]), key_of(engine, texts[3])]
        with pytest.raises(StoreError, match="no room for"):
            engine.warm(texts)
        assert [store.contains(key_of(engine, text)) for text in texts] == [True, False, True, False, True]
        with store.claim(store.refused[0]) as mine:
            assert mine, "claims are given up"


# Others meanwhile ---------------------------------------------------------------------------


@pytest.mark.parametrize("gives_up", [True, False])
def test_chunk_that_another_computes_is_left_to_it(gives_up: bool, tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    texts = [tiny.text(40, seed) for seed in range(4)]
    with engine_of(store=store) as engine:
        key, made = key_of(engine, texts[1]), Hooked()
        with engine_of(store=made) as twin:
            twin.warm(texts[1:2])
        held, release = threading.Event(), threading.Event()

        def compute() -> None:
            with store.claim(key) as mine:
                assert mine
                held.set()
                release.wait(60)
                if not gives_up:
                    store.put(key, made.kept[key])

        with ThreadPoolExecutor() as pool:
            computing = pool.submit(compute)
            held.wait(60)
            warming = pool.submit(engine.warm, texts)
            until(lambda: store.stats().records == 3)
            assert [store.contains(key_of(engine, text)) for text in texts] == [True, False, True, True]
            assert not warming.done()
            release.set()
            report = warming.result(60)
            computing.result(60)
        assert (report.computed, report.present) == ((4, 0) if gives_up else (3, 1))
        assert engine.fuse(Prompt("", texts, "Why?")).report.hits == 4
    store.close()
