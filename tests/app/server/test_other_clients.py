"""The attacks of other clients, a few of each, on a server of this process."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from docs.benchmarks.scripts import attacks, other_clients
from tests.app.server.common import Running, running, settings_for


@pytest.fixture(scope="module")
def attacked(chat_model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    settings = settings_for(chat_model, docs, tmp_path_factory.mktemp("data"), keys=other_clients.KEYS)
    with running(settings) as made:
        yield made


def counted(server: Running, attack: str) -> tuple[Counter[str], Counter[str]]:
    """What became of an attack, a hundredth of it, and what is wrong."""
    run = other_clients.attacks(server.url, 0.01, seed=2)[attack]
    found = other_clients.watched(server.url, psutil.Process(), run)
    assert found["tried"] == found["seen"].total()
    return found["seen"], found["failures"]


@pytest.mark.parametrize(
    ("attack", "outcome"),
    [
        ("aiohttp: bodies above 4 MB", "413"),
        ("aiohttp: answers never read", "200"),
        ("asyncio: 60 files asked for, none read", "200"),
        ("asyncio: heads without end", "open, no answer"),
    ],
)
def test_attacks_end_as_documented(attacked: Running, attack: str, outcome: str) -> None:
    seen, wrong = counted(attacked, attack)
    assert set(seen) == {outcome}
    assert not wrong


def test_bodies_that_are_nearly_too_large_are_refused(attacked: Running) -> None:
    found = asyncio.run(other_clients.send_bodies(attacked.url, 390_000, 12))
    assert {status for status, _ in found} <= {"200", "201", "400", "413", "422"}
    assert not any(wrong for _, wrong in found)


def test_streams_of_openai_are_whole_or_left_and_answers_that_are_not_there_are_refused(attacked: Running) -> None:
    found = Counter(other_clients.openai_clients(attacked.url, 8))
    assert found == {("whole", ""): 2, ("left", ""): 2, ("400", ""): 2, ("404", ""): 2}


def test_outcomes_that_are_wrong_are_told(attacked: Running) -> None:
    found = other_clients.watched(
        attacked.url, psutil.Process(), lambda: [("503", ""), ("200", "other text"), ("200", "")]
    )
    assert found["failures"] == {"503": 1, "other text": 1}


@pytest.mark.parametrize(
    ("said", "status", "wrong"),
    [
        ("", 0, 1),
        ("Tested: 3\n12 generated, 12 passed", 0, 0),
        ("12 generated, 10 passed", 1, 2),
        ("12 generated, 12 passed", 1, 1),
    ],
)
def test_tool_that_makes_no_request_finds_nothing_right(
    said: str, status: int, wrong: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "schemathesis"
    tool.write_text(f"#!/bin/sh\necho '{said}'\nexit {status}\n")
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = attacks.generated_requests("http://127.0.0.1:9", 5.0)
    assert (found.tried, found.wrong) == (12 if said else 0, wrong)
