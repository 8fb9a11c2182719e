"""Text that repeats in the messages of any client: it hits at its third sight, for its tenant alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from cacheblend_rag.app.server import app
from cacheblend_rag.engine.segments import Kind
from tests.app.server.common import Running, client_of, running, settings_for, settle, upload
from tests.integrations.test_repeated import PROMPTS, A, B, C, D, G

KEYS = {"ada": "a-key-of-16-characters", "ben": "b-key-of-16-characters"}


def in_tags(texts: Sequence[str], question: str) -> list[dict[str, str]]:
    """As clients write it that put sources in tags, into the user's message."""
    sources = "\n".join(f'<source id="{at}" name="a.md">{text}</source>' for at, text in enumerate(texts, 1))
    told = f"### Task:\nUse the context.\n\n<context>\n{sources}\n</context>\n\n{question}"
    return [{"role": "user", "content": told}]


def ask(client: httpx.Client, messages: list[dict[str, Any]]) -> list[bool]:
    """Whether the KV of each text that was found in a conversation was read, as its answer says it."""
    name = client.get("/v1/models").json()["data"][0]["id"]
    answer = client.post("/v1/chat/completions", json={"model": name, "messages": messages, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["cacheblend"][0]["found"])


def kept(server: Running) -> set[str]:
    settle(server.service)
    return {key for key, _ in server.service.engine.store.infos(Kind.FOUND)}


def test_passages_in_messages_hit_at_their_third_sight_are_counted_and_erased(
    chat_model: Path, docs: Path, tmp_path: Path
) -> None:
    with running(settings_for(chat_model, docs, tmp_path)) as server, client_of(server) as client:
        found = []
        for number, texts in enumerate(PROMPTS):
            found.append(ask(client, in_tags(texts, f"Which one falls, is it number {number}?")))
            settle(server.service)
        assert found[0] == []
        assert found[1:] == [[False, False], [True, True]]
        metrics = client.get("/metrics").text
        assert 'cacheblend_rag_found_chunks_total{found="hit"} 2.0' in metrics
        assert 'cacheblend_rag_found_chunks_total{found="miss"} 2.0' in metrics
        assert len(kept(server)) == 2
        id = upload(client, {"a.txt": A})["a.txt"]["id"]
        gone = client.delete(f"/api/documents/{id}")
        assert gone.is_success, gone.text
        assert len(kept(server)) < 2
        assert not any(ask(client, in_tags([G, A, D], "Is it still there?")))


def test_tenants_find_their_own_text_alone(chat_model: Path, docs: Path, tmp_path: Path) -> None:
    settings = settings_for(chat_model, docs, tmp_path, keys=KEYS)
    with running(settings) as server, client_of(server, KEYS["ada"]) as ada, client_of(server, KEYS["ben"]) as ben:
        for number, texts in enumerate(PROMPTS[:2]):
            ask(ada, in_tags(texts, f"Which one falls, is it number {number}?"))
        assert len(kept(server)) == 2
        assert ask(ben, in_tags(PROMPTS[2], "And what do I ask?")) == []
        assert ask(ben, in_tags(PROMPTS[1], "And what else do I ask?")) == [False, False]
        assert len(kept(server)) == 4
        assert ask(ada, in_tags(PROMPTS[2], "And what do I ask?")) == [True, True]


def test_messages_sent_again_each_turn_are_stored_nowhere(chat_model: Path, docs: Path, tmp_path: Path) -> None:
    with running(settings_for(chat_model, docs, tmp_path)) as server, client_of(server) as client:
        turns: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}]
        for number in range(4):
            turns.append({"role": "user", "content": f"{[A, B, C, D][number]}\nWhat is this, {number}?"})
            assert ask(client, turns) == []
            turns.append({"role": "assistant", "content": f"{G} {number}"})
        assert ask(client, [turns[0], *turns[3:], {"role": "user", "content": "And that?"}]) == [], "some was left out"
        assert kept(server) == set()


def test_nothing_is_found_where_it_is_turned_off_and_the_start_says_what_is_kept(
    chat_model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(settings_for(chat_model, docs, tmp_path, find_repeated=False)) as server, client_of(server) as client:
        for number, texts in enumerate(PROMPTS):
            assert ask(client, in_tags(texts, f"Which one falls, is it number {number}?")) == []
        assert kept(server) == set()
    monkeypatch.setattr(app._AnnouncingServer, "run", lambda self: None)
    monkeypatch.setattr(app, "configure_logs", lambda form: None)
    for number, choice in enumerate(({}, {"find_repeated": False})):
        app.serve(settings_for(chat_model, docs, tmp_path / str(number), **choice))
        assert ("--find-repeated off" in capsys.readouterr().err) == (not choice)
