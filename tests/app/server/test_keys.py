"""API keys in a file: made while a server runs, taken out by editing the file, and what the file must be like."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.app.cli import main
from cacheblend_rag.app.server import keys_file
from cacheblend_rag.app.server.keys_file import KEYS_FILE, KeysFile, add_key, new_key, read_keys, secret_kept
from cacheblend_rag.errors import ConfigError
from tests.app.server.common import (
    Running,
    client_of,
    documents,
    passage,
    process_logits,
    running,
    settings_for,
    settle,
    upload,
)
from tests.waiting import until

ENV_KEY = "env-0123456789abcdef"


@pytest.fixture
def add(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Make a key by the command; the key."""

    def made(name: str, *more: str) -> str:
        assert main(["keys", "add", name, "--data-dir", str(tmp_path), *more]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    return made


def test_damaged_salt_is_put_aside_and_another_drawn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "salt"
    first = secret_kept(path, 16)
    assert secret_kept(path, 16) == first
    for damage in (b"\xff\x00\x80", first[:-1].encode(), first[:-2].encode(), b"no salt"):
        path.write_bytes(damage)
        drawn = secret_kept(path, 16)
        assert (len(drawn), secret_kept(path, 16)) == (32, drawn)
        assert (tmp_path / "salt.damaged").read_bytes() == damage
    assert caplog.text.count("is damaged") == 4
    with pytest.raises(ConfigError, match=r"data_dir='.*test_.*' .*: Is a directory; move it away"):
        secret_kept(tmp_path, 16)


def take_out(folder: Path, *names: str) -> None:
    """Edit a file of keys, as a person does."""
    path = folder / KEYS_FILE
    content = json.loads(path.read_text())
    content["keys"] = [one for one in content["keys"] if one["name"] not in names]
    path.write_text(json.dumps(content))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is looked at for every request."""
    monkeypatch.setattr(keys_file, "LOOK_AGAIN", 0.0)


@pytest.fixture
def server(model: Path, docs: Path, tmp_path: Path, add: Callable[..., str], at_once: None) -> Iterator[Running]:
    """A server with a tenant of the environment and one of a file."""
    add("ada")
    with running(settings_for(model, docs, tmp_path, keys={"eve": ENV_KEY})) as made:
        yield made


def status(server: Running, key: str, path: str = "/v1/models") -> int:
    with client_of(server, key) as client:
        return client.get(path).status_code


def test_the_file_holds_no_key_and_is_the_owners_alone(
    tmp_path: Path, add: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = add("ada"), add("ben", "--tenant", "ada")
    assert len(one) > 40
    path = tmp_path / KEYS_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    for part in (one, other, one.split("_", 2)[2], other.split("_", 2)[2]):
        assert part not in path.read_text()
    entries = read_keys(path)
    assert [(entry.name, entry.tenant) for entry in entries] == [("ada", "ada"), ("ben", "ada")]
    assert entries[0].salt != entries[1].salt
    assert [entry.fits(one) for entry in entries] == [True, False]
    assert list(tmp_path.glob("*.new")) == []
    for arguments, message in (
        (["ada"], "name='ada' is not usable: there is a key of this name"),
        (["../ada"], "name='../ada' is not usable: use 1 to 64 letters"),
        (["cal", "--tenant", "a/b"], "tenant='a/b' is not usable: use 1 to 64 letters"),
    ):
        assert main(["keys", "add", *arguments, "--data-dir", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err
    with ThreadPoolExecutor(12) as pool:  # at the same time
        list(pool.map(lambda number: add_key(path, new_key(f"key-{number}", "ada")[0]), range(12)))
    assert len(read_keys(path)) == 14


def test_bad_key_file_stops_a_start_and_leaves_a_running_server_its_keys(
    model: Path, docs: Path, tmp_path: Path, add: Callable[..., str], at_once: None, caplog: pytest.LogCaptureFixture
) -> None:
    key, path = add("ada"), tmp_path / KEYS_FILE
    text, known = path.read_text(), KeysFile(path)
    cases: list[tuple[str | bytes | int | None, str]] = [
        (0o644, "others can read or change it: chmod 600"),
        (0o620, "others can read or change it"),
        ("{", "it is damaged"),
        ("[" * 100_000, "it is damaged"),
        ('{"version": 1, "keys": [{"name": "ada"}]}', "it is damaged"),
        ('{"version": 2, "keys": []}', "it is of version 2"),
        (text.replace('"tenant": "ada"', '"tenant": "../x"'), "'../x'"),
        (text.replace('"sha256": "', '"sha256": "é'), "it is damaged"),
        (b"\xff\xfe", "it is damaged"),
        (None, "No such file"),
    ]
    for damage, message in cases:
        if isinstance(damage, int):
            path.chmod(damage)
        elif damage is None:
            path.unlink()
        else:
            path.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                found = known.find(key)
                assert found is not None
                assert found.tenant == "ada"
        (record,) = caplog.records  # it is told once
        assert "the previous keys stay valid" in record.getMessage()
        assert message in record.getMessage()
        with pytest.raises(ConfigError, match="keys_file") as refused:
            settings_for(model, docs, tmp_path, keys_file=path)
        assert message in str(refused.value)
        path.touch()
        path.write_text(text)
        path.chmod(0o600)
        assert known.find(key) is not None


def test_keys_come_and_go_while_the_server_runs(server: Running, tmp_path: Path, add: Callable[..., str]) -> None:
    assert [status(server, key) for key in (ENV_KEY, "")] == [200, 401]
    ben = add("ben")
    again = add("ben-2", "--tenant", "ben")
    with client_of(server, ben) as old, client_of(server, again) as new:
        upload(old, {"a.txt": passage(900)})  # the tenant was not there when the server started
        take_out(tmp_path, "ben")
        assert old.get("/api/documents").status_code == 401
        assert "a.txt" in documents(new)
        take_out(tmp_path, "ben-2")
        assert new.get("/api/documents").status_code == 401
    with client_of(server, add("ben-3", "--tenant", "ben")) as back:
        assert "a.txt" in documents(back), "documents of a tenant whose key comes back are there"
    assert [status(server, key) for key in ("", "x", ENV_KEY)] == [401, 401, 200]
    mark, id, secret = ben.split("_", 2)
    ada = add("ada-2")
    for wrong in (f"{mark}_{id}_", f"{mark}_{id}", f"_{id}_{secret}", secret, f"{ada}x", ada[:-1], ben):
        assert status(server, wrong) == 401, wrong
    metrics = add("prometheus", "--metrics")
    assert status(server, metrics, "/metrics") == 200
    assert [status(server, metrics, path) for path in ("/v1/models", "/api/state", "/metrics/")] == [403] * 3


def test_key_that_is_taken_out_ends_what_is_under_way_with_it(
    server: Running, tmp_path: Path, add: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, token = threading.Event(), threading.Semaphore(0)

    def slow(ids: Any, scores: Any) -> Any:
        token.release()
        go_on.wait(0.05)
        scores[..., 2] = float("-inf")
        return scores

    process_logits(monkeypatch, slow)
    monkeypatch.setattr("cacheblend_rag.app.server.api.gatekeeper.LOOK_AGAIN", 0.1)
    with (
        client_of(server, add("ben")) as one,
        client_of(server, add("ben-2", "--tenant", "ben")) as other,
        ThreadPoolExecutor(3) as pool,
    ):
        long = {"max_tokens": 2_000, "stop_repetition": False}
        completion = {"model": server.service.model_name, "prompt": "Which?", **long}
        asked = [
            pool.submit(one.post, "/api/ask", json={"question": "Which leaf?", **long}),
            pool.submit(one.post, "/v1/completions", json={**completion, "stream": True}),
        ]
        until(lambda: server.service.queue.served == 2)
        assert all(token.acquire(timeout=60) for _ in range(12))
        asked.append(pool.submit(one.post, "/v1/completions", json=completion))
        until(lambda: server.service.queue.waiting)  # a tenant has half of the slots
        take_out(tmp_path, "ben")
        answers = [future.result(60) for future in asked]
        assert all("the key was revoked" in answer.text for answer in answers)
        assert (answers[2].status_code, answers[2].json()["error"]["message"]) == (401, "the key was revoked")
        assert other.get("/v1/models").status_code == 200
        go_on.set()
        settle(server.service)
    counted = server.service.metrics.text().decode()
    for kind in ("prompt", "generated"):  # of both answers, up to where they were broken off
        assert float(re.findall(rf'tenant_tokens_total{{key="ben",kind="{kind}",.*}} (\S+)', counted)[0]) > 3
