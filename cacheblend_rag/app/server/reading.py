"""One uploaded file parsed in a process of its own, within limits of time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.errors import DocumentError
from cacheblend_rag.retrieval.documents import SUFFIXES, FileBytes, SourceFile, parse

__all__ = ["main", "read_upload", "suffix_of"]

_FAILED, _TOO_LONG = 3, 4
# -P: no module is ever picked up from the working folder.
_FLAGS = ("-P", "-s", "-W", "ignore")


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


def read_upload(path: Path, name: str, limits: Limits, stopping: Callable[[], bool] = lambda: False) -> SourceFile:
    """Parse a file.

    Parameters
    ----------
    path : path
        Where its bytes are.
    name : str
        Tells its kind; is never opened.
    limits : Limits
    stopping : callable
        Once this is true nobody waits for the text any more.

    Raises
    ------
    DocumentError
        If it cannot be read within the limits.
    """
    suffix = suffix_of(name)
    arguments = [str(path), suffix, str(limits.document_chars), str(limits.parse_bytes), str(limits.parse_seconds)]
    with subprocess.Popen(
        [sys.executable, *_FLAGS, "-m", "cacheblend_rag.app.server.reading", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        output = _output(process, limits.parse_seconds, stopping)
    if process.returncode == _TOO_LONG:
        raise DocumentError(f"the file holds more than {limits.document_chars:,} characters of text")
    try:
        answer = json.loads(output)
    except ValueError:
        raise DocumentError("the file cannot be read within the limits of memory and time") from None
    if process.returncode:
        raise DocumentError(str(answer))
    return SourceFile(name, "", tuple(answer))


def _output(process: subprocess.Popen[bytes], seconds: float, stopping: Callable[[], bool]) -> bytes:
    ends = time.monotonic() + seconds
    while True:
        try:
            output, _ = process.communicate(timeout=0.2)
            return output
        except subprocess.TimeoutExpired:
            if time.monotonic() > ends or stopping():
                process.kill()
                process.communicate()
                raise DocumentError("reading the file took too long") from None


def main(arguments: list[str]) -> int:
    """The process that parses: pages as JSON on standard output, or why there are none."""
    path, suffix, most, memory, seconds = arguments
    _confine(int(memory), float(seconds))
    try:
        pages = parse(FileBytes("the file" + suffix, "", Path(path).read_bytes())).pages
    except (DocumentError, ImportError) as error:
        print(json.dumps(str(error)))
        return _FAILED
    if sum(map(len, pages)) > int(most):
        return _TOO_LONG
    sys.stdout.write(json.dumps(pages))
    return 0


def _confine(memory: int, seconds: float) -> None:
    try:
        import resource
    except ImportError:  # not on Windows; the time limit of the parent holds there too
        return
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it has nothing to write
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
