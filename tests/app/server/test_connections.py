"""Clients that send half of a request, one byte at a time, or nothing; and a server that is to stop."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from cacheblend_rag.app.server import app
from cacheblend_rag.app.server.api.streams import EventStream, event
from cacheblend_rag.app.server.services.admission_queue import AdmissionQueue
from cacheblend_rag.app.server.settings import Limits
from tests.app.server.common import Running, client_of, running, settings_for
from tests.programs import start_program
from tests.toy import EMBEDDER_PATH
from tests.waiting import until

HALF = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
WHOLE = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
KEYS = {"ada": "ada-0123456789abcdef"}


@pytest.fixture(scope="module")
def careful(model: Path, docs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = Limits(connections=60, address_connections=40, head_seconds=10, body_seconds=30)
    with running(settings_for(model, docs, tmp_path_factory.mktemp("data"), limits=limits, keys=KEYS)) as made:
        yield made


def address_of(server: Running) -> tuple[str, int]:
    host, port = server.server.servers[0].sockets[0].getsockname()[:2]
    return str(host), int(port)


@contextmanager
def connected(server: Running, sent: bytes, source: str = "127.0.0.1") -> Iterator[socket.socket]:
    with socket.create_connection(address_of(server), 20, (source, 0)) as made:
        made.sendall(sent)
        yield made


def heard(one: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    pieces = []
    try:
        while piece := one.recv(65536):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def test_half_sent_heads_of_one_address_leave_room_for_others_and_end(careful: Running) -> None:
    with ExitStack() as open_ones:
        slow = [open_ones.enter_context(connected(careful, HALF)) for _ in range(39)]
        with connected(careful, WHOLE) as last, connected(careful, WHOLE) as more:
            assert last.recv(12) == b"HTTP/1.1 200"
            assert more.recv(12) == b"HTTP/1.1 429"
        with connected(careful, WHOLE, "127.0.0.2") as other:
            assert other.recv(12) == b"HTTP/1.1 200"
        careful.later(10)
        answers = [heard(one) for one in slow]
        assert all(one.startswith(b"HTTP/1.1 408") for one in answers)


def waits_for_body(server: Running) -> bool:
    """Whether the head of a request has been read, and its body has not."""
    connections: list[Any] = list(server.server.server_state.connections)
    return any(one.under_way and one.cycle.more_body for one in connections)


def test_stalled_body_is_cut_off_and_a_slow_one_is_not(careful: Running) -> None:
    head = (
        f"POST /api/search HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEYS['ada']}\r\n"
        "Content-Type: application/json\r\nContent-Length: 23\r\n\r\n"
    ).encode()
    with connected(careful, head + b'{"question"') as one:
        until(lambda: waits_for_body(careful))
        careful.later(30)
        assert heard(one) == b""
    with connected(careful, head) as one:
        until(lambda: waits_for_body(careful))
        for byte in b'{"question":  "a leaf"}':
            one.sendall(bytes([byte]))
            careful.later(29)  # all take longer than one may
        assert one.recv(12) == b"HTTP/1.1 200"


FILE = b"GET /static/vendor/markdown-it.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@contextmanager
def never_reading(server: Running, sent: bytes, source: str) -> Iterator[socket.socket]:
    """A connection whose client takes as little as its system lets it."""
    with socket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        made.bind((source, 0))
        made.settimeout(20)
        made.connect(address_of(server))
        made.sendall(sent)
        yield made


@pytest.fixture
def small_buffers(careful: Running) -> Iterator[None]:
    """The system takes little of an answer for those who do not read it."""
    listening = careful.server.servers[0].sockets[0]
    before = listening.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    yield
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, before // 2)  # the system doubles what it is told


def stalled(server: Running) -> list[Any]:
    return [one for one in list(server.server.server_state.connections) if one.flow.write_paused]


@pytest.mark.usefixtures("small_buffers")
def test_answers_that_nobody_takes_are_given_up(careful: Running) -> None:
    with ExitStack() as open_ones:
        for number in range(20):
            open_ones.enter_context(never_reading(careful, FILE, f"127.0.2.{number % 4 + 1}"))
        until(lambda: len(stalled(careful)) == 20)
        careful.later(29)
        assert len(stalled(careful)) == 20, "they have thirty seconds"
        careful.later(1)
        until(lambda: not careful.server.server_state.connections)
        until(lambda: not careful.server.server_state.tasks)


@pytest.mark.usefixtures("small_buffers")
def test_readers_who_take_nothing_give_way_to_others_at_once(careful: Running) -> None:
    """All connections there may be, of four addresses."""
    with ExitStack() as open_ones:
        for number in range(60):
            open_ones.enter_context(never_reading(careful, FILE * 60, f"127.0.3.{number % 4 + 1}"))
        until(lambda: len(stalled(careful)) == 60)
        for number in range(30):
            with connected(careful, WHOLE, f"127.0.4.{number + 1}") as other:
                assert other.recv(12) == b"HTTP/1.1 200"
    until(lambda: not careful.server.server_state.connections)


@pytest.mark.usefixtures("small_buffers")
def test_slow_reader_gets_the_whole_answer(careful: Running) -> None:
    with never_reading(careful, FILE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), "127.0.0.1") as one:
        got = b""
        while piece := one.recv(8192):
            got += piece
            careful.later(2)  # all of it takes longer than a gap may be
    body = got.partition(b"\r\n\r\n")[2]
    assert body == (Path(app.__file__).parent / "page/vendor/markdown-it.js").read_bytes()


def test_requests_sent_ahead_are_not_answered(careful: Running) -> None:
    with connected(careful, WHOLE * 3) as one:
        assert heard(one).count(b"HTTP/1.1 200") == 1
    with connected(careful, WHOLE) as one:  # one after the other they are
        for _ in range(3):
            said = b""
            while not said.endswith(b"}"):
                said += one.recv(65536)
            one.sendall(WHOLE)


def test_network_of_an_ipv6_address_counts_as_one() -> None:
    for one, other, same in (
        ("127.0.0.1", "127.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::1", "127.0.0.1", False),
    ):
        assert app._same_network(one, other) is same, (one, other)


def test_tenant_has_so_many_requests_under_way(
    model: Path, docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all addresses together."""
    keys, began, held = {**KEYS, "ben": "ben-0123456789abcdef"}, threading.Semaphore(0), threading.Event()

    def hold(*given: Any) -> tuple[int, int]:
        began.release()
        held.wait(60)
        return 0, 0

    with running(settings_for(model, docs, tmp_path, limits=Limits(at_once=2), keys=keys)) as server:
        monkeypatch.setattr("cacheblend_rag.app.server.services.folders.Folder.counts", hold)
        request = "GET /api/state HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {}\r\n\r\n"
        with ExitStack() as open_ones:
            for address in ("127.0.0.1", "127.0.0.2"):
                open_ones.enter_context(connected(server, request.format(keys["ada"]).encode(), address))
            assert began.acquire(timeout=20)
            with client_of(server, keys["ada"]) as ada, client_of(server, keys["ben"]) as ben:
                until(lambda: ada.get("/v1/models").status_code == 429)
                assert ben.get("/v1/models").status_code == 200
                held.set()
                until(lambda: ada.get("/v1/models").status_code == 200)


