from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest

from cacheblend_rag.errors import ConfigError, DocumentError
from cacheblend_rag.retrieval.documents import FileBytes, by_suffix, list_files, parse, read_bytes, read_folder
from tests.integrations.retrieval.pdf import make_pdf


def write(folder: Path, path: str, data: str | bytes) -> None:
    place = folder / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data.encode() if isinstance(data, str) else data)


def parsed(path: str, data: bytes) -> tuple[str, ...]:
    return parse(FileBytes(path, "", data)).pages


def test_reads_known_files_in_order_of_their_paths(tmp_path: Path) -> None:
    for path in ("b.txt", "sub/deep/c.md", "a.MD", "sub/z.txt", "picture.png", "Makefile"):
        write(tmp_path, path, f"text of {path}")
    sources = read_folder(tmp_path)
    assert [one.path for one in sources] == ["a.MD", "b.txt", "sub/deep/c.md", "sub/z.txt"]
    assert sources[1].pages == ("text of b.txt",)
    assert sources[1].sha256 == hashlib.sha256(b"text of b.txt").hexdigest()
    assert not sources[1].is_pdf


def test_hidden_files_and_folders_are_left_out(tmp_path: Path) -> None:
    for path in ("seen.txt", ".hidden.txt", ".git/config.txt", "sub/.cache/x.md"):
        write(tmp_path, path, "x")
    assert list_files(tmp_path).readable == ("seen.txt",)


def test_links_out_of_the_folder_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "outside/secret.txt", "secret")
    write(tmp_path, "docs/a.txt", "a")
    docs = tmp_path / "docs"
    (docs / "file-out.txt").symlink_to(tmp_path / "outside" / "secret.txt")
    (docs / "folder-out").symlink_to(tmp_path / "outside", target_is_directory=True)
    (docs / "loop").symlink_to(docs, target_is_directory=True)
    (docs / "broken.txt").symlink_to(docs / "nowhere.txt")
    (docs / "inside.txt").symlink_to(docs / "a.txt")
    assert [one.path for one in read_folder(docs)] == ["a.txt", "inside.txt"]
    assert "file-out.txt is skipped" in caplog.text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_list_files_leaves_out_pipes_and_folders(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", "a")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "folder.txt").mkdir()
    assert list_files(tmp_path).readable == ("a.txt",)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"nowhere does not exist"):
        list_files(tmp_path / "nowhere")
    write(tmp_path, "a.txt", "a")
    with pytest.raises(DocumentError, match=r"a\.txt is a file; name the folder"):
        list_files(tmp_path / "a.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DocumentError, match=r"holds no \.c, .*\.docx, .*\.pdf, .*\.txt, .* file; add"):
        list_files(tmp_path / "empty")


def test_vanished_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"gone\.txt cannot be read: No such file"):
        read_bytes(tmp_path, "gone.txt")


def test_byte_order_mark_and_line_ends_are_not_text() -> None:
    assert parsed("a.txt", b"\xef\xbb\xbfone\r\ntwo\rthree\n") == ("one\ntwo\nthree\n",)
    assert parsed("a.md", "Åse\u2028søker".encode()) == ("Åse\u2028søker",)
    assert parsed("a.txt", b"") == ("",)


def test_unreadable_file_is_an_error_by_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "good.txt", "good")
    write(tmp_path, "sub/bytes.txt", bytes(range(256)) * 8)
    with pytest.raises(DocumentError, match=r"sub/bytes\.txt holds bytes that are not text"):
        read_folder(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert [one.path for one in read_folder(tmp_path, on_error="skip")] == ["good.txt"]
    assert "skipped: sub/bytes.txt holds bytes" in caplog.text
    with pytest.raises(ConfigError, match="on_error='ignore' is not usable: use one of 'raise', 'skip'"):
        read_folder(tmp_path, on_error="ignore")


def test_files_of_other_kinds_are_listed_and_counted(tmp_path: Path) -> None:
    for path in ("a.txt", "x.png", "sub/y.PNG", "sub/z.xls", "Makefile", "~$letter.docx", ".hidden.png"):
        write(tmp_path, path, "x")
    found = list_files(tmp_path)
    assert found.readable == ("a.txt",)
    assert found.others == ("Makefile", "sub/y.PNG", "sub/z.xls", "x.png")
    assert by_suffix(found.others) == "2 .png, 1 .xls, 1 without suffix"
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DocumentError, match=r"\(there: 2 \.png, 1 \.xls, 1 without suffix\)"):
        list_files(tmp_path)


def test_pdf_is_read_page_by_page(tmp_path: Path) -> None:
    write(tmp_path, "book.PDF", make_pdf(["First page here.", "", "Third page."]))
    (book,) = read_folder(tmp_path)
    assert book.is_pdf
    assert [page.strip() for page in book.pages] == ["First page here.", "", "Third page."]


def test_pdf_without_text_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    assert parsed("scan.pdf", make_pdf([""])) == ("",)
    assert "scan.pdf holds no text" in caplog.text


@pytest.mark.parametrize("data", [b"", b"no pdf at all", make_pdf(["x"], password="secret")])
def test_pdf_that_cannot_be_read(data: bytes) -> None:
    with pytest.raises(DocumentError, match=r"bad\.pdf cannot be read as PDF"):
        parsed("bad.pdf", data)


def test_pdf_that_forbids_copying_alone_is_read() -> None:
    assert parsed("rules.pdf", make_pdf(["Rules of the house."], owner="secret")) == ("Rules of the house.",)


def test_lone_surrogates_of_a_pdf_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pypdf.PageObject.extract_text", lambda page: "a\ud800b")
    assert parsed("odd.pdf", make_pdf(["x"])) == ("a?b",)
