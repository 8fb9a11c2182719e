"""Records in the memory of a Valkey or Redis server: a key for the header, and one for each layer."""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from cacheblend_rag.config import ENV_PREFIX
from cacheblend_rag.errors import ConfigError, MissingExtraError, RecordError, StoreError, StoreUnreachableError
from cacheblend_rag.store.base import UNLIMITED, KVRecord
from cacheblend_rag.store.record import START_BYTES, EncodedRecord, LayerPlace, RecordFormat, encode
from cacheblend_rag.store.remote import RemoteStore, check_address

VALKEY_SCHEMES = ("valkey", "valkeys", "redis", "rediss")
_USERNAME_VARIABLE = ENV_PREFIX + "VALKEY_USERNAME"
_PASSWORD_VARIABLE = ENV_PREFIX + "VALKEY_PASSWORD"

# Bytes of layers that are asked for before they are read.
_AHEAD_BYTES = 2**23
# Keys that one call erases: those of most records.
_MANY = 128
_LONGEST_LINE = 512
# Milliseconds after which a claim lapses whose holder was killed.
_CLAIM_MS = 120_000
_POLL_SECONDS = 0.02
# Erases a claim if it is still the one that was made.
_RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end"


class ValkeyStore(RemoteStore):
    """A KV store in the memory of a Valkey or Redis server, shared by all machines that reach it.

    The server evicts what was not used for longest, if it is set to (``maxmemory-policy allkeys-lru``). It may evict
    any layer at any moment: the record is then a miss. Its limit (``maxmemory``) is that of all its contents, read once
    when the store is opened.

    Parameters
    ----------
    url : str
        ``"valkey://host:6379/0"``, or ``"valkeys://…"`` for TLS. User and password come from
        ``CACHEBLEND_RAG_VALKEY_USERNAME`` and ``CACHEBLEND_RAG_VALKEY_PASSWORD``.
    timeout : float
        Seconds that the server may take to answer, and to send one layer.
    form : RecordFormat, optional
        How records are written, by default raw. If ``CACHEBLEND_RAG_ENCRYPTION_KEY`` is set they are always encrypted.
    clock : callable
        Seconds, from any beginning: how long a store that does not answer is left alone.

    Raises
    ------
    ConfigError
        If the address is not valid, or contains a secret.
    MissingExtraError
        If ``valkey`` is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 2.0,
        form: RecordFormat | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_address(url, VALKEY_SCHEMES, f"{_USERNAME_VARIABLE} and {_PASSWORD_VARIABLE}")
        try:
            import valkey
        except ImportError as error:
            raise MissingExtraError("valkey", "valkey") from error
        self._valkey: Any = valkey
        super().__init__(url, "valkey", timeout, form, clock)
        try:
            self._client = self._valkey.Valkey.from_url(
                url,
                username=os.environ.get(_USERNAME_VARIABLE) or None,
                password=os.environ.get(_PASSWORD_VARIABLE) or None,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
            )
            self.connections = self._client.connection_pool
        except ValueError as error:
            raise ConfigError("store", url, f"{error}; use valkey://host:6379/0") from None
        with suppress(StoreError):  # one that is away now may answer later; nobody knows its limit then
            self.traits = replace(self.traits, size_limit=int(self._memory().get("maxmemory", 0)) or UNLIMITED)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Context that turns errors of the client into `StoreError`."""
        failures = self._valkey.exceptions
        try:
            yield
        except (failures.AuthenticationError, failures.NoPermissionError, failures.ReadOnlyError) as error:
            raise StoreError(
                f"{self.name} refuses it: {error}; check {_PASSWORD_VARIABLE} and the user's rights"
            ) from None
        except (failures.ConnectionError, failures.TimeoutError, OSError) as error:
            raise StoreUnreachableError(f"{self.name} does not answer: {error}") from None
        except failures.ValkeyError as error:  # such as: out of memory, and nothing may be evicted
            raise StoreError(f"{self.name} refuses it: {error}") from None

    def _opened(self, key: str) -> ValkeyRecord | None:
        with self.asking():
            head = self._client.get(_header_key(key))
            if head is None:
                return None
            record = ValkeyRecord(self, head, key)
            layers = [_layer_key(key, layer) for layer in range(record.info.layers)]
            if self._client.exists(*layers) != len(layers):
                raise RecordError("some of its layers were evicted")
            return record

    def _write(self, key: str, record: KVRecord, replace: bool) -> bool:
        if not replace and self._has(key):
            return False
        head, _, layers = encode(record, self.form, key)
        with self.asking():
            # Layers first: who finds the header finds all. One key a call, so that others get through between them.
            for number, pieces in enumerate(layers):
                self._client.set(_layer_key(key, number), b"".join(pieces))
            self._client.set(_header_key(key), head)
        return True

    def _has(self, key: str) -> bool:
        with self.asking():
            return bool(self._client.exists(_header_key(key)))

    def _erase(self, key: str) -> bool:
        erased, layer, names = 0, 0, [_header_key(key)]  # the header first, so that nobody begins to read what goes
        with self.asking():
            while True:
                names += [_layer_key(key, number) for number in range(layer, layer + _MANY)]
                gone = int(self._client.unlink(*names))
                if not gone:
                    return bool(erased)
                erased, layer, names = erased + gone, layer + _MANY, []

    def _keys(self, beginning: str) -> Iterator[str]:
        start, end = _header_key("")[:-1], "}"
        pattern = re.sub(r"([\\*?\[\]^])", r"\\\1", start + beginning) + "*" + end
        with self.asking():
            for name in self._client.scan_iter(match=pattern, count=1000):
                yield name.decode(errors="replace")[len(start) : -len(end)]

    def _memory(self) -> dict[str, int]:
        with self.reads.call(), self.asking():
            return dict(self._client.info("memory"))

    def volume(self) -> int:
        """Bytes that the server takes for all that it holds."""
        return int(self._memory()["used_memory"])

    @contextmanager
    def claim(self, key: str, wait: float = 0.0) -> Iterator[bool]:
        """See `KVStore.claim`; among all machines. A holder that dies loses it after two minutes."""
        name, token = f"cacheblend-claim:{{{key}}}", secrets.token_hex(16)
        end = time.monotonic() + wait
        try:
            while not (mine := self._claimed(name, token)) and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
        except StoreError:  # without the server there is double work, no more
            with super().claim(key, wait) as mine:
                yield mine
            return
        try:
            yield mine
        finally:
            if mine:
                with suppress(StoreError), self.writes.call(), self.asking():
                    self._client.eval(_RELEASE, 1, name, token)

    def _claimed(self, name: str, token: str) -> bool:
        with self.writes.call(), self.asking():
            return bool(self._client.set(name, token, nx=True, px=_CLAIM_MS))

    def close(self) -> None:
        """See `RemoteStore.close`."""
        super().close()
        self._client.close()


