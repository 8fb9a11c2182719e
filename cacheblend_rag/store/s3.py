"""Records in a bucket of S3, Google Cloud Storage, Azure or MinIO, by the package ``obstore``: one object a record."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate
from typing import Any
from urllib.parse import unquote, urlsplit

from cacheblend_rag.errors import ConfigError, MissingExtraError, RecordError, StoreError, StoreUnreachableError
from cacheblend_rag.store.base import KVRecord
from cacheblend_rag.store.record import START_BYTES, EncodedRecord, LayerPlace, RecordFormat, encode_pieces
from cacheblend_rag.store.remote import RemoteStore, check_address

S3_SCHEMES = ("s3", "gs", "az", "abfs", "abfss", "file", "memory")
# Stores of obstore without a network: for trying things out.
_LOCAL = ("file", "memory")
_CREDENTIALS = "the environment (such as AWS_ACCESS_KEY_ID) or the role of the machine"
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")

# Bytes of the first request, which has the header of most records in it and is often made in vain.
_HEAD_BYTES = 2**16
# A slow link carries all requests together, and a pass waits for the first layers. So a record begins with one small
# request. Each has twice as many bytes as the one before, up to this many, and each that has come lets one more be
# under way, up to so many at once.
_FIRST_BYTES, _REQUEST_BYTES = 2**20, 2**23
_UNDER_WAY = 3
# Seconds that one upload may take; nobody waits for it.
_UPLOAD_SECONDS = 60.0


class S3Store(RemoteStore):
    """A KV store in a bucket, shared by all machines that can read it.

    The bucket's lifecycle rules say which records go, and when.

    Parameters
    ----------
    url : str
        ``"s3://bucket/prefix"``, ``"gs://…"`` or ``"az://…"``. Credentials come from the environment or the role of the
        machine, and so does the endpoint of MinIO (``AWS_ENDPOINT_URL``).
    timeout : float
        Seconds that one request to read, look or erase may take.
    form : RecordFormat, optional
        How records are written, by default raw. If ``CACHEBLEND_RAG_ENCRYPTION_KEY`` is set they are always encrypted.
    clock : callable
        Seconds, from any beginning: how long a store that does not answer is left alone.

    Raises
    ------
    ConfigError
        If the address is not valid, or contains a secret.
    MissingExtraError
        If ``obstore`` is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 5.0,
        form: RecordFormat | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_address(url, S3_SCHEMES, _CREDENTIALS)
        super().__init__(url, "s3", timeout, form, clock)
        try:
            import obstore
            import obstore.exceptions
        except ImportError as error:
            raise MissingExtraError("obstore", "s3") from error
        self._obstore: Any = obstore
        self._reader = self._writer = self._client(url, timeout)
        if urlsplit(url).scheme not in _LOCAL:
            self._writer = self._client(url, max(timeout, _UPLOAD_SECONDS))

    def _client(self, url: str, seconds: float) -> Any:
        from obstore.store import from_url

        options: dict[str, Any] = {}
        if urlsplit(url).scheme not in _LOCAL:
            span = timedelta(seconds=seconds)
            # An endpoint without TLS is used only if its address says so.
            plain = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
            client = {"timeout": span, "connect_timeout": min(span, timedelta(seconds=2)), "allow_http": plain}
            options = {"client_options": client, "retry_config": {"max_retries": 2, "retry_timeout": span}}
        elif urlsplit(url).scheme == "file":
            options = {"mkdir": True}
        try:
            return from_url(url, **options)
        except (self._obstore.exceptions.BaseError, ValueError) as error:
            raise ConfigError("store", url, f"{_said(error)}; use s3://bucket/prefix") from None

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Within it errors of the client become ours, but for what is not there, or there already."""
        failures = self._obstore.exceptions
        try:
            yield
        except (FileNotFoundError, failures.AlreadyExistsError):
            raise
        except (failures.PermissionDeniedError, failures.UnauthenticatedError) as error:
            remedy = "check the credentials and the policy of the bucket"
            raise StoreError(f"{self.name} refuses it: {_said(error)}; {remedy}") from None
        except (failures.BaseError, OSError) as error:
            if re.search(r"\b416\b|InvalidRange", str(error)):
                raise RecordError("it is shorter than it should be") from None
            raise StoreUnreachableError(f"{self.name} does not answer as it should: {_said(error)}") from None

    def read(self, path: str, start: int, stop: int) -> memoryview:
        """Bytes of an object, as far as there are any.

        Raises
        ------
        RecordError
            If it is gone.
        """
        try:
            with self._asking():
                return memoryview(self._obstore.get_range(self._reader, path, start=start, end=stop))
        except FileNotFoundError:
            raise RecordError("it is gone") from None

    def _opened(self, key: str) -> S3Record | None:
        path = _path(key)
        try:
            with self._asking():
                found = self._obstore.get(self._reader, path, options={"range": (0, _HEAD_BYTES)})
                head, size = memoryview(found.bytes()), int(found.meta["size"])
        except FileNotFoundError:
            return None
        return S3Record(self, path, head, size, key)

    def _write(self, key: str, record: KVRecord, replace: bool) -> bool:
        if not replace and self._has(key):
            return False
        data = b"".join(encode_pieces(record, self.form, key))
        try:
            with self._asking():
                self._obstore.put(self._writer, _path(key), data, mode="overwrite" if replace else "create")
        except self._obstore.exceptions.AlreadyExistsError:
            return False
        except FileNotFoundError as error:
            raise StoreError(f"there is no {self.name}: {_said(error)}; make the bucket first") from None
        return True

    def _has(self, key: str) -> bool:
        try:
            with self._asking():
                self._obstore.head(self._reader, _path(key))
        except FileNotFoundError:
            return False
        return True

    def _erase(self, key: str) -> bool:
        if not self._has(key):
            return False
        try:
            with self._asking():
                self._obstore.delete(self._reader, _path(key))
        except FileNotFoundError:
            return False
        return True

    def _keys(self, beginning: str) -> Iterator[str]:
        for path, _ in self._objects(_name(beginning)[:2] if len(_name(beginning)) >= 2 else None):
            key = unquote(path.rpartition("/")[2].removesuffix(".kv").replace("=", "%"))
            if _path(key) == path and key.startswith(beginning):  # else it is none of ours
                yield key

    def _objects(self, folder: str | None) -> Iterator[tuple[str, int]]:
        try:
            with self._asking():
                for some in self._obstore.list(self._reader, prefix=folder, chunk_size=1000):
                    yield from ((one["path"], one["size"]) for one in some)
        except FileNotFoundError:
            return

    def volume(self) -> int:
        """See `KVStore.volume`; every object is listed."""
        with self.reads.call():
            return sum(size for _, size in self._objects(None))


class S3Record(EncodedRecord):
    """A record in a bucket. Several layers come with one request, and requests are made ahead of the reader.

    Parameters
    ----------
    store : S3Store
    path : str
        Of the object.
    head : memoryview
        Its first bytes.
    size : int
        Of the whole object.
    key : str
    """

    tier = "s3"

    def __init__(self, store: S3Store, path: str, head: memoryview, size: int, key: str) -> None:
        super().__init__(key, store.form.seal)
        self._store, self._path, self._head = store, path, head
        stop = START_BYTES + self._header_size(head)
        if stop > size:
            raise RecordError("it is shorter than its header")
        if stop > len(head):
            self._head = store.read(path, 0, stop)
        self._take_header(self._head[:START_BYTES], self._head[START_BYTES:stop], size)
        self._requests = _requests(self._layers)
        self._request_of = [number for number, one in enumerate(self._requests) for _ in one]
        self._coming: dict[int, Future[memoryview]] = {}

    def read_ahead(self, layer: int) -> None:
        """See `StoredKV.read_ahead`."""
        self._ask(self._request_of[layer])

    def _ask(self, first: int) -> None:
        """Make a request and some of those that follow, unless that was done."""
        for number in range(first, min(first + min(first + 1, _UNDER_WAY), len(self._requests))):
            places = self._requests[number]
            if number not in self._coming and places[-1].offset + places[-1].size > len(self._head):
                self._coming[number] = self._store.pool.submit(self._read, places)

    def _read(self, places: Sequence[LayerPlace]) -> memoryview:
        with self._store.reads.call():
            return self._store.read(self._path, places[0].offset, places[-1].offset + places[-1].size)

    def _fetch(self, place: LayerPlace, *buffers: Any) -> None:
        number = self._request_of[place.number]
        places = self._requests[number]
        self._ask(number)
        if number in self._coming:
            try:
                # The request has its own deadline; it may have waited for others before.
                data, begins = self._coming[number].result(2 * self._store.timeout), places[0].offset
            except FutureTimeoutError:
                raise StoreUnreachableError(f"{self._store.name} is too slow") from None
            self._ask(number + 1)
            if place is places[-1]:
                del self._coming[number]
        else:  # it came with the header
            data, begins = self._head, 0
        data = data[place.offset - begins : place.offset - begins + place.size]
        if len(data) != place.size:
            raise RecordError(f"it ends within layer {place.number}")
        for buffer, stop in zip(buffers, accumulate(map(len, buffers)), strict=True):
            memoryview(buffer)[:] = data[stop - len(buffer) : stop]

    def close(self) -> None:
        """Stop waiting for requests."""
        for one in self._coming.values():
            one.cancel()
        self._coming.clear()


def _requests(layers: Sequence[LayerPlace]) -> list[list[LayerPlace]]:
    """Layers by the request they come with: little first, then more and more."""
    requests: list[list[LayerPlace]] = [[]]
    for place in layers:
        most = min(_FIRST_BYTES << (len(requests) - 1), _REQUEST_BYTES)
        if requests[-1] and place.offset + place.size - requests[-1][0].offset > most:
            requests.append([])
        requests[-1].append(place)
    return requests


def _name(key: str) -> str:
    """A key in letters that every bucket takes."""
    return re.sub(r"[^A-Za-z0-9_-]", lambda found: "".join(f"={byte:02X}" for byte in found[0].encode()), key)


def _path(key: str) -> str:
    name = _name(key)
    return f"{name[:2]}/{name}.kv"


def _said(error: BaseException) -> str:
    """Message of a client's error, without addresses that may hold a signature and without its inner workings."""
    first = str(error).partition("\n")[0].partition(": <?xml")[0]
    return re.sub(r"(//)[^/@\s]+@|\?\S+", r"\1…", first)
