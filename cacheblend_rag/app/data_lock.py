"""One process at a time writes a data folder."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from pathlib import Path

import filelock

from cacheblend_rag.errors import ConfigError

_log = logging.getLogger(__name__)


class FolderInUseError(ConfigError):
    """Another process writes the data folder."""


class DataLock:
    """Held by the process that writes a data folder; its end, of whatever kind, frees the lock.

    Two that write one folder would each save an index without what the other has added.

    Parameters
    ----------
    folder : path
        A folder that cannot be written needs no lock and gets none.

    Raises
    ------
    FolderInUseError
        If another holds it; the message says who.
    """

    def __init__(self, folder: Path) -> None:
        self._owner = folder / "in-use.json"
        self._lock: filelock.BaseFileLock | None = filelock.FileLock(
            folder / "in-use.lock", mode=0o600, thread_local=False
        )
        try:
            self._lock.acquire(timeout=0)
        except filelock.Timeout:
            try:
                said = json.loads(self._owner.read_text(encoding="utf-8"))
                who = f"process {int(said['process'])} ({said['command']!s:.80})"
            except (OSError, ValueError, KeyError, TypeError):
                who = "another process"
            raise FolderInUseError(
                "data_dir", str(folder), f"it is in use by {who}; stop that process, or use another data folder"
            ) from None
        except (OSError, NotImplementedError) as error:
            self._lock = None
            if os.access(folder, os.W_OK):
                _log.warning(
                    "the data folder %r cannot be locked (%s); use it with only one process", str(folder), error
                )
            return
        program = Path(sys.argv[0]).name.replace("__main__.py", "cacheblend-rag")
        said = {"process": os.getpid(), "command": " ".join([program, *sys.argv[1:2]])}
        with contextlib.suppress(OSError):  # a full disk; the lock holds all the same
            self._owner.write_text(json.dumps(said), encoding="utf-8")

    def release(self) -> None:
        """Give it up; doing so twice is harmless."""
        lock, self._lock = self._lock, None
        if lock is not None:
            self._owner.unlink(missing_ok=True)
            lock.release()
