"""A server whose models give their memory back while nobody asks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import cacheblend_rag.engine.keep_alive as keep_alive
from cacheblend_rag.app.cli.configuration import GivenValue, server_settings
from cacheblend_rag.errors import ConfigError
from tests.app.server.common import client_of, running, settings_for

IN_MEMORY = 'cacheblend_rag_model_in_memory{{model="{}"}} {}'


def test_models_of_a_server_rest_until_somebody_asks(
    model: Path, deep: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_alive, "default_data_path", lambda: tmp_path / "cache")
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
            one.engine.keep_alive.seconds = 0.0
            one.engine.keep_alive.look()
        for path in ("/metrics", "/healthz", "/readyz", "/api/state", "/v1/models"):
            assert client.get(path).status_code == 200
        assert shown() == [False, False], "looking brings nothing back"
        assert ask() == expected
        assert shown() == [True, True]


def test_time_is_given_to_serve_by_flag_variable_and_file(docs: Path) -> None:
    given = {"docs": GivenValue(str(docs), "--docs"), "keep_alive": GivenValue("30m", "--keep-alive")}
    assert server_settings(given).rag.keep_alive == 1800.0
    with pytest.raises(ConfigError, match=r"^--keep-alive='soon' .*\"5m\""):
        server_settings(given | {"keep_alive": GivenValue("soon", "--keep-alive")})
