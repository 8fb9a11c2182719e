"""Prompts of a batch: in an order that keeps shared chunks together, what several need read once and kept no longer."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cacheblend_rag import BlendEngine, Prompt
from cacheblend_rag.report import Generation, Seconds
from cacheblend_rag.store import DiskStore, KVStore
from tests import tiny
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
