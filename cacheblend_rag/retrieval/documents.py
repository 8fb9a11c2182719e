"""The documents of a folder, and the text of each by its kind: text, code, tables, HTML, office formats, books and PDF.

Files may come from anywhere. Nothing they name is opened or fetched. A file that does not fit its kind is a
`DocumentError`.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import json
import logging
import os
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any
from xml.parsers import expat

from cacheblend_rag.errors import ConfigError, DocumentError, MissingExtraError
from cacheblend_rag.retrieval.office import MARKUP, chapters, open_document, sheets, slides, with_all_text

Reader = Callable[[str, bytes], tuple[str, ...]]

_log = logging.getLogger(__name__)
# Losses of files that are read. Commands, which list the files that are skipped themselves, let it through.
_losses = logging.getLogger(f"{__package__}.losses")
# Bytes of XML in a Word document, unpacked. A book of 1,000 pages has fewer; as a tree they take 50 times that.
_MOST_XML = 20_000_000
# Elements within elements in XML. Nested tables are the deepest in practice, at about 10 a table.
_DEEPEST = 200
# Share of characters that may be damaged in text.
_BROKEN = 0.05
# Share of bytes beyond ASCII that stand in characters of UTF-8.
# In damaged UTF-8 it is near 1, in other encodings below 0.3.
_UTF8 = 0.6
# Characters that stand in text of other encodings that may pass for ASCII, and hardly ever in plain text.
_CONTROLS = re.compile("[\0\x1b]")
_COLOURS = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")  # of a terminal
_BEYOND_ASCII = bytes(range(128, 256))
_DIGIT = re.compile(r"\d")
# Rows that tell the delimiter; Excel writes it in a line of its own.
_FIRST_ROWS = 20
_SEPARATOR = re.compile(r'\s*"?sep=(.)"?[ \t]*\r?\n', re.IGNORECASE)
# Characters of a cell that is written once, however many rows high it is.
_LONG_CELL = 200
# Cells and elements that rows of a page may repeat; and characters of a file's values, each with its names.
_MOST_REPEATED, _MOST_NAMED = 100_000, 100_000_000
# Elements that a browser does not show.
_UNSEEN = ("head", "script", "style", "template", "noscript", "iframe", "object", "svg", "math", "select", "textarea")
# Blocks that the converter takes for a part of the line; browsers begin a new one.
_BLOCKS = (
    *("address", "aside", "center", "details", "dialog", "fieldset", "figure", "footer", "form", "header"),
    *("hgroup", "legend", "main", "nav", "search", "summary"),
)
_BLOCK = re.compile(r"display\s*:\s*(block|flex|grid|table|list-item)\b", re.IGNORECASE)
_HIDING = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
# Emphasis that is left out. What is struck out stays marked, ~~so~~.
_PLAIN = ("b", "strong", "em", "i")
# Raised and lowered text that has characters of its own, the marks of other such text, and styles that mean the same.
_FORMS = {
    "sup": str.maketrans("0123456789+-−=()", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾"),
    "sub": str.maketrans("0123456789+-−=()", "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎"),
}
_MARKS = {"sup": "^", "sub": "_"}
_BY_STYLE = re.compile(r"vertical-align\s*:\s*(super|sub)\b", re.IGNORECASE)
# Signs and marks of notes, which stay as they are, and endings of numbers in other languages: 4e, 1er, 2ème.
_AS_IT_IS = re.compile(r"st|nd|rd|th|[™℠®©*]|(\[[^\[\]]*\][\s,–-]*)+")
_ENDING = re.compile(r"(e|ers?|res?|i?ème|es|de|s?te|[rdtmvn][oa]|[ao]s?|è|nds?)\.?")
_ON_ERROR = ("raise", "skip")
_NO_TEXT = "{} holds bytes that are not text in any known encoding; save it as UTF-8"
LEADS_OUT = "it is a link that leads out of the folder"


def _decode(name: str, data: bytes, *, markup: bool = False) -> str:
    """Text in whatever encoding it is; that of markup may be declared in it."""
    if data.isascii():
        data = _COLOURS.sub(b"", data)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = ""
    if (text or not data) and not _CONTROLS.search(text):
        return text
    if _is_damaged_utf8(data):
        text = _CONTROLS.sub("\ufffd", data.decode("utf-8-sig", "replace"))
        damaged = text.count("\ufffd")
        _losses.warning("%s is UTF-8 with damage in %d places, read as \ufffd; save it again", name, damaged)
    else:
        text = data.decode(_encoding(name, data, markup), "replace")
    if "\0" in text or text.count("\ufffd") > _BROKEN * len(text):
        raise DocumentError(_NO_TEXT.format(name))
    return text.removeprefix("\ufeff")


def _is_damaged_utf8(data: bytes) -> bool:
    """Whether bytes are UTF-8 but for a few."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # of UTF-32, too
        return False
    beyond = len(data) - len(data.translate(None, _BEYOND_ASCII))
    if data.count(0) > _BROKEN * len(data):
        return False
    if not beyond:  # an escape may switch to another set of characters
        return b"\x1b" not in data
    kept = data.decode("utf-8", "ignore").encode()
    return len(kept) - len(kept.translate(None, _BEYOND_ASCII)) >= _UTF8 * beyond


