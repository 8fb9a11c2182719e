"""The process that parses: what it is given, what it can reach, and whom it blames."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.app.server.security.file_reader import FileReader
from cacheblend_rag.app.server.settings import KEYS_VARIABLE, Limits
from cacheblend_rag.errors import DocumentError
from tests.integrations.retrieval import test_office as office
from tests.integrations.retrieval.office import make_docx
from tests.integrations.retrieval.pdf import make_pdf

ROOT = Path(__file__).parents[3]
LIMITS = Limits(document_chars=100_000, parse_seconds=10)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="system calls are filtered on Linux")

# Runs within the limits of the process that parses, and says what an attack came to.
CONFINED = """
import ctypes, os, socket, sys
from cacheblend_rag.app.server.security.sandbox import confine
held = confine(2_000_000_000, 10)
print(*sorted(held))
def attack():
{attack}
try:
    print("done", attack())
except OSError as error:
    print("refused", type(error).__name__)
"""


def confined(attack: str) -> tuple[set[str], str]:
    """The limits in force, and the outcome of an attack."""
    program = CONFINED.replace("{attack}", "\n".join("    " + line for line in attack.splitlines()))
    command = [sys.executable, "-c", program]
    environment = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    held, _, outcome = done.stdout.partition("\n")
    return set(held.split()), outcome.strip() or done.stderr


def readers() -> list[int]:
    """Processes that parse for this one."""
    found = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended since
            children = path.read_text().split()
            found += [int(pid) for pid in children if b"security.file_reader" in _command(pid)]
    return found


def _command(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@LINUX
@pytest.mark.parametrize(
    "attack",
    [
        "return socket.create_connection(('127.0.0.1', {port}), 2)",
        "return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
        "return socket.socket(socket.AF_UNIX)",
        "return open('{folder}/new', 'w')",
        "return os.open('{folder}/new', os.O_RDONLY | os.O_CREAT)",
        "return open('{folder}/there', 'a')",
        "return os.unlink('{folder}/there')",
        "return os.rename('{folder}/there', '{folder}/elsewhere')",
        "return os.truncate('{folder}/there', 0)",
        "return os.chmod('{folder}/there', 0o777)",
        "return os.mkdir('{folder}/made')",
        "return os.symlink('/etc/passwd', '{folder}/made')",
        "return os.fork()",
        "return os.execv('/bin/true', ['true'])",
        "return os.kill({parent}, 0)",
        "return os.posix_spawn('/bin/true', ['true'], {{}})",
    ],
)
def test_reader_reaches_no_network_no_file_and_no_process(attack: str, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("there")
    before = (tmp_path / "there").stat()
    held, outcome = confined(attack.format(folder=tmp_path, port=9, parent=os.getpid()))
    assert "calls" in held
    assert outcome == "refused PermissionError"
    assert [one.name for one in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").stat().st_mode == before.st_mode


@LINUX
def test_reader_reads_no_file_but_code(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    held, outcome = confined(f"return open({str(tmp_path / 'secret')!r}).read()")
    if "reading" not in held:
        pytest.skip("the kernel has no Landlock")
    assert outcome == "refused PermissionError"
    for path in (f"/proc/{os.getpid()}/environ", "/etc/passwd", str(Path.home())):
        assert confined(f"return os.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r}).read()")[1] == (
            "refused PermissionError"
        )
    assert confined("import pypdf, mammoth, lxml.html, decimal\nreturn 1")[1] == "done 1"


@LINUX
def test_reader_gets_nothing_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "ada=ada-0123456789abcdef")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    (tmp_path / "a.txt").write_text("some text")
    with FileReader(LIMITS) as reader:
        assert reader.read(tmp_path / "a.txt", "a.txt").pages == ("some text",)
        (process,) = readers()
        told = Path(f"/proc/{process}/environ")
        assert told.read_bytes() == b""
        assert Path(f"/proc/{process}/cwd").resolve() == Path("/")


@LINUX
def test_every_kind_is_read_within_the_limits_by_one_process(tmp_path: Path) -> None:
    files = {
        "a.txt": "Grüße".encode("latin-1") + b" aus der Stadt am Fluss, in der es immer regnet und die Leute lachen",
        "b.html": b"<html><title>T</title><p>Text of a page</p></html>",
        "c.docx": make_docx(lambda one: one.add_paragraph("Text of a letter")),
        "d.pdf": make_pdf(["Text of a page in print"]),
        "e.md": b"# Head\n\nText",
    }
    found, first = {}, list[int]()
    with FileReader(LIMITS) as reader:
        for name, data in files.items():
            (tmp_path / "file").write_bytes(data)
            found[name] = reader.read(tmp_path / "file", name).pages[0]
            first = first or readers()
        assert len(first) == 1
        assert readers() == first
    assert "Grüße" in found["a.txt"]
    assert all("Text of a" in found[name] for name in ("b.html", "c.docx", "d.pdf"))


@LINUX
def test_file_that_kills_the_reader_is_blamed_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "good").write_text("good text")
    (tmp_path / "bomb").write_bytes(b"<p>" + b"<b>x" * 400_000)
    narrow = Limits(document_chars=100_000, parse_seconds=3, parse_bytes=400_000_000)
    with FileReader(narrow) as reader:
        assert reader.read(tmp_path / "good", "a.txt").pages == ("good text",)
        with pytest.raises(DocumentError):
            reader.read(tmp_path / "bomb", "b.html")
        assert reader.read(tmp_path / "good", "c.txt").pages == ("good text",)
        (process,) = readers()
        os.kill(process, signal.SIGKILL)  # whoever did that
        assert reader.read(tmp_path / "good", "d.txt").pages == ("good text",)


@LINUX
def test_file_is_not_blamed_for_the_end_that_the_system_makes_of_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where memory is short; but one file cannot have it done for ever."""
    (tmp_path / "file").write_text("good text")
    start = FileReader._started

    def killed(self: FileReader) -> Any:
        process = start(self)
        process.kill()
        process.wait()
        return process

    with FileReader(LIMITS) as reader, monkeypatch.context() as patch:
        patch.setattr(FileReader, "_started", killed)
        for _ in range(3):
            with pytest.raises(OSError, match="the system has ended"):
                reader.read(tmp_path / "file", "a.txt")
        patch.undo()
        assert reader.read(tmp_path / "file", "a.txt").pages == ("good text",)
    with FileReader(LIMITS) as reader, monkeypatch.context() as patch:
        patch.setattr(FileReader, "_started", killed)
        patch.setattr("cacheblend_rag.app.server.security.file_reader._TRIES", 2)
        with pytest.raises(OSError, match="the system has ended"):
            reader.read(tmp_path / "file", "a.txt")
        with pytest.raises(DocumentError):
            reader.read(tmp_path / "file", "a.txt")


