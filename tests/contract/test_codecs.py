"""Codecs: what they lose, what they take, and that no record of theirs is read for another's."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.store import DiskStore, KVRecord, RecordFormat
from cacheblend_rag.store.codecs import CODECS, codec_named
from cacheblend_rag.store.record import as_written, record_bytes
from tests.contract.store_contract import encoded
from tests.contract.test_record import opened

LAYERS, HEADS, DIM = 2, 2, 64
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LOSSY = [name for name in CODECS if name != "raw"]


def make(dtype: torch.dtype = torch.float32, seed: int = 0, tokens: int = 70, dim: int = DIM) -> KVRecord:
    """Keys with channels of very different range, values with tokens of very different range."""
    generator = torch.Generator().manual_seed(seed)
    shape = (HEADS, tokens, dim)
    channels = torch.logspace(-3, 2, dim)
    rows = torch.logspace(-2, 2, tokens)[:, None]
    keys = tuple((torch.randn(shape, generator=generator) * channels + channels).to(dtype) for _ in range(LAYERS))
    values = tuple((torch.randn(shape, generator=generator) * rows).to(dtype) for _ in range(LAYERS))
    kv = SegmentKV(keys, values, rotated=False)
    return KVRecord.describe(kv, fingerprint="f", context_ids=(1,), token_ids=tuple(range(tokens)))


def read_back(record: KVRecord, form: RecordFormat) -> list[tuple[torch.Tensor, torch.Tensor]]:
    file = opened(encoded(record, form))
    try:
        assert file.info == record.info
        return [file.read_layer(layer) for layer in range(record.info.layers)]
    finally:
        file.close()


def bound(name: str, exact: torch.Tensor, axis: int) -> torch.Tensor:
    """Most an element may be off: half a step of its codec, and the rounding of its element type."""
    wide = exact.float()
    kind = torch.finfo(exact.dtype)
    rounding = wide.abs() * 2 * kind.eps + kind.smallest_normal * kind.eps  # and one step where steps shrink no more
    largest = wide.abs().amax(axis, keepdim=True)
    return largest / 127 * 1.001 + rounding  # a scale is a power of two, up to twice the least that would do


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(LOSSY),
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(1, 131),
    dim=st.sampled_from([1, 3, 8, 31, 64, 96]),
    seed=st.integers(0, 2**31),
)
def test_any_shape_keeps_the_bound(name: str, dtype: torch.dtype, tokens: int, dim: int, seed: int) -> None:
    record = make(dtype, seed, tokens, dim)
    for layer, (keys, values) in enumerate(read_back(record, RecordFormat(name))):
        assert bool(
            ((keys.float() - record.kv.keys[layer].float()).abs() <= bound(name, record.kv.keys[layer], 1)).all()
        )
        exact = record.kv.values[layer]
        assert bool(((values.float() - exact.float()).abs() <= bound(name, exact, 2)).all())


@pytest.mark.parametrize("name", CODECS)
def test_the_size_is_known_before_a_record_is_made(name: str) -> None:
    form = RecordFormat(name)
    for tokens in (1, 70, 300):
        record = make(tokens=tokens)
        assert len(encoded(record, form)) == record_bytes(record.info, form)


@pytest.mark.parametrize("name", LOSSY)
def test_unscalable_rows_are_kept_raw(name: str) -> None:
    for bad in (float("nan"), float("inf"), 1e38):
        record = make()
        record.kv.keys[1][0, 3, 5] = bad
        record.kv.keys[1][0, 4, 5] = -bad
        for layer, (keys, values) in enumerate(read_back(record, RecordFormat(name))):
            if bad != 1e38:
                assert torch.equal(keys.nan_to_num(7.0), record.kv.keys[layer].nan_to_num(7.0))
                assert torch.equal(values, record.kv.values[layer])
            assert bool((keys.isfinite() == record.kv.keys[layer].isfinite()).all())


@settings(max_examples=30, deadline=None)
@given(dtype=st.sampled_from(DTYPES), tokens=st.integers(1, 131), seed=st.integers(0, 2**31))
def test_eight_bits_once_decoded_are_encoded_again_without_loss(dtype: torch.dtype, tokens: int, seed: int) -> None:
    form, record = RecordFormat("int8"), make(dtype, seed, tokens)
    once = as_written(record, form)
    for layer, (keys, values) in enumerate(read_back(once, form)):
        assert torch.equal(keys, once.kv.keys[layer])
        assert torch.equal(values, once.kv.values[layer])


@pytest.mark.parametrize("name", CODECS)
def test_as_written_equals_the_record_that_is_read_back(name: str, tmp_path: Path) -> None:
    record = make(torch.bfloat16)
    record.kv.keys[0][1].zero_()
    with closing(DiskStore(tmp_path, form=RecordFormat(name))) as store:
        expected = as_written(record, store.traits.form)
        store.put("a", record)
        stored = store.open("a")
        assert stored is not None
        for layer in range(LAYERS):
            keys, values = stored.read_layer(layer)
            assert torch.equal(keys, expected.kv.keys[layer])
            assert torch.equal(values, expected.kv.values[layer])
            placed = torch.empty(2, HEADS, 90, DIM, dtype=torch.bfloat16)[:, :, 5:75]  # a place among other rows
            stored.read_into(layer, placed[0], placed[1])
            assert torch.equal(placed[0], keys)
            assert torch.equal(placed[1], values)
        stored.close()


@pytest.mark.parametrize("name", LOSSY)
def test_constant_and_zero_kv_are_exact(name: str) -> None:
    record = make()
    for tensors in (record.kv.keys, record.kv.values):
        tensors[0].zero_()
        tensors[1].fill_(2.0)
    for layer, (keys, values) in enumerate(read_back(record, RecordFormat(name))):
        torch.testing.assert_close(keys, record.kv.keys[layer])
        torch.testing.assert_close(values, record.kv.values[layer])


@pytest.mark.parametrize("name", LOSSY)
def test_prefix_is_never_quantised(name: str) -> None:
    record = make()
    prefix = KVRecord(dataclasses.replace(record.info, rotated=True, kind="prefix"), record.kv)
    for layer, (keys, values) in enumerate(read_back(prefix, RecordFormat(name))):
        assert torch.equal(keys, record.kv.keys[layer])
        assert torch.equal(values, record.kv.values[layer])
    assert record_bytes(prefix.info, RecordFormat(name)) == record_bytes(prefix.info)


def test_unknown_codecs_are_refused_by_name() -> None:
    for make_it in (codec_named, RecordFormat):
        with pytest.raises(ConfigError, match=r"codec='int4' is not usable: use one of 'raw', 'int8'"):
            make_it("int4")


# In a store ---------------------------------------------------------------------------------


def test_store_reads_records_of_every_codec(tmp_path: Path) -> None:
    record = make(torch.bfloat16)
    for name in CODECS:
        store = DiskStore(tmp_path, form=RecordFormat(name))
        store.put(name, record)
        store.close()
    store = DiskStore(tmp_path)
    for name in CODECS:
        stored = store.open(name)
        assert stored is not None
        expected = read_back(record, RecordFormat(name))
        for layer in range(LAYERS):
            for got, want in zip(stored.read_layer(layer), expected[layer], strict=True):
                assert torch.equal(got, want)
        stored.close()
    sizes = {entry.key: entry.bytes for entry in store.entries()}
    assert sizes["int8"] < sizes["raw"]
    store.close()
