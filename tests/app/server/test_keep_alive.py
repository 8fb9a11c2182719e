"""A server whose models give their memory back while nobody asks."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cacheblend_rag import BlendConfig, BlendEngine, config
from cacheblend_rag.app.server.services.keep_alive import KeepAlive
from cacheblend_rag.engine.scheduler import Scheduler
from cacheblend_rag.errors import ConfigError
from tests import tiny
from tests.app.server.common import client_of, running, settings_for
from tests.probes import PROMPT

IN_MEMORY = 'cacheblend_rag_model_in_memory{{model="{}"}} {}'
FOR_EVER = 10_000.0


def put_away(kept: KeepAlive) -> None:
    """As the watcher does once it is time."""
    kept.seconds = 0.0
    kept.look()
    kept.seconds = FOR_EVER


def test_models_of_a_server_rest_until_somebody_asks(
    model: Path, deep: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "default_data_path", lambda: tmp_path / "cache")
    settings = settings_for(model, docs, tmp_path / "data")
    rag = dataclasses.replace(settings.rag, keep_alive="1000h")
    settings = dataclasses.replace(settings, rag=rag, served_model_name="flat", also_models=[f"deep={deep}"])
    with running(settings) as server, client_of(server) as client:

        def ask() -> str:
            body = {"model": "flat", "prompt": "Which leaf fell into the river?", "max_tokens": 4}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])

        def shown() -> list[bool]:
            text = client.get("/metrics").text
            return [IN_MEMORY.format(name, 1.0) in text for name in ("flat", "deep")]

        expected = ask()
        assert shown() == [True, True]
        for one in server.service.models.values():
            one.engine.flush()
            put_away(one.keep_alive)
        for path in ("/metrics", "/healthz", "/readyz", "/api/state", "/v1/models"):
            assert client.get(path).status_code == 200
        assert shown() == [False, False], "looking brings nothing back"
        assert ask() == expected
        assert shown() == [True, True]
        assert not list((tmp_path / "cache").iterdir()), "the file has no name"


@pytest.mark.parametrize(
    "make", [tiny.model, lambda: tiny.model(tie_word_embeddings=True).to(torch.bfloat16)], ids=["float32", "tied"]
)
def test_answers_are_those_of_a_model_that_stayed(make: Callable[[], Any], tmp_path: Path) -> None:
    with BlendEngine(make(), tiny.tokenizer(), config=BlendConfig(min_tokens=0, write_back="inline")) as engine:
        kept = KeepAlive(engine, FOR_EVER, tmp_path)
        engine.generate(PROMPT, max_new_tokens=1)  # computes the chunks
        objects, values = list(engine.model.parameters()), [one.clone() for one in engine.model.parameters()]
        identity, logits = engine.fingerprint, engine.fuse(PROMPT).logits
        text = engine.generate(PROMPT, max_new_tokens=6).text
        for _ in range(2):
            before = [StorageWeakRef(one.untyped_storage()) for one in engine.model.parameters()]
            put_away(kept)
            gc.collect()
            assert kept.away
            assert all(one.expired() for one in before), "memory is free"
            assert engine.fingerprint == identity
            assert engine.generate(PROMPT, max_new_tokens=6).text == text
            assert engine.fuse(PROMPT).logits.equal(logits)
            assert not kept.away
        assert all(one is other for one, other in zip(engine.model.parameters(), objects, strict=True))
        assert all(one.equal(value) for one, value in zip(objects, values, strict=True))
        kept.close()


def test_weights_that_cannot_be_put_away_are_refused_at_the_start(tmp_path: Path) -> None:
    model = tiny.model()
    with BlendEngine(model, tiny.tokenizer()) as engine:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=r"^keep_alive=.*cannot be written to"):
            KeepAlive(engine, FOR_EVER, tmp_path / "file" / "folder")
        model.config.quantization_config = SimpleNamespace()
        with pytest.raises(ConfigError, match=r"^keep_alive=.*another package"):
            KeepAlive(engine, FOR_EVER, tmp_path)


def test_scheduler_is_held_only_if_nobody_has_wanted_the_model_for_so_long() -> None:
    now = [100.0]
    scheduler = Scheduler(lambda: now[0])
    with scheduler.entered(), scheduler.held_if_idle(0.0) as held:
        assert not held
    now[0] = 109.0
    with scheduler.held_if_idle(10.0) as held:
        assert not held
    now[0] = 110.0
    with scheduler.held_if_idle(10.0) as held:
        assert held
    with scheduler.entered():
        assert scheduler.alone
