"""The page on operating the server, tried and computed."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from cacheblend_rag.app.cli import main
from cacheblend_rag.app.server.keys_file import change_keys, new_key
from docs.benchmarks.scripts.common import SHAPES, shape_config
from tests import tiny
from tests.app.server.common import (
    Running,
    client_of,
    new_collection,
    passage,
    running,
    settings_for,
    settle,
    upload,
    write_documents,
)

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "operations.md").read_text(encoding="utf-8")
TOKENS = 10_000 * 1_000


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def test_backup_of_a_running_server_holds_its_documents(model: Path, docs: Path, tmp_path: Path) -> None:
    data, backup = tmp_path / "data", tmp_path / "backup"
    data.mkdir()
    entry, key = new_key("ada", "ada")
    change_keys(data / "keys.json", lambda keys: [entry])
    with running(settings_for(model, docs, data)) as server, client_of(server, key) as client:
        id = new_collection(client, "Letters")
        for number in range(5):
            upload(client, id, {f"{number}.txt": passage(700 + number)})
        settle(server.service)
        variables = {**os.environ, "DATA": str(data), "BACKUP": str(backup)}
        done = subprocess.run(
            ["bash", "-euc", block("bash")], env=variables, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        upload(client, id, {"later.txt": passage(800)})
        before = client.get(f"/api/collections/{id}/documents").json()
    assert not [path for path in backup.rglob("*") if path.stat().st_mode & 0o077]
    shutil.rmtree(data)
    with running(settings_for(model, docs, backup)) as server, client_of(server, key) as client:
        after = client.get(f"/api/collections/{id}/documents").json()
        assert after == [one for one in before if one["name"] != "later.txt"]
        found = client.post(f"/api/collections/{id}/search", json={"query": passage(702), "k": 1}).json()
        assert found[0]["document"] == "2.txt"


def test_log_says_how_many_files_of_other_kinds_are_left_out(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    docs = write_documents(tmp_path / "docs", 1)
    for name in ("thing.xyz", "other.xyz", "picture.png"):
        (docs / name).write_bytes(b"x")
    caplog.set_level(logging.INFO)
    with running(settings_for(model, docs, tmp_path / "data")):
        assert "3 files of other kinds left out (2 .xyz, 1 .png)" in [one.getMessage() for one in caplog.records]


@pytest.mark.parametrize("shape", SHAPES)
def test_sizes_are_what_the_estimate_says(shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_minutes_are_what_was_measured_a_token() -> None:
    rows = re.findall(r"\| ([\d.]+) (ms|µs) \| ([\d,]+) \| ([\d,]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 3
    measured = (Path(__file__).parents[3] / "docs" / "benchmarks" / "warm.md").read_text(encoding="utf-8")
    in_bfloat16 = measured.partition("## With prompts in eight bits")[0]
    (behind_two,) = re.findall(r"warm behind two contexts, disk \| ([\d.]+) ms", in_bfloat16)
    for value, unit, sink, default in rows:
        assert f"{value} {unit}" in measured
        minutes = TOKENS * float(value) * {"ms": 1e-3, "µs": 1e-6}[unit] / 60
        assert float(sink.replace(",", "")) == pytest.approx(minutes, rel=0.02)
        if value == "2.27":  # the default was measured beside it
            assert float(default.replace(",", "")) == pytest.approx(TOKENS * float(behind_two) * 1e-3 / 60, rel=0.02)
        else:
            assert 2.0 * minutes < float(default.replace(",", "")) < 2.2 * minutes


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
