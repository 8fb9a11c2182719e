"""Text of files of each kind, and files that would do harm."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.errors import DocumentError, MissingExtraError
from cacheblend_rag.retrieval.documents import FileBytes, parse
from tests.integrations.retrieval.office import make_docx, nested, of_entities, with_part


def parsed(path: str, data: bytes) -> str:
    (text,) = parse(FileBytes(path, "", data)).pages
    return text


def html(data: str | bytes) -> str:
    return parsed("page.html", data.encode() if isinstance(data, str) else data)


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1252", "Ole Åse går på søndagstur ved sjøen. Blåbær er gode."),
        ("cp1252", "Le garçon a mangé une crêpe à l’été, pour 5 €."),
        ("cp1252", "blåbær"),
        ("latin-1", "El niño comió una manzana ayer por la mañana."),
        ("cp1251", "Договор аренды заключён на один год."),
        ("cp1250", "Příliš žluťoučký kůň"),
        ("shift_jis", "これは日本語の文章です。"),
        ("gb18030", "这是一个中文的句子，用来测试。"),
        ("utf-16", "Åse søker"),
        ("utf-16-le", "Hello there, this is text."),
        ("utf-8-sig", "Åse søker"),
    ],
)
def test_text_is_read_in_the_encoding_it_is_in(encoding: str, text: str) -> None:
    assert parsed("a.txt", text.encode(encoding)) == text
    assert parsed("a.markdown", text.encode(encoding)) == text


@pytest.mark.parametrize(
    "data", [b"\x89PNG\r\n\x1a\n" + bytes(range(256)), b"\0" * 100, bytes(range(256)) * 9, b"\xff\xfe\0"]
)
def test_what_is_no_text_is_named(data: bytes) -> None:
    with pytest.raises(DocumentError, match=r"picture\.txt holds bytes that are no text"):
        parsed("picture.txt", data)


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_each_row_of_separated_values_names_its_columns(mark: str) -> None:
    rows = ["Name,Price,Note", 'Rondo,12,"red, round\nand ""light"""', ",,", "Kvadrat,9", "Tri,8,sharp,extra"]
    text = parsed("a.csv", "\r\n".join(row.replace(",", mark) for row in rows).encode("utf-8-sig"))
    assert text.split("\n\n") == [
        f'Name: Rondo; Price: 12; Note: red{mark} round\nand "light"',
        "Name: Kvadrat; Price: 9",
        "Name: Tri; Price: 8; Note: sharp; extra",
    ]


def test_separated_values_of_one_row_or_none() -> None:
    assert parsed("a.csv", b"just,words") == "just; words"
    assert parsed("a.csv", b"one\ntwo\nthree") == "one: two\n\none: three"
    assert parsed("a.csv", b"\n \n") == ""
    with pytest.raises(DocumentError, match=r"wide\.csv is no table of separated values"):
        parsed("wide.csv", b"a,b\n" + b"x" * 200_000)


def test_html_becomes_headings_paragraphs_lists_and_tables() -> None:
    text = html(
        "<title>A page</title><h1>Boats</h1><p>One<p>Two <b>bold</b> <a href=http://x.org/>link</a> a_b *c*"
        "<ul><li>oars<li>sails<ul><li>jib</ul></ul><ol><li>first<li>second</ol>"
        "<table><tr><th>Name<th>Length<tr><td>Anna<td>7 m</table><pre>x = 1\n  y</pre>"
    )
    assert text.startswith("A page\n\n# Boats\n\nOne\n\nTwo bold link a_b *c*\n\n- oars\n- sails\n  - jib\n")
    assert "1. first\n2. second" in text
    assert "| Name | Length |\n| --- | --- |\n| Anna | 7 m |" in text
    assert "x = 1\n  y" in text


def test_what_a_browser_does_not_show_is_no_text() -> None:
    seen = html(
        "<html><head><title>Boats</title><style>p{color:red}</style><script>alert(1)</script></head><body>"
        "<!-- a comment --><h1>Boats</h1><p>Shown.</p><p hidden>no1</p><p style='Display : NONE'>no2</p>"
        "<div aria-hidden=true>no3</div><template>no4</template><noscript>no5</noscript><svg><text>no6</text></svg>"
        "<iframe src='file:///etc/passwd'>no7</iframe><script>no8</script><img src=http://x.org/y.png alt=no9></body>"
    )
    assert seen == "# Boats\n\nShown."


@pytest.mark.parametrize("encoding", ["iso-8859-1", "iso-8859-2", "koi8-r", "windows-1251", "shift_jis"])
def test_html_says_its_encoding(encoding: str) -> None:
    text = {"iso-8859-1": "blåbær", "iso-8859-2": "kůň", "shift_jis": "日本"}.get(encoding, "Договор")
    assert html(f"<html><meta charset={encoding}><p>{text}</html>".encode(encoding)) == text


def test_html_of_utf8_and_utf16_needs_no_word_about_it() -> None:
    assert html("<p>Åse søker") == "Åse søker"
    assert html("<p>Åse søker".encode("utf-16")) == "Åse søker"