def _encoding(name: str, data: bytes, markup: bool) -> str:
    try:
        import chardet
    except ImportError as error:
        raise _missing("chardet", f"{name} is not UTF-8 text and") from error
    # Older encodings are found where there are none, unless a page declares one.
    era = chardet.EncodingEra.MODERN_WEB
    if markup:
        era |= chardet.EncodingEra.LEGACY_ISO
    encoding = chardet.detect(data, encoding_era=era)["encoding"]
    if encoding is None:
        raise DocumentError(_NO_TEXT.format(name))
    _log.info("%s is read as %s", name, encoding)
    return encoding


def _text_of_html(name: str, markup: str, left_out: Iterable[str] = ()) -> str:
    """Headings, paragraphs, lists and tables as Markdown; links and emphasis as their words. Losses are logged."""
    try:
        from bs4 import BeautifulSoup
        from markdownify import MarkdownConverter
    except ImportError as error:
        raise _missing(error.name or "beautifulsoup4", name) from error
    shape: dict[str, Any] = {"heading_style": "ATX", "bullets": "-", "table_infer_header": True}
    shape |= {"escape_asterisks": False, "escape_underscores": False, "strip": ["a", "img", *_PLAIN]}
    converter = MarkdownConverter(**shape)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # markup that looks like a file's name, or like XML
            soup = BeautifulSoup(markup, "lxml")
            title = soup.title.get_text(" ", strip=True) if soup.title else ""
            for element in soup.find_all("math", alttext=True):  # which is its source
                element.replace_with(str(element["alttext"]))
            left_out = [*left_out, *("an equation" for _ in soup.find_all("math"))]
            for element in soup.find_all(_is_unseen):
                element.decompose()
            _fill_rows(soup)
            _keep_apart(soup)
            _write_levels(soup)
            body = converter.convert_soup(soup)
    except RecursionError:
        raise DocumentError(f"{name} cannot be read: its elements are nested too deeply") from None
    except Exception as error:  # parsers raise errors of many kinds
        raise DocumentError(f"{name} cannot be read as HTML ({type(error).__name__}: {error})") from error
    _warn(name, left_out)
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in body.splitlines())).strip("\n")
    return f"{title}\n\n{text}" if title and title not in text else text


def _warn(name: str, left_out: Iterable[str]) -> None:
    if named := "; ".join(dict.fromkeys(left_out)):
        _losses.warning("%s is read, except: %s", name, named)