class ValkeyRecord(EncodedRecord):
    """A record on a server. Layers are received where they belong, and some are asked for ahead of the reader.

    Parameters
    ----------
    store : ValkeyStore
    head : bytes
        The value under the key of the header.
    key : str
    """

    tier = "valkey"

    def __init__(self, store: ValkeyStore, head: bytes, key: str) -> None:
        super().__init__(key, store.form.seal)
        self._store = store
        self._take_header(head[:START_BYTES], head[START_BYTES:], None)
        self._lock = threading.Lock()
        self._connection: Any = None
        self._asked: deque[int] = deque()  # layers whose answers come next on the connection

    def read_ahead(self, layer: int) -> None:
        """See `StoredKV.read_ahead`. The first answers wait in the buffers of the connection."""
        with self._lock, self._receiving():
            self._ask(layer)

    def _fetch(self, place: LayerPlace, *buffers: Any) -> None:
        with self._lock, self._receiving():
            self._ask(place.number)
            deadline = time.monotonic() + self._store.timeout
            sock: socket.socket = self._connection._sock  # the client itself copies what it receives twice
            size = _size_of_answer(sock, deadline)
            if size != place.size:
                raise RecordError(f"layer {place.number} has {size} bytes instead of {place.size}")
            for buffer in (*buffers, bytearray(2)):
                _receive(sock, memoryview(buffer), deadline)
            self._asked.popleft()
            if place.number == len(self._layers) - 1:
                self._give_back()

    @contextmanager
    def _receiving(self) -> Iterator[None]:
        """Within it a connection is used. After an error it is closed, for answers may still come on it."""
        try:
            with self._store.reads.call(), self._store.asking():
                yield
        except BaseException:
            self._give_back(broken=True)
            raise

    def _ask(self, layer: int) -> None:
        """Ask for a layer and those that follow, unless that was done."""
        if self._asked and self._asked[0] != layer:
            self._give_back(broken=True)
        if self._connection is None:
            self._connection = self._store.connections.get_connection("GET")
        following = self._asked[-1] + 1 if self._asked else layer
        coming = sum(self._layers[number].size for number in self._asked)
        for place in self._layers[following:]:
            if self._asked and coming + place.size > _AHEAD_BYTES:
                break
            self._connection.send_command("GET", _layer_key(self._key, place.number))
            self._asked.append(place.number)
            coming += place.size

    def _give_back(self, broken: bool = False) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if broken or self._asked:
            connection.disconnect()
        else:
            connection._sock.settimeout(connection.socket_timeout)
        self._asked.clear()
        self._store.connections.release(connection)

    def close(self) -> None:
        """Give its connection back."""
        with self._lock:
            self._give_back()


def _size_of_answer(sock: socket.socket, deadline: float) -> int:
    """Bytes of the value that follows.

    Raises
    ------
    RecordError
        If there is no value.
    """
    line = bytearray()
    while not line.endswith(b"\r\n"):
        byte = bytearray(1)
        _receive(sock, memoryview(byte), deadline)
        line += byte
        if len(line) > _LONGEST_LINE:
            raise StoreUnreachableError("the server's answer is not understood")
    if line.startswith(b"$-1"):
        raise RecordError("a layer was evicted")
    if not line.startswith(b"$"):  # such as: loading, or no permission
        raise StoreUnreachableError(f"the server says {line[:80].decode(errors='replace').strip()!r}")
    return int(line[1:-2])


def _receive(sock: socket.socket, view: memoryview, deadline: float) -> None:
    """Fill a buffer from a socket."""
    while len(view):
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        got = sock.recv_into(view)
        if not got:
            raise StoreUnreachableError("the server has closed the connection")
        view = view[got:]


def _header_key(key: str) -> str:
    return f"cacheblend-kv:{{{key}}}"


def _layer_key(key: str, layer: int) -> str:
    return f"{_header_key(key)}:{layer}"
