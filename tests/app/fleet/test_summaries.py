"""A replica knows what lies in its memory and on its disk, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.app.fleet.pieces import piece_digests
from cacheblend_rag.app.fleet.routing import HeldChunks
from cacheblend_rag.app.fleet.summaries import SummarizedStore
from cacheblend_rag.store.disk import DiskStore
from cacheblend_rag.store.memory import MemoryStore
from cacheblend_rag.store.tiered import TieredStore
from tests import tiny
from tests.probes import key_of

CHUNKS = [f"Passage {number}. {tiny.text(30, number)}" for number in range(4)]
CONFIG = BlendConfig(min_tokens=0, condition="sink")
Opened = Callable[..., BlendEngine]


@pytest.fixture(params=[True, False], ids=["BOS", "no BOS"])
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    """Makes engines over one model and a store, and closes them; without a BOS a chunk's first token is the sink."""
    model, tokenizer = tiny.model(num_hidden_layers=2), tiny.tokenizer(request.param)
    made: list[BlendEngine] = []

    def engine(store: SummarizedStore, config: BlendConfig = CONFIG) -> BlendEngine:
        made.append(BlendEngine(model, tokenizer, store=store, config=config))
        store.read(partial(tokenizer.decode, skip_special_tokens=True), made[-1].fingerprint, made[-1].config.separator)
        return made[-1]

    yield engine
    for one in made:
        one.close()


def held(store: SummarizedStore) -> tuple[list[int], list[int]]:
    """Numbers of the chunks that are said to be in memory, and on the disk alone."""
    found = HeldChunks.read(store.summary())
    number = {digest >> 32: at for at, text in enumerate(CHUNKS) for digest in piece_digests(text)}
    return sorted(number[one] for one in found.memory), sorted(number[one] for one in found.disk)


def test_summary_holds_stored_chunks_and_drops_erased_ones(tmp_path: Path, opened: Opened) -> None:
    store = SummarizedStore(DiskStore(tmp_path / "kv", 10**9))
    engine = opened(store)
    assert held(store) == ([], [])
    engine.warm(CHUNKS[:3])
    assert held(store) == ([], [0, 1, 2])
    engine.forget([CHUNKS[1]])
    assert held(store) == ([], [0, 2])


def test_restarted_summary_knows_what_its_folder_holds(tmp_path: Path, opened: Opened) -> None:
    opened(SummarizedStore(DiskStore(tmp_path / "kv", 10**9))).warm(CHUNKS)
    store = SummarizedStore(TieredStore([MemoryStore(10**8), DiskStore(tmp_path / "kv", 10**9)]))
    engine = opened(store)
    assert held(store) == ([], [0, 1, 2, 3])
    engine.generate(Prompt(chunks=CHUNKS[:2], suffix="Who?"), max_new_tokens=1)
    assert held(store) == ([0, 1], [2, 3])


def test_summary_drops_evicted_chunks(tmp_path: Path, opened: Opened) -> None:
    first = SummarizedStore(DiskStore(tmp_path / "first", 10**9))
    opened(first).warm(CHUNKS[:1])
    disk = DiskStore(tmp_path / "kv", int(2.5 * first.volume()))
    store = SummarizedStore(disk)
    engine = opened(store)
    for chunk in CHUNKS:
        engine.warm([chunk])
    engine.flush()
    memory, kept = held(store)
    assert memory == []
    assert kept == [at for at, chunk in enumerate(CHUNKS) if disk.contains(key_of(engine, chunk))]
    assert 0 < len(kept) < len(CHUNKS)


def test_records_of_another_model_are_not_held(tmp_path: Path, opened: Opened) -> None:
    opened(SummarizedStore(DiskStore(tmp_path / "kv", 10**9))).warm(CHUNKS)
    other = BlendEngine(
        tiny.model(num_hidden_layers=3), tiny.tokenizer(), store=DiskStore(tmp_path / "kv", 10**9), config=CONFIG
    )
    other.warm(CHUNKS[:1])
    store = SummarizedStore(DiskStore(tmp_path / "kv", 10**9))
    store.read(partial(tiny.tokenizer().decode, skip_special_tokens=True), other.fingerprint, CONFIG.separator)
    assert held(store) == ([], [0])
    other.close()
