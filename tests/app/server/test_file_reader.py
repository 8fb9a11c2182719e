"""The process that parses: what it gets, and whom it blames."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.app.server.security.file_reader import FileReader
from cacheblend_rag.app.server.settings import KEYS_VARIABLE, Limits
from cacheblend_rag.errors import DocumentError
from cacheblend_rag.retrieval.documents import FileBytes
from tests.integrations.retrieval.office import make_docx
from tests.integrations.retrieval.pdf import make_pdf

LIMITS = Limits(document_chars=100_000, parse_seconds=10)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory and of processor time are POSIX's")
BOMB = b"<p>" + b"<b>x" * 400_000


def file(name: str, data: bytes = b"good text") -> FileBytes:
    return FileBytes(name, sha256(data).hexdigest(), data)


def process_of(reader: FileReader) -> int:
    assert reader._process is not None
    return reader._process.pid


@LINUX
def test_every_kind_is_read_by_one_process_that_knows_nothing_of_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "ada=ada-0123456789abcdef")
    files = {
        "a.txt": "Text of Grüße aus der Stadt am Fluss, in der es regnet und die Leute lachen".encode("latin-1"),
        "b.html": b"<html><title>T</title><p>Text of a page</p></html>",
        "c.docx": make_docx(lambda one: one.add_paragraph("Text of a letter")),
        "d.pdf": make_pdf(["Text of a page in print"]),
        "e.json": b'{"a": "Text of a value"}',
        "f.html": b"<p>Text of it <math><mi>x</mi></math>",
    }
    with closing(FileReader(LIMITS)) as reader:
        processes = set()
        for name, data in files.items():
            assert "Text of " in reader.parse(file(name, data)).pages[0], name
            processes.add(process_of(reader))
        assert caplog.messages == ["f.html is read, except: an equation"]
        (process,) = processes
        assert Path(f"/proc/{process}/environ").read_bytes() == b""
        assert Path(f"/proc/{process}/cwd").resolve() == Path("/")
        with pytest.raises(DocumentError, match=r"^contract\.pdf cannot be read as PDF"):
            reader.parse(file("contract.pdf", b"no PDF"))
        with pytest.raises(DocumentError, match=r"^long\.txt holds more than 100,000 characters"):
            reader.parse(file("long.txt", b"x" * 100_001))


@LINUX
@pytest.mark.parametrize(
    ("name", "data", "limits"),
    [
        ("memory.json", b"[" + b"{}," * 5_000_000 + b"1]", Limits(document_chars=100_000, parse_bytes=400_000_000)),
        ("time.html", BOMB, Limits(document_chars=100_000, parse_seconds=0.2)),
    ],
    ids=["memory", "time"],
)
def test_file_beyond_the_limits_is_named_and_the_next_one_is_read(name: str, data: bytes, limits: Limits) -> None:
    with closing(FileReader(limits)) as reader:
        assert reader.parse(file("a.txt")).pages == ("good text",)
        with pytest.raises(DocumentError, match=f"^{name} cannot be read within the limits of memory and time"):
            reader.parse(file(name, data))
        assert reader.parse(file("c.txt")).pages == ("good text",)


@LINUX
def test_crash_of_the_reader_is_blamed_on_the_file_that_crashes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(FileReader(LIMITS)) as reader:
        reader.parse(file("a.txt"))
        os.kill(process_of(reader), signal.SIGKILL)  # whoever did that
        assert reader.parse(file("b.txt")).pages == ("good text",)

        # As where a parser written in C has a fault: the process ends in the midst of a file.
        module = "cacheblend_rag.app.server.security.file_reader"
        crash = "import os, signal; print('ready', flush=True); input(); os.kill(os.getpid(), signal.SIGSEGV)"
        reader.close()
        with monkeypatch.context() as patch:
            patch.setattr(f"{module}.isolated", lambda *_: child(crash))
            with pytest.raises(DocumentError, match=r"^c\.txt cannot be read within the limits"):
                reader.parse(file("c.txt"))
            patch.setattr(f"{module}.isolated", lambda *_: child("raise SystemExit(1)"))
            with pytest.raises(OSError, match="does not start"):
                reader.parse(file("e.txt"))
        assert reader.parse(file("f.txt")).pages == ("good text",)


def child(program: str) -> dict[str, Any]:
    return {"args": [sys.executable, "-c", program], "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}


@LINUX
def test_reading_ends_when_the_server_stops() -> None:
    with closing(FileReader(LIMITS)) as reader:
        reader.parse(file("a.txt"))
        stops = threading.Timer(0.2, reader.stop)
        stops.start()
        for name in ("bomb.html", "b.txt"):  # in the midst of one, and none after it
            with pytest.raises(OSError, match="the server is stopping"):
                reader.parse(file(name, BOMB))
        stops.join()
