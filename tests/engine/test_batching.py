"""Prompts of a batch: in an order that keeps shared chunks together, what several need read once and kept no longer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendEngine, Prompt
from cacheblend_rag.loading.shared import SharedKV
from cacheblend_rag.report import Generation, Seconds
from cacheblend_rag.store import DiskStore, KVStore
from tests import tiny
from tests.contract.faults import record_of
from tests.probes import CountingStore, engine_of, key_of, record_files

TEXTS = [tiny.text(12, seed) for seed in range(5)]


# A batch over an engine -----------------------------------------------------------------------


def prompt_of(*chunks: int, prefix: str = "Use this:") -> Prompt:
    return Prompt(prefix, [TEXTS[one] for one in chunks], "What fell?")


@contextmanager
def warm_engine(store: KVStore, **options: Any) -> Iterator[tuple[BlendEngine, CountingStore]]:
    """An engine over a store with all texts and the usual prefix."""
    counting = CountingStore(store)
    with engine_of(store=counting, recompute_ratio=0.5, **options) as engine:
        engine.warm(TEXTS, progress=False)
        engine.generate(prompt_of(0), max_new_tokens=1)
        yield engine, counting
    counting.close()


def timeless(answer: Generation) -> Any:
    """An answer and its report, but for times."""
    return answer.token_ids, dataclasses.replace(answer.report, seconds=Seconds())


PROMPTS = [prompt_of(0, 1), prompt_of(2, 3), prompt_of(1, 0), prompt_of(1, 4)]


def test_record_of_several_prompts_is_read_once(tmp_path: Path) -> None:
    with warm_engine(DiskStore(tmp_path), max_concurrent=3) as (engine, store):
        alone = [engine.generate(prompt, max_new_tokens=3) for prompt in PROMPTS]
        store.forget()
        together = engine.generate_batch(PROMPTS, max_new_tokens=3)
        reads = Counter(call[1] for call in store.calls if call[0] == "read_into")
        assert set(reads.values()) == {engine.adapter.num_layers}
        assert len(reads) == len(TEXTS) + 1, "the prefix, too"
        calls = Counter(call[0] for call in store.calls)
        assert calls == {"open_all": 4, "read_into": reads.total(), "close": 12}
        assert (store.most_held, store.most_open) == (0, 3)
    assert list(map(timeless, together)) == list(map(timeless, alone))


def test_jobs_in_the_background_store_what_a_batch_missed(tmp_path: Path) -> None:
    store = CountingStore(DiskStore(tmp_path))
    with engine_of(store=store, write_back="background") as engine:
        engine.generate_batch(PROMPTS, max_new_tokens=2)
        engine.flush()
        again = engine.generate_batch(PROMPTS, max_new_tokens=2)
        assert [(one.report.hits, one.report.prefix_hit) for one in again] == [(2, True)] * 4
    store.close()


def test_damaged_record_is_a_miss_for_every_prompt_of_a_batch(tmp_path: Path) -> None:
    with warm_engine(DiskStore(tmp_path), write_back="off") as (engine, store):
        key = key_of(engine, TEXTS[1])
        assert store.delete(key)
        expected = engine.generate_batch(PROMPTS, max_new_tokens=2)
        before = set(record_files(tmp_path))
        engine.warm(TEXTS[1:2], progress=False)
        (path,) = set(record_files(tmp_path)) - before
        data = bytearray(path.read_bytes())
        data[-4096] ^= 1  # in the last layer, which takes a page; those before it are good
        path.write_bytes(data)
        found = engine.generate_batch(PROMPTS, max_new_tokens=2)
        assert not store.contains(key)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.report.hits for one in found] == [1, 2, 1, 1]
    assert sum(one.report.lost for one in found) == 1, "the others did not find it"


# What is kept ---------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CountingStore]:
    """A folder with a record for each of three texts, by the text."""
    with contextlib.closing(CountingStore(DiskStore(tmp_path))) as made:
        for number, text in enumerate("abc"):
            made.put(text, record_of(number))
        yield made


def read(shared: SharedKV, store: CountingStore, text: str) -> int:
    """Read the record of a text whole, by way of what a batch shares; how many of its layers came from the store."""
    record = store.open(text)
    assert record is not None
    assert shared.takes(text, text, record)
    expected = [record.read_layer(layer) for layer in range(record.info.layers)]
    store.forget()
    for layer, (keys, values) in enumerate(expected):
        ours = torch.empty_like(keys), torch.empty_like(values)
        shared.copy_layer(text, record, layer, *ours)
        assert torch.equal(ours[0], keys)
        assert torch.equal(ours[1], values)
    reads = len(store.calls)
    record.close()
    return reads


def kv_bytes(number: int) -> int:
    kv = record_of(number).kv
    return sum(tensor.nbytes for tensor in kv.keys + kv.values)


def test_shared_kv_is_freed_after_the_last_prompt_that_needs_it(store: CountingStore) -> None:
    layers = record_of(0).info.layers
    first, second, third = "ab", "bc", "c"
    shared = SharedKV([first, second, third])
    with shared.read_by(first):
        alone = store.open("a")
        assert alone is not None
        with contextlib.closing(alone):
            assert not shared.takes("a", "a", alone)
        assert read(shared, store, "b") == layers
        assert shared.size == kv_bytes(1)
    with shared.read_by(second):
        assert read(shared, store, "b") == 0
        assert shared.size == 0, "the last prompt takes it along"
        assert read(shared, store, "c") == layers
        assert read(shared, store, "c") == 0, "the same text at two places"
        assert shared.size == kv_bytes(2)
    with pytest.raises(KeyError), shared.read_by(third):
        raise KeyError("the last prompt fails before it reads")
    assert shared.size == 0