def _fill_rows(soup: Any) -> None:
    """Write a cell that is several rows high into each of them, or all after it would stand in other columns."""
    left = _MOST_REPEATED
    for table in (one for one in soup.find_all("table") if one.find(rowspan=True)):
        high: dict[int, tuple[int, Any]] = {}  # by column, rows to come and the cell
        for row in (one for one in table.find_all("tr") if one.find_parent("table") is table):
            cells, column, below = row.find_all(("td", "th"), recursive=False), 0, dict[int, tuple[int, Any]]()
            while cells or column in high:
                rows, cell = high.pop(column, (0, None))
                if cell is None:
                    cell = cells.pop(0)
                    rows = int(cell["rowspan"]) if str(cell.get("rowspan")).isdecimal() else 1
                else:
                    if (left := left - 1 - len(list(cell.descendants))) < 0:
                        raise ValueError("too many of its cells are several rows high")
                    cell = copy(cell)
                    if len(cell.get_text()) > _LONG_CELL:
                        cell.clear()
                    row.append(cell) if not cells else cells[0].insert_before(cell)
                if rows > 1:
                    below[column] = rows - 1, cell
                column += int(cell["colspan"]) if str(cell.get("colspan")).isdecimal() else 1
            high = below | {at: (rows - 1, cell) for at, (rows, cell) in high.items() if rows > 1}


def _write_levels(soup: Any) -> None:
    """Write all raised and lowered text of a page so that its meaning stays in plain text.

    Text of which each character has a raised or lowered form becomes these characters: ``m²``, ``H₂O``. Other text
    stands after a mark: ``x^n``, ``a_(i,j)``. Endings of numbers, signs and marks of notes stay: ``1st``, ``[4]``.
    """
    for element in soup.find_all(style=_BY_STYLE):
        lowered = re.search(r"vertical-align\s*:\s*sub\b", element["style"], re.IGNORECASE)
        element.name = "sub" if lowered else "sup"
    for element in reversed(soup.find_all(("sup", "sub"))):  # the innermost first
        text, before, after = element.get_text().strip(), element.previous_sibling, element.next_sibling
        front = str(before or "")
        # It ends a number, is a sign or a note's number, or begins a line of small print.
        plain = _AS_IT_IS.fullmatch(text) or not front.strip() or (front[-1:].isdecimal() and _ENDING.fullmatch(text))
        if element.parent.name == element.name and element.parent.get_text().strip() == text:
            element.unwrap()
        elif text and all(ord(one) in _FORMS[element.name] for one in text):
            for part in list(element.strings):
                part.replace_with(part.translate(_FORMS[element.name]))
        elif text and not plain:
            alone = len(text) == 1 and not str(after or "")[:1].isalnum()
            bare = alone or (text[0] == "(" and text.find(")") == len(text) - 1)
            element.insert(0, _MARKS[element.name] if bare else f"{_MARKS[element.name]}(")
            element.append("" if bare else ")")


def _is_unseen(element: Any) -> bool:
    return (
        element.name in _UNSEEN
        or element.has_attr("hidden")
        or element.get("aria-hidden") == "true"
        or _HIDING.search(str(element.get("style", ""))) is not None
    )


def _keep_apart(soup: Any) -> None:
    """Let stand apart in text what stands apart on the screen: blocks, buttons, readings of ruby."""
    for element in soup.find_all(True):
        if element.name in ("menu", "dir"):
            element.name = "ul"
        elif element.name in _BLOCKS or (element.name == "span" and _BLOCK.search(str(element.get("style", "")))):
            element.name = "div"
        elif element.name == "button":
            if element.previous_sibling:
                element.insert_before(" ")
        elif element.name == "rp":
            element.clear()
        elif element.name == "rt":
            element.insert(0, "(")
            element.append(")")
        elif element.name == "input" and element.get("type") == "checkbox":
            element.replace_with("☒ " if element.has_attr("checked") else "☐ ")


def _docx_text(name: str, data: bytes) -> str:
    try:
        import mammoth
    except ImportError as error:
        raise MissingExtraError("mammoth", "app") from error
    data, left_out = with_all_text(data)
    result = mammoth.convert_to_html(
        io.BytesIO(data),
        style_map="p[style-name='Title'] => h1:fresh",
        include_embedded_style_map=False,
        convert_image=mammoth.images.img_element(lambda image: {}),
    )
    left_out += [one.message for one in result.messages if one.message.startswith("A w:sym")]
    return _text_of_html(name, result.value, left_out)


