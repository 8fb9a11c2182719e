"""Fingerprints of models on disk, so that weights are not read through again at every load.

The files of a model folder are told apart by their inode, size and times of change, as build tools
and git do. What is kept is a hash of that and the fingerprint; never anything of the model itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import cached_file

from cacheblend_rag.config import default_data_path
from cacheblend_rag.models.fingerprint import ADAPTER_VERSION

__all__ = ["files_identity", "known_fingerprint", "known_names", "remember_fingerprint"]

_log = logging.getLogger(__name__)
_MOST_ENTRIES = 256


def files_identity(model: str, dtype: str) -> str | None:
    """Hash of where a model's files lie, their sizes and times, and what reads them.

    Parameters
    ----------
    model : str
        Folder or id of a model; an id must be in the local cache.
    dtype : str
        Element type it is loaded in.

    Returns
    -------
    str or None
        None if its files are not known, or do not hold the whole model.
    """
    folder = _folder_of(model)
    if folder is None or (folder / "adapter_config.json").exists():  # its base model lies elsewhere
        return None
    rows = [[ADAPTER_VERSION, torch.__version__, transformers.__version__, dtype]]
    try:
        for path in sorted(folder.iterdir()):
            real = path.resolve()
            state = real.stat()
            times = (state.st_mtime_ns, state.st_ctime_ns)
            rows.append([path.name, str(real), state.st_dev, state.st_ino, state.st_size, *times])
    except OSError:
        return None
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def known_fingerprint(identity: str | None) -> str | None:
    """The fingerprint that files of this identity gave."""
    entry = _read().get(identity or "")
    return entry[0] if entry else None


def remember_fingerprint(identity: str, fingerprint: str, name: str) -> None:
    """Keep the fingerprint of files of this identity."""
    entries = _read()
    entries.pop(identity, None)
    entries[identity] = (fingerprint, name)
    path = _cache_file()
    newest = dict(list(entries.items())[-_MOST_ENTRIES:])
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(newest, file)
        os.replace(file.name, path)
    except OSError as error:
        _log.debug("the fingerprint of %s is not kept: %s", name, error)


def known_names() -> dict[str, str]:
    """Names of models by fingerprint, as far as they were loaded by name here."""
    return dict(_read().values())


def _folder_of(model: str) -> Path | None:
    if os.path.isdir(model):
        return Path(model)
    try:
        found = cached_file(model, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError):
        return None
    return Path(found).parent if found else None


def _cache_file() -> Path:
    return default_data_path() / "fingerprints.json"


def _read() -> dict[str, tuple[str, str]]:
    try:
        content: Any = json.loads(_cache_file().read_text(encoding="utf-8"))
        pairs = {str(identity): (str(entry[0]), str(entry[1])) for identity, entry in content.items()}
    except (OSError, ValueError, AttributeError, IndexError, KeyError, TypeError, RecursionError):
        return {}
    return {identity: pair for identity, pair in pairs.items() if _is_hash(pair[0])}


def _is_hash(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")
