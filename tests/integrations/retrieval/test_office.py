"""Spreadsheets, slides, OpenDocument texts, books, JSON and code: their text, and files that would do harm."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from datetime import date, datetime

import docx
import openpyxl
import pptx
import pytest
from pptx.chart.data import CategoryChartData
from pptx.enum.chart import XL_CHART_TYPE
from pptx.util import Inches
from pypdf import PdfReader, PdfWriter
from pypdf.generic import ArrayObject, DictionaryObject, NameObject, NumberObject, TextStringObject

from cacheblend_rag.errors import DocumentError
from cacheblend_rag.retrieval.documents import FileBytes, parse
from tests.integrations.retrieval.office import make_docx, with_part
from tests.integrations.retrieval.pdf import make_pdf
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


def epub(*chapters: str, ending: str = "xhtml", again: int = 1, **more: str) -> bytes:
    container = '<container><rootfiles><rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
    items = "".join(f'<item id="c{at}" href="text/{at}%20.{ending}"/>' for at in range(len(chapters)))
    spine = "".join(f'<itemref idref="c{at}"/>' for at in reversed(range(len(chapters)))) * again
    book = f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{spine}</spine></package>'
    texts = {f"OEBPS/text/{at} .{ending}": text for at, text in enumerate(chapters)}
    return zipped(**{"META-INF/container.xml": container, "OEBPS/book.opf": book, **texts, **more})


def formatted(**formats: tuple[float, str]) -> bytes:
    book = openpyxl.Workbook()
    book.active.append(list(formats))
    book.active.append([value for value, _ in formats.values()])
    for cell, (_, form) in zip(book.active[2], formats.values(), strict=True):
        cell.number_format = form
    out = io.BytesIO()
    book.save(out)
    return out.getvalue()


def word(document: docx.document.Document) -> None:
    table = document.add_table(3, 3)
    for at, text in enumerate(["Region", "Town", "People", "North", "Aldra", "5", "-", "Berin", "7"]):
        table.cell(at // 3, at % 3).text = text.strip("-")
    table.cell(1, 0).merge(table.cell(2, 0))
    paragraph = document.add_paragraph("Rent ")
    paragraph.add_run("2010").font.strike = True
    paragraph.add_run(" 2020")


def chart(made: pptx.presentation.Presentation) -> None:
    data = CategoryChartData()
    data.categories = ["2023"]
    data.add_series("Herring", (722,))
    made.slides.add_slide(made.slide_layouts[6]).shapes.add_chart(XL_CHART_TYPE.PIE, 0, 0, 9, 9, data)


def form() -> bytes:
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(make_pdf(["Lease.", ""]))))
    for name, value in (("Rent", TextStringObject("1,250 EUR")), ("Pets", NameObject("/Off"))):
        field = {"/Subtype": NameObject("/Widget"), "/T": TextStringObject(name), "/V": value}
        rectangle = ArrayObject(map(NumberObject, (0, 0, 9, 9)))
        writer.add_annotation(
            0, DictionaryObject({NameObject(k): v for k, v in (field | {"/Rect": rectangle}).items()})
        )
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


MATH = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
SUM = "<m:nary><m:sub><m:r><m:t>i</m:t></m:r></m:sub></m:nary>"
ROOT = "<m:rad><m:e><m:d><m:e><m:r><m:t>a+b</m:t></m:r></m:e></m:d><m:r><m:t>c</m:t></m:r></m:e></m:rad>"
TABLES = [["Prices"], [], ["item", "price"], ["tea", 3], [], ["town", "people"], ["Aldra", 5], [], [0, 0]]
HIGH = "<table><tr><th>Year<th>Town<th>In<th>Out<tr><td>1912<td rowspan=2 colspan=2>Aldra<td>5<tr><td>1913<td>7</table>"
SHORT = "<table><tr><td rowspan=2>A<td>b<td rowspan=2>C<tr><tr><td>x<td>y<td>z</table>"
READ: tuple[tuple[str, Callable[[], bytes], str, str], ...] = (
    ("a.json", lambda: b'{"a": "x\\ud83d"}', "a: x?", ""),
    ("a.jsonl", lambda: '{"a": "x\u2028y"}\r\n{"a": 2}'.encode(), "a: x\u2028y\n\na: 2", ""),
    ("a.epub", lambda: epub("<p>One", ending="xml"), "One", ""),
    ("a.log.txt", lambda: b"\x1b[31mfailed\x1b[0m at 9", "failed at 9", ""),
    ("a.csv", lambda: b"Name\nSmith, John\nDoe, Jane", "Name: Smith, John\n\nName: Doe, Jane", ""),
    ("a.csv", lambda: b"Prices 2024\n\nitem,price\ntea,3", "Prices 2024\n\nitem: tea; price: 3", ""),
    ("a.csv", lambda: b"Customer,ACME\n\nItem,Qty\nBolt,5", "Customer; ACME\n\nItem: Bolt; Qty: 5", ""),
    ("a.html", lambda: SHORT.encode(), "| x | y | z |", ""),
    ("a.html", lambda: HIGH.encode(), "| 1912 | Aldra | | 5 |\n| 1913 | Aldra | | 7 |", ""),
    ("a.html", lambda: b"<p>So <math alttext='x^2'><mi>x</mi></math>.", "So x^2.", ""),
    ("a.html", lambda: b"<p>So <math><mi>x</mi><mn>2</mn></math>", "So", "a.html is read, except: an equation"),
    ("a.docx", lambda: make_docx(word), "| North | Berin | 7 |\n\nRent ~~2010~~ 2020", ""),
    ("a.docx", lambda: equation(ROOT), "√((a+b)c)", ""),
    ("a.docx", lambda: equation(SUM), "_i", "a.docx is read, except: signs, marks or rows of an equation"),
    ("a.xlsx", lambda: formatted(rate=(0.0575, "0.00%"), zip=(1067, "00000")), "rate: 5.75%; zip: 01067", ""),
    ("a.xlsx", lambda: formatted(a=(19, '0"%"'), b=(5, r"0\%")), "a: 19%; b: 5%", ""),
    ("a.xlsx", lambda: workbook(A=TABLES), "Prices\n\nitem: tea; price: 3\n\ntown: Aldra; people: 5\n\ntown: 0", ""),
    ("a.xlsx", lambda: workbook(A=[["a"], ["=1+1"]]), "a", "formulas without saved values, sheet1.xml from A2 on"),
    ("a.pptx", lambda: presentation(chart), "## Slide 1", "a.pptx is read, except: a chart on slide 1"),
    ("a.pdf", form, "Lease.\nRent: 1,250 EUR", "a.pdf is read, except: pages without text"),
)  # fmt: skip


def equation(inner: str) -> bytes:
    body = f"<w:body><w:p><m:oMath {MATH}>{inner}</m:oMath></w:p>".encode()
    return with_part(make_docx(lambda _: None), "word/document.xml", lambda xml: xml.replace(b"<w:body>", body))


def test_facts_stay_in_their_places_or_what_is_lost_is_named(caplog: pytest.LogCaptureFixture) -> None:
    for name, data, text, lost in READ:
        caplog.clear()
        seen = parse(FileBytes(name, "", data())).pages[0]
        assert text in seen, (name, seen)
        assert lost in caplog.text if lost else not caplog.text, (name, caplog.text)
    assert "Pets" not in seen


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
    text = parsed("a.epub", epub(chapter.format("Last"), chapter.format("First"), again=3))
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
        ("a.json", lambda: b'{"a": 1,}', "is not JSON"),
        ("a.jsonl", lambda: b'{"a": 1}\n{', "is not JSON"),
        ("a.py", lambda: bytes(range(256)), "not text"),
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
