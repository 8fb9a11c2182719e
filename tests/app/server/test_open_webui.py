"""Open WebUI itself, from an environment of its own: passages that it retrieves are found in the prompts it writes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from cacheblend_rag.engine.segments import Kind
from tests.app.server.common import client_of, running, settings_for, settle
from tests.integrations.test_repeated import passage
from tests.waiting import until

pytestmark = pytest.mark.slow

# Its command, if that is not on the path: it has too many requirements to live beside the tests.
COMMAND = os.environ.get("OPEN_WEBUI") or shutil.which("open-webui")


@contextmanager
def open_webui(url: str, embedder: str, folder: Path) -> Iterator[httpx.Client]:
    """Open WebUI on a port of this machine, over a server of ours, and its one user."""
    assert COMMAND is not None
    folder /= "open-webui"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "DATA_DIR": str(folder),
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "a-key-of-16-characters",
        "OFFLINE_MODE": "true",
        "ANONYMIZED_TELEMETRY": "false",
        "ENABLE_OLLAMA_API": "False",
        "OPENAI_API_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "any",
        "RAG_TOP_K": "4",
        "RAG_EMBEDDING_ENGINE": "openai",
        "RAG_EMBEDDING_MODEL": embedder,
        "RAG_OPENAI_API_BASE_URL": f"{url}/v1",
        "RAG_OPENAI_API_KEY": "any",
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [COMMAND, "serve", "--host", "127.0.0.1", "--port", str(port)],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            until(lambda: process.poll() is not None or answers(client), 300)
            assert process.poll() is None, (folder / "log").read_text()
            told = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).raise_for_status()
            client.headers["Authorization"] = f"Bearer {told.json()['token']}"
            yield client
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def answers(client: httpx.Client) -> bool:
    """Whether it is ready."""
    try:
        return client.get("/health").is_success
    except httpx.TransportError:
        return False


def uploaded(client: httpx.Client, name: str, text: str) -> str:
    """Id of a document that is in its index."""
    sent = client.post(
        "/api/v1/files/", params={"process_in_background": "false"}, files={"file": (name, text, "text/markdown")}
    )
    assert sent.is_success, sent.text
    return str(sent.json()["id"])


@pytest.mark.skipif(COMMAND is None, reason="open-webui is not installed: set OPEN_WEBUI to its command")
def test_passages_that_open_webui_retrieves_hit_and_neither_questions_nor_answers_are_stored(
    deep: Path, docs: Path, tmp_path: Path
) -> None:
    texts, question = [passage(400 + number, 8) for number in range(4)], passage(450, 9)
    with running(settings_for(deep, docs, tmp_path)) as server, client_of(server) as ours:
        name, service = ours.get("/v1/models").json()["data"][0]["id"], server.service
        with open_webui(server.url, service.embedder_name, tmp_path) as theirs:
            files = [uploaded(theirs, f"file-{number}.md", text) for number, text in enumerate(texts)]
            assert name in [one["id"] for one in theirs.get("/api/models").raise_for_status().json()["data"]]
            found = []
            for some in ((1, 2), (0, 3, 1), (2, 0), (3, 2, 1), (0, 2)):
                body = {
                    "model": name,
                    "messages": [{"role": "user", "content": question}],
                    "files": [{"type": "file", "id": files[number]} for number in some],
                    "stream": False,
                }
                answer = theirs.post("/api/chat/completions", json=body)
                assert answer.is_success, answer.text
                found.append(answer.json()["cacheblend"][0]["found"])
                settle(service)
        assert found[0] == []
        assert any(found[-1])
        assert 'cacheblend_rag_found_chunks_total{found="hit"}' in ours.get("/metrics").text
        tokenizer = service.engine.tokenizer
        kept = [tokenizer.decode(info.token_ids) for _, info in service.engine.store.infos(Kind.FOUND)]
        assert kept
        assert all(any(text[:60] in one or text[-60:] in one for text in texts) for one in kept)
        assert not any(question[at : at + 40] in one for one in kept for at in range(0, len(question) - 40, 20))
