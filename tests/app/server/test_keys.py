"""API keys in a file: made and revoked while a server runs, and what the file must be like."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from cacheblend_rag.app.cli import main
from cacheblend_rag.app.server import keys_file
from cacheblend_rag.app.server.keys_file import KEYS_FILE, KeysFile, change_keys, new_key, read_keys
from cacheblend_rag.app.server.security.file_reader import FileReader
from cacheblend_rag.errors import ConfigError
from tests.app.server.common import (
    Running,
    client_of,
    new_collection,
    passage,
    process_logits,
    read_events,
    running,
    settings_for,
    settle,
    upload,
)
from tests.waiting import Clock, until

ENV_KEY = "env-0123456789abcdef"


@pytest.fixture
def add(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Make a key by the command; the key."""

    def made(name: str, *more: str) -> str:
        assert main(["keys", "add", name, "--data-dir", str(tmp_path), *more]) == 0
        return capsys.readouterr().out.splitlines()[-1]

    return made


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
    assert one != other
    path = tmp_path / KEYS_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    for part in (one, other, one.split("_", 2)[2], other.split("_", 2)[2]):
        assert part not in text
    entries = read_keys(path)
    assert [(entry.name, entry.tenant) for entry in entries] == [("ada", "ada"), ("ben", "ada")]
    assert entries[0].salt != entries[1].salt
    assert [entry.fits(one) for entry in entries] == [True, False]
    assert main(["keys", "list", "--data-dir", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[:2] for line in listed.splitlines()] == [["ada", "ada"], ["ben", "ada"]]
    assert main(["keys", "revoke", "ada", "--data-dir", str(tmp_path)]) == 0
    assert [entry.name for entry in read_keys(path)] == ["ben"]
    assert list(tmp_path.glob("*.new")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["add", "ada"], "name='ada' is not usable: there is a key of this name"),
        (["add", "../ada"], "name='../ada' is not usable: use 1 to 64 letters"),
        (["add", "ben", "--tenant", "a/b"], "tenant='a/b' is not usable: use 1 to 64 letters"),
        (["revoke", "ben"], "name='ben' is not usable: there is no such key; there are: ada"),
    ],
)
def test_keys_command_names_what_it_cannot_do(
    arguments: list[str], message: str, tmp_path: Path, add: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    add("ada")
    assert main(["keys", *arguments, "--data-dir", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert [entry.name for entry in read_keys(tmp_path / KEYS_FILE)] == ["ada"]


def test_the_file_is_where_the_server_looks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "serve.toml"
    config.write_text(f"[rag]\ndata_dir = '{tmp_path / 'data'}'")
    assert main(["keys", "add", "ada", "--config", str(config)]) == 0
    config.write_text(f"[server]\nkeys_file = '{tmp_path / 'own.json'}'")
    assert main(["keys", "add", "ben", "--config", str(config)]) == 0
    monkeypatch.setenv("CACHEBLEND_RAG_DATA_DIR", str(tmp_path / "other"))
    assert main(["keys", "add", "eve"]) == 0
    for name, path in (("ada", "data/keys.json"), ("ben", "own.json"), ("eve", "other/keys.json")):
        assert [entry.name for entry in read_keys(tmp_path / path)] == [name]
    assert main(["keys", "list", "--data-dir", str(tmp_path / "nowhere")]) == 2
    assert not (tmp_path / "nowhere").exists()


def damaged(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.chmod(0o644), "others can read or change it: chmod 600"),
        (lambda path: path.chmod(0o620), "others can read or change it"),
        (damaged("{"), "it is damaged"),
        (damaged("[]"), "it is damaged"),
        (damaged('{"version": 1, "keys": [{"name": "ada"}]}'), "it is damaged"),
        (damaged('{"version": 2, "keys": []}'), "it is of version 2"),
        (lambda path: path.write_text(path.read_text().replace('"tenant": "ada"', '"tenant": 3')), "it is damaged"),
        (lambda path: path.write_text(path.read_text().replace('"tenant": "ada"', '"tenant": "../x"')), "'../x'"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "it is damaged"),
        (lambda path: path.unlink(), "No such file"),
    ],
)
def test_bad_key_file_stops_a_start_and_leaves_a_running_server_its_keys(
    damage: Callable[[Path], object],
    message: str,
    model: Path,
    docs: Path,
    tmp_path: Path,
    add: Callable[..., str],
    at_once: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    key, path = add("ada"), tmp_path / KEYS_FILE
    running_keys = KeysFile(path)
    damage(path)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            found = running_keys.find(key)
            assert found is not None
            assert found.tenant == "ada"
    (record,) = caplog.records  # it is told once
    assert "the former keys hold" in record.getMessage()
    assert message in record.getMessage()
    with pytest.raises(ConfigError, match="keys_file") as refused:
        settings_for(model, docs, tmp_path, keys_file=path)
    assert message in str(refused.value)


def test_file_that_cannot_be_read_for_a_moment_is_read_at_the_next_look(
    tmp_path: Path, add: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    """A server without a free descriptor, just as a key is revoked."""
    key, path, clock = add("ada"), tmp_path / KEYS_FILE, Clock()
    known = KeysFile(path, clock)
    change_keys(path, lambda _: [])
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, old[1]))
    try:
        for _ in range(3):
            clock.advance(1)
            assert known.find(key) is not None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)
    clock.advance(1)
    assert known.find(key) is None
    (record,) = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert "Too many open files" in record.getMessage()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"sha256": "', '"sha256": "é'),
        lambda text: text.replace('"salt": "', '"salt": "\\ud800'),
        lambda text: "[" * 100_000,
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "null",
    ],
    ids=["no hash", "no salt", "deep", "half", "empty", "null"],
)
def test_damaged_file_lets_nobody_in_and_throws_nobody_out(
    tmp_path: Path, add: Callable[..., str], damage: Callable[[str], str]
) -> None:
    key, path, clock = add("ada"), tmp_path / KEYS_FILE, Clock()
    known, text = KeysFile(path, clock), path.read_text()
    entry, other = new_key("ben", "ben")
    for content in (damage(text), text, damage(text)):
        path.write_text(content, encoding="utf-8")  # where it is, as an editor does
        clock.advance(1)
        assert known.find(key) is not None
        assert known.find(other) is None
    path.unlink()
    clock.advance(1)
    assert known.find(key) is not None
    change_keys(path, lambda none: [entry])
    clock.advance(1)
    assert (known.find(key), known.find(other)) == (None, entry)


