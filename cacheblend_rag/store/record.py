r"""Record format, version 1: one file a segment, readable layer by layer.

::

    magic        8 bytes  b"CBRAGKV\x01" (the last byte is the version)
    header size  4 bytes  little endian
    header CRC   4 bytes  CRC-32 of the header
    header       JSON     identity, shape, element type, checksum of each layer
    padding               to a multiple of 4,096 bytes
    layer 0               keys then values, contiguous; padded likewise
    layer 1 …

Nothing is pickled. Every number in the header is checked against the file's size before anything
is allocated or read.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import zlib
from typing import IO, Any

import torch

from cacheblend_rag.errors import RecordError
from cacheblend_rag.store.base import KVRecord, RecordInfo

__all__ = ["FileRecord", "encode_record", "record_bytes"]

MAGIC = b"CBRAGKV\x01"
_PAGE = 4096
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def record_bytes(info: RecordInfo) -> int:
    """Bytes the file of a record takes."""
    return _padded(16 + _header_bytes(info)) + info.layers * _padded(_layer_bytes(info))


def encode_record(record: KVRecord) -> bytes:
    """The file of a record."""
    info, kv = record.info, record.kv
    layers = [_tensor_bytes(key) + _tensor_bytes(value) for key, value in zip(kv.keys, kv.values, strict=True)]
    header = _header(info, [zlib.crc32(layer) for layer in layers]).ljust(_header_bytes(info))
    out = io.BytesIO()
    out.write(MAGIC + len(header).to_bytes(4, "little") + zlib.crc32(header).to_bytes(4, "little") + header)
    for layer in layers:
        out.write(b"\0" * (_padded(out.tell()) - out.tell()))
        out.write(layer)
    out.write(b"\0" * (_padded(out.tell()) - out.tell()))
    return out.getvalue()


class FileRecord:
    """A record file opened for reading.

    Parameters
    ----------
    handle : binary file
        Open file; owned and closed by this object.

    Raises
    ------
    RecordError
        If the file is not a whole record of this version.
    """

    def __init__(self, handle: IO[bytes]) -> None:
        self._handle = handle
        try:
            self._read_header()
        except BaseException:
            handle.close()
            raise

    def _read_header(self) -> None:
        size = os.fstat(self._handle.fileno()).st_size
        start = self._read(0, 16)
        if start[:8] != MAGIC:
            raise RecordError("not a KV record of version 1")
        length = int.from_bytes(start[8:12], "little")
        if 16 + length > size:
            raise RecordError(f"the header should take {length} bytes but the file has only {size}")
        header = self._read(16, length)
        if zlib.crc32(header) != int.from_bytes(start[12:16], "little"):
            raise RecordError("the header fails its checksum")
        self.info, self._checksums = _parse_header(header)
        self._layer_bytes = _layer_bytes(self.info)
        self._first = _padded(16 + length)
        expected = self._first + self.info.layers * _padded(self._layer_bytes)
        if size != expected:
            raise RecordError(f"the file has {size} bytes but its header describes {expected}")

    def read_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each ``[kv_heads, tokens, head_dim]``; see `StoredKV`."""
        info = self.info
        data = self._read(self._first + layer * _padded(self._layer_bytes), self._layer_bytes)
        if zlib.crc32(data) != self._checksums[layer]:
            raise RecordError(f"layer {layer} fails its checksum")
        both = torch.frombuffer(data, dtype=_DTYPES[info.dtype])
        both = both.view(2, info.kv_heads, info.tokens, info.head_dim)
        return both[0], both[1]

    def close(self) -> None:
        """Close the file."""
        self._handle.close()

    def _read(self, offset: int, size: int) -> bytearray:
        data = bytearray(size)
        try:
            got = os.preadv(self._handle.fileno(), [data], offset)
        except (OSError, ValueError) as error:
            raise RecordError(f"cannot read {size} bytes at {offset}: {error}") from error
        if got != size:
            raise RecordError(f"the file ends within the {size} bytes at {offset}")
        return data


def _header(info: RecordInfo, checksums: list[int]) -> bytes:
    return json.dumps(dataclasses.asdict(info) | {"checksums": checksums}, separators=(",", ":")).encode()


def _header_bytes(info: RecordInfo) -> int:
    """Size of a header, whatever its checksums: shorter ones are filled up with spaces."""
    return len(_header(info, [2**32 - 1] * info.layers))


def _parse_header(header: bytes | bytearray) -> tuple[RecordInfo, list[int]]:
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
        )
        checksums = list(map(int, fields["checksums"]))
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RecordError(f"the header cannot be understood: {error!r}") from error
    if info.dtype not in _DTYPES or min(info.layers, info.kv_heads, info.head_dim, info.tokens) < 1:
        raise RecordError("the header describes an impossible shape or element type")
    if len(checksums) != info.layers:
        raise RecordError(f"the header has {len(checksums)} checksums for {info.layers} layers")
    return info, checksums


def _layer_bytes(info: RecordInfo) -> int:
    return 2 * info.kv_heads * info.tokens * info.head_dim * _DTYPES[info.dtype].itemsize


def _padded(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