def _check_package(data: bytes, *, xml: bool = True) -> None:
    """Refuse what would fill memory: too much markup when unpacked, XML that defines entities or is too deep.

    Chapters of books may be HTML that is no XML.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as package:
        parts = [one for one in package.infolist() if one.filename.lower().endswith(MARKUP)]
        if sum(one.file_size for one in parts) > _MOST_XML:
            raise ValueError(f"it unpacks to more than {_MOST_XML // 10**6} MB of XML")
        for part in parts if xml else ():
            if part.filename.lower().endswith((".xml", ".rels")):
                _check_xml(package.read(part))


def _check_xml(data: bytes) -> None:
    depth = 0

    def begin(*_: object) -> None:
        nonlocal depth
        depth += 1
        if depth > _DEEPEST:
            raise ValueError("its elements are nested too deeply")

    def end(*_: object) -> None:
        nonlocal depth
        depth -= 1

    def refuse(*_: object) -> None:
        raise ValueError("it defines a document type, which documents of this kind never do")

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = begin, end
    parser.StartDoctypeDeclHandler = refuse
    parser.Parse(data, True)


def _office(kind: str, text_of: Callable[[str, bytes], str], *, xml: bool = True) -> Reader:
    """A reader of packages, by what makes text of one."""

    def read(name: str, data: bytes) -> tuple[str, ...]:
        try:
            _check_package(data, xml=xml)
            return (text_of(name, data),)
        except MissingExtraError as missing:
            raise _missing(missing.package, name) from missing
        except DocumentError:
            raise
        except RecursionError:
            raise DocumentError(f"{name} cannot be read: its elements are nested too deeply") from None
        except Exception as error:  # a damaged file makes parsers raise errors of many kinds
            reason = str(error) or type(error).__name__
            raise DocumentError(
                f"{name} cannot be read as {kind} ({reason}); save it again without a password"
            ) from error

    return read


def _xlsx_text(name: str, data: bytes) -> str:
    """Each row as a paragraph, as in `_csv`, after the name of its sheet."""
    left_out = list[str]()
    found = [(title, rows) for title, rows in sheets(data, left_out) if rows]
    _warn(name, left_out)
    texts = (f"## {title}\n\n" + "\n\n".join(_bounded(name, _paragraphs(rows))) for title, rows in found)
    return "\n\n".join(texts)


def _epub_text(name: str, data: bytes) -> str:
    texts = (_text_of_html(name, _decode(name, one, markup=True)) for one in chapters(data))
    return "\n\n".join(filter(None, (text.strip() for text in texts)))


def _json(name: str, data: bytes) -> tuple[str, ...]:
    """Each element of a list, or each entry of an object, as a paragraph; values stand behind the path to them."""
    text = _decode(name, data)
    try:
        if name.lower().endswith(".json"):
            found = json.loads(text)
        else:
            found = [json.loads(line) for line in re.split(r"[\r\n]", text) if line.strip()]
        if not isinstance(found, list):
            found = [{key: found[key]} for key in found] if isinstance(found, dict) else [found]
        entries = ("; ".join(_bounded(name, _leaves(one))) for one in found)
        return ("\n\n".join(filter(None, _bounded(name, entries))),)
    except RecursionError:
        raise DocumentError(f"{name} cannot be read: its values are nested too deeply") from None
    except ValueError as error:
        raise DocumentError(f"{name} is not JSON ({error}); correct it, or rename it to .txt") from None


def _bounded(name: str, texts: Iterable[str]) -> Iterator[str]:
    """The texts of a file, until they would fill memory: names stand with each of its values."""
    left = _MOST_NAMED
    for text in texts:
        if (left := left - len(text)) < 0:
            raise DocumentError(f"{name} cannot be read: long names stand with too many of its values; shorten them")
        yield text


def _leaves(value: Any, path: str = "") -> Iterator[str]:
    """The values within a value, each behind the names that lead to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        plain = [one for one in value if not isinstance(one, (dict, list))]
        if plain:
            yield from _leaves(", ".join(map(_plain, plain)), path)
        for inner in value:
            if isinstance(inner, (dict, list)):
                yield from _leaves(inner, path)
    elif (shown := _plain(value)) != "":
        yield f"{path}: {shown}" if path else shown


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value.strip()
    return "" if value is None else json.dumps(value)


