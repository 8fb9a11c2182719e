"""The benchmark of requests at rising rates: its queue, its prefix cache, and what it reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cacheblend_rag import Prompt
from cacheblend_rag.errors import ConfigError
from docs.benchmarks.scripts.throughput import PrefixCache, Served, ThroughputOptions, in_batches, main, waited
from tests import tiny
from tests.probes import engine_of

METHODS = ["full recompute", "prefix caching", "blended"]


def test_requests_wait_for_those_before_them() -> None:
    served = [Served(1.0, 3.0, 0.0), Served(2.0, 4.0, 0.0), Served(1.0, 1.0, 0.0)]
    assert waited(served, [5.0, 1.0, 1.0]) == [1.0, 2.0 + 2.0, 5.0 + 1.0]
    assert waited(served, [10.0, 10.0, 10.0]) == [1.0, 2.0, 1.0]
    assert waited(served, [0.0, 0.0, 0.0]) == [1.0, 3.0 + 2.0, 7.0 + 1.0]


def test_requests_that_come_at_once_are_answered_one_after_another() -> None:
    served = {"full": [Served(1.0, 3.0, 0.0), Served(2.0, 4.0, 0.0), Served(1.0, 1.0, 0.0)]}
    one, two, three = in_batches(served, [1, 2, 3])
    assert one == {"size": 1, "mean": {"full": pytest.approx(4 / 3)}, "last": {"full": pytest.approx(4 / 3)}}
    # First the batch of the first and the second, then that of the second and the third.
    assert two["mean"]["full"] == pytest.approx(((1 + 3 + 2) / 2 + (2 + 4 + 1) / 2) / 2)
    assert two["last"]["full"] == pytest.approx((3 + 2 + 4 + 1) / 2)
    assert three == {"size": 3, "mean": {"full": pytest.approx((1 + 5 + 8) / 3)}, "last": {"full": 8.0}}


def test_the_prefix_cache_is_exact_and_keeps_to_its_limit() -> None:
    with engine_of() as engine:
        ids = [list(engine.tokenize(Prompt("Read:", [tiny.text(20, n)], "Why?")).input_ids) for n in (1, 1, 2)]
        ids[1] += [7, 8]
        one = engine.adapter.prefill(ids[0])
        size = sum(layer.keys.nbytes + layer.values.nbytes for layer in one.cache.layers)
        prefixes = PrefixCache(engine, size + size // 2)
        shared = []
        for prompt in ids:
            found, known = prefixes.prefill(prompt)
            prefixes.keep(prompt, found.cache, known)
            torch.testing.assert_close(found.logits, engine.adapter.prefill(prompt).logits, atol=1e-4, rtol=1e-4)
            shared.append(known)
            assert prefixes.held <= size + size // 2
        assert shared[:2] == [0, len(ids[0])]
        assert 0 < shared[2] < len(ids[0])


@pytest.mark.parametrize("capacity", ["0", "3"])
def test_every_method_meets_the_same_requests(
    tiny_shape: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, capacity: str
) -> None:
    drawn = tmp_path / "throughput.svg"
    arguments = ["--shape", "tiny", "--chunks", "2", "--chunk-tokens", "30", "--rounds", "3"]
    arguments += ["--requests", "6", "--documents", "4", "--capacity", capacity, "--new-tokens", "2"]
    arguments += ["--load", "0.5", "--load", "4", "--batch", "2", "--batch", "6", "--batch", "8"]
    assert main([*arguments, "--threads", "1", "--plot", str(drawn)]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert list(result["served"]) == METHODS
    assert len([line for line in table if line.startswith("| ")]) == 2 * (2 + 2)
    assert result["served"]["full recompute"]["reused"] == 0.0
    assert 0 < result["served"]["prefix caching"]["reused"] < 1
    assert 0 < result["served"]["blended"]["reused"] < 1
    slow, fast = result["rows"]
    assert fast["rate"] == pytest.approx(8 * slow["rate"])
    assert slow["rate"] == pytest.approx(0.5 / result["served"]["full recompute"]["busy"])
    for name in METHODS:
        assert slow["median"][name] <= fast["median"][name] <= fast["p99"][name]
    assert [row["size"] for row in result["batches"]] == [2, 6], "there are no 8 requests"
    for row in result["batches"]:
        assert all(0 < row["mean"][name] < row["last"][name] for name in METHODS)
    assert drawn.read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    "changes",
    [
        {"documents": 2},
        {"capacity": -1},
        {"requests": 1},
        {"loads": ()},
        {"loads": (0.0,)},
        {"rounds": 0},
        {"batches": (0,)},
    ],
)
def test_bad_options_are_named(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ThroughputOptions(**changes)  # type: ignore[arg-type]
