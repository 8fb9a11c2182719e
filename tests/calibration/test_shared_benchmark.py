"""The benchmark of shared stores, and the link it puts before them: what they measure, not how fast this machine is."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from cacheblend_rag.errors import ConfigError
from docs.benchmarks.scripts import redraw, shared
from docs.benchmarks.scripts.servers import link_process
from docs.benchmarks.scripts.shared import SharedOptions


def test_link_carries_what_it_is_given_at_its_rate() -> None:
    """Two connections have the rate together; what comes through is what was sent."""
    sent, rate = bytes(range(256)) * 8000, 10e6  # 2 MB each

    def send(near: socket.socket) -> None:
        with near:
            near.sendall(sent)

    with socket.create_server(("127.0.0.1", 0)) as behind, link_process(behind.getsockname()[1], rate) as port:
        began = time.perf_counter()
        ends = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        for _ in ends:
            threading.Thread(target=send, args=[behind.accept()[0]]).start()
        came = {number: bytearray() for number in range(2)}

        def receive(number: int) -> None:
            with ends[number] as end:
                while data := end.recv(2**16):
                    came[number] += data

        threads = [threading.Thread(target=receive, args=[number]) for number in came]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        took = time.perf_counter() - began
    assert all(data == sent for data in came.values())
    assert took >= 0.95 * 2 * len(sent) / rate


@pytest.mark.slow
def test_every_store_is_measured_and_gives_the_same(
    tiny_shape: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--shape", "tiny", "--chunks", "2", "--chunk-tokens", "40", "--rounds", "2", "--threads", "1"]
    plot = tmp_path / "shared.svg"
    assert shared.main([*arguments, "--link", "0.5", "--plot", str(plot)]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    rows = {row["store"]: row for row in result["rows"]}
    slow = [f"{name} at 0.5 MB/s" for name in ("disk", "valkey", "s3")]
    assert list(rows) == ["memory", "disk", "valkey", "s3", *slow, *(f"{name}, read plainly" for name in slow)]
    assert len(shown) == 2 + 2 + len(rows)
    load = result["bytes"] / 0.5e6
    assert result["link_load"] == pytest.approx(load)
    for name, row in rows.items():
        assert row["hits"] == 2
        assert row["range"][0] <= row["ttft"] <= row["range"][1]
        assert (row["hidden"] is None) == (name not in slow and not name.endswith("plainly"))
        if row["hidden"] is not None:
            low, high = row["hidden_interval"]
            assert low <= row["hidden"] <= high
            assert row["reading"] >= 0.9 * load, "all of it came over the link"
            assert row["ttft"] >= 0.9 * load
    assert rows["disk"]["to_disk"] == rows["memory"]["to_memory"] == 1
    path = tmp_path / "shared.json"
    path.write_text(last)
    assert redraw.draw_file(path, tmp_path / "again.svg") == "shared"
    assert (tmp_path / "again.svg").read_bytes() == plot.read_bytes()


def test_link_without_a_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match="link"):
        SharedOptions(link=0.0)