def _pdf(name: str, data: bytes) -> tuple[str, ...]:
    try:
        from pypdf import PdfReader
        from pypdf.errors import DependencyError
    except ImportError as error:
        raise _missing("pypdf", name) from error
    try:
        pages = tuple(
            "\n".join((page.extract_text(), *dict.fromkeys(_fields(page))))
            for page in PdfReader(io.BytesIO(data)).pages
        )
    except DependencyError as error:
        raise _missing("cryptography", f"{name} is encrypted and") from error
    except Exception as error:  # a damaged PDF makes pypdf raise errors of many kinds
        raise DocumentError(
            f"{name} cannot be read as PDF ({type(error).__name__}: {error}); save it again without damage or password"
        ) from error
    empty = [str(number) for number, page in enumerate(pages, 1) if not page.strip()]
    if len(empty) == len(pages):
        _log.warning("%s holds no text; scanned pages need text recognition first", name)
    elif empty:
        _warn(name, [f"pages without text, which need text recognition first: {', '.join(empty)}"])
    return pages


def _fields(page: Any) -> Iterator[str]:
    """The fields of a form that are filled in."""
    notes = None if page.get("/Annots") is None else page["/Annots"].get_object()
    for field in (one.get_object() for one in (notes if isinstance(notes, list) else ())):
        if not isinstance(field, dict):
            continue
        one = field
        field = field if "/T" in field or "/Parent" not in field else field["/Parent"]
        value = field.get("/V", one).get_object()
        if isinstance(value, str) and value not in ("", "/Off"):
            yield f"{field.get('/T', '')}: {value.removeprefix('/')}"


def _missing(package: str, name: str) -> MissingExtraError:
    missing = MissingExtraError(package, "app")
    missing.msg = f"{name} cannot be read: {missing}"
    return missing


def _csv(name: str, data: bytes) -> tuple[str, ...]:
    """A table as one paragraph a row; each cell stands behind its column's name, so that a row is understood alone."""
    text = _decode(name, data)
    told = _SEPARATOR.match(text)
    text = text[told.end() :] if told else text.lstrip("\r\n")
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # of the whole process; a cell may be a long text
    try:
        delimiter = told[1] if told else max(",;\t|", key=lambda mark: _widths(text, mark))
        if not told and _widths(text, delimiter)[0] < 2 and not re.search(rf"\{delimiter}[^ ]", text):
            delimiter = "\x1f"  # one column of sentences
        rows = [
            [cell.strip() for cell in row] for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        ]
    except (csv.Error, ValueError) as error:
        raise DocumentError(f"{name} is not a table of separated values: {error}") from None
    return ("\n\n".join(_bounded(name, _paragraphs(rows))),)


def _paragraphs(rows: list[list[str]]) -> Iterator[str]:
    """Rows as paragraphs. A cell alone above a table is its title. Words after a gap, above figures, begin another."""
    head, used = list[str](), True
    filled = [(row, not any(above)) for above, row in zip([[], *rows], rows, strict=False) if any(row)]
    for (row, gap), (below, _) in zip_longest(filled, filled[1:], fillvalue=([], False)):
        cells, unused = list(filter(None, row)), [] if used else ["; ".join(filter(None, head))]
        if len(cells) == 1 < sum(map(bool, below)) and (not head or (gap and not _DIGIT.search("".join(below)))):
            yield from (*unused, cells[0])
            head, used = [], True
        elif below and (not head or (gap and _DIGIT.search("".join(below)) and not _DIGIT.search("".join(row)))):
            yield from unused
            head, used = row, False
        else:
            used = True
            named = zip_longest(head, row, fillvalue="")
            yield "; ".join(f"{column}: {one}" if column else one for column, one in named if one)


