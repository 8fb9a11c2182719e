"""Text of files of each kind, and files that would do harm."""

from __future__ import annotations

import sys
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


def test_text_is_read_in_the_encoding_it_is_in() -> None:
    for encoding, text in (
        ("cp1252", "Ole Åse går på søndagstur ved sjøen. Blåbær er gode."),
        ("cp1252", "blåbær"),
        ("cp1251", "Договор аренды заключён на один год."),
        ("shift_jis", "これは日本語の文章です。"),
        ("utf-16", "Åse søker"),
        ("utf-8-sig", "Åse søker"),
    ):
        assert parsed("a.txt", text.encode(encoding)) == text


def test_file_that_is_no_text_is_named() -> None:
    for data in (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), b"\0" * 100, b"\xff\xfe\0"):
        with pytest.raises(DocumentError, match=r"picture\.txt holds bytes that are not text"):
            parsed("picture.txt", data)


def test_text_that_would_fill_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_rag.retrieval.documents._MOST_NAMED", 1_000_000, raising=False)
    name = "n" * 10_000
    for path, data, reason in (
        ("a.html", "<table><tr>" + "<td rowspan=65534>x" * 200 + "<tr><td>x" * 1_000, "several rows high"),
        ("a.csv", f"{name},m\n" + "1,2\n" * 1_000, "long names"),
        ("a.json", f'{{"{name}": [' + '{"a": 1},' * 1_000 + "1]}", "long names"),
    ):
        with pytest.raises(DocumentError, match=rf"^{path} cannot be read.*{reason}"):
            parsed(path, data.encode())


def test_each_row_of_separated_values_names_its_columns() -> None:
    rows = ["Name,Price,Note", 'Rondo,12,"red, round\nand ""light"""', ",,", "Kvadrat,9", "Tri,8,sharp,extra"]
    for mark in ",;\t|":
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


def test_the_delimiter_is_the_one_that_separates_columns() -> None:
    for data, text in (
        ("sep=;\r\nName;Price\r\nRondo;12,50", "Name: Rondo; Price: 12,50"),
        ('"Name, first, last";"Price, net"\nRondo;12', "Name, first, last: Rondo; Price, net: 12"),
        ("Name;Price\nRondo, red, large;1,5", "Name: Rondo, red, large; Price: 1,5"),
        ("a,b\n1," + "x" * 200_000, "a: 1; b: " + "x" * 200_000),
    ):
        assert parsed("a.csv", data.encode()) == text


SENTENCES = (
    "Die Gemeinde Süßen verlängert die Fristen für Anträge auf Förderung um zwei Monate, über Ostern hinweg. ",
    "Договор аренды заключён на один год. ",
    "これは日本語の文章です。契約は一年間です。",
)


def test_damaged_byte_makes_no_other_text_of_utf8(caplog: pytest.LogCaptureFixture) -> None:
    for sentence in SENTENCES:
        for bad in (b"\xff", b"\x00", b"\x1b[0m", b"\xed\xa0\x80"):
            for name in ("a.txt", "a.html"):
                data = (sentence * 3).encode()
                at = len(sentence.encode())
                seen = parsed(name, data[:at] + bad + data[at:])
                assert sentence.strip()[:12] in seen
                assert sentence.strip()[-12:] in seen
                assert "\ufffd" in seen
                assert f"{name} is UTF-8 with damage" in caplog.text


def test_text_that_ends_within_a_character_is_utf8() -> None:
    assert parsed("a.txt", ("Die Straße heißt Süd" * 3 + "ü").encode()[:-1]) == "Die Straße heißt Süd" * 3 + "\ufffd"
    assert parsed("a.txt", b"An ASCII text \x00 with a byte too many.") == "An ASCII text \ufffd with a byte too many."


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


def test_html_leaves_out_hidden_elements() -> None:
    seen = html(
        "<html><head><title>Boats</title><style>p{color:red}</style><script>alert(1)</script></head><body>"
        "<!-- a comment --><h1>Boats</h1><p>Shown.</p><p hidden>no1</p><p style='Display : NONE'>no2</p>"
        "<div aria-hidden=true>no3</div><template>no4</template><noscript>no5</noscript><svg><text>no6</text></svg>"
        "<iframe src='file:///etc/passwd'>no7</iframe><script>no8</script><img src=http://x.org/y.png alt=no9></body>"
    )
    assert seen == "# Boats\n\nShown."