def test_file_of_the_same_size_and_time_is_another(tmp_path: Path) -> None:
    path, clock = tmp_path / KEYS_FILE, Clock()
    one, other = new_key("one", "ada"), new_key("two", "ada")
    change_keys(path, lambda _: [one[0]])
    known, before = KeysFile(path, clock), path.stat()
    change_keys(path, lambda _: [other[0]])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    clock.advance(1)
    assert (known.find(one[1]), known.find(other[1])) == (None, other[0])


def test_keys_come_and_go_while_the_server_runs(server: Running, tmp_path: Path, add: Callable[..., str]) -> None:
    assert status(server, ENV_KEY) == 200
    assert status(server, "") == 401
    ben = add("ben")
    assert status(server, ben) == 200
    again = add("ben-2", "--tenant", "ben")
    with client_of(server, ben) as old, client_of(server, again) as new:
        id = new_collection(old)
        events = upload(old, id, {"a.txt": passage(900)})  # the tenant was not there when the server started
        settle(server.service)
        assert events[-1]["stage"] == "done"
        assert main(["keys", "revoke", "ben", "--data-dir", str(tmp_path)]) == 0
        assert old.get(f"/api/collections/{id}/documents").status_code == 401
        assert len(new.get(f"/api/collections/{id}/documents").json()) == 1
        asked = new.post(f"/api/collections/{id}/ask", json={"question": "Which leaf?"})
        assert read_events(asked.text)[-1][0] == "done"
    assert status(server, ENV_KEY, f"/api/collections/{id}/documents") == 404


