r"""Record format, version 2: one file for each segment, readable layer by layer (docs/reference/kv-record.md).

::

    magic        8 bytes  b"CBRAGKV\x02" (the last byte is the version)
    header size  4 bytes  little endian
    header CRC   4 bytes  CRC-32 of the header
    header       JSON     identity, shape, codec; offset, size and XXH3 of each layer
    padding               to a multiple of 4,096 bytes
    layer 0               keys then values, contiguous; padded likewise
    layer 1 …

With encryption the magic is ``b"CBRAGKS\x02"``, and header and layers are encrypted one by one.

Nothing is pickled. Every number in the header is checked against the file's size before anything
is allocated or read.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeAlias

import torch
import xxhash

from cacheblend_rag.errors import RecordError, StoreError
from cacheblend_rag.store.codecs import CODECS, DTYPES, Codec, EncodedKV, codec_named
from cacheblend_rag.store.encryption import SEAL_BYTES, Seal
from cacheblend_rag.store.stored_kv import KVRecord, RecordInfo, StoredKV

_log = logging.getLogger(__name__)
MAGIC = b"CBRAGKV\x02"
_SEALED_MAGIC = b"CBRAGKS\x02"
_PAGE = 4096
START_BYTES = 16
"""Bytes of a record before its header."""
# Entries of the layer table count as this, so that a header's size does not depend on them.
_WIDEST = [2**48, 2**48, 2**64 - 1]
_Piece: TypeAlias = bytes | memoryview
# Pieces of memory one read may fill on every system (IOV_MAX).
_MOST_PARTS = 1024


@dataclass(frozen=True)
class RecordFormat:
    """How records are written.

    Parameters
    ----------
    codec : str
        ``"raw"`` or ``"int8"``. Records whose keys are rotated (a prefix)
        are reused exactly and always written raw.
    seal : Seal, optional
        Encrypts header and layers.

    Raises
    ------
    ConfigError
        If there is no such codec.
    """

    codec: str = "raw"
    seal: Seal | None = None

    def __post_init__(self) -> None:
        codec_named(self.codec)

    def sealed(self) -> RecordFormat:
        """The same format, encrypted with ``CACHEBLEND_RAG_ENCRYPTION_KEY`` if it is set and no key was given."""
        return self if self.seal else dataclasses.replace(self, seal=Seal.from_environment())

    def codec_of(self, info: RecordInfo) -> Codec:
        """The codec for a record."""
        return CODECS["raw" if info.rotated else self.codec]


@dataclass(frozen=True)
class LayerPlace:
    """Where one layer lies in the record."""

    number: int
    offset: int
    size: int
    checksum: int


def record_bytes(info: RecordInfo, form: RecordFormat | None = None) -> int:
    """Bytes the file of a record takes."""
    form = form or RecordFormat()
    extra = SEAL_BYTES if form.seal else 0
    layer = form.codec_of(info).layer_bytes(info) + extra
    return _pad(START_BYTES + _header_bytes(info) + extra) + info.layers * _pad(layer)


def encode_pieces(record: KVRecord, form: RecordFormat | None = None, key: str = "") -> list[_Piece]:
    """The file of a record in pieces, none empty, to be written one behind another.

    A sealed file can be read under its key only. Pieces may be the memory of the record itself: a large one is copied
    only where it is written.
    """
    head, table, layers = encode(record, form or RecordFormat(), key)
    pieces: list[_Piece] = [head]
    end = len(head)
    for place, layer in zip(table, layers, strict=True):
        pieces += [bytes(place.offset - end), *layer]
        end = place.offset + place.size
    return [piece for piece in (*pieces, bytes(_pad(end) - end)) if len(piece)]


def as_written(record: KVRecord, form: RecordFormat | None) -> KVRecord:
    """A record as it is read once it was written in this form; itself, where nothing is lost."""
    if form is None:
        return record
    codec, layers = _encoded_layers(record, form.codec_of(record.info))
    if codec is CODECS["raw"]:
        return record
    size = _pad(codec.layer_bytes(record.info))
    data = [torch.frombuffer(bytearray().join(layer).ljust(size), dtype=torch.uint8) for layer in layers]
    kv = EncodedKV(record.info, codec, data)
    return KVRecord(record.info, kv)


def encode(
    record: KVRecord, form: RecordFormat, key: str
) -> tuple[bytes, list[LayerPlace], Sequence[Sequence[_Piece]]]:
    """Magic and header, where each layer lies behind them, and each layer in pieces."""
    codec, layers = _encoded_layers(record, form.codec_of(record.info))
    room = _header_bytes(record.info)
    size = room + (SEAL_BYTES if form.seal else 0)
    if form.seal:
        layers = [[form.seal.close(b"".join(layer), _place(key, number))] for number, layer in enumerate(layers)]
    table, offset = list[LayerPlace](), _pad(START_BYTES + size)
    for layer in layers:
        table.append(LayerPlace(len(table), offset, sum(map(len, layer)), _checksum(layer)))
        offset = _pad(offset + table[-1].size)
    header = _header(record.info, codec.name, table).ljust(room)
    if form.seal:
        header = form.seal.close(header, _place(key, "header"))
    magic, checksum = _SEALED_MAGIC if form.seal else MAGIC, zlib.crc32(header)
    return magic + size.to_bytes(4, "little") + checksum.to_bytes(4, "little") + header, table, layers


def _encoded_layers(record: KVRecord, codec: Codec) -> tuple[Codec, Sequence[Sequence[_Piece]]]:
    """Each layer by the codec, or raw, which takes every value, if the codec cannot scale one."""
    pairs = list(zip(record.kv.keys, record.kv.values, strict=True))
    try:
        return codec, [codec.encode(keys, values) for keys, values in pairs]
    except StoreError as error:
        _log.info("a record is stored raw: %s", error)
        return CODECS["raw"], [CODECS["raw"].encode(keys, values) for keys, values in pairs]


class EncodedRecord(StoredKV):
    """A record in this format, wherever its bytes lie. A subclass says how they are fetched.

    Parameters
    ----------
    key : str
        Key it is stored under.
    seal : Seal, optional
        Decrypts the record if it is encrypted.
    """

    def __init__(self, key: str, seal: Seal | None) -> None:
        self._key, self._seal = key, seal
        self._buffer = bytearray(0)  # made when a layer is first read into place

    def _fetch(self, place: LayerPlace, *buffers: Any) -> None:
        """Fill buffers, one after another, with the bytes of a layer.

        Raises
        ------
        RecordError
            If they are not all there.
        """
        raise NotImplementedError

    @staticmethod
    def _header_size(start: Any) -> int:
        """Bytes of the header, from the first `START_BYTES` of a record."""
        if bytes(start[:8]) not in (MAGIC, _SEALED_MAGIC):
            raise RecordError("not a KV record of version 2")
        return int.from_bytes(start[8:12], "little")

    def _take_header(self, start: Any, header: Any, size: int | None) -> None:
        """Check the header and hold what it says.

        Parameters
        ----------
        start : buffer
            The first `START_BYTES` of the record.
        header : buffer
        size : int or None
            Bytes of the whole record; None where layers are kept one by one.
        """
        if (bytes(start[:8]) == _SEALED_MAGIC) != (self._seal is not None):
            raise RecordError("it is encrypted" if self._seal is None else "it is not encrypted, as it should be")
        if len(header) != self._header_size(start) or zlib.crc32(header) != int.from_bytes(start[12:16], "little"):
            raise RecordError("the header fails its checksum")
        first = _pad(START_BYTES + len(header))
        if self._seal:
            header = self._seal.open(header, _place(self._key, "header"))
        self.info, self._codec, self._layers = _parse_header(header)
        _check_layout(self.info, self._codec, self._layers, first, size, SEAL_BYTES if self._seal else 0)

    def read_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `StoredKV.read_layer`."""
        return self._codec.decode(self._layer_bytes(layer, bytearray(self._layers[layer].size)), self.info)

    def read_into(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Read one layer into place; see `StoredKV.read_into`.

        Bytes that lie in the record as they do in memory are read where they belong. Others go by way of a
        buffer that all layers share.
        """
        place = self._layers[layer]
        parts = self._parts(keys, values)
        if parts:
            self._fetch(place, *parts)
            _check_sum(place, *parts)
            return
        if not self._buffer:
            self._buffer = bytearray(max(one.size for one in self._layers))
        data = self._layer_bytes(layer, memoryview(self._buffer)[: place.size])
        self._codec.decode_into(data, self.info, keys, values)

    def _parts(self, *targets: torch.Tensor) -> list[memoryview]:
        """Memory of each head, if a layer can be read into it as it is."""
        as_it_is = self._codec is CODECS["raw"] and self._seal is None
        dtype = DTYPES[self.info.dtype]
        if not as_it_is or len(targets) * self.info.kv_heads > _MOST_PARTS:
            return []
        heads = [head for target in targets for head in target]
        if any(head.device.type != "cpu" or head.dtype != dtype or not head.is_contiguous() for head in heads):
            return []
        return [memoryview(head.view(torch.uint8).numpy()).cast("B") for head in heads]

    def _layer_bytes(self, layer: int, data: Any) -> Any:
        """A layer as its codec wrote it, fetched into a buffer of its size."""
        place = self._layers[layer]
        self._fetch(place, data)
        _check_sum(place, data)
        if self._seal:
            data = self._seal.open(data, _place(self._key, layer))
        return data


class FileRecord(EncodedRecord):
    """A record file opened for reading.

    Parameters
    ----------
    handle : binary file
        Open file. This object owns and closes it.
    key, seal
        As for `EncodedRecord`.

    Raises
    ------
    RecordError
        If the file is not a whole record of this version, or is encrypted with another key.
    """

    tier = "disk"

    def __init__(self, handle: IO[bytes], key: str = "", seal: Seal | None = None) -> None:
        super().__init__(key, seal)
        self._handle = handle
        try:
            size = os.fstat(handle.fileno()).st_size
            start = bytearray(START_BYTES)
            self._read(0, start)
            length = self._header_size(start)
            if START_BYTES + length > size:
                raise RecordError(f"the header should take {length} bytes but the file has only {size}")
            header = bytearray(length)
            self._read(START_BYTES, header)
            self._take_header(start, header, size)
        except BaseException:
            handle.close()
            raise

    @property
    def codec(self) -> str | None:
        """See `StoredKV.codec`; empty for an encrypted record."""
        return self._codec.name if self._seal is None else None

    def read_written(self, layers: slice, pinned: bool = False) -> torch.Tensor:
        """See `StoredKV.read_written`; layers lie one behind another in the file, and are read at once."""
        places = self._layers[layers]
        data = torch.empty((len(places), _pad(places[0].size)), dtype=torch.uint8, pin_memory=pinned)
        self._read(places[0].offset, data.numpy().data.cast("B"))
        for place, layer in zip(places, data.numpy(), strict=True):
            _check_sum(place, layer[: place.size])
        return data

    def _fetch(self, place: LayerPlace, *buffers: Any) -> None:
        self._read(place.offset, *buffers)

    def close(self) -> None:
        """Close the file."""
        self._handle.close()

    def _read(self, offset: int, *buffers: Any) -> None:
        """Fill buffers, one after another, from a place in the file."""
        size = sum(map(len, buffers))
        try:
            got = os.preadv(self._handle.fileno(), buffers, offset)
        except (OSError, ValueError) as error:
            raise RecordError(f"cannot read {size} bytes at {offset}: {error}") from error
        if got != size:
            raise RecordError(f"the file ends within the {size} bytes at {offset}")


def _check_sum(layer: LayerPlace, *parts: Any) -> None:
    """Raise unless bytes are those that were written."""
    if _checksum(parts) != layer.checksum:
        raise RecordError(f"layer {layer.number} fails its checksum")


def _checksum(parts: Iterable[_Piece]) -> int:
    """XXH3 (64 bits) of parts one behind another; CRC-32 takes several times as long, and loading waits for it."""
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    return checksum.intdigest()


def _header(info: RecordInfo, codec: str, layers: list[LayerPlace]) -> bytes:
    table = [(layer.offset, layer.size, layer.checksum) for layer in layers]
    fields = vars(info) | {"codec": codec, "table": table}
    return json.dumps(fields, separators=(",", ":")).encode()


def _header_bytes(info: RecordInfo) -> int:
    """Size of a header, whatever its codec and layer table: a shorter one is filled up with spaces."""
    longest = max(CODECS, key=len)
    return len(_header(info, longest, [LayerPlace(0, *_WIDEST)] * info.layers))


def _parse_header(header: bytes | bytearray) -> tuple[RecordInfo, Codec, tuple[LayerPlace, ...]]:
    try:
        fields: dict[str, Any] = json.loads(bytes(header))
        info = RecordInfo(
            fingerprint=str(fields["fingerprint"]),
            context_ids=tuple(map(int, fields["context_ids"])),
            token_ids=tuple(map(int, fields["token_ids"])),
            layers=int(fields["layers"]),
            kv_heads=int(fields["kv_heads"]),
            head_dim=int(fields["head_dim"]),
            dtype=str(fields["dtype"]),
            rotated=bool(fields["rotated"]),
            kind=str(fields["kind"]),
            contexts=int(fields.get("contexts", 0)),
            behind=tuple(map(int, fields.get("behind", ()))),
            before=tuple(map(str, fields.get("before", ()))),
        )
        codec = str(fields["codec"])
        layers = tuple(LayerPlace(at, *map(int, entry)) for at, entry in enumerate(fields["table"]))
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RecordError(f"the header cannot be understood: {error!r}") from error
    if info.dtype not in DTYPES or min(info.layers, info.kv_heads, info.head_dim, info.tokens) < 1:
        raise RecordError("the header describes an impossible shape or element type")
    if codec not in CODECS:
        raise RecordError(f"the header names an unknown codec {codec!r}")
    if len(layers) != info.layers:
        raise RecordError(f"the header has {len(layers)} layers in its table for {info.layers} layers")
    return info, CODECS[codec], layers


def _check_layout(
    info: RecordInfo, codec: Codec, layers: Sequence[LayerPlace], first: int, size: int | None, extra: int
) -> None:
    """Layers must lie one behind another, each as long as its shape says, and end where the file ends."""
    whole = codec.layer_bytes(info)
    offset = first
    for number, layer in enumerate(layers):
        if layer.offset != offset or layer.size != whole + extra:
            raise RecordError(f"the header describes an impossible place or size of layer {number}")
        offset = _pad(offset + layer.size)
    if size not in (None, offset):
        raise RecordError(f"the file has {size} bytes but its header describes {offset}")


def _place(key: str, part: int | str) -> str:
    """The place to which a sealed piece is bound."""
    return f"{key} {part}"


def _pad(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
