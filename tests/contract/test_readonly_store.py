"""A store in a folder that cannot be written: it serves hits, keeps nothing new, and says so once."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cacheblend_rag import BlendConfig, BlendEngine
from tests import tiny

CHUNKS = [tiny.text(40, 61), tiny.text(40, 62)]
SCRIPT = """
import json, logging, sys
from pathlib import Path
from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.errors import StoreError
from cacheblend_rag.store import DiskStore
from tests import tiny
from tests.contract.test_readonly_store import CHUNKS
from tests.contract.store_contract import make

warned = []
handler = logging.Handler()
handler.emit = lambda record: warned.append(record.getMessage())
logging.getLogger("cacheblend_rag").addHandler(handler)

def said_of(path, write_back, memory):
    warned.clear()
    quick = {"min_tokens": 0, "recompute_ratio": 0.2, "prompt_cache": 0}
    config = BlendConfig(write_back=write_back, memory_limit=memory, **quick)
    said, folder = {}, Path(path)
    with BlendEngine(tiny.model(), tiny.tokenizer(), config=config, store=folder) as engine:
        for turn in range(2):
            for name, chunks in {"stored": CHUNKS, "new": [*CHUNKS, tiny.text(40, 63)]}.items():
                report = engine.generate(Prompt("", chunks, "What fell?"), max_new_tokens=2).report
                said[f"{name} {turn}"] = [report.hits, report.misses]
        warmed = engine.warm([*CHUNKS, tiny.text(40, 64)], progress=False)
        said["warmed"] = [warmed.computed, warmed.present, warmed.skipped]
        engine.flush()
        try:
            engine.forget([CHUNKS[0]])
        except StoreError as error:
            said["forget"] = str(error)
    store = DiskStore(folder)
    said["records"] = store.stats().records
    said["volume"] = store.volume() >= store.stats().bytes > 0
    said["entries"] = len(list(store.entries())), len(list(store.infos("")))
    try:
        store.put("key", make())
    except StoreError as error:
        said["put"] = str(error)
    store.close()
    return {**said, "warned": list(warned)}


print(json.dumps([said_of(*case) for case in json.loads(sys.argv[1])]))
"""


CASES = {"alone": ("background", "0"), "below memory": ("inline", "1GB")}


class Kept(NamedTuple):
    """The script's output for a folder, and the folder's files with their times before and after."""

    said: dict[str, Any]
    before: list[tuple[str, int]]
    after: list[tuple[str, int]]


def files_of(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def kept() -> Iterator[dict[str, Kept]]:
    """Folders with two chunks' KV that nobody can write, outside of what only their owner may enter; each was used."""
    above = Path(tempfile.mkdtemp())
    above.chmod(0o755)
    config = BlendConfig(min_tokens=0, recompute_ratio=0.2)
    folders = {name: above / name for name in CASES}
    first, *others = folders.values()
    with BlendEngine(tiny.model(), tiny.tokenizer(), config=config, store=first) as engine:
        engine.warm(CHUNKS, progress=False)
    for other in others:
        shutil.copytree(first, other)
    for folder in folders.values():
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
    before = {name: files_of(folder) for name, folder in folders.items()}
    said = run([(str(folders[name]), *case) for name, case in CASES.items()])
    yield {name: Kept(one, before[name], files_of(folders[name])) for name, one in zip(CASES, said, strict=True)}
    for path in above.rglob("*"):
        path.chmod(0o755)
    shutil.rmtree(above)


def may_not_write_everything() -> None:
    """Take from the program that is run next what lets root write what is protected: CAP_DAC_OVERRIDE."""
    ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)  # PR_CAPBSET_DROP


def run(cases: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """The script's output for folders, each with its way of writing back and its limit of memory."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(cases)],
        cwd=Path(__file__).parents[2],
        preexec_fn=may_not_write_everything if os.geteuid() == 0 else None,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(done.stdout))


@pytest.mark.skipif(sys.platform != "linux" and os.geteuid() == 0, reason="root may write everything")
def test_unwritable_folder_serves_hits(kept: dict[str, Kept]) -> None:
    said = kept["alone"].said
    for turn in range(2):
        assert said[f"stored {turn}"] == [2, 0]
        assert said[f"new {turn}"] == [2, 1]
    assert said["warmed"] == [0, 2, 1]
    assert (said["records"], said["volume"], said["entries"]) == (2, True, [2, 2])
    assert "cannot be written" in said["put"]
    opened = [text for text in said["warned"] if "nothing is added" in text]
    assert len(opened) == 2, "one a store; the script opens two"
    others = [text for text in said["warned"] if text not in opened]
    assert others == []
    assert "not all could be forgotten" in said["forget"]
    assert "cannot be erased" in said["forget"]
    assert kept["alone"].before == kept["alone"].after


@pytest.mark.skipif(sys.platform != "linux" and os.geteuid() == 0, reason="root may write everything")
def test_memory_above_such_a_folder_keeps_what_is_new(kept: dict[str, Kept]) -> None:
    said = kept["below memory"].said
    assert (said["stored 0"], said["new 0"], said["new 1"]) == ([2, 0], [2, 1], [3, 0])