def _widths(text: str, delimiter: str) -> tuple[int, int]:
    """Columns of the first row, and of the first few together; delimiters within quotes are none."""
    found = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    widths = [len(row) for row in islice(filter(None, found), _FIRST_ROWS)] or [0]
    return widths[0], sum(widths)


# Programs and their settings, read as text.
_CODE = (
    *(".c", ".cc", ".cpp", ".cs", ".css", ".go", ".h", ".hpp", ".ini", ".java", ".js", ".jsx", ".kt", ".lua", ".php"),
    *(".pl", ".py", ".r", ".rb", ".rs", ".rst", ".scala", ".sh", ".sql", ".swift", ".tex", ".toml", ".ts", ".tsx"),
    *(".xml", ".yaml", ".yml"),
)
# By suffix. The one list: folders, uploads and the page go by it.
_READERS: dict[str, Reader] = {
    **dict.fromkeys((*_CODE, ".markdown", ".md", ".txt"), lambda name, data: (_decode(name, data),)),
    **dict.fromkeys((".htm", ".html"), lambda name, data: (_text_of_html(name, _decode(name, data, markup=True)),)),
    ".csv": _csv,
    ".docx": _office("a Word document", _docx_text),
    ".epub": _office("a book", _epub_text, xml=False),
    ".json": _json,
    ".jsonl": _json,
    ".odt": _office("an OpenDocument text", lambda name, data: _text_of_html(name, *open_document(data))),
    ".pdf": _pdf,
    ".pptx": _office("a presentation", lambda name, data: _text_of_html(name, *slides(data))),
    ".xlsx": _office("a workbook", _xlsx_text),
}


SUFFIXES = tuple(sorted(_READERS))


@dataclass(frozen=True)
class FileBytes:
    """A file as it lies in the folder.

    Parameters
    ----------
    path : str
        Path relative to the folder, with forward slashes.
    sha256 : str
        Hash of the bytes, in hexadecimal.
    data : bytes
        The bytes.
    """

    path: str
    sha256: str
    data: bytes


@dataclass(frozen=True)
class SourceFile:
    """The text of one file.

    Parameters
    ----------
    path : str
        Path relative to the folder, with forward slashes.
    sha256 : str
        Hash of the file's bytes, in hexadecimal.
    pages : tuple of str
        The text: one entry a page for a PDF, a single entry otherwise. Lines end in a line
        feed alone, on every system.
    """

    path: str
    sha256: str
    pages: tuple[str, ...]

    @property
    def is_pdf(self) -> bool:
        """Whether ``pages`` are pages of a PDF."""
        return _suffix(self.path) == ".pdf"


@dataclass(frozen=True)
class FolderFiles:
    """The files of a folder, and of the folders in it. Paths are relative to it, with forward slashes, sorted.

    Parameters
    ----------
    readable : tuple of str
        Files of a kind that can be read.
    others : tuple of str
        Files of other kinds.
    outside : tuple of str
        Links of a kind that could be read, but they lead out of the folder.
    """

    readable: tuple[str, ...]
    others: tuple[str, ...]
    outside: tuple[str, ...]


def list_files(folder: str | os.PathLike[str], *, may_be_empty: bool = False) -> FolderFiles:
    """List the files of a folder, and of the folders in it.

    Hidden files and folders are left out, and so are the lock files of Word (``~$…``). Links to folders are not
    followed: what they show inside the folder is listed where it lies.

    Parameters
    ----------
    folder : path
        The folder.
    may_be_empty : bool
        Whether it may hold no file that can be read. By default that is an error.

    Raises
    ------
    DocumentError
        If the folder is missing, is no folder, cannot be listed or holds no file that can be read.
    """
    root = Path(folder)
    if not root.exists():
        raise DocumentError(f"the folder {root} does not exist; name a folder that holds the documents")
    if not root.is_dir():
        raise DocumentError(f"{root} is a file; name the folder that holds it")

    def refuse(error: OSError) -> None:
        raise DocumentError(f"the folder {error.filename} cannot be listed: {error.strerror or error}") from error

    real_root = root.resolve()
    readable, others, outside = list[str](), list[str](), list[str]()
    for place, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            if name.startswith((".", "~$")) or not path.is_file():
                continue
            kind = readable if _suffix(name) in SUFFIXES else others
            if kind is readable and path.is_symlink() and not path.resolve().is_relative_to(real_root):
                kind = outside
            kind.append(path.relative_to(root).as_posix())
    found = FolderFiles(*(tuple(sorted(one)) for one in (readable, others, outside)))
    if not found.readable and not may_be_empty:
        there = f" (there: {by_suffix(found.others)})" if found.others else ""
        raise DocumentError(f"the folder {root} holds no {', '.join(SUFFIXES)} file{there}; add documents to it")
    return found


