"""Record files: what is written is read, and nothing else ever is."""

from __future__ import annotations

import io
import json
import tempfile
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.errors import RecordError
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.store import KVRecord
from cacheblend_rag.store import record as record_module
from cacheblend_rag.store.record import FileRecord, record_bytes
from tests.contract.store_contract import encoded

LAYERS, HEADS, TOKENS, DIM = 3, 2, 5, 4
PAGE = 4096


def make(dtype: torch.dtype = torch.float32, seed: int = 0, tokens: int = TOKENS) -> KVRecord:
    generator = torch.Generator().manual_seed(seed)
    shape = (HEADS, tokens, DIM)
    keys = tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(LAYERS))
    values = tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(LAYERS))
    kv = SegmentKV(keys, values, rotated=False)
    return KVRecord.describe(kv, fingerprint="f" * 64, context_ids=(1,), token_ids=tuple(range(7, 7 + tokens)))


RECORD = make()
DATA = encoded(RECORD)


def opened(data: bytes) -> FileRecord:
    handle = tempfile.TemporaryFile()  # noqa: SIM115 - the record owns and closes it
    handle.write(data)
    handle.flush()
    return FileRecord(handle)


def read_all(data: bytes) -> list[tuple[torch.Tensor, torch.Tensor]]:
    record = opened(data)
    try:
        return [record.read_layer(layer) for layer in range(record.info.layers)]
    finally:
        record.close()


def header_of(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[8:12], "little")
    fields: dict[str, Any] = json.loads(data[16 : 16 + length])
    return fields


def with_header(text: str | bytes, body: bytes = DATA[PAGE:]) -> bytes:
    """A file with another header, its checksum right."""
    raw = text.encode() if isinstance(text, str) else text
    head = record_module.MAGIC + len(raw).to_bytes(4, "little") + zlib.crc32(raw).to_bytes(4, "little") + raw
    return head + b"\0" * (-len(head) % PAGE) + body


def test_round_trip() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        record = make(dtype)
        file = opened(encoded(record))
        assert file.info == record.info
        assert file.info.dtype == str(dtype).removeprefix("torch.")
        for layer in range(LAYERS):
            keys, values = file.read_layer(layer)
            assert keys.dtype == dtype
            assert torch.equal(keys, record.kv.keys[layer])
            assert torch.equal(values, record.kv.values[layer])
        file.close()


def test_layout_is_padded_to_pages_and_layers_are_contiguous() -> None:
    assert len(DATA) == PAGE + LAYERS * PAGE
    assert len(DATA) == record_bytes(RECORD.info)
    for layer in range(LAYERS):
        start = PAGE * (1 + layer)
        size = HEADS * TOKENS * DIM * 4
        assert DATA[start : start + size] == RECORD.kv.keys[layer].numpy().tobytes()
        assert DATA[start + size : start + 2 * size] == RECORD.kv.values[layer].numpy().tobytes()


@pytest.mark.pairwise
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("swapped", [False, True], ids=["heads apart", "heads interleaved"])
def test_reading_into_place_gives_what_reading_gives(stored: torch.dtype, wanted: torch.dtype, swapped: bool) -> None:
    """Read straight into the memory of each head where that is possible, by way of a buffer where it is not."""
    data = encoded(make(stored))
    file = opened(data)
    shape = (TOKENS + 2, HEADS, DIM) if swapped else (HEADS, TOKENS + 2, DIM)
    for layer in (2, 0, 1):
        buffers = [torch.full(shape, 7.0, dtype=wanted) for _ in range(2)]
        keys, values = (one.transpose(0, 1) if swapped else one for one in buffers)
        file.read_into(layer, keys[:, 1:-1], values[:, 1:-1])
        for read, plain in zip((keys, values), file.read_layer(layer), strict=True):
            assert torch.equal(read[:, 1:-1], plain.to(wanted))
            assert (read[:, 0] == 7).all(), "what stands around it is left alone"
            assert (read[:, -1] == 7).all()
    file.close()


def test_damage_is_found_when_a_layer_is_read_into_place() -> None:
    place = header_of(DATA)["table"][1]
    damaged = bytearray(DATA)
    damaged[place[0] + 3] ^= 1
    file = opened(bytes(damaged))
    keys, values = torch.empty(HEADS, TOKENS, DIM), torch.empty(HEADS, TOKENS, DIM)
    file.read_into(0, keys, values)
    with pytest.raises(RecordError, match="layer 1 fails its checksum"):
        file.read_into(1, keys, values)
    file.close()


def test_another_version_is_refused() -> None:
    for version in (0, 1, 255):
        with pytest.raises(RecordError, match="version 2"):
            opened(DATA[:7] + bytes([version]) + DATA[8:])


def test_view_with_strides_is_stored_in_order() -> None:
    whole = torch.randn(HEADS, DIM, TOKENS).transpose(1, 2)
    kv = SegmentKV((whole,), (whole,), rotated=True)
    record = KVRecord.describe(kv, fingerprint="f", context_ids=(), token_ids=tuple(range(TOKENS)))
    (keys, values), *_ = read_all(encoded(record))
    assert torch.equal(keys, whole)
    assert torch.equal(values, whole)


