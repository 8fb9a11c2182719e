"""Prompts of a batch: in an order that keeps shared chunks together, each record read once."""

from __future__ import annotations

from typing import Any

import torch

from cacheblend_rag.engine.batch import ReadOnceStore, by_common_chunks
from cacheblend_rag.store import BaseRecord, MemoryStore
from tests import tiny
from tests.probes import engine_of, key_of


def test_prompts_with_chunks_in_common_are_neighbours() -> None:
    assert by_common_chunks([["a", "b"], ["x"], ["b", "c"], ["x", "y"], ["c"]]) == [0, 2, 4, 1, 3]
    assert by_common_chunks([]) == []
    assert by_common_chunks([[], []]) == [0, 1]


class Counting:
    """A store that counts what is opened, read and closed."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.opened = self.read = self.closed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open(self, key: str) -> Any:
        record = self._store.open(key)
        if record is not None:
            self.opened += 1
            return _Record(self, record)
        return None


class _Record(BaseRecord):
    def __init__(self, counts: Counting, record: Any) -> None:
        self._counts, self._record, self.tier = counts, record, "memory"

    @property
    def info(self) -> Any:
        return self._record.info

    def read_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._counts.read += 1
        found: tuple[torch.Tensor, torch.Tensor] = self._record.read_layer(layer)
        return found

    def close(self) -> None:
        self._counts.closed += 1
        self._record.close()


def filled(texts: list[str]) -> tuple[Counting, list[str]]:
    """A store with the KV of some chunks, and their keys."""
    store = MemoryStore(10**8)
    with engine_of(store=store) as engine:
        engine.warm(texts, progress=False)
        keys = [key_of(engine, text) for text in texts]
    return Counting(store), keys


def test_a_record_is_opened_and_read_once_and_closed_at_the_end() -> None:
    store, (first, second) = filled([tiny.text(9, 1), tiny.text(9, 2)])
    with ReadOnceStore(store) as shared:  # type: ignore[arg-type]
        for _ in range(3):
            shared.next_prompt()
            for key in (first, second):
                record = shared.open(key)
                assert record is not None
                keys, values = torch.empty_like(record.read_layer(0)[0]), torch.empty_like(record.read_layer(0)[1])
                record.read_into(0, keys, values)
                assert torch.equal(keys, record.read_layer(0)[0])
                record.close()
        assert shared.open("unknown") is None
        assert shared.contains(first)
        assert (store.opened, store.read, store.closed) == (2, 2, 0)
    assert store.closed == 2


def test_what_is_too_much_is_let_go_but_not_while_it_is_read() -> None:
    store, (first, second) = filled([tiny.text(9, 1), tiny.text(9, 2)])
    with ReadOnceStore(store, limit=1) as shared:  # type: ignore[arg-type]
        held = shared.open(first)
        assert held is not None
        before = held.read_layer(0)[0].clone()
        shared.next_prompt()
        assert store.closed == 0
        assert torch.equal(held.read_layer(0)[0], before)
        held.close()
        assert store.closed == 1
        other = shared.open(second)
        assert other is not None
        other.close()
        assert shared.delete(second)
        assert store.closed == 2
        assert shared.open(second) is None


def test_a_batch_answers_as_single_prompts_do() -> None:
    texts = [tiny.text(12, seed) for seed in range(4)]
    prompts = [f"Use: # # {texts[a]} # # {texts[b]} # # What?" for a, b in ((0, 1), (2, 3), (1, 0))]
    with engine_of(recompute_ratio=0.5, separator=" # # ", split_at_separator=True) as engine:
        engine.warm(texts, progress=False)
        alone = [engine.generate(prompt, max_new_tokens=3).token_ids for prompt in prompts]
        together = engine.generate_batch(prompts, max_new_tokens=3)
    assert [one.token_ids for one in together] == alone
    assert [one.report.hits for one in together] == [2, 2, 2]