def test_without_a_key_no_body_is_read(careful: Running) -> None:
    head = "POST /api/documents HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 10000000\r\n\r\n"
    with connected(careful, head.encode()) as one:
        assert one.recv(12) == b"HTTP/1.1 401"


def test_ready_is_who_answers(careful: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    service = careful.service
    with client_of(careful) as client:
        assert client.get("/livez").json() == client.get("/readyz").json() == {"status": "ok"}
        with monkeypatch.context() as patch:
            patch.setattr(AdmissionQueue, "still", 1e6)
            told = client.get("/readyz")
            assert (told.status_code, told.json()["error"]["code"]) == (503, "not_ready")
            assert client.get("/livez").status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr("cacheblend_rag.app.server.services.service._THREAD_SECONDS", 0.2)
            release = threading.Event()

            async def occupy() -> None:
                loop = asyncio.get_running_loop()
                for _ in range(64):
                    loop.run_in_executor(None, release.wait)

            loop = next(iter(careful.server.server_state.connections)).loop
            asyncio.run_coroutine_threadsafe(occupy(), loop).result(5)
            assert "threads" in client.get("/readyz").json()["error"]["message"]
            assert client.get("/livez").status_code == 200
            release.set()
        with monkeypatch.context() as patch:
            patch.setattr(service, "stopping", True)
            assert "stopping" in client.get("/readyz").json()["error"]["message"]
        assert client.get("/readyz").status_code == 200


STUCK = """
import sys, threading
from cacheblend_rag.app.cli import main
from cacheblend_rag.app.server import app
from cacheblend_rag.engine.engine import BlendEngine
def never(*args, **more):
    print("it is stuck", file=sys.stderr, flush=True)
    threading.Event().wait()
BlendEngine.stream = never
app._GRACE, app._LAST = 1, 2
sys.exit(main(sys.argv[1:]))
"""


def test_server_ends_on_a_signal_whatever_runs(model: Path, docs: Path, tmp_path: Path) -> None:
    command = ["-c", STUCK, "serve", "--port", "0", "--device", "cpu", "--model", str(model)]
    command += ["--embedder", str(EMBEDDER_PATH), "--docs", str(docs), "--data-dir", str(tmp_path / "data")]
    log = tmp_path / "log"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = start_program(command, tmp_path, Path(os.devnull), log, environment)
    try:

        def logged(line: str) -> re.Match[str] | None:
            assert process.is_alive()
            return re.search(line, log.read_text("utf-8") if log.exists() else "", re.MULTILINE)

        found = until(lambda: logged(r"^Open http.*:(\d+)$"), 180)
        assert found is not None
        port = int(found[1])
        body = b'{"question": "Which?"}'
        head = "POST /api/ask HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", port), 10) as one:
            one.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: logged("^it is stuck$"))
            assert process.pid is not None
            os.kill(process.pid, signal.SIGTERM)
            process.join(60)
            assert process.exitcode == 1
        assert "ends while something still runs" in log.read_text("utf-8")
    finally:
        process.kill()
        process.join()


async def test_stream_stays_alive_while_its_answer_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill takes minutes on a slow machine; proxies give up a connection that is silent for one."""
    monkeypatch.setattr(EventStream, "quiet_seconds", 0.01)
    told, sent = asyncio.Event(), list[bytes]()

    async def answer() -> AsyncIterator[str]:
        await told.wait()
        yield event(None, {"text": "oak"})

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))
        if sent.count(b": under way\n\n") == 2:
            told.set()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async with asyncio.timeout(20):
        await EventStream(answer())({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
    begin, *comments, text, end = sent
    assert (begin, end) == (b"", b"")
    assert set(comments) == {b": under way\n\n"}
    assert text == b'data: {"text": "oak"}\n\n'
