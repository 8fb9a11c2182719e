"""The store of the guide: short, and held to the contract of every store."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cacheblend_rag.store import KVStore, MemoryStore, RecordFormat, TieredStore
from cacheblend_rag.store.encryption import KEY_VARIABLE
from cacheblend_rag.store.record import record_bytes
from tests.contract.store_contract import BoundedStoreContract, make, same
from tests.test_documents_run import ROOT, blocks

CODE = blocks((ROOT / "docs" / "how-to" / "adding-a-store.md").read_text(encoding="utf-8"), "python")[0]
GUIDE: Any = ModuleType("mount_store")
exec(compile(CODE, "adding-a-store.md", "exec"), GUIDE.__dict__)


def test_the_store_of_the_guide_is_one_short_file() -> None:
    assert CODE.count("\n") < 120


class TestMountStore(BoundedStoreContract):
    def of_size(self, folder: Path, size_limit: int) -> KVStore:
        store: KVStore = GUIDE.MountStore(folder / "kv", size_limit)
        return store


def test_damaged_record_is_a_logged_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for damage in ("emptied", "truncated", "altered"):
        store = GUIDE.MountStore(tmp_path / damage)
        store.put("a", make(1))
        (path,) = (tmp_path / damage).glob("*.kv")
        data = path.read_bytes()
        path.write_bytes({"emptied": b"", "truncated": data[:5000], "altered": data[:20] + b"?" + data[21:]}[damage])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert store.open("a") is None, damage
        assert "counts as a miss" in caplog.text, damage
        assert not store.contains("a"), damage
        store.put("a", make(1))
        assert same(store.open("a"), make(1)), damage


def test_mount_store_is_a_tier_with_small_encrypted_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "A" * 43 + "=")
    mount = GUIDE.MountStore(tmp_path / "mount", form=RecordFormat("int8"))
    store = TieredStore([MemoryStore("1MB"), mount])
    store.put("a", make(1))
    (path,) = (tmp_path / "mount").glob("*.kv")
    assert path.stat().st_size == record_bytes(make(1).info, mount.traits.form) == store.record_bytes(make(1).info)
    assert b"fingerprint" not in path.read_bytes()
    near, far = store.traits.tiers[0].open("a"), mount.open("a")
    assert near is not None
    assert [(one.tier, one.read_layer(0)[0].tolist()) for one in (near, far)] == [
        ("memory", far.read_layer(0)[0].tolist()),
        ("mount", near.read_layer(0)[0].tolist()),
    ]
    far.close()
    assert store.traits.folder == tmp_path / "mount"
