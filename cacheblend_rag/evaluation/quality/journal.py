"""Results as they come: lines appended to a file that outlives a killed process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from filelock import FileLock, Timeout

from cacheblend_rag.errors import ConfigError

__all__ = ["Journal"]

_NAME = "results.jsonl"


class Journal:
    """One line of settings, then one line for everything that was finished.

    Parameters
    ----------
    folder : path
        Made if it is not there.
    settings : mapping
        What the results depend on, fit for JSON. A folder with those of another run is refused.

    Raises
    ------
    ConfigError
        If the folder holds another run, is in use by another process, or cannot be written.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self.lines: list[dict[str, Any]] = []
        """What was finished, this time and before."""
        self._settings = json.loads(json.dumps(settings))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("out", str(folder), f"use a folder that can be written ({error})") from error
        self._lock = FileLock(folder / ".lock")
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Journal:
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ConfigError("out", str(self.folder), "use another folder; a run is writing to this one") from error
        try:
            self._open()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _open(self) -> None:
        path = self.folder / _NAME
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]  # a line that was cut off when the process died is done again
        lines = [self._parse(number, line) for number, line in enumerate(whole.split(b"\n")[:-1], 1)]
        if lines:
            self._compare(lines[0].get("settings", {}))
        self._file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115
        self._file.truncate(len(whole))
        self._file.seek(0, os.SEEK_END)
        if not lines:
            self._write({"settings": self._settings})
        self.lines = lines[1:]

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            where = str(self.folder / _NAME)
            raise ConfigError("out", where, f"remove it or use another folder; its line {number} is damaged")
        return found

    def _compare(self, before: Mapping[str, Any]) -> None:
        names = sorted(before.keys() | self._settings.keys())
        changed = [name for name in names if before.get(name) != self._settings.get(name)]
        if changed:
            what = ", ".join(f"{name} was {before.get(name)!r}, not {self._settings.get(name)!r}" for name in changed)
            raise ConfigError("out", str(self.folder), f"use another folder; this one holds another run ({what})")

    def append(self, line: Mapping[str, Any]) -> None:
        """Keep what was finished; it is on the disk when this returns."""
        kept = json.loads(json.dumps(line))
        self._write(kept)
        self.lines.append(kept)

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            raise ConfigError("journal", "closed", "use it within `with`")
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._lock.release()