@pytest.mark.parametrize("data", ["<div>" * 100_000, "<b>" * 50_000 + "x", "<ul><li>" * 5_000])
def test_html_nested_too_deeply_is_an_error(data: str) -> None:
    with pytest.raises(DocumentError, match=r"page\.html cannot be read: its elements are nested too deeply"):
        html(data)


@pytest.mark.parametrize(
    "data", ["<a " * 300_000, "<!--" * 300_000, "<a b='" * 200_000, "<![CDATA[" * 100_000, "<p>x" * 5_000]
)
def test_html_of_broken_tags_is_read_in_a_moment(data: str) -> None:
    started = time.perf_counter()
    html(data)
    assert time.perf_counter() - started < 20


def test_html_that_names_files_and_entities_reads_none(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    uri = (tmp_path / "secret.txt").as_uri()
    seen = html(
        f"<?xml version='1.0'?><!DOCTYPE html [<!ENTITY x SYSTEM '{uri}'><!ENTITY a 'aaaa'><!ENTITY b '&a;&a;'>]>"
        f"<html><p>&x;&b; read <object data='{uri}'></object><link rel=import href='{uri}'></p></html>"
    )
    assert "secret" not in seen
    assert "read" in seen


def write(document: Any) -> None:
    document.add_heading("The boat", 0)
    document.add_heading("Parts", 1)
    document.add_paragraph("It has oars.").add_run(" Bold.").bold = True
    for one in ("oars", "sails"):
        document.add_paragraph(one, style="List Bullet")
    table = document.add_table(2, 2)
    for row, texts in enumerate((("Name", "Length"), ("Anna", "7 m"))):
        for column, text in enumerate(texts):
            table.cell(row, column).text = text


def test_word_documents_become_headings_paragraphs_lists_and_tables() -> None:
    assert parsed("boat.DOCX", make_docx(write)) == (
        "# The boat\n\n# Parts\n\nIt has oars. Bold.\n\n- oars\n- sails\n\n"
        "| Name | Length |\n| --- | --- |\n| Anna | 7 m |"
    )


def test_changes_that_were_accepted_or_deleted_are_as_word_shows_them() -> None:
    runs = (
        b"<w:body><w:p><w:r><w:t>Stays</w:t></w:r><w:ins><w:r><w:t> added</w:t></w:r></w:ins>"
        b"<w:del><w:r><w:delText> gone</w:delText></w:r></w:del></w:p>"
    )
    data = with_part(make_docx(lambda _: None), "word/document.xml", lambda xml: xml.replace(b"<w:body>", runs))
    assert parsed("a.docx", data) == "Stays added"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a zip file"),
        (b"PK\x03\x04 broken", "not a zip file"),
        (make_docx(write)[:-200], "not a zip file"),
        (with_part(make_docx(write), "word/document.xml", lambda xml: xml[:-30]), "no element found|unclosed token"),
        (nested(make_docx(write), 100_000), "nested too deeply"),
        (of_entities(make_docx(write)), "document type"),
        (of_entities(make_docx(write), "file:///etc/passwd"), "document type"),
        (with_part(make_docx(write), "word/document.xml", lambda xml: b" " * 30_000_000), "unpacks to more than 20 MB"),
    ],
    ids=["empty", "no zip", "cut", "cut part", "deep", "entities", "external entity", "bomb"],
)
def test_word_documents_that_cannot_be_read(data: bytes, reason: str) -> None:
    started = time.perf_counter()
    with pytest.raises(DocumentError, match=rf"bad\.docx cannot be read as a Word document \(.*({reason})"):
        parsed("bad.docx", data)
    assert time.perf_counter() - started < 20


def test_pictures_that_are_linked_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    uri = (tmp_path / "secret.png").as_uri()
    relation = (
        '<Relationship Id="rId99" Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/image" '
        f'Target="{uri}" TargetMode="External"/></Relationships>'
    ).encode()
    picture = (
        b'<w:body><w:p><w:r><w:t>Text.</w:t><w:drawing><wp:inline xmlns:wp="http://schemas.openxmlformats.org/'
        b'drawingml/2006/wordprocessingDrawing"><a:graphic xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/'
        b'main"><a:graphicData><pic:pic xmlns:pic="http://schemas.openxmlformats.org/drawingml/2006/picture">'
        b'<pic:blipFill><a:blip r:link="rId99"/></pic:blipFill></pic:pic></a:graphicData></a:graphic></wp:inline>'
        b"</w:drawing></w:r></w:p>"
    )
    data = with_part(
        make_docx(lambda _: None),
        "word/_rels/document.xml.rels",
        lambda xml: xml.replace(b"</Relationships>", relation),
    )
    data = with_part(data, "word/document.xml", lambda xml: xml.replace(b"<w:body>", picture))
    assert parsed("a.docx", data) == "Text."


@pytest.mark.parametrize(
    ("path", "data", "package"),
    [
        ("a.docx", b"", "mammoth"),
        ("a.html", b"<p>x", "bs4"),
        ("a.txt", b"\xe6\xf8\xe5", "chardet"),
    ],
)
def test_a_missing_package_is_named_with_file_and_remedy(
    path: str, data: bytes, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError) as caught:
        parsed(path, data)
    assert path in str(caught.value)
    assert "pip install 'cacheblend-rag[app]'" in str(caught.value)
