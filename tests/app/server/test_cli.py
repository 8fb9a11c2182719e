"""``cacheblend-rag serve``: its options, and what it says when it cannot start."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from cacheblend_rag.app.cli import _parser, main
from cacheblend_rag.app.cli.serve import server_settings
from cacheblend_rag.app.server.logs import JsonFormatter
from cacheblend_rag.app.server.request_ids import request_id
from cacheblend_rag.app.server.settings import KEYS_VARIABLE
from tests.toy import EMBEDDER_PATH


def test_options_become_settings(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "ada=0123456789abcdef")
    options = ["--host", "0.0.0.0", "--port", "0", "--upload-limit", "5MB", "--queue", "3", "--ratio", "0.2"]
    settings = server_settings(_parser().parse_args(["serve", "--docs", str(docs), *options, "--max-new-tokens", "9"]))
    assert (settings.host, settings.port) == ("0.0.0.0", 0)
    assert (settings.limits.upload_bytes, settings.limits.queue) == (5_000_000, 3)
    assert (settings.rag.config.recompute_ratio, settings.rag.max_new_tokens) == (0.2, 9)
    assert settings.rag.docs == str(docs)
    assert settings.served_model_name is None
    named = server_settings(_parser().parse_args(["serve", "--served-model-name", "house/model-1"]))
    assert named.served_model_name == "house/model-1"
    assert "0123456789abcdef" not in repr(settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], KEYS_VARIABLE),
        (["--port", "70000"], "port=70000"),
        (["--queue", "0"], "queue=0"),
        (["--served-model-name", "two words"], "served_model_name='two words'"),
        (["--upload-limit", "much"], "upload_limit='much'"),
        (["--docs", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_used_is_named(
    arguments: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = ["--model", str(model), "--embedder", str(EMBEDDER_PATH), "--data-dir", str(tmp_path)]
    assert main(["serve", *known, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_log_line_has_the_kind_of_an_error_and_not_its_message() -> None:
    try:
        raise ValueError("pineapple")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    record.fields = {"path": "/x"}
    assert "request" not in json.loads(JsonFormatter().format(record))
    token = request_id.set("mine-17")
    line = json.loads(JsonFormatter().format(record))
    request_id.reset(token)
    assert line["request"] == "mine-17"
    assert (line["message"], line["error"], line["path"], line["level"]) == ("failed", "ValueError", "/x", "error")
    assert "pineapple" not in str(line)
