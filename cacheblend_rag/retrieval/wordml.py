"""Text of Word documents that stands in elements which mammoth does not read.

The document is written anew with that text in plain runs: simple fields, ruby, equations, shapes, text of another
direction, chosen entries of forms. Comments, headers and footers are left out. So is what stands in the instructions of
a field, such as the result of another field.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

# Elements around runs; the runs stay in their place.
_AROUND = frozenset(("fldSimple", "dir", "bdo", "hyperlink"))
_MATHS = frozenset(("oMath", "oMathPara"))
# Marks before parts of an equation; without them figures would run together.
_BEFORE = {"den": "/", "sup": "^", "sub": "_", "deg": "√", "lim": "_"}
_BREAKS = {"cr": "br", "ptab": "tab"}
# Contents that lie elsewhere or are of another program: named, not read.
_ELSEWHERE = {
    "altChunk": "a document within it",
    "subDoc": "a document that it refers to",
    "OLEObject": "an object of another program",
    "chart": "a chart",
    "relIds": "a diagram",
}
# Texts of their own, which fields do not cross.
_STORIES = frozenset(("txbxContent", "footnote", "endnote"))
_TAKEN_OUT = frozenset(("del", "moveFrom"))  # by tracked changes
_KEPT_OF_INSTRUCTIONS = frozenset(("rPr", "fldChar", "instrText"))
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
    _drop_instructions(tree)
    for element in list(tree.iter("{*}*")):
        local = _local(element)
        if element.getparent() is None or not any(up is tree for up in element.iterancestors()):
            continue  # it was taken out
        if local in _ELSEWHERE:
            yield _ELSEWHERE[local]
        elif local in _BREAKS:
            element.tag = _tag(tree, _BREAKS[local])
        elif local in _MATHS:
            _replace(element, [_run(tree, _formula(element))])
        elif local == "ruby":
            base, reading = (_inner(element, name) for name in ("rubyBase", "rt"))
            _replace(element, [_run(tree, f"{base}({reading})" if reading else base)])
        elif local == "ddList":
            _choose(tree, element)
        elif local == "AlternateContent":
            if not any(_within(one, "t") for one in element if _local(one) == "Fallback"):
                _replace(element, [part for one in element if _local(one) == "Choice" for part in one])
        elif local in ("drawing", "pict"):
            _shapes(tree, element)
    for element in list(tree.iter("{*}*")):
        if _local(element) in _AROUND and element.getparent() is not None:
            _replace(element, list(element))


def _drop_instructions(tree: Any) -> None:
    """Take out what stands in the instructions of fields. What follows the mark of a field that is not ended stays."""
    stories: dict[Any, list[list[Any] | None]] = {}
    for run in list(tree.iter("{*}r")):
        around = list(run.iterancestors())
        if any(_local(one) in _TAKEN_OUT for one in around):
            continue
        story = next((one for one in around if _local(one) in _STORIES), tree)
        # The fields under way, from the outermost: what stands in the instructions of each, None behind them.
        fields = stories.setdefault(story, [])
        for element in list(run):
            kind = _values(element, "fldCharType")
            if kind == ["begin"]:
                fields.append([])
            elif kind and fields:
                for dropped in fields.pop() or ():
                    dropped.getparent().remove(dropped)
                if kind == ["separate"]:
                    fields.append(None)
            elif _local(element) not in _KEPT_OF_INSTRUCTIONS:
                open_fields = [one for one in fields if one is not None]
                if open_fields:
                    open_fields[-1].append(element)


def _shapes(tree: Any, element: Any) -> None:
    """Text of shapes as that of boxes which mammoth reads, whatever the shapes are."""
    boxes = [one for one in _within(element, "txbxContent") if not _in_box(one, element)]
    drawn = [one for one in _within(element, "t") if "drawingml" in one.tag and not _in_box(one, element)]
    others = [one.text or "" for one in drawn]
    others += [one.get("string") or "" for one in _within(element, "textpath")]
    if others := [text for text in others if text.strip()]:
        made = _make(tree, "txbxContent")
        for text in others:
            made.append(_paragraph(tree, text))
        boxes.append(made)
    if boxes:
        element.tag = _tag(tree, "pict")
        for child in list(element):
            element.remove(child)
        element.extend(boxes)


def _in_box(one: Any, top: Any) -> bool:
    """Whether an element stands in a text box below another."""
    around = takewhile(lambda up: up is not top, one.iterancestors())
    return any(_local(up) == "txbxContent" for up in around)


def _choose(tree: Any, element: Any) -> None:
    """Write the chosen entry of a list of a form behind the list."""
    entries = [value for one in element if _local(one) == "listEntry" for value in _values(one)]
    chosen = next((value for one in element if _local(one) == "result" for value in _values(one)), "0")
    run = next((up for up in element.iterancestors() if _local(up) == "r"), None)
    if run is not None and chosen.isdecimal() and int(chosen) < len(entries):
        run.addnext(_run(tree, entries[int(chosen)]))


def _values(element: Any, attribute: str = "val") -> list[str]:
    return [value for name, value in element.attrib.items() if name.endswith("}" + attribute)]


def _formula(element: Any) -> str:
    """An equation as text."""
    if _local(element) == "t":
        return element.text or ""
    text = "".join(map(_formula, element.iterchildren("{*}*")))
    if _local(element) in ("num", "den", "sup", "sub") and len(text) > 1:
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
    run, inner = _make(tree, "r"), _make(tree, "t")
    inner.text = text
    run.append(inner)
    return run


def _paragraph(tree: Any, text: str) -> Any:
    paragraph = _make(tree, "p")
    paragraph.append(_run(tree, text))
    return paragraph


def _make(tree: Any, name: str) -> Any:
    return tree.makeelement(_tag(tree, name))


def _tag(tree: Any, name: str) -> str:
    """The tag of an element of WordprocessingML, in whichever of its namespaces the document is."""
    return str(tree.tag).partition("}")[0] + "}" + name


def _within(element: Any, name: str) -> list[Any]:
    return list(element.iterdescendants("{*}" + name))


def _inner(element: Any, name: str) -> str:
    return "".join("".join(one.itertext()) for one in _within(element, name))


def _local(element: Any) -> str:
    return str(element.tag).rpartition("}")[2]