def test_documents_of_a_tenant_whose_key_comes_back_are_there(
    model: Path, docs: Path, tmp_path: Path, add: Callable[..., str], at_once: None
) -> None:
    old = add("ada")
    with running(settings_for(model, docs, tmp_path)) as server, client_of(server, old) as client:
        id = new_collection(client)
        upload(client, id, {"a.txt": passage(910)})
        assert main(["keys", "revoke", "ada", "--data-dir", str(tmp_path)]) == 0
    with running(settings_for(model, docs, tmp_path)) as server:
        assert server.service.sessions == {}
        key = add("ada")
        with client_of(server, key) as client, ThreadPoolExecutor(8) as pool:
            path = f"/api/collections/{id}/documents"
            answers = list(pool.map(lambda _: client.get(path), range(8)))  # all are the first
            assert [answer.status_code for answer in answers] == [200] * 8
            assert [one["name"] for one in answers[0].json()] == ["a.txt"]
            assert upload(client, id, {"b.txt": passage(911)})[-1]["stage"] == "done"


def test_the_last_key_that_goes_opens_nothing(server: Running, tmp_path: Path, add: Callable[..., str]) -> None:
    assert main(["keys", "revoke", "ada", "--data-dir", str(tmp_path)]) == 0
    assert [status(server, key) for key in ("", "x", ENV_KEY)] == [401, 401, 200]


def test_key_file_without_keys_closes_the_server(model: Path, docs: Path, tmp_path: Path, at_once: None) -> None:
    path = tmp_path / "keys.json"
    change_keys(path, lambda keys: ())
    with running(settings_for(model, docs, tmp_path)) as server:
        assert status(server, "") == 401
        entry, key = new_key("ada", "ada")
        change_keys(path, lambda keys: [*keys, entry])
        assert status(server, key) == 200


def test_parts_of_keys_open_nothing(server: Running, add: Callable[..., str]) -> None:
    ada, ben = add("ada-2"), add("ben")
    mark, id, secret = ada.split("_", 2)
    other = ben.split("_", 2)[2]
    entry = next(one for one in read_keys(server.service.settings.keys_file) if one.name == "ada-2")
    for wrong in (
        f"{mark}_{id}_{other}",  # the id of one, the secret of another
        f"{mark}_{id}_",
        f"{mark}_{id}",
        f"_{id}_{secret}",
        f"{mark}__{secret}",
        secret,
        entry.sha256,
        f"{mark}_{id}_{entry.sha256}",
        f"{ada}x",
        ada[:-1],
    ):
        assert status(server, wrong) == 401, wrong
    assert status(server, ada) == 200


def test_key_for_metrics_reads_nothing_else(server: Running, add: Callable[..., str]) -> None:
    key = add("prometheus", "--metrics")
    assert status(server, key, "/metrics") == 200
    with client_of(server, key) as client:
        refused = [
            client.get("/v1/models"),
            client.get("/api/state"),
            client.post("/api/collections", json={"name": "x"}),
            client.get("/metrics/"),
        ]
    assert [answer.status_code for answer in refused] == [403] * 4
    assert refused[0].json()["error"]["code"] == "metrics_only"


