"""Text of Word documents that stands in elements which mammoth does not read.

The document is written anew with that text in plain runs: simple fields, ruby, equations, text boxes, text of another
direction. Comments, headers and footers are left out.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

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
    from lxml import etree  # type: ignore[import-untyped]

    parser = etree.XMLParser(resolve_entities=False, no_network=True, load_dtd=False)
    out, left_out, trees = io.BytesIO(), list[str](), dict[str, Any]()
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(out, "w") as after:
        for name in before.namelist():
            folder, _, part = name.rpartition("/")
            if folder == "word" and part.removesuffix(".xml").rstrip("0123456789") in _PARTS and part.endswith(".xml"):
                trees[name] = etree.fromstring(before.read(name), parser)
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
