"""Spreadsheets, slides, OpenDocument texts, books, JSON and code: their text, and files that would do harm."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from datetime import date, datetime

import openpyxl
import pptx
import pytest
from pptx.util import Inches

from cacheblend_rag.errors import DocumentError
from tests.integrations.retrieval.office import with_part
from tests.integrations.retrieval.test_formats import parsed


def workbook(**sheets: list[list[object]]) -> bytes:
    book = openpyxl.Workbook()
    book.remove(book.active)
    for name, rows in sheets.items():
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(row)
    out = io.BytesIO()
    book.save(out)
    return out.getvalue()


def presentation(write: Callable[[pptx.presentation.Presentation], object]) -> bytes:
    made = pptx.Presentation()
    write(made)
    out = io.BytesIO()
    made.save(out)
    return out.getvalue()


def zipped(**parts: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as package:
        for name, text in parts.items():
            package.writestr(name, text)
    return out.getvalue()


_NAMES = (
    'xmlns:office="urn:oasis:names:tc:opendocument:xmlns:office:1.0" '
    'xmlns:text="urn:oasis:names:tc:opendocument:xmlns:text:1.0" '
    'xmlns:table="urn:oasis:names:tc:opendocument:xmlns:table:1.0"'
)


def odt(body: str, manifest: str = "<manifest/>", head: str = "") -> bytes:
    content = f"{head}<office:document-content {_NAMES}><office:body><office:text>{body}</office:text></office:body>"
    parts = {"META-INF/manifest.xml": manifest, "content.xml": f"{content}</office:document-content>"}
    return zipped(mimetype="application/vnd.oasis.opendocument.text", **parts)


def epub(*chapters: str, **more: str) -> bytes:
    container = '<container><rootfiles><rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
    items = "".join(f'<item id="c{at}" href="text/{at}%20.xhtml"/>' for at in range(len(chapters)))
    spine = "".join(f'<itemref idref="c{at}"/>' for at in reversed(range(len(chapters))))
    book = f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{spine}</spine></package>'
    texts = {f"OEBPS/text/{at} .xhtml": text for at, text in enumerate(chapters)}
    return zipped(**{"META-INF/container.xml": container, "OEBPS/book.opf": book, **texts, **more})


def test_each_row_of_a_workbook_names_its_columns_and_its_sheet() -> None:
    rows = [
        ["Name", "Price", "Since", "At"],
        [],
        ["Rondo", 12.0, date(2024, 3, 1), datetime(2024, 3, 1, 9, 30)],
        ["Tri", 0.5],
    ]
    text = parsed("a.xlsx", workbook(Prices=rows, Empty=[], Notes=[["Only one row"]]))
    assert text.split("\n\n") == [
        "## Prices",
        "Name: Rondo; Price: 12; Since: 2024-03-01; At: 2024-03-01 09:30:00",
        "Name: Tri; Price: 0.5",
        "## Notes",
        "Only one row",
    ]


def test_formulas_are_read_as_the_value_that_was_saved() -> None:
    data = with_part(
        workbook(Sums=[["Sum"], [1]]),
        "xl/worksheets/sheet1.xml",
        lambda xml: xml.replace(b"<v>1</v>", b"<f>1+1</f><v>2</v>"),
    )
    assert parsed("a.xlsx", data).endswith("Sum: 2")


def test_slides_become_titles_texts_tables_and_notes() -> None:
    def write(made: pptx.presentation.Presentation) -> None:
        slide = made.slides.add_slide(made.slide_layouts[1])
        slide.shapes.title.text = "Harbour & sea"
        slide.placeholders[1].text = "First line\nSecond <line>"
        table = slide.shapes.add_table(2, 2, Inches(1), Inches(1), Inches(4), Inches(1)).table
        for at, text in enumerate(("Boat", "Length", "Rondo", "12 m")):
            table.cell(at // 2, at % 2).text = text
        slide.notes_slide.notes_text_frame.text = "Say it slowly."
        made.slides.add_slide(made.slide_layouts[6])
        group = slide.shapes.add_group_shape()
        group.shapes.add_textbox(0, 0, Inches(1), Inches(1)).text_frame.text = "Within a group"

    text = parsed("a.pptx", presentation(write))
    for part in (
        "## Slide 1: Harbour & sea",
        "First line\n\nSecond",
        "Boat | Length",
        "Rondo | 12 m",
        "Say it slowly.",
    ):
        assert part in text, text
    assert "Within a group" in text
    assert text.endswith("## Slide 2")
    assert text.count("Harbour") == 1


def test_open_document_becomes_headings_paragraphs_lists_and_tables() -> None:
    cells = "".join(f"<table:table-cell><text:p>{one}</text:p></table:table-cell>" for one in ("Boat", "Rondo"))
    body = (
        '<text:h text:outline-level="2">The &amp; harbour</text:h>'
        "<text:tracked-changes><text:p>deleted</text:p></text:tracked-changes>"
        "<text:p>It was <text:span>dredged</text:span> in<text:s/>1912"
        "<text:note><text:note-citation>1</text:note-citation>"
        "<text:note-body><text:p>By hand.</text:p></text:note-body></text:note>.</text:p>"
        "<text:list><text:list-item><text:p>one</text:p></text:list-item></text:list>"
        f"<table:table><table:table-row>{cells}</table:table-row></table:table>"
        "<text:p>A<office:annotation><text:p>remark</text:p></office:annotation>B</text:p>"
    )
    text = parsed("a.odt", odt(body))
    assert text.startswith("## The & harbour\n\nIt was dredged in 1912")
    for part in ("By hand.", "- one", "Boat | Rondo", "\n\nAB"):
        assert part in text, text
    assert "deleted" not in text
    assert "remark" not in text


def test_chapters_of_a_book_stand_in_the_order_in_which_they_are_read() -> None:
    doctype = '<?xml version="1.0"?><!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.1//EN" "http://example.org/x.dtd">'
    chapter = doctype + '<html xmlns="http://www.w3.org/1999/xhtml"><body><h1>{0}</h1><p>Text of {0}.</p></body></html>'
    text = parsed("a.epub", epub(chapter.format("Last"), chapter.format("First")))
    assert text == "# First\n\nText of First.\n\n# Last\n\nText of Last."


def test_values_of_json_stand_behind_the_path_to_them() -> None:
    rows = [{"name": "Rondo", "sold": {"in": 1912, "to": None}}, {"name": "Tri", "tags": ["a", 2]}]
    nested = {"title": "Boats", "list": [{"x": True}, {"x": [[1], 2]}]}
    for given, text in (
        (rows, "name: Rondo; sold.in: 1912\n\nname: Tri; tags: a, 2"),
        (nested, "title: Boats\n\nlist.x: true; list.x: 2; list.x: 1"),
        ("alone", "alone"),
        ([], ""),
    ):
        assert parsed("a.json", json.dumps(given).encode()) == text


def test_lines_of_json_are_paragraphs() -> None:
    assert parsed("a.jsonl", b'{"q": "Who?"}\n\n{"q": "Where?", "n": 1.5}\n') == "q: Who?\n\nq: Where?; n: 1.5"


def _far_apart() -> bytes:
    cells = b"".join(b'<row r="%d"><c r="XFD%d"><v>1</v></c></row>' % (n, n) for n in range(1, 400))
    change = lambda xml: xml.replace(b"<sheetData>", b"<sheetData>" + cells)  # noqa: E731
    return with_part(
        workbook(A=[]),
        "xl/worksheets/sheet1.xml",
        lambda xml: change(xml.replace(b"<sheetData/>", b"<sheetData></sheetData>")),
    )


def _bomb(xml: bytes) -> bytes:
    return b"<x>" + b"word " * 5_000_000 + b"</x>"


def _entities(xml: bytes) -> bytes:
    return _ENTITIES.encode() + b"<x/>"


_ENTITIES = "<!DOCTYPE x [<!ENTITY a 'aaaa'><!ENTITY b '&a;&a;'>]>"
_DEEP = "<text:p>" * 500 + "</text:p>" * 500


def test_file_that_would_do_harm_or_is_damaged_is_refused() -> None:
    cases: tuple[tuple[str, Callable[[], bytes], str], ...] = (
        ("a.xlsx", lambda: with_part(workbook(A=[[1]]), "xl/more.xml", _bomb), "20 MB of XML"),
        ("a.xlsx", _far_apart, "too far apart"),
        ("a.xlsx", lambda: with_part(workbook(A=[[1]]), "xl/workbook.xml", _entities), "document type"),
        ("a.xlsx", lambda: b"PK\x03\x04 no workbook", "workbook"),
        ("a.pptx", lambda: with_part(presentation(lambda made: None), "ppt/more.xml", _bomb), "20 MB of XML"),
        ("a.pptx", lambda: workbook(A=[[1]]), "presentation"),
        ("a.odt", lambda: odt(_DEEP), "nested too deeply"),
        ("a.odt", lambda: odt("", head=_ENTITIES), "document type"),
        ("a.odt", lambda: odt("", manifest='<x xmlns:manifest="y"><manifest:encryption-data/></x>'), "password"),
        ("a.odt", lambda: zipped(mimetype="x"), "OpenDocument"),
        ("a.epub", lambda: epub("<p>" + "word " * 5_000_000), "20 MB"),
        ("a.epub", lambda: epub("<p>x", **{"META-INF/encryption.xml": "<x>OEBPS/text/0 .xhtml</x>"}), "protected"),
        ("a.epub", lambda: epub("<div>" * 100_000), "nested too deeply"),
        ("a.json", lambda: b"[" * 100_000, "nested too deeply"),
        ("a.json", lambda: b'{"a": 1,}', "is no JSON"),
        ("a.jsonl", lambda: b'{"a": 1}\n{', "is no JSON"),
        ("a.py", lambda: bytes(range(256)), "no text"),
    )  # fmt: skip
    for name, data, reason in cases:
        with pytest.raises(DocumentError, match=reason) as caught:
            parsed(name, data())
        assert str(caught.value).startswith(name)


def test_pictures_of_slides_are_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture of zeros takes a thousandth of its size in the package."""
    data = with_part(
        presentation(lambda made: made.slides.add_slide(made.slide_layouts[6])),
        "ppt/media/a.png",
        lambda _: bytes(10**7),
    )
    read = zipfile.ZipFile.read

    def noted(self: zipfile.ZipFile, name: str, *more: object) -> bytes:
        found = read(self, name, *more)  # type: ignore[arg-type]
        assert len(found) < 10**6, name
        return found

    monkeypatch.setattr(zipfile.ZipFile, "read", noted)
    assert parsed("a.pptx", data) == "## Slide 1"