def test_reader_that_does_not_start_is_no_fault_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("good text")
    with FileReader(LIMITS) as reader:
        with monkeypatch.context() as patch:
            patch.setattr(
                "cacheblend_rag.app.server.security.file_reader.isolated",
                lambda *_: {"args": [sys.executable, "-c", "raise SystemExit(1)"], "stdout": subprocess.PIPE},
            )
            with pytest.raises(OSError, match="does not start"):
                reader.read(tmp_path / "file", "a.txt")
        assert reader.read(tmp_path / "file", "a.txt").pages == ("good text",)
        (tmp_path / "file").unlink()
        with pytest.raises(DocumentError, match="lost the file"):
            reader.read(tmp_path / "file", "a.txt")


def test_answer_about_one_file_is_never_taken_for_that_about_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "other"):
        (tmp_path / name).write_text(name)
    with FileReader(LIMITS) as reader:
        with monkeypatch.context() as patch:
            patch.setattr("json.loads", lambda *_: (_ for _ in ()).throw(MemoryError()))
            with pytest.raises(MemoryError):
                reader.read(tmp_path / "one", "one.txt")
        assert reader.read(tmp_path / "other", "other.txt").pages == ("other",)


def test_error_names_the_upload_as_the_file(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"no PDF")
    with FileReader(Limits()) as reader, pytest.raises(DocumentError, match=r"^the file cannot be read as PDF"):
        reader.read(tmp_path / "bad", "contract.pdf")


@pytest.mark.parametrize("moment", ["as it begins", "while it goes on"])
def test_reading_ends_when_the_server_stops(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bomb").write_bytes(b"<p>" + b"<b>x" * 400_000)
    reader, failed, begun, start = FileReader(Limits(parse_seconds=60)), [], threading.Event(), FileReader._started

    def started(self: FileReader) -> Any:
        if moment == "as it begins":
            reader.stop()
        process = start(self)
        begun.set()
        return process

    monkeypatch.setattr(FileReader, "_started", started)

    def read() -> None:
        try:
            reader.read(tmp_path / "bomb", "b.html")
        except DocumentError as error:
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(20)
    if moment == "while it goes on":
        reader.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert failed
    reader.close()


def test_every_kind_is_read_within_the_limits(tmp_path: Path) -> None:
    page = "<html><body><p>Chapter</p></body></html>"
    files = {
        "a.xlsx": (office.workbook(A=[["Name"], ["Rondo"]]), "## A\n\nName: Rondo"),
        "a.pptx": (office.presentation(lambda made: made.slides.add_slide(made.slide_layouts[6])), "## Slide 1"),
        "a.odt": (office.odt("<text:p>Line</text:p>"), "Line"),
        "a.epub": (office.epub(page), "Chapter"),
        "a.json": (b'{"a": 1}', "a: 1"),
        "a.py": (b"x = 1", "x = 1"),
    }
    with FileReader(LIMITS) as reader:
        for name, (data, text) in files.items():
            path = tmp_path / name
            path.write_bytes(data)
            assert reader.read(path, name).pages == (text,), name
