"""Encryption at rest: nothing of a record is legible, and nothing altered or moved is accepted."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import torch

from cacheblend_rag.errors import ConfigError, RecordError
from cacheblend_rag.store import DiskStore, RecordFormat
from cacheblend_rag.store.codecs import CODECS
from cacheblend_rag.store.encryption import KEY_VARIABLE, Seal
from cacheblend_rag.store.record import FileRecord, record_bytes
from tests.contract.faults import record_of, wrong_records
from tests.contract.store_contract import encoded
from tests.contract.test_store import files

KEY, OTHER = bytes(range(32)), bytes(32)


@pytest.fixture
def seal() -> Seal:
    pytest.importorskip("cryptography")
    return Seal(KEY)


def test_bad_key_is_named_but_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for text in ("short", base64.b64encode(KEY[:16]).decode(), "not base64 at all!", "ä"):
        monkeypatch.setenv(KEY_VARIABLE, text)
        with pytest.raises(ConfigError, match=KEY_VARIABLE) as caught:
            DiskStore(tmp_path)
        assert text not in str(caught.value)


@pytest.mark.parametrize("codec", CODECS)
def test_sealed_record_is_read_as_it_was_written(codec: str, seal: Seal, tmp_path: Path) -> None:
    plain, form = RecordFormat(codec), RecordFormat(codec, seal)
    record = record_of(3)
    (tmp_path / "plain").write_bytes(encoded(record, plain))
    data = encoded(record, form, "key")
    assert len(data) == record_bytes(record.info, form)
    (tmp_path / "sealed").write_bytes(data)
    expected = FileRecord((tmp_path / "plain").open("rb"))
    got = FileRecord((tmp_path / "sealed").open("rb"), "key", seal)
    assert got.info == expected.info == record.info
    for layer in range(record.info.layers):
        for mine, its in zip(got.read_layer(layer), expected.read_layer(layer), strict=True):
            assert torch.equal(mine, its)
    got.close()
    expected.close()


def test_nothing_of_a_record_is_legible(seal: Seal) -> None:
    record = record_of(3)
    one, two = (encoded(record, RecordFormat(seal=seal), "key") for _ in range(2))
    for part in (b"faults", b"token_ids", record.kv.keys[0].view(torch.uint8).numpy().tobytes()[:16]):
        assert part in encoded(record)
        assert part not in one
    assert one[16:] != two[16:], "the same record sealed twice looks different"
    assert repr(KEY) not in repr(RecordFormat(seal=seal))


def test_another_key_another_place_or_none_is_refused(seal: Seal, tmp_path: Path) -> None:
    path = tmp_path / "record"
    data = encoded(record_of(3), RecordFormat(seal=seal), "key")
    path.write_bytes(data)
    for key, other in (("key", Seal(OTHER)), ("other key", seal), ("key", None)):
        with pytest.raises(RecordError, match="encrypted"):
            FileRecord(path.open("rb"), key, other)
    path.write_bytes(encoded(record_of(3)))
    with pytest.raises(RecordError, match="not encrypted"):
        FileRecord(path.open("rb"), "key", seal)


def test_layers_cannot_change_places(seal: Seal) -> None:
    first, second = (seal.close(b"content", f"key {layer}") for layer in (0, 1))
    assert seal.open(first, "key 0") == b"content"
    for sealed, place in ((first, "key 1"), (second, "key 0"), (first[:-1], "key 0"), (b"", "key 0")):
        with pytest.raises(RecordError):
            seal.open(sealed, place)


def test_store_encrypts_when_the_environment_says_so(
    seal: Seal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, base64.b64encode(KEY).decode())
    store = DiskStore(tmp_path)
    store.put("3", record_of(3))
    assert b"token_ids" not in files(tmp_path)[0].read_bytes()
    assert list(wrong_records(store)) == []
    store.close()
    monkeypatch.setenv(KEY_VARIABLE, base64.b64encode(OTHER).decode())
    other = DiskStore(tmp_path)
    assert other.open("3") is None
    other.close()
