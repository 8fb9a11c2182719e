"""A file of what was finished, line by line, so that a search or a run that was killed goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from filelock import FileLock, Timeout

from cacheblend_rag.errors import ConfigError

_NAME = "results.jsonl"
_PARTS = "results-*.jsonl"


class Journal:
    """One line of settings, then one line for everything that was finished.

    Parameters
    ----------
    folder : path
        Made if it is not there.
    settings : mapping
        Settings on which the results depend, fit for JSON. A folder with those of another run is refused.
    part : str
        Name of a file of its own, so that several processes can write to one folder. Each reads what the others
        had finished when it began.

    Raises
    ------
    ConfigError
        If the folder holds another run, is in use by another process, or cannot be written. Without a part, also
        if a part is in use.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], part: str = "") -> None:
        self.folder = folder
        self.lines: list[dict[str, Any]] = []
        """Answers finished by all parts, this time and before."""
        self._settings = json.loads(json.dumps(settings))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("out", str(folder), f"use a folder that can be written ({error})") from error
        self._path = folder / (_PARTS.replace("*", part) if part else _NAME)
        self._locks = ExitStack()
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Journal:
        parts = self.folder.glob(_PARTS) if self._path.name == _NAME else ()
        try:
            self._acquire({self._path, *parts})
            self._open()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _acquire(self, paths: Iterable[Path]) -> None:
        for path in paths:
            lock = FileLock(self.folder / path.stem.replace("results", ".lock"))
            try:
                self._locks.enter_context(lock.acquire(timeout=0))
            except Timeout as error:
                message = "use another folder; a run is writing to this one"
                raise ConfigError("out", str(self.folder), message) from error

    def _open(self) -> None:
        whole, lines = self._read(self._path)
        others = [path for path in (self.folder / _NAME, *sorted(self.folder.glob(_PARTS))) if path != self._path]
        known = [line for path in others for line in self._read(path)[1][1:]]
        self._file = open(self._path, "r+b" if self._path.exists() else "w+b")  # noqa: SIM115
        self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)
        if not lines:
            self._write({"settings": self._settings})
        self.lines = lines[1:] + known

    def _read(self, path: Path) -> tuple[int, list[dict[str, Any]]]:
        """Bytes and contents of the whole lines of a file; one that is cut off is done again."""
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        lines = [self._parse(path, number, line) for number, line in enumerate(whole.split(b"\n")[:-1], 1)]
        if lines:
            self._compare(lines[0].get("settings", {}))
        return len(whole), lines

    def _parse(self, path: Path, number: int, line: bytes) -> dict[str, Any]:
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ConfigError("out", str(path), f"remove it or use another folder; its line {number} is damaged")
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
        self._locks.close()
