"""The order of replicas for a request, and the summaries it is made from."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.app.fleet.routing import MOST_CHUNKS, HeldChunks, RoutingRule, chunk_digest, rank_replicas

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


@settings(max_examples=25)
@given(REQUESTS, HELD, ONGOING)
def test_every_replica_is_named_once_whatever_the_order_of_the_input(
    chunks: dict[int, int], held: dict[str, HeldChunks], ongoing: dict[str, int]
) -> None:
    order = rank_replicas(chunks, held, ongoing)
    assert sorted(order) == sorted(ongoing)
    turned = [dict(reversed(list(mapping.items()))) for mapping in (chunks, held, ongoing)]
    assert rank_replicas(*turned) == order  # type: ignore[arg-type]


@settings(max_examples=25)
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


@settings(max_examples=25)
@given(REQUESTS, HELD, ONGOING, st.sampled_from(REPLICAS))
def test_the_order_of_others_stays_when_a_replica_is_lost(
    chunks: dict[int, int], held: dict[str, HeldChunks], ongoing: dict[str, int], lost: str
) -> None:
    left = {replica: count for replica, count in ongoing.items() if replica != lost}
    left = left or {"another": 0}
    ongoing = left | {lost: max(left.values())}  # else the load of others counts from another
    assert [r for r in rank_replicas(chunks, held, ongoing) if r != lost] == rank_replicas(chunks, held, left)


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


def test_among_equals_the_least_loaded_is_first() -> None:
    held = dict.fromkeys(REPLICAS, holding("a"))
    ongoing = {replica: number for number, replica in enumerate(reversed(REPLICAS))}
    assert rank_replicas(request("a"), held, ongoing) == REPLICAS[::-1]


def test_request_without_chunks_goes_to_the_least_loaded_replica() -> None:
    ongoing = dict.fromkeys(REPLICAS, 3) | {"replica-5": 2}
    assert rank_replicas({}, dict.fromkeys(REPLICAS, holding("a")), ongoing)[0] == "replica-5"
    assert rank_replicas({}, {}, {}) == []


def test_summary_is_read_back_and_has_a_bounded_size() -> None:
    digests = [chunk_digest(str(number)) for number in range(MOST_CHUNKS + 500)]
    held = HeldChunks.from_digests(digests[:300], digests[200:])
    text = json.dumps(held.summary())
    assert HeldChunks.read(json.loads(text)) == held
    assert len(text) < 53_400
    assert (len(held.memory), len(held.disk)) == (300, MOST_CHUNKS - 300)
    assert digests[MOST_CHUNKS - 1] >> 32 in held.disk
    assert digests[MOST_CHUNKS] >> 32 not in held.disk, "the most recently used come first"


def test_damaged_summary_holds_nothing() -> None:
    for damaged in (None, [], {}, {"memory": 7, "disk": ""}, {"memory": "AAA*", "disk": ""}):
        assert HeldChunks.read(damaged) == HeldChunks()
    for memory in ("AAAA", "é", "AAAA" * 54_000):
        assert HeldChunks.read({"memory": memory, "disk": ""}) == HeldChunks()


def test_digest_depends_on_text_and_tenant() -> None:
    digests = {chunk_digest("text"), chunk_digest("text "), chunk_digest("text", "tenant"), chunk_digest("\ud800")}
    assert len(digests) == 4
    assert chunk_digest("bc", "a") != chunk_digest("c", "ab")
    assert chunk_digest("text") == chunk_digest("text") < 2**64
