"""Office formats and books as what readers take. Callers look at the size of a package first."""

from __future__ import annotations

import io
import posixpath
import re
import zipfile
from collections.abc import Iterator, Sequence
from datetime import date, datetime, time
from html import escape
from typing import Any
from urllib.parse import unquote
from xml.parsers import expat

from cacheblend_rag.errors import MissingExtraError

MARKUP = (".xml", ".rels", ".opf", ".ncx", ".xhtml", ".html", ".htm")
"""Endings of parts that hold text."""

# Cells up to the last one of each row, of a whole workbook: the reader fills the gaps between them.
_MOST_CELLS = 5_000_000
_COLUMN = re.compile("[A-Z]{1,3}")
_UNSAVED = re.compile(rb'<c r="([A-Z]+[0-9]+)"[^>]*><f\b[^>]*>(?:[^<]*</f>)?(?:<v ?/>|<v></v>)?</c>')
# Elements of OpenDocument that are no text of the reader's: notes of the author, deleted text, drawn forms.
_UNREAD = frozenset(
    ("annotation", "annotation-end", "tracked-changes", "change", "forms", "sequence-decls", "event-listeners")
)


def sheets(data: bytes, left_out: list[str]) -> Iterator[tuple[str, list[list[str]]]]:
    """Name and rows of each sheet of an Excel workbook; of a formula the value that was saved with it.

    Losses are added to ``left_out``.

    Raises
    ------
    MissingExtraError
        Without the package that reads them.
    Exception
        Of many kinds, if it is damaged.
    """
    try:
        import openpyxl
    except ImportError as error:
        raise MissingExtraError("openpyxl", "app") from error
    left_out += _check_cells(data)
    book = openpyxl.load_workbook(io.BytesIO(data), read_only=True, data_only=True, keep_links=False)
    try:
        for sheet in book.worksheets:
            sheet.reset_dimensions()  # which a file may name wrongly
            yield sheet.title, [[_value(cell.value, cell.number_format) for cell in row] for row in sheet.iter_rows()]
    finally:
        book.close()


def _value(cell: Any, form: str) -> str:
    if cell is None:
        return ""
    plain = re.sub(r'"[^"]*"|\\.|_.', "", form)  # without text of the format
    if isinstance(cell, (int, float)) and ("%" in form or re.fullmatch("00+", plain)):
        return f"{100 * cell if '%' in plain else cell:.10g}%" if "%" in form else f"{cell:0{len(plain)}.0f}"
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    if isinstance(cell, datetime):
        return cell.date().isoformat() if cell.time() == time() else cell.isoformat(" ")
    return cell.isoformat() if isinstance(cell, (date, time)) else str(cell).strip()


def _check_cells(data: bytes) -> list[str]:
    """Refuse a workbook whose few cells lie so far apart that the gaps would fill memory; names lost formulas."""
    from openpyxl.utils import column_index_from_string

    cells, last, lost = 0, 0, list[str]()

    def begin(tag: str, attributes: dict[str, str]) -> None:
        nonlocal last
        if tag.rpartition(":")[2] == "c":
            found = _COLUMN.match(attributes.get("r", ""))
            last = column_index_from_string(found[0]) if found else last + 1

    def end(tag: str) -> None:
        nonlocal cells, last
        if tag.rpartition(":")[2] == "row":
            cells, last = cells + last, 0
            if cells > _MOST_CELLS:
                raise ValueError("its cells lie too far apart; save only the part in use")

    with zipfile.ZipFile(io.BytesIO(data)) as package:
        for name in package.namelist():
            if "worksheets/" in name and name.endswith(".xml"):
                parser = expat.ParserCreate()
                parser.StartElementHandler, parser.EndElementHandler = begin, end
                parser.Parse(package.read(name), True)
                if formula := _UNSAVED.search(package.read(name)):
                    lost.append(
                        f"formulas without saved values, {posixpath.basename(name)} from {formula[1].decode()} on"
                    )
    return lost


