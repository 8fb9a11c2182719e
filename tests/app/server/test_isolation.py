"""Two tenants over shared collections: nothing of what one asks shows in hits, times or counts of the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.app.server.common import client_of, passage, running, settings_for, settle, write_documents

KEYS = {"ada": "ada-0123456789abcdef", "ben": "ben-0123456789abcdef"}


@contextmanager
def two(model: Path, docs: Path, data: Path, **more: Any) -> Iterator[tuple[Any, httpx.Client, httpx.Client]]:
    with (
        running(settings_for(model, docs, data, keys=KEYS, **more)) as server,
        client_of(server, KEYS["ada"]) as ada,
        client_of(server, KEYS["ben"]) as ben,
    ):
        yield server.service, ada, ben


def ask(client: httpx.Client, seed: int, **more: Any) -> dict[str, Any]:
    """The report of an answer from the passage of this number, which lies in the shared collection."""
    body = {"question": passage(seed), "k": 1, "max_tokens": 2, "stream": False, "show_prompt": False, **more}
    answer = client.post("/api/collections/archive/ask", json=body)
    assert answer.status_code == 200, answer.text
    report: dict[str, Any] = answer.json()["report"]
    return report


def seen(report: dict[str, Any]) -> tuple[Any, ...]:
    """All that a report says of what was there before."""
    chunks = [(one["hit"], one["device"]) for one in report["chunks"]]
    return report["hits"], report["misses"], chunks, report["reused"], report["resumed"], report["ratio"]


def test_tenants_store_their_own_kv_of_shared_collections(model: Path, docs: Path, tmp_path: Path) -> None:
    with two(model, docs, tmp_path) as (service, ada, ben):
        first = seen(ask(ada, 1))
        settle(service)
        assert seen(ask(ben, 1)) == first
        assert first[0] == 0
        settle(service)
        assert [ask(one, 1, instructions="Another prompt.")["hits"] for one in (ada, ben)] == [1, 1]


def test_no_tenant_drops_remembered_prompts_of_one_that_has_less(model: Path, docs: Path, tmp_path: Path) -> None:
    with two(model, docs, tmp_path, prompt_cache=300_000) as (service, ada, ben):
        first = ask(ben, 1)
        again = ask(ben, 1)
        assert (first["resumed"], again["resumed"] > 0) == (0, True)
        for number in range(12):
            ask(ada, number % 4, instructions=f"Number {number}.")
        assert service.engine.prompts.nbytes <= 300_000
        assert ask(ben, 1)["resumed"] == again["resumed"]


def test_deleted_shared_texts_go_from_the_kv_of_every_tenant(model: Path, tmp_path: Path) -> None:
    docs = write_documents(tmp_path / "docs")
    with two(model, docs, tmp_path / "data") as (service, ada, ben):
        for one in (ada, ben):
            ask(one, 1, ratio=0.2)
        settle(service)
        ids = service.engine.chunks.pipeline.segments.chunk(passage(1).strip()).token_ids
        held = [key for key, info in service.engine.store.infos("") if ids[:32] == info.token_ids[:32]]
        assert held
    (docs / "passage-1.md").unlink()
    with two(model, docs, tmp_path / "data") as (service, ada, ben):
        held = [key for key, info in service.engine.store.infos("") if ids[5:37] == info.token_ids[5:37]]
        assert held == []
        assert ask(ben, 2)["hits"] == 1
