"""The text of a file, by its kind.

Files may come from anywhere. Nothing they name is opened or fetched. What does not fit its kind is a `DocumentError`.
"""

from __future__ import annotations

import csv
import io
import logging
import re
import warnings
import zipfile
from collections.abc import Callable
from itertools import zip_longest
from typing import Any
from xml.parsers import expat

from cacheblend_rag.errors import DocumentError, MissingExtraError

Reader = Callable[[str, bytes], tuple[str, ...]]

_log = logging.getLogger(__name__)
# Bytes of XML in a Word document, unpacked. A book of 1,000 pages has fewer; as a tree they take 50 times that.
_MOST_XML = 20_000_000
# Elements within elements in XML. Nested tables are the deepest in practice, at about 10 a table.
_DEEPEST = 200
# Share of characters that may be damaged in text.
_BROKEN = 0.05
# What a browser does not show.
_UNSEEN = ("head", "script", "style", "template", "noscript", "iframe", "object", "svg", "math", "select", "textarea")
_HIDING = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)


def _text(name: str, data: bytes) -> tuple[str, ...]:
    return (_decoded(name, data),)


def _decoded(name: str, data: bytes, *, markup: bool = False) -> str:
    """Text in whatever encoding it is; that of markup may be declared in it."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    # Both stand in text of other encodings that may pass for ASCII, and in no plain text.
    if "\0" not in text and "\x1b" not in text:
        return text
    text = data.decode(_encoding(name, data, markup), "replace")
    if "\0" in text or text.count("\ufffd") > _BROKEN * len(text):
        raise _no_text(name)
    return text.removeprefix("\ufeff")


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
        raise _no_text(name)
    _log.info("%s is read as %s", name, encoding)
    return encoding


def _no_text(name: str) -> DocumentError:
    return DocumentError(f"{name} holds bytes that are no text in any known encoding; save it as UTF-8 or move it away")


def _html(name: str, data: bytes) -> tuple[str, ...]:
    return (_text_of_html(name, _decoded(name, data, markup=True)),)


def _text_of_html(name: str, markup: str) -> str:
    """Headings, paragraphs, lists and tables as Markdown; links and emphasis as their words."""
    try:
        from bs4 import BeautifulSoup
        from markdownify import MarkdownConverter
    except ImportError as error:
        raise _missing(error.name or "beautifulsoup4", name) from error
    converter = MarkdownConverter(
        heading_style="ATX",
        bullets="-",
        strip=["a", "img", "b", "strong", "em", "i", "del", "s"],
        escape_asterisks=False,
        escape_underscores=False,
        table_infer_header=True,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # markup that looks like a file's name, or like XML
            soup = BeautifulSoup(markup, "lxml")
            title = soup.title.get_text(" ", strip=True) if soup.title else ""
            for element in soup.find_all(_is_unseen):
                element.decompose()
            body = converter.convert_soup(soup)
    except RecursionError:
        raise DocumentError(f"{name} cannot be read: its elements are nested too deeply") from None
    except Exception as error:  # parsers raise errors of many kinds
        raise DocumentError(f"{name} cannot be read as HTML ({type(error).__name__}: {error})") from error
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in body.splitlines())).strip("\n")
    return f"{title}\n\n{text}" if title and title not in text else text


def _is_unseen(element: Any) -> bool:
    return (
        element.name in _UNSEEN
        or element.has_attr("hidden")
        or element.get("aria-hidden") == "true"
        or _HIDING.search(str(element.get("style", ""))) is not None
    )


def _docx(name: str, data: bytes) -> tuple[str, ...]:
    try:
        import mammoth
    except ImportError as error:
        raise _missing("mammoth", name) from error
    try:
        _check_package(data)
        html = mammoth.convert_to_html(
            io.BytesIO(data),
            style_map="p[style-name='Title'] => h1:fresh",
            include_embedded_style_map=False,
            convert_image=mammoth.images.img_element(lambda image: {}),
        ).value
    except RecursionError:
        raise DocumentError(f"{name} cannot be read: its elements are nested too deeply") from None
    except Exception as error:  # a damaged document makes parsers raise errors of many kinds
        reason = str(error) or type(error).__name__
        raise DocumentError(
            f"{name} cannot be read as a Word document ({reason}); save it anew as .docx without a password, "
            "or move it away"
        ) from error
    return (_text_of_html(name, html),)


def _check_package(data: bytes) -> None:
    """Refuse what would fill memory: too much XML when unpacked, XML that defines entities or is too deep."""
    with zipfile.ZipFile(io.BytesIO(data)) as package:
        parts = [one for one in package.infolist() if one.filename.lower().endswith((".xml", ".rels"))]
        if sum(one.file_size for one in parts) > _MOST_XML:
            raise ValueError(f"it unpacks to more than {_MOST_XML // 10**6} MB of XML")
        for part in parts:
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
                raise ValueError("it defines a document type, which no Word document does")

            parser = expat.ParserCreate()
            parser.StartElementHandler, parser.EndElementHandler = begin, end
            parser.StartDoctypeDeclHandler = refuse
            parser.Parse(package.read(part), True)


def _pdf(name: str, data: bytes) -> tuple[str, ...]:
    try:
        from pypdf import PdfReader
    except ImportError as error:
        raise _missing("pypdf", name) from error
    try:
        pages = tuple(page.extract_text() for page in PdfReader(io.BytesIO(data)).pages)
    except Exception as error:  # a damaged PDF makes pypdf raise errors of many kinds
        raise DocumentError(
            f"{name} cannot be read as PDF ({type(error).__name__}: {error}); "
            "save it anew without damage or password, or move it away"
        ) from error
    if not any(page.strip() for page in pages):
        _log.warning("%s holds no text; scanned pages need text recognition first", name)
    # Broken font tables give lone surrogates, which no tokenizer takes.
    return tuple(page.encode("utf-8", "replace").decode("utf-8") for page in pages)


def _missing(package: str, name: str) -> MissingExtraError:
    missing = MissingExtraError(package, "app")
    missing.msg = f"{name} cannot be read: {missing}"
    return missing


def _csv(name: str, data: bytes) -> tuple[str, ...]:
    """A table as one paragraph a row; each cell stands behind its column's name, so that a row is understood alone."""
    text = _decoded(name, data)
    first = text.lstrip().partition("\n")[0]
    delimiter = max(",;\t|", key=first.count)
    try:
        rows = [
            [cell.strip() for cell in row] for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        ]
    except csv.Error as error:
        raise DocumentError(f"{name} is no table of separated values: {error}") from None
    head, *others = [row for row in rows if any(row)] or [[]]
    told = ["; ".join(filter(None, map(_cell, zip_longest(head, row, fillvalue="")))) for row in others]
    return ("\n\n".join(told or ["; ".join(filter(None, head))]),)


def _cell(column_and_value: tuple[str, str]) -> str:
    column, value = column_and_value
    return f"{column}: {value}" if column and value else value


# By suffix. The one list: folders, uploads and the page go by it.
READERS: dict[str, Reader] = {
    ".csv": _csv,
    ".docx": _docx,
    ".htm": _html,
    ".html": _html,
    ".markdown": _text,
    ".md": _text,
    ".pdf": _pdf,
    ".txt": _text,
}