def test_changed_file_is_seen_within_its_time_and_not_looked_at_for_every_request(
    tmp_path: Path, add: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = add("ada")
    clock = Clock()
    keys, looks = KeysFile(tmp_path / KEYS_FILE, clock), 0
    state = KeysFile.state

    def counted(self: KeysFile) -> tuple[int, ...]:
        nonlocal looks
        looks += 1
        return state(self)

    monkeypatch.setattr(KeysFile, "state", counted)
    assert main(["keys", "revoke", "ada", "--data-dir", str(tmp_path)]) == 0
    for _ in range(4):  # within a second
        clock.advance(0.2)
        assert keys.find(key) is not None
    assert looks == 0
    clock.advance(0.2)
    assert keys.find(key) is None
    assert looks == 1


def test_keys_that_are_added_at_the_same_time_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / KEYS_FILE

    def add(number: int) -> None:
        entry, _ = new_key(f"key-{number}", "ada")
        change_keys(path, lambda keys: [*keys, entry])

    threads = [threading.Thread(target=add, args=(number,)) for number in range(12)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(read_keys(path)) == 12


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_root_leaves_the_file_to_the_user_of_the_server(tmp_path: Path) -> None:
    os.chown(tmp_path, 1234, 1234)
    path = tmp_path / "state" / "data" / KEYS_FILE
    change_keys(path, lambda keys: [new_key("ada", "ada")[0]])
    assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (1234, 0o600)
    assert {one.stat().st_uid for one in tmp_path.rglob("*")} == {1234}, "folders and its lock, too"
    assert json.loads(path.read_text())["version"] == 1


def test_links_that_are_laid_out_for_root_lead_nowhere(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("keys.json.new", "keys.json"):
        (folder / name).symlink_to(victim)
    keys_file.write_private(folder / "keys.json", "new")
    assert victim.read_text() == "mine"
    assert (folder / "keys.json").read_text() == "new"
    assert not (folder / "keys.json").is_symlink()


def test_clients_of_a_running_server_are_not_slowed_by_wrong_keys(server: Running, add: Callable[..., str]) -> None:
    """A slow hash would be a way to keep the server busy: a wrong key costs as little as none."""
    key = add("ben")
    wrong = key[:-4] + "AAAA"
    keys = KeysFile(server.service.settings.keys_file)
    began = time.process_time()
    for _ in range(2000):
        assert keys.find(wrong) is None
    assert time.process_time() - began < 20, "2,000 slow hashes take minutes"
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {key}"}) as client:
        assert client.get("/v1/models").status_code == 200


def test_conversations_go_with_the_last_key_of_their_tenant(
    server: Running, tmp_path: Path, add: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    key, folder = add("ada-2", "--tenant", "ada"), tmp_path / "tenants" / "ada"
    with client_of(server, key) as client:
        id = client.post("/api/conversations", json={"collections": ["archive"]}).json()["id"]
        body = {"question": "Is this gone by then?", "conversation": id, "stream": False}
        assert client.post("/api/collections/archive/ask", json=body).status_code == 200

        def files_with_it() -> list[Path]:
            return [one for one in folder.rglob("*") if one.is_file() and b"gone by then" in one.read_bytes()]

        assert main(["keys", "revoke", "ada", "--data-dir", str(tmp_path)]) == 0
        assert "erased" not in capsys.readouterr().out
        assert len(client.get("/api/conversations").json()) == 1
        assert files_with_it() != []
        assert main(["keys", "revoke", "ada-2", "--data-dir", str(tmp_path)]) == 0  # the server runs
        assert "the last key of ada: 1 conversations are erased" in capsys.readouterr().out
    assert files_with_it() == []
    with client_of(server, add("ada")) as client:
        assert client.get("/api/conversations").json() == []


class Stream:
    """An answer that a thread reads, until it ends or is broken off."""

    def __init__(self, client: httpx.Client, method: str, path: str, body: dict[str, object] | None = None) -> None:
        self.text, self.broken, self.status = "", False, 0
        self._thread = threading.Thread(target=self._read, args=(client, method, path, body))
        self._thread.start()

    def _read(self, client: httpx.Client, method: str, path: str, body: dict[str, object] | None) -> None:
        try:
            with client.stream(method, path, json=body) as answer:
                self.status = answer.status_code
                for piece in answer.iter_text():
                    self.text += piece
        except httpx.RemoteProtocolError:
            self.broken = True

    @property
    def goes_on(self) -> bool:
        return self._thread.is_alive()


def test_revoked_key_ends_what_it_reads_and_the_last_key_ends_the_answer(
    server: Running, tmp_path: Path, add: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, go_on = FileReader.read, threading.Event()

    def slow(ids: object, scores: Any) -> Any:
        time.sleep(0.02)
        scores[..., 2] = -math.inf  # the end of a text
        return scores

    def held(self: FileReader, *given: Path | str) -> object:
        assert go_on.wait(60)
        return file(self, *given)  # type: ignore[arg-type]

    process_logits(monkeypatch, slow)
    monkeypatch.setattr(FileReader, "read", held)
    with client_of(server, add("ben")) as one, client_of(server, add("ben-2", "--tenant", "ben")) as other:
        id = one.post("/api/conversations", json={"collections": ["archive"]}).json()["id"]
        sent = [("files", ("a.txt", passage(900)))]
        job = one.post(f"/api/collections/{new_collection(one)}/documents", files=sent).json()["job"]
        long = {"max_tokens": 2_000, "stop_repetition": False}
        model = one.get("/v1/models").json()["data"][0]["id"]
        asked = {"question": "Which leaf?", "conversation": id, "turn": "one", **long}
        streams = [
            Stream(one, "POST", "/api/collections/archive/ask", asked),
            Stream(one, "POST", "/v1/completions", {"model": model, "prompt": "Which?", "stream": True, **long}),
            Stream(one, "GET", f"/api/jobs/{job}/events"),
        ]
        until(lambda: all("data: " in stream.text for stream in streams))
        streams.append(Stream(one, "POST", "/v1/completions", {"model": model, "prompt": "Which?"}))
        until(lambda: server.service.queue.waiting_of("ben"))  # a tenant has half of the slots
        followed = Stream(other, "GET", "/api/answers/one/events")
        assert main(["keys", "revoke", "ben", "--data-dir", str(tmp_path)]) == 0
        until(lambda: not any(stream.goes_on for stream in streams), 30)
        assert not any(stream.broken for stream in streams)
        assert all("the key was revoked" in stream.text for stream in streams)
        assert (streams[3].status, json.loads(streams[3].text)["error"]["message"]) == (401, "the key was revoked")
        seen = followed.text
        until(lambda: followed.goes_on and followed.text != seen)
        (answer,) = server.service.sessions["ben"].under_way._known.values()
        assert answer.state == "running"
        assert main(["keys", "revoke", "ben-2", "--data-dir", str(tmp_path)]) == 0
        until(lambda: answer.over and not followed.goes_on, 30)
        assert answer.state == "stopped"
        go_on.set()
        settle(server.service)
    counted = server.service.metrics.text().decode()
    assert 'tenant_requests_total{key="ben",status="4xx",tenant="ben"} 4.0' in counted
    for kind in ("prompt", "generated"):  # of both answers, up to where they were broken off
        assert float(re.findall(rf'tenant_tokens_total{{key="ben",kind="{kind}",.*}} (\S+)', counted)[0]) > 10


def test_server_closes_what_is_open_for_tenants_that_have_left(
    server: Running, tmp_path: Path, add: Callable[..., str]
) -> None:
    """Keys come and go while it runs; when the next tenant comes, it has as many open as there are."""
    service = server.service
    for number in range(3):
        name, key = f"guest-{number}", add(f"guest-{number}")
        with client_of(server, key) as client:
            id = new_collection(client)
            upload(client, id, {"a.txt": passage(900)})
        settle(service)
        assert set(service.sessions) == {"eve", "ada", name}
        session = service.sessions[name]
        assert not session.is_idle(), "it was here just now"
        session.used -= 3_700
        assert main(["keys", "revoke", name, "--data-dir", str(tmp_path)]) == 0
    with client_of(server, add("guest-0")) as client:  # who comes back finds what is there
        assert id not in [one["id"] for one in client.get("/api/state").json()["collections"]]
        (mine,) = [one for one in client.get("/api/state").json()["collections"] if one["writable"]]
        assert mine["documents"] == 1
        upload(client, mine["id"], {"b.txt": passage(901)})
        assert len(client.get(f"/api/collections/{mine['id']}/documents").json()) == 2
    assert set(service.sessions) == {"eve", "ada", "guest-0"}
    assert set(service.ingestion._libraries) == set(service.sessions)


def test_conversations_can_stay_for_a_key_made_later(server: Running, tmp_path: Path, add: Callable[..., str]) -> None:
    key = add("flo")
    with client_of(server, key) as client:
        client.post("/api/conversations", json={"collections": ["archive"]})
    assert main(["keys", "revoke", "flo", "--keep-conversations", "--data-dir", str(tmp_path)]) == 0
    with client_of(server, add("flo")) as client:
        assert len(client.get("/api/conversations").json()) == 1
