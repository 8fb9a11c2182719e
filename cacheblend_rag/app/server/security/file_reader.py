"""Uploaded files parsed in a process of its own, which gets their bytes and gives their text.

The process is started with no environment, holds itself within limits (`sandbox`) and opens no file of ours. It
parses the files of one tenant one after the other. One that ends it is tried once more in a fresh process, so that
no file is blamed for another. Nor is a file blamed for the server: where a process cannot be started, or the system
ends it, the file can be read later.
"""

from __future__ import annotations

import hashlib
import json
import mimetypes
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, cast

from cacheblend_rag.app.server.security.sandbox import isolated
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.errors import DocumentError
from cacheblend_rag.retrieval.documents import SUFFIXES, FileBytes, SourceFile, parse

_LONGEST_HEAD = 1_000
_READY = b"ready\n"
# Seconds in which a process that has ended is known to have.
_ENDING = 1.0


def suffix_of(name: str) -> str:
    """The kind of a file, by its name.

    Raises
    ------
    DocumentError
        If it is none that can be read.
    """
    suffix = Path(name).suffix.lower()
    if suffix not in SUFFIXES:
        raise DocumentError(f"files of this kind cannot be read; upload {', '.join(SUFFIXES)}")
    return suffix


# Times that the system may end a process with one file before the file is blamed: it may take all memory there is.
_TRIES = 12


class _EndedError(Exception):
    """The process gave no answer; ``by_system`` says whether it was ended from without."""

    def __init__(self, by_system: bool) -> None:
        super().__init__()
        self.by_system = by_system


class FileReader:
    """Parses files, each within limits of time and memory. To be closed.

    Parameters
    ----------
    limits : Limits
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._ended: tuple[str, int] = "", 0  # the latest file with which the system ended a process, and how often

    def read(self, path: Path, name: str) -> SourceFile:
        """Parse a file.

        Parameters
        ----------
        path : path
            Where its bytes are.
        name : str
            Tells its kind; is never opened.

        Raises
        ------
        DocumentError
            If it cannot be read within the limits, or its bytes are gone.
        OSError
            If the server lacks what is needed to read any file; this one can be read later.
        """
        suffix = suffix_of(name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise DocumentError("the server has lost the file; upload it again") from None
        fresh, digest = self._process is None, hashlib.sha256(data).hexdigest()
        try:
            answer = self._ask(suffix, data)
        except _EndedError as ended:
            if not fresh:
                return self.read(path, name)
            if ended.by_system and self._may_try_again(digest):
                raise OSError("the system has ended the process that reads files") from None
            raise DocumentError("the file cannot be read within the limits of memory and time") from None
        if "error" in answer:
            raise DocumentError(str(answer["error"]))
        return SourceFile(name, digest, tuple(map(str, answer["pages"])))

    def _may_try_again(self, digest: str) -> bool:
        known, times = self._ended
        self._ended = digest, (times + 1 if known == digest else 1)
        return self._ended[1] < _TRIES

    def _ask(self, suffix: str, data: bytes) -> dict[str, list[object]]:
        if self._stopped:
            raise DocumentError("the server is stopping")
        process = self._process = self._process or self._started()
        if self._stopped:  # since it was looked at, when there was no process to end
            process.kill()
        requests, answers = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        ends = threading.Timer(self._limits.parse_seconds, end)
        ends.daemon = True
        try:
            ends.start()
            requests.write(json.dumps({"suffix": suffix, "bytes": len(data)}).encode() + b"\n" + data)
            requests.flush()
            # Six bytes for a character are the most that JSON takes; what goes on longer is no answer.
            line = answers.readline(12 * self._limits.document_chars + 1_000_000)
            answer = json.loads(line)
            if not isinstance(answer, dict) or not isinstance(answer.get("pages", []), list):
                raise ValueError
        except (OSError, ValueError):
            raise _EndedError(self.close() and not late.is_set() and not self._stopped) from None
        except BaseException:  # its answer would be taken for that to the next file
            self.close()
            raise
        finally:
            ends.cancel()
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        """A process that is ready to read files.

        Raises
        ------
        OSError
            If there is not enough of something for it.
        """
        limits = self._limits
        arguments = [str(limits.document_chars), str(limits.parse_bytes), str(limits.parse_seconds)]
        process = subprocess.Popen(**isolated(__name__, arguments), stdin=subprocess.PIPE)
        if cast("IO[bytes]", process.stdout).readline(len(_READY)) != _READY:
            _end(process)
            raise OSError("the process that reads files does not start")
        return process

    def stop(self) -> None:
        """Parse nothing more, from any thread; what is being parsed fails."""
        self._stopped = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> bool:
        """End the process; whether it was killed before."""
        process, self._process = self._process, None
        return process is not None and _end(process) == -signal.SIGKILL

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """End a process for good; its status, if it had ended by itself or soon does."""
    _close(process.stdin)  # which ends one that is waiting
    try:
        status: int | None = process.wait(_ENDING)
    except subprocess.TimeoutExpired:
        status = None
        process.kill()
    _close(process.stdout)
    process.wait()
    return status


def _close(pipe: IO[bytes] | None) -> None:
    try:
        if pipe is not None:
            pipe.close()
    except OSError:  # what was not written yet cannot be any more
        pass


def main(arguments: list[str]) -> int:
    """The process that parses: a line of JSON for each file on standard input, until that ends."""
    from cacheblend_rag.app.server.security.sandbox import confine

    most, memory, seconds = int(arguments[0]), int(arguments[1]), float(arguments[2])
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    # A reader of spreadsheets imports these: numpy begins with threads, and the other with files of the system.
    sys.modules["numpy"] = None  # type: ignore[assignment]
    mimetypes.init([])
    confine(memory, seconds)
    answers.write(_READY)
    answers.flush()
    while head := requests.readline(_LONGEST_HEAD):
        request = json.loads(head)
        parsed = _parsed(request["suffix"], requests.read(request["bytes"]), most)
        answers.write(json.dumps(parsed).encode() + b"\n")
        answers.flush()
    return 0


def _parsed(suffix: str, data: bytes, most: int) -> dict[str, object]:
    name = "the file" + suffix
    try:
        pages = parse(FileBytes(name, "", data)).pages
    except (DocumentError, ImportError) as error:
        return {"error": str(error).replace(name, "the file")}
    if sum(map(len, pages)) > most:
        return {"error": f"the file holds more than {most:,} characters of text"}
    return {"pages": pages}