def test_html_keeps_apart_what_stands_apart() -> None:
    for markup, text in (
        ("<p>opened in 1912<sup>3</sup> at 5<sup>−2</sup>", "opened in 1912³ at 5⁻²"),
        ("<p>H<sub>2</sub>O, 12 m<sup>2</sup>, 1<sup>st</sup>, built<sup>[4]</sup>", "H₂O, 12 m², 1st, built[4]"),
        ("<p>10<sup>2.5</sup>, 2<sup>n</sup>, SO<sub>4</sub><sup>2−</sup>", "10^(2.5), 2^n, SO₄²⁻"),
        ("<p>x<sup><i>n</i>+<b>1</b></sup>, x<sup>1<b>0</b></sup>, a<sub>n+1</sub>", "x^(n+1), x¹⁰, a_(n+1)"),
        ("<p>x<sup>2<sup>3</sup></sup>, x<sup>n<sub>1</sub></sup>, x<sup></sup>", "x^(2³), x^(n₁), x"),
        ("<p>4<sup>e</sup>, 1<sup>er</sup>, oil<sup>™</sup>, x<sup>(i)</sup>", "4e, 1er, oil™, x^(i)"),
        ("<p>m<span style='Vertical-Align : super'>2</span>, H<span style='vertical-align:sub'>2</span>O", "m², H₂O"),
        ("<p>Total<p><sup>a</sup> Small print", "Total\n\na Small print"),
        ("<header>Boats</header><main>One</main><footer>Two</footer>", "Boats\n\nOne\n\nTwo"),
        ("<nav>a</nav><form>b<fieldset><legend>c</legend>d</fieldset></form>", "a\n\nb\n\nc\n\nd"),
        ("<span style='display:block'>One</span><span style='display: flex'>Two</span>", "One\n\nTwo"),
        ("<span>pre</span><span>fix</span><button>Yes</button><button>No</button>", "prefix Yes No"),
        ("<menu><li>oars<li>sails</menu>", "- oars\n- sails"),
        ("<p><ruby>漢字<rp>(</rp><rt>かんじ</rt><rp>)</rp></ruby>です", "漢字(かんじ)です"),
        ("<p><input type=checkbox checked>paid <input type=checkbox>open", "☒ paid ☐ open"),
    ):
        assert html(markup) == text


def test_html_says_its_encoding() -> None:
    for encoding, text in (
        ("iso-8859-1", "blåbær"),
        ("iso-8859-2", "kůň"),
        ("koi8-r", "Договор"),
        ("shift_jis", "日本"),
    ):
        assert html(f"<html><meta charset={encoding}><p>{text}</html>".encode(encoding)) == text
    assert html("<p>Åse søker".encode("utf-16")) == "Åse søker"


def test_html_nested_too_deeply_or_of_broken_tags() -> None:
    for deep in ("<div>" * 20_000, "<ul><li>" * 2_000):
        with pytest.raises(DocumentError, match=r"page\.html cannot be read: its elements are nested too deeply"):
            html(deep)
    for broken in ("<a " * 50_000, "<!--" * 50_000, "<a b='" * 50_000, "<![CDATA[" * 50_000):
        html(broken)  # in no more time than other pages


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


MATH = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
COMPATIBLE = 'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'


def raised(text: str, way: str = "superscript") -> str:
    return f"<w:r><w:rPr><w:vertAlign w:val='{way}'/></w:rPr><w:t>{text}</w:t></w:r>"


def run(text: str) -> str:
    return f'<w:r><w:t xml:space="preserve">{text}</w:t></w:r>'


EMPTY = make_docx(lambda _: None)
BOX = (
    '<wps:txbx xmlns:wps="http://schemas.microsoft.com/office/word/2010/wordprocessingShape"><w:txbxContent>'
    f"<w:p>{run('In a box')}</w:p></w:txbxContent></wps:txbx>"
)