def slides(data: bytes) -> tuple[str, list[str]]:
    """HTML of a PowerPoint presentation: of each slide its title, texts, tables and notes; and what is not read.

    Raises
    ------
    MissingExtraError
        Without the package that reads it.
    Exception
        Of many kinds, if it is damaged.
    """
    try:
        import pptx
    except ImportError as error:
        raise MissingExtraError("python-pptx", "app") from error
    written, left_out, plain = list[str](), list[str](), io.BytesIO()
    # A package of which nothing but its markup is there: no picture or film comes into memory.
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(plain, "w") as after:
        for name in before.namelist():
            after.writestr(name, before.read(name) if name.lower().endswith((".xml", ".rels")) else b"")
    for number, slide in enumerate(pptx.Presentation(plain).slides, 1):
        title = slide.shapes.title
        named = title.text_frame.text.strip() if title is not None else ""
        written.append(f"<h2>{escape(f'Slide {number}: {named}' if named else f'Slide {number}')}</h2>")
        written += [
            part
            for shape in slide.shapes
            if title is None or shape.shape_id != title.shape_id
            for part in _shape(shape)
        ]
        xml = slide.shapes._spTree.xml
        left_out += [f"{what} on slide {number}" for sign, what in _ON_SLIDES.items() if sign in xml]
        if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
            written += _paragraphs(slide.notes_slide.notes_text_frame.text)
    return "\n".join(written), left_out


def _shape(shape: Any) -> Iterator[str]:
    for inner in getattr(shape, "shapes", ()):  # of a group
        yield from _shape(inner)
    if getattr(shape, "has_table", False):
        rows = ("".join(f"<td>{escape(cell.text)}</td>" for cell in row.cells) for row in shape.table.rows)
        yield "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"
    elif getattr(shape, "has_text_frame", False):
        yield from _paragraphs(shape.text_frame.text)


def _paragraphs(text: str) -> list[str]:
    return [f"<p>{escape(line)}</p>" for line in re.split(r"[\n\v]", text) if line.strip()]


def open_document(data: bytes) -> tuple[str, list[str]]:
    """HTML of an OpenDocument text: headings, paragraphs, lists, tables and notes; and what is not read.

    Raises
    ------
    Exception
        Of many kinds, if it is damaged.
    """
    from lxml import etree  # type: ignore[import-untyped]

    with zipfile.ZipFile(io.BytesIO(data)) as package:
        if b"manifest:encryption-data" in package.read("META-INF/manifest.xml"):
            raise ValueError("it has a password")
        tree = etree.fromstring(package.read("content.xml"), _parser())
    body = next(tree.iter("{*}body"))
    return "".join(_odt(body)), ["a chart or an equation" for _ in body.iter("{*}object")]


def _parser() -> Any:
    from lxml import etree

    return etree.XMLParser(
        resolve_entities=False, no_network=True, load_dtd=False, remove_comments=True, remove_pis=True
    )


_ON_SLIDES = {
    "<c:chart": "a chart",
    "dgm:relIds": "a diagram",
    "AlternateContent": "a shape",
    "<m:oMath": "an equation",
}
# Elements of OpenDocument in HTML; contents of others stand where they are.
_AS_HTML = {
    **{"p": "p", "list": "ul", "list-item": "li", "table": "table", "table-row": "tr", "table-cell": "td"},
    **{"covered-table-cell": "td", "note-body": "div"},
}


def _odt(element: Any) -> Iterator[str]:
    """An element's content in HTML, and the text behind it."""
    tag = element.tag.rpartition("}")[2]
    if tag not in _UNREAD:
        level = element.get("{urn:oasis:names:tc:opendocument:xmlns:text:1.0}outline-level", "1")
        named = f"h{min(int(level) if level.isdigit() else 1, 6)}" if tag == "h" else _AS_HTML.get(tag)
        yield f"<{named}>" if named else {"tab": "\t", "s": " ", "line-break": "<br>"}.get(tag, "")
        yield escape(element.text or "")
        for inner in element:
            yield from _odt(inner)
        yield f"</{named}>" if named else ""
    yield escape(element.tail or "")


def chapters(data: bytes) -> list[bytes]:
    """Markup of the chapters of an EPUB book, in the order in which they are read.

    Raises
    ------
    Exception
        Of many kinds, if it is damaged.
    """
    from lxml import etree

    with zipfile.ZipFile(io.BytesIO(data)) as package:
        names = set(package.namelist())
        container = etree.fromstring(package.read("META-INF/container.xml"), _parser())
        root = next(container.iter("{*}rootfile")).get("full-path")
        book = etree.fromstring(package.read(root), _parser())
        items = {one.get("id"): one for one in book.iter("{*}item")}
        spine = [items[one.get("idref")].get("href") for one in book.iter("{*}itemref") if one.get("idref") in items]
        joined = (posixpath.normpath(posixpath.join(posixpath.dirname(root), unquote(one))) for one in spine)
        places = list(dict.fromkeys(joined))  # a book may name a chapter again and again
        locked = package.read("META-INF/encryption.xml") if "META-INF/encryption.xml" in names else b""
        if any(one.encode() in locked for one in places):
            raise ValueError("it is protected against copying")
        return [
            package.read(one)
            for one in places
            if one in names and one.lower().endswith((".xhtml", ".html", ".htm", ".xml"))
        ]


