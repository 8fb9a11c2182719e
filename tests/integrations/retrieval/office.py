"""Word documents for tests."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from typing import Any

import docx


def make_docx(write: Callable[[Any], object]) -> bytes:
    """A document that python-docx writes."""
    document = docx.Document()
    write(document)
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


def with_part(data: bytes, name: str, change: Callable[[bytes], bytes]) -> bytes:
    """The document with one part changed, or added."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as after:
        for one in before.namelist():
            if one != name:
                after.writestr(one, before.read(one))
        after.writestr(name, change(before.read(name) if name in before.namelist() else b""))
    return out.getvalue()


def nested(data: bytes, depth: int) -> bytes:
    """The document with elements within elements."""
    deep = b"<w:ins>" * depth + b"</w:ins>" * depth
    return with_part(data, "word/document.xml", lambda xml: xml.replace(b"<w:body>", b"<w:body>" + deep))


def of_entities(data: bytes, external: str = "") -> bytes:
    """The document with entities that unfold to gigabytes, or one that is to be read from elsewhere."""
    lines = [b'<!ENTITY e0 "word">']
    lines += [b'<!ENTITY e%d "%s">' % (n, b"&e%d;" % (n - 1) * 10) for n in range(1, 10)]
    if external:
        lines.append(b'<!ENTITY e9x SYSTEM "%s">' % external.encode())
    dtd = b"<!DOCTYPE x [" + b"".join(lines) + b"]>"
    body = b"<w:body><w:p><w:r><w:t>%s</w:t></w:r></w:p>" % (b"&e9x;" if external else b"&e9;")

    def change(xml: bytes) -> bytes:
        head, rest = xml.split(b"?>", 1)
        return head + b"?>" + dtd + rest.replace(b"<w:body>", body)

    return with_part(data, "word/document.xml", change)
