"""The page on operating the server, tried and computed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from cacheblend_rag.app.cli import main
from docs.benchmarks.scripts.common import SHAPES, shape_config
from tests import tiny
from tests.app.server.common import Running, client_of

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "operations.md").read_text(encoding="utf-8")
TOKENS = 10_000 * 1_000


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def test_sizes_are_what_the_estimate_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = next(iter(SHAPES))
    config = shape_config(shape)
    config.dtype = "bfloat16"
    config.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    assert main(["cache", "estimate", "--model", str(tmp_path), "--dtype", "bfloat16"]) == 0
    a_token = dict(re.findall(r"^(\w+) +([\d.]+) kB a token", capsys.readouterr().out, re.MULTILINE))
    (row,) = re.findall(rf"^\| {re.escape(shape)} \| (.+) \|$", PAGE, re.MULTILINE)
    shown = [float(re.sub(r"[^\d.]", "", cell)) for cell in row.split(" | ")]
    assert shown[0] == float(a_token["raw"])
    for gigabytes, codec in zip(shown[1:], ("raw", "int8"), strict=True):
        assert gigabytes == pytest.approx(TOKENS * float(a_token[codec]) * 1e3 / 1e9, rel=0.01)


def test_metrics_named_in_the_guide_exist(server: Running) -> None:
    target = yaml.safe_load(block("yaml"))["scrape_configs"][0]
    assert target["job_name"] == "cacheblend-rag"
    with client_of(server) as client:
        client.post("/api/ask", json={"question": "Which leaf?"})
        text = client.get("/metrics").text
    named = set(re.findall(r"`((?:cacheblend_rag|process)_\w+)`", PAGE))
    assert len(named) >= 14
    known = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
    assert named <= known