def by_suffix(paths: Iterable[str]) -> str:
    """Number of files by suffix, the most frequent first: "3 .png, 1 without suffix"."""
    counts = Counter(_suffix(path) or "without suffix" for path in paths)
    return ", ".join(f"{count} {suffix}" for suffix, count in sorted(counts.items(), key=lambda one: (-one[1], one[0])))


def read_bytes(folder: str | os.PathLike[str], path: str) -> FileBytes:
    """Read the bytes of one file that `list_files` found.

    Raises
    ------
    DocumentError
        If the file cannot be read.
    """
    try:
        data = Path(folder, path).read_bytes()
    except OSError as error:
        raise DocumentError(f"{path} cannot be read: {error.strerror or error}; fix it or move it away") from error
    return FileBytes(path, hashlib.sha256(data).hexdigest(), data)


def parse(file: FileBytes) -> SourceFile:
    """Turn the bytes of a file into text.

    Text and Markdown are read as UTF-8 where they are that, else in the encoding that their bytes are most likely in.
    HTML and Word documents become Markdown: headings, paragraphs, lists and tables, without what a browser hides.
    Damaged bytes in UTF-8 become U+FFFD. Of these, and of what is not read in a Word document, a warning is logged.

    Raises
    ------
    DocumentError
        If the bytes are no text, or not a document of its kind that can be read.
    MissingExtraError
        If a package that reads this kind is not installed.
    """
    pages = _READERS[_suffix(file.path)](file.path, file.data)
    # As Python reads text: the same words give the same chunks on every system.
    lines = (page.replace("\r\n", "\n").replace("\r", "\n") for page in pages)
    # JSON and broken font tables of PDF give halves of surrogate pairs, which no tokenizer takes.
    plain = tuple(page.encode("utf-8", "replace").decode("utf-8") for page in lines)
    return SourceFile(file.path, file.sha256, plain)


def read_folder(folder: str | os.PathLike[str], *, on_error: str = "raise") -> tuple[SourceFile, ...]:
    """Read every document of a folder, in the order of their paths; see `list_files`.

    Links that lead out of the folder are left out with a logged warning.

    Parameters
    ----------
    folder : path
        The folder to read.
    on_error : {"raise", "skip"}
        For a file that cannot be read: raise, or leave it out with a logged warning.
        A missing package is always raised, since it concerns every file of a kind.

    Raises
    ------
    DocumentError
        If the folder or, with ``on_error="raise"``, a file in it cannot be read.
    MissingExtraError
        If a package that reads a file's kind is not installed.
    ConfigError
        If ``on_error`` is neither of the two.
    """
    check_on_error(on_error)
    found = list_files(folder)
    for path in found.outside:
        _log.warning("%s is skipped: %s", path, LEADS_OUT)
    sources = []
    for path in found.readable:
        try:
            sources.append(parse(read_bytes(folder, path)))
        except DocumentError as error:
            if on_error == "raise":
                raise
            _log.warning("skipped: %s", error)
    return tuple(sources)


def check_on_error(value: str) -> None:
    """Raise `ConfigError` unless the value is one of `_ON_ERROR`."""
    if value not in _ON_ERROR:
        raise ConfigError("on_error", value, "use one of " + ", ".join(map(repr, _ON_ERROR)))


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()
