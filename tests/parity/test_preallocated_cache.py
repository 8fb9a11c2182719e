"""Decoding after a blend: rows are added in place, on the caller's thread, and to the same answer."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.generation import LogitsProcessor

from cacheblend_rag import Prompt
from cacheblend_rag.models.cache import PreallocatedLayer, preallocate
from tests import tiny
from tests.probes import engine_of

PROMPT = Prompt("Read this:", [tiny.text(23, 1), tiny.text(31, 2), tiny.text(17, 3)], "What fell in the end?")
PLAIN = "What fell in the end?"


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(1, 2, count, 8, generator=torch.Generator().manual_seed(seed))


def add(cache: Any, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        keys, values = cache.update(rows(count, seed), rows(count, seed + 1000), 0)
        return keys, values


def growing() -> Any:
    cache = preallocate(DynamicCache(config=tiny.model().config))
    assert type(cache.layers[0]) is PreallocatedLayer
    return cache


class Watched(LogitsProcessor):
    """Notes on which thread each token is made."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.threads.append(threading.get_ident())
        return scores


@pytest.mark.parametrize("steps", [(5, 300, 1), (1, *[1] * 300)], ids=["many", "past the room"])
def test_rows_come_out_as_from_transformers_own_layer(steps: tuple[int, ...]) -> None:
    ours, plain = growing(), DynamicCache()
    for seed, count in enumerate(steps):
        for mine, theirs in zip(add(ours, count, seed), add(plain, count, seed), strict=True):
            assert torch.equal(mine, theirs)
        assert ours.get_seq_length() == plain.get_seq_length()


def test_token_moves_no_other_row() -> None:
    cache = growing()
    add(cache, 5, 0)
    add(cache, 1, 1)
    before = cache.layers[0].keys.data_ptr(), cache.layers[0].values.data_ptr()
    for seed in range(2, 50):
        add(cache, 1, seed)
    assert (cache.layers[0].keys.data_ptr(), cache.layers[0].values.data_ptr()) == before


@pytest.mark.parametrize(("share", "grown"), [(copy.copy, 1), (copy.deepcopy, 0)], ids=["copy", "deepcopy"])
def test_rows_added_to_one_copy_are_not_in_the_other(share: Any, grown: int) -> None:
    one = growing()
    add(one, 5, 0)
    for seed in range(grown):
        add(one, 1, 1 + seed)
    two = share(one)
    two.layers = [share(layer) for layer in one.layers]
    start = one.get_seq_length()
    first, _ = add(one, 1, 10)
    assert torch.equal(first[:, :, start:], rows(1, 10))
    second, _ = add(two, 1, 20)
    again, _ = add(one, 1, 30)
    assert torch.equal(again[:, :, start:], torch.cat((rows(1, 10), rows(1, 30)), dim=2))
    assert torch.equal(second[:, :, start:], rows(1, 20))
    assert torch.equal(second[:, :, :start], again[:, :, :start])


def test_rows_taken_back_are_written_anew() -> None:
    cache = growing()
    for seed, count in enumerate((5, 1, 1, 1)):
        add(cache, count, seed)
    kept = cache.layers[0].keys[:, :, :6].clone()
    cache.crop(-2)
    keys, _ = add(cache, 1, 9)
    assert torch.equal(keys[:, :, :6], kept)
    assert torch.equal(keys[:, :, 6:], rows(1, 9))


def test_whole_answer_is_decoded_in_place_on_the_callers_thread() -> None:
    watched = Watched()
    with engine_of(tiny.model(), recompute_ratio=0.2) as engine:
        engine.warm(PROMPT.chunks)
        for prompt in (PLAIN, PROMPT):
            assert all(type(layer) is PreallocatedLayer for layer in engine.fuse(prompt).cache.layers), prompt
        options: dict[str, Any] = {"max_new_tokens": 3, "logits_processor": [watched]}
        single = engine.generate(PROMPT, **options)
        batch = engine.generate_batch([PROMPT], **options)
        whole = engine.stream(PROMPT, **options).complete()
        assert set(watched.threads) == {threading.get_ident()}
        pieces = "".join(engine.stream(PROMPT, **options))
        in_time = engine.stream(PROMPT, timeout=60, **options).complete()
    assert len(set(watched.threads)) > 1  # who reads pieces, or wants a timeout kept, cannot generate meanwhile
    assert single.text == batch[0].text == whole.text == pieces == in_time.text