# Elements around runs; the runs stay in their place.
_AROUND = frozenset(("fldSimple", "dir", "bdo", "hyperlink"))
_MATHS = frozenset(("oMath", "oMathPara"))
# Marks before parts of an equation; without them figures would run together.
_BEFORE = {"den": "/", "sup": "^", "sub": "_", "lim": "_", "rad": "√"}
# Parts of an equation that lose their meaning as text.
_NO_TEXT = ("acc", "bar", "borderBox", "deg", "eqArr", "groupChr", "m", "nary", "sPre")
_BREAKS = {"cr": "br", "ptab": "tab", "dstrike": "strike"}
# Contents that lie elsewhere or are of another program: named, not read.
_ELSEWHERE = {
    "altChunk": "a document within it",
    "subDoc": "a document that it refers to",
    "OLEObject": "an object of another program",
    "chart": "a chart",
    "relIds": "a diagram",
}
_PARTS = ("document", "footnotes", "endnotes")


def with_all_text(data: bytes) -> tuple[bytes, list[str]]:
    """A Word document of which mammoth reads all text, and the names of what is in it beside text.

    Raises
    ------
    Exception
        Of many kinds, if it is damaged.
    """
    from lxml import etree

    out, left_out, trees = io.BytesIO(), list[str](), dict[str, Any]()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(out, "w") as after:
        for name in before.namelist():
            folder, _, part = name.rpartition("/")
            if folder == "word" and part.removesuffix(".xml").rstrip("0123456789") in _PARTS and part.endswith(".xml"):
                trees[name] = etree.fromstring(before.read(name), _parser())
                left_out += _rewritten(trees[name])
        for name in before.namelist():
            kept = before.read(name) if name.lower().endswith((".xml", ".rels")) else b""  # no picture is looked at
            after.writestr(name, etree.tostring(trees[name]) if name in trees else kept)
    return out.getvalue(), list(dict.fromkeys(left_out))


def _rewritten(tree: Any) -> Iterator[str]:
    """Put all text into elements that mammoth reads; gives the names of what is not read."""
    for element in list(tree.iter("{*}*")):
        local = _local(element)
        if element.getparent() is None or not any(up is tree for up in element.iterancestors()):
            continue  # it was taken out
        if local in _ELSEWHERE:
            yield _ELSEWHERE[local]
        elif local in _BREAKS:
            element.tag = _tag(tree, _BREAKS[local])
        elif local in _MATHS:
            parts = [part for name in _NO_TEXT for part in _within(element, name)]
            if any(_within(part, "t") for part in parts):
                yield "signs, marks or rows of an equation"
            _replace(element, [_run(tree, _formula(element))])
        elif local == "ruby":
            base, reading = (
                "".join("".join(one.itertext()) for one in _within(element, name)) for name in ("rubyBase", "rt")
            )
            _replace(element, [_run(tree, f"{base}({reading})" if reading else base)])
        elif local == "AlternateContent":
            if not any(_within(one, "t") for one in element if _local(one) == "Fallback"):
                _replace(element, [part for one in element if _local(one) == "Choice" for part in one])
        elif local in ("drawing", "pict") and (boxes := _within(element, "txbxContent")):
            element.tag = _tag(tree, "pict")  # whose boxes mammoth reads
            element[:] = boxes
    for element in list(tree.iter("{*}*")):
        if _local(element) in _AROUND and element.getparent() is not None:
            _replace(element, list(element))


def _formula(element: Any) -> str:
    """An equation as text."""
    if _local(element) == "t":
        return element.text or ""
    text = "".join(map(_formula, element.iterchildren("{*}*")))
    if _local(element) == "d" or (_local(element) in ("num", "den", "sup", "sub", "rad") and len(text) > 1):
        text = f"({text})"
    return _BEFORE.get(_local(element), "") + text if text else ""


def _replace(element: Any, others: Sequence[Any]) -> None:
    """Put elements in the place of another; what is not below it any more goes with it."""
    parent = element.getparent()
    at = parent.index(element)
    parent.remove(element)
    for one in reversed(others):
        parent.insert(at, one)


def _run(tree: Any, text: str) -> Any:
    run, inner = (tree.makeelement(_tag(tree, name)) for name in "rt")
    inner.text = text
    run.append(inner)
    return run


def _tag(tree: Any, name: str) -> str:
    """The tag of an element of WordprocessingML, in whichever of its namespaces the document is."""
    return str(tree.tag).partition("}")[0] + "}" + name


def _within(element: Any, name: str) -> list[Any]:
    return list(element.iterdescendants("{*}" + name))


def _local(element: Any) -> str:
    return str(element.tag).rpartition("}")[2]