@settings(max_examples=80, deadline=None)
@given(at=st.integers(0, len(DATA) - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_refused_unless_it_is_padding(at: int, bit: int) -> None:
    damaged = bytearray(DATA)
    damaged[at] ^= 1 << bit
    try:
        layers = read_all(bytes(damaged))
    except RecordError:
        return
    header_end = 16 + int.from_bytes(DATA[8:12], "little")
    layer_end = 2 * HEADS * TOKENS * DIM * 4
    assert header_end <= at < PAGE or (at >= PAGE and at % PAGE >= layer_end), "a flip in content went unnoticed"
    for layer, (keys, values) in enumerate(layers):
        assert torch.equal(keys, RECORD.kv.keys[layer])
        assert torch.equal(values, RECORD.kv.values[layer])


@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, len(DATA) - 1))
def test_any_truncation_is_refused_before_a_layer_is_read(length: int) -> None:
    with pytest.raises(RecordError):
        opened(DATA[:length])


def test_longer_file_is_refused() -> None:
    for extra in (1, PAGE):
        with pytest.raises(RecordError, match="describes"):
            opened(DATA + b"\0" * extra)


class _Watch:
    """Every buffer the reader makes, by size."""

    def __init__(self) -> None:
        self.largest = 0

    def __call__(self, size: int) -> bytearray:
        self.largest = max(self.largest, size)
        return bytearray(size)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> _Watch:
    seen = _Watch()
    monkeypatch.setattr(record_module, "bytearray", seen, raising=False)
    return seen


HUGE = [
    {"layers": 10**12},
    {"kv_heads": 10**12},
    {"head_dim": 2**62},
    {"kv_heads": 10**30, "head_dim": 10**30},
    {"layers": 0, "table": []},
    {"kv_heads": 0},
    {"token_ids": []},
    {"layers": LAYERS + 1},
    {"table": [[PAGE, 320, 0]]},
    {"table": [[0, 320, 0]] * LAYERS},
    {"table": [[2**62, 320, 0]] * LAYERS},
    {"table": [[PAGE, -1, 0]] * LAYERS},
    {"table": [[PAGE, 320]] * LAYERS},
    {"codec": "int8"},
    {"codec": None},
    {"dtype": "float64"},
    {"token_ids": None},
    {"token_ids": [float("inf")] * TOKENS},
    {"layers": float("nan")},
    {"table": [5] * LAYERS},
    {"table": None},
]


def test_crafted_header_is_refused_without_allocating(watch: _Watch) -> None:
    changes: dict[str, Any]
    for changes in HUGE:
        data = with_header(json.dumps(header_of(DATA) | changes))
        with pytest.raises(RecordError):
            opened(data)
        assert watch.largest <= len(data), changes
    for text in (b"", b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b'{"layers": 1e999}'):
        with pytest.raises(RecordError):
            opened(with_header(text))


def test_header_size_beyond_the_file_is_refused_without_allocating(watch: _Watch) -> None:
    for length in (2**32 - 1, 2**31, len(DATA) + 1, len(DATA) - 15):
        with pytest.raises(RecordError, match="file has only"):
            opened(DATA[:8] + length.to_bytes(4, "little") + DATA[12:])
    assert watch.largest <= 16


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(header_of(DATA))),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=6,
    ),
)
def test_any_value_in_any_header_field_gives_a_record_error_or_a_whole_record(name: str, value: Any) -> None:
    try:
        record = opened(with_header(json.dumps(header_of(DATA) | {name: value})))
    except RecordError:
        return
    try:
        for layer in range(record.info.layers):
            keys, _ = record.read_layer(layer)
            assert keys.shape == (record.info.kv_heads, record.info.tokens, record.info.head_dim)
    except RecordError:
        pass
    finally:
        record.close()


def test_record_truncated_after_it_was_opened_is_refused_when_read(tmp_path: Any) -> None:
    path = tmp_path / "record"
    path.write_bytes(DATA)
    record = FileRecord(path.open("rb"))
    record.read_layer(0)
    with path.open("r+b") as file:
        file.truncate(2 * PAGE + 7)
    record.read_layer(0)
    with pytest.raises(RecordError, match="ends within"):
        record.read_layer(1)
    record.close()
    with pytest.raises(RecordError):
        record.read_layer(0)


def test_the_file_is_closed_when_the_header_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "record"
    path.write_bytes(b"nothing of use" * 10)
    handle = path.open("rb")
    with pytest.raises(RecordError):
        FileRecord(handle)
    assert handle.closed


def test_nothing_in_a_record_is_pickled() -> None:
    import pickletools

    for start in (0, 16, PAGE):
        with pytest.raises(Exception, match=r".*"):
            pickletools.dis(io.BytesIO(DATA[start:]), out=io.StringIO())