def test_text_in_any_element_of_word_is_read() -> None:
    cases = (
        (f"{run('Rent ')}<w:fldSimple w:instr='MERGEFIELD rent'>{run('1,250')}</w:fldSimple>", "Rent 1,250"),
        (f"<w:r><w:ruby><w:rt>{run('よむ')}</w:rt><w:rubyBase>{run('読')}</w:rubyBase></w:ruby></w:r>", "読(よむ)"),
        (f'<w:dir w:val="rtl">{run("שלום")}</w:dir><w:bdo w:val="ltr">{run(" 42")}</w:bdo>', "שלום 42"),
        ("<w:r><w:t>one</w:t><w:cr/><w:t>two</w:t><w:ptab/><w:t>three</w:t></w:r>", "one\ntwo three"),
        (f"{run('x')}{raised('3')}{run(' m')}", "x³ m"),
        (
            f"{run('It is ')}<m:oMath {MATH}><m:f><m:num><m:r><m:t>1</m:t></m:r></m:num><m:den><m:r><m:t>2</m:t></m:r>"
            "</m:den></m:f><m:sSup><m:e><m:r><m:t>x</m:t></m:r></m:e><m:sup><m:r><m:t>n+1</m:t></m:r></m:sup></m:sSup>"
            f"</m:oMath>{run('.')}",
            "It is 1/2x^(n+1).",
        ),
        (f"{run('Text')}<w:r><w:drawing>{BOX}</w:drawing></w:r>", "Text\n\nIn a box"),
        (
            f"{run('Text')}<w:r><mc:AlternateContent {COMPATIBLE}><mc:Choice><w:drawing>{BOX}</w:drawing></mc:Choice>"
            "</mc:AlternateContent></w:r>",
            "Text\n\nIn a box",
        ),
    )
    body = "<w:body>" + "".join(f"<w:p>{inner}</w:p>" for inner, _ in cases)
    data = with_part(EMPTY, "word/document.xml", lambda xml: xml.replace(b"<w:body>", body.encode()))
    read = parsed("a.docx", data).replace("\t", " ").replace("  \n", "\n")
    assert read == "\n\n".join(text for _, text in cases)


def test_unread_parts_of_a_word_document_are_named(caplog: pytest.LogCaptureFixture) -> None:
    inner = b"<w:body><w:altChunk/><w:p><w:r><w:t>Text</w:t><w:sym w:font='Own' w:char='F0AA'/></w:r></w:p>"
    data = with_part(make_docx(lambda _: None), "word/document.xml", lambda xml: xml.replace(b"<w:body>", inner))
    assert parsed("a.docx", data) == "Text"
    assert "a.docx is read, except: a document within it; A w:sym element" in caplog.text
    assert "F0AA" in caplog.text
    caplog.clear()
    parsed("a.docx", make_docx(write))
    assert caplog.text == ""


def test_word_documents_that_cannot_be_read() -> None:
    made = make_docx(write)
    for data, reason in (
        (b"", "not a zip file"),
        (made[:-200], "not a zip file"),
        (with_part(made, "word/document.xml", lambda xml: xml[:-30]), "no element found|unclosed token"),
        (nested(made, 100_000), "nested too deeply"),
        (of_entities(made), "document type"),
        (of_entities(made, "file:///etc/passwd"), "document type"),
        (with_part(made, "word/document.xml", lambda xml: b" " * 30_000_000), "unpacks to more than 20 MB"),
    ):
        with pytest.raises(DocumentError, match=rf"bad\.docx cannot be read as a Word document \(.*({reason})"):
            parsed("bad.docx", data)


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


def test_missing_package_is_named_with_file_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, data, package in (
        ("a.docx", make_docx(write), "mammoth"),
        ("a.html", b"<p>x", "bs4"),
        ("a.txt", b"\xe6\xf8\xe5", "chardet"),
        ("a.pdf", b"", "pypdf"),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtraError, match=rf"{path}.*pip install 'cacheblend-rag\[app\]'"):
            parsed(path, data)
