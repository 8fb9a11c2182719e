"""Two processes never write one data folder."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from cacheblend_rag.app.data_lock import DataLock
from cacheblend_rag.app.folder_rag import FolderRAG, FolderRAGOptions
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.errors import CacheBlendError, ConfigError
from tests.app.server.common import Served, documents, passage, upload, write_documents
from tests.programs import run_program
from tests.toy import EMBEDDER_PATH
from tests.waiting import until


def second(command: list[str], model: Path, docs: Path, data: Path) -> subprocess.CompletedProcess[str]:
    """Another process on the same folder."""
    arguments = ["--model", str(model), "--embedder", str(EMBEDDER_PATH), "--docs", str(docs), "--data-dir", str(data)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return run_program(
        ["-m", "cacheblend_rag.app.cli", *command, *arguments, "--device", "cpu"], data.parent, environment
    )


def test_second_process_is_refused_and_a_start_after_a_kill_finds_and_erases_what_it_must(
    model: Path, tmp_path: Path
) -> None:
    docs, data = write_documents(tmp_path / "docs"), tmp_path / "data"
    server = Served(model, docs, data)
    upload(server.client, {"a.txt": passage(60), "b.txt": passage(61)})
    for command in (["serve", "--port", "0"], ["ask", "Which leaf?"]):
        done = second(command, model, docs, data)
        assert done.returncode == 2, done.stderr
        assert f"in use by process {server.process.pid} (" in done.stderr
        assert "serve)" in done.stderr
        assert "use another data folder" in done.stderr
    body = {"model": model.name, "prompt": "Which?", "documents": [passage(60)], "max_tokens": 1}

    def hits(served: Served) -> int:
        return int(served.client.post("/v1/completions", json=body).json()["cacheblend"][0]["hits"])

    until(lambda: hits(server) == 1)
    assert server.end(signal.SIGKILL) == -signal.SIGKILL  # which leaves no time to give anything up
    (docs / "a.txt").unlink()  # as a deletion that was answered by nobody
    again = Served(model, docs, data)
    left = documents(again.client)
    assert ("a.txt" in left, "b.txt" in left, hits(again)) == (False, True, 0)
    assert again.end(signal.SIGTERM) in (0, -signal.SIGTERM)


def test_lock_holds_within_a_process_and_is_released_from_any_thread(tmp_path: Path) -> None:
    held = DataLock(tmp_path)
    with pytest.raises(ConfigError, match=f"data_dir=.*in use by process {os.getpid()}"):
        DataLock(tmp_path)
    thread = threading.Thread(target=held.release)
    thread.start()
    thread.join()
    held.release()
    DataLock(tmp_path).release()
    assert not (tmp_path / "in-use.json").exists()


def test_folder_locked_by_an_unknown_owner_is_refused(tmp_path: Path) -> None:
    held = DataLock(tmp_path)
    for text in ("", "{", "[]", '{"process": "x", "command": 1}'):
        (tmp_path / "in-use.json").write_text(text)
        with pytest.raises(ConfigError, match="in use by another process"):
            DataLock(tmp_path)
    held.release()


def test_failed_start_releases_the_data_folder(tmp_path: Path) -> None:
    docs = write_documents(tmp_path / "docs")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    options = FolderRAGOptions(
        docs=docs, model=tmp_path / "model", embedder=EMBEDDER_PATH, data_dir=tmp_path / "data", config=BlendConfig()
    )
    with pytest.raises(CacheBlendError):
        FolderRAG(options)
    DataLock(tmp_path / "data").release()
