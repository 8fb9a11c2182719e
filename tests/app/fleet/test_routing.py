"""The order of replicas for a request, and the pieces and summaries it is made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.app.fleet.pieces import piece_digests, texts_in, weighed_pieces
from cacheblend_rag.app.fleet.routing import MOST_CHUNKS, HeldChunks, RoutingRule, chunk_digest, rank_replicas
from cacheblend_rag.app.fleet.summaries import SummarizedStore
from cacheblend_rag.store.disk import DiskStore
from cacheblend_rag.store.memory import MemoryStore
from cacheblend_rag.store.tiered import TieredStore
from tests import tiny
from tests.probes import key_of

REPLICAS = [f"replica-{number}" for number in range(8)]
NAMES = st.integers(0, 30).map(lambda number: chunk_digest(f"chunk {number}"))
REQUESTS = st.dictionaries(NAMES, st.integers(1, 600), max_size=8)
HELD = st.dictionaries(
    st.sampled_from(REPLICAS),
    st.builds(HeldChunks.from_digests, st.lists(NAMES, max_size=9), st.lists(NAMES, max_size=9)),
)
ONGOING = st.dictionaries(st.sampled_from(REPLICAS), st.integers(0, 40), min_size=1)


def request(*texts: str, tokens: int = 100) -> dict[int, int]:
    return {chunk_digest(text): tokens for text in texts}


def holding(*texts: str, disk: bool = False) -> HeldChunks:
    return HeldChunks.from_digests([], request(*texts)) if disk else HeldChunks.from_digests(request(*texts))


def idle(*replicas: str) -> dict[str, int]:
    return dict.fromkeys(replicas, 0)


@settings(max_examples=30)
@given(REQUESTS, HELD, ONGOING)
def test_every_replica_is_named_once_whatever_the_order_of_the_input(
    chunks: dict[int, int], held: dict[str, HeldChunks], ongoing: dict[str, int]
) -> None:
    order = rank_replicas(chunks, held, ongoing)
    assert sorted(order) == sorted(ongoing)
    turned = [dict(reversed(list(mapping.items()))) for mapping in (chunks, held, ongoing)]
    assert rank_replicas(*turned) == order  # type: ignore[arg-type]


@settings(max_examples=30)
@given(REQUESTS, HELD, ONGOING)
def test_beyond_the_limit_a_replica_stands_behind_the_least_loaded(
    chunks: dict[int, int], held: dict[str, HeldChunks], ongoing: dict[str, int]
) -> None:
    rule = RoutingRule(imbalance_limit=4)
    order = rank_replicas(chunks, held, ongoing, rule)
    least = min(ongoing.values())
    first = min(order.index(replica) for replica in ongoing if ongoing[replica] == least)
    assert all(order.index(replica) > first for replica in ongoing if ongoing[replica] > least + 4)
    assert ongoing[order[0]] <= least + 4


def test_homes_stay_when_a_replica_is_lost_and_are_spread_evenly() -> None:
    sets = [request(*(f"{number} {chunk}" for chunk in range(4))) for number in range(800)]
    homes = [rank_replicas(chunks, {}, idle(*REPLICAS))[0] for chunks in sets]
    fewer = [rank_replicas(chunks, {}, idle(*REPLICAS[1:]))[0] for chunks in sets]
    assert all(old in (new, REPLICAS[0]) for old, new in zip(homes, fewer, strict=True))
    assert all(60 < homes.count(replica) < 140 for replica in REPLICAS)


def test_replica_with_most_tokens_is_first_and_memory_comes_before_disk() -> None:
    chunks = request("a", "b") | request("long", tokens=500)
    held = {"one": holding("a", "b"), "two": holding("long"), "three": holding("long", disk=True)}
    assert rank_replicas(chunks, held, idle("one", "two", "three", "four")) == ["two", "three", "one", "four"]


def test_request_without_chunks_goes_to_the_least_loaded_replica() -> None:
    ongoing = dict.fromkeys(REPLICAS, 3) | {"replica-5": 2}
    assert rank_replicas({}, dict.fromkeys(REPLICAS, holding("a")), ongoing)[0] == "replica-5"
    assert rank_replicas({}, {}, {}) == []


def test_summary_has_a_bounded_size() -> None:
    digests = [chunk_digest(str(number)) for number in range(MOST_CHUNKS + 500)]
    held = HeldChunks.from_digests(digests[:300], digests[200:])
    assert (len(held.memory), len(held.disk)) == (300, MOST_CHUNKS - 300)
    assert digests[MOST_CHUNKS - 1] >> 32 in held.disk
    assert digests[MOST_CHUNKS] >> 32 not in held.disk, "the most recently used come first"


def test_digest_depends_on_every_character() -> None:
    assert len({chunk_digest("text"), chunk_digest("text "), chunk_digest("\ud800")}) == 3
    assert chunk_digest("text") == chunk_digest("text") < 2**64


CHUNK = "The harbour was dredged in 1912, and again in 1954.\n\nThe mill burned down in 1931, on a Sunday morning."
OTHER = "The boathouse stands on oak piles, which were replaced in 1974."


def test_prompt_has_the_pieces_of_its_chunks() -> None:
    for prompt, separator in (
        (f"Read this.\n\n{CHUNK}\n\n{OTHER}\n\nWhen did it burn?", ""),
        (f"Read this. # # {CHUNK} # # {OTHER} # # When?", " # # "),
        (CHUNK.replace(" ", "\n ") + "\n\n" + OTHER, ""),
    ):
        assert set(piece_digests(CHUNK) + piece_digests(OTHER)) <= weighed_pieces([prompt], separator).keys(), prompt


def test_pieces_weigh_about_as_much_as_their_tokens() -> None:
    weights = weighed_pieces([CHUNK])
    assert list(weights) == list(piece_digests(CHUNK))
    assert sum(weights.values()) == pytest.approx(len(CHUNK) / 4, abs=2)


def test_short_pieces_are_left_out() -> None:
    assert weighed_pieces(["Yes.\n\nNo.\n\nWho built it?"]) == {}


def test_huge_request_has_a_bounded_number_of_pieces() -> None:
    text = "\n\n".join(f"{number} green bottles hanging on the wall of the old inn" for number in range(5_000))
    assert len(weighed_pieces([text])) == 2_000


def test_texts_of_a_body_are_found_wherever_they_stand() -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "x", "content": "b"}],
        "documents": ["c", {"title": "d", "text": "e"}],
        "n": 1,
        "stream": True,
        "stop": None,
    }
    assert list(texts_in(body)) == ["user", "text", "a", "x", "b", "c", "d", "e"]


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
    found = HeldChunks(**store.summary())
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
