"""Files of strangers parsed in a process of its own, which gets their bytes and gives their text.

The process is started with no environment and holds itself within limits (`sandbox`). It parses one file after the
other. A file that ends it is tried once more in a fresh process, so that none is blamed for the one before it. Nor is
a file blamed for the server: where no process can be started, or the system ends it, the file can be read later.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import mimetypes
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, cast

from cacheblend_rag.app.server.security.sandbox import confine, isolated
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.errors import DocumentError
from cacheblend_rag.retrieval.documents import FileBytes, SourceFile, parse

_log = logging.getLogger(__name__)
_READY = b"ready\n"
_LONGEST_HEAD = 1_000
# In the process that parses: what is said of the file that is being parsed.
_LOSSES = logging.handlers.BufferingHandler(1_000)


class _EndedError(Exception):
    """The process gave no answer."""


class FileReader:
    """Parses files, each within limits of time and memory, from any thread. To be closed.

    Parameters
    ----------
    limits : Limits
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def parse(self, file: FileBytes) -> SourceFile:
        """Parse a file, of whose path only the suffix is used.

        Raises
        ------
        DocumentError
            If it cannot be read within the limits.
        OSError
            If the server lacks what is needed to read any file, or is stopping; this one can be read later.
        """
        with self._lock:
            fresh = self._process is None
            try:
                try:
                    answer = self._ask(file)
                except _EndedError:
                    if fresh:
                        raise
                    answer = self._ask(file)
            except _EndedError:
                if self._stopped:
                    raise OSError("the server is stopping") from None
                message = f"{file.path} cannot be read within the limits of memory and time"
                raise DocumentError(message) from None
        if "error" in answer:
            raise DocumentError(str(answer["error"]).replace("the file", file.path, 1))
        for lost in answer.get("left_out", ()):
            _log.warning("%s", str(lost).replace("the file", file.path, 1))
        return SourceFile(file.path, file.sha256, tuple(map(str, answer["pages"])))

    def _ask(self, file: FileBytes) -> dict[str, list[object]]:
        if self._stopped:
            raise _EndedError
        process = self._process or self._started()
        requests, answers = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
        ends = threading.Timer(self._limits.parse_seconds, process.kill)
        ends.daemon = True
        try:
            ends.start()
            head = {"suffix": Path(file.path).suffix.lower(), "bytes": len(file.data)}
            requests.write(json.dumps(head).encode() + b"\n" + file.data)
            requests.flush()
            # Six bytes for a character are the most that JSON takes; what goes on longer is no answer.
            answer = json.loads(answers.readline(12 * self._limits.document_chars + 1_000_000))
            if not isinstance(answer, dict) or not isinstance(answer.get("pages", []), list):
                raise ValueError
        except (OSError, ValueError):
            self.close()
            raise _EndedError from None
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
        process = self._process = subprocess.Popen(**isolated(__name__, arguments), stdin=subprocess.PIPE)
        if cast("IO[bytes]", process.stdout).readline(len(_READY)) != _READY:
            self.close()
            raise OSError("the process that reads files does not start")
        return process

    def stop(self) -> None:
        """Parse nothing more, from any thread; what is being parsed fails."""
        self._stopped = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()  # which closes the pipes and waits


def main(arguments: list[str]) -> int:
    """The process that parses: a line of JSON for each file on standard input, until that ends."""
    most, memory, seconds = int(arguments[0]), int(arguments[1]), float(arguments[2])
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    # A reader of spreadsheets imports these: numpy begins with threads, and the other with files of the system.
    sys.modules["numpy"] = None  # type: ignore[assignment]
    mimetypes.init([])
    logging.getLogger("cacheblend_rag.retrieval.losses").addHandler(_LOSSES)
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
    _LOSSES.flush()
    try:
        pages = parse(FileBytes(name, "", data)).pages
    except (DocumentError, ImportError) as error:
        return {"error": str(error).replace(name, "the file")}
    if sum(map(len, pages)) > most:
        return {"error": f"the file holds more than {most:,} characters of text"}
    lost = [record.getMessage().replace(name, "the file") for record in _LOSSES.buffer]
    return {"pages": pages, "left_out": lost}
