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
def test_file_that_is_no_text_is_named(data: bytes) -> None:
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


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("sep=;\r\nName;Price\r\nRondo;12,50", "Name: Rondo; Price: 12,50"),
        ('"sep=|"\nName|Price\nRondo|1,2', "Name: Rondo; Price: 1,2"),
        ("sep=\t\nName\tPrice\nRondo\t1", "Name: Rondo; Price: 1"),
        ('"Name, first, last";"Price, net"\nRondo;12', "Name, first, last: Rondo; Price, net: 12"),
        ('\n"a\nb; c","d"\n1,2', "a\nb; c: 1; d: 2"),
        ("Name;Price\nRondo, red, large;1,5", "Name: Rondo, red, large; Price: 1,5"),
        ("a,b\n1," + "x" * 200_000, "a: 1; b: " + "x" * 200_000),
    ],
)
def test_the_delimiter_is_the_one_that_separates_columns(data: str, text: str) -> None:
    assert parsed("a.csv", data.encode()) == text


SENTENCES = {
    "de": "Die Gemeinde Süßen verlängert die Fristen für Anträge auf Förderung um zwei Monate, über Ostern hinweg. ",
    "fr": "L’été dernier, la mairie a décidé que les écoles fermées rouvriraient à la rentrée. ",
    "ru": "Договор аренды заключён на один год. ",
    "ja": "これは日本語の文章です。契約は一年間です。",
}


@pytest.mark.parametrize("language", SENTENCES)
@pytest.mark.parametrize("bad", [b"\xff", b"\xe9", b"\x00", b"\x1b[0m", b"\xc3", b"\xed\xa0\x80"])
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.html", "a.csv"])
def test_damaged_byte_makes_no_other_text_of_utf8(
    language: str, bad: bytes, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = SENTENCES[language] * 3
    data = text.encode()
    at = len(SENTENCES[language].encode())
    seen = parsed(name, data[:at] + bad + data[at:])
    first, last = SENTENCES[language].strip()[:12], SENTENCES[language].strip()[-12:]
    assert first in seen
    assert last in seen
    assert "\ufffd" in seen
    assert f"{name} is UTF-8 but for" in caplog.text


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


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("<p>opened in 1912<sup>3</sup> at 5<sup>−2</sup>", "opened in 1912³ at 5⁻²"),
        ("<p>H<sub>2</sub>O, 12 m<sup>2</sup>, 1<sup>st</sup>, built<sup>[4]</sup>", "H₂O, 12 m², 1st, built[4]"),
        ("<p>x<sup>n+1</sup>, 2<sup>2n</sup>, a<sub>n+1</sub>, b<sub>10</sub>", "x^(n+1), 2^(2n), a_(n+1), b₁₀"),
        ("<p>10<sup>2.5</sup>, seen<sup>1,2</sup>, SO<sub>4</sub><sup>2−</sup>", "10^(2.5), seen^(1,2), SO₄²⁻"),
        ("<p>2<sup>n</sup>, x<sup>-n</sup>, x<sup>n</sup>y, Na<sup>+</sup>", "2^n, x^(-n), x^(n)y, Na⁺"),
        ("<p>x<sup><i>n</i>+<b>1</b></sup>, x<sup>1<b>0</b></sup>", "x^(n+1), x¹⁰"),
        ("<p>x<sup>2<sup>3</sup></sup>, x<sup>n<sub>1</sub></sup>", "x^(2³), x^(n₁)"),
        ("<p>x<sup> 2 </sup>y, x<sup>2<!-- 7 --></sup>, x<sup></sup>", "x ² y, x², x"),
        ("<p>4<sup>e</sup>, n<sup>o</sup>, M<sup>me</sup>, oil<sup>™</sup>, CO<sub>x</sub>", "4e, nº, Mme, oil™, CO_x"),
        ("<p>x<sub>i,j</sub>, C<sub>p,m</sub>, a<sub>max</sub>, V<sub>DD</sub>", "x_(i,j), C_(p,m), a_(max), V_(DD)"),
        ("<p>x<sub>i</sub>, log<sub>b</sub> a, H<sub>n</sub>O, <i>x<sub>i</sub></i>y", "x_i, log_b a, H_(n)O, x_(i)y"),
        ("<p>a<sup>b</sup>, n<sup>log n</sup>, x<sup>a/b</sup>, e<sup>x</sup>", "a^b, n^(log n), x^(a/b), e^x"),
        ("<p>x<sup>2</sup><sub>i</sub>, x<sub>i</sub><sup>2</sup>, x<sub>i</sub><sup>n</sup>", "x²_i, x_i², x_i^n"),
        ("<p>x<sup>a<sup>b</sup></sup>, x<sup>∞</sup>, A<sup>⊤</sup>, A<sup>*</sup>", "x^(a^b), x^∞, A^⊤, A*"),
        ("<p>2<sup>p</sup>, sin<sup>k</sup> x, x<sup>(i)</sup>, x<sub>(i)</sub>", "2^p, sin^k x, x^(i), x_(i)"),
        ("<p>Total<sup>a</sup>, cells<sup>a,b</sup>, R<sup>max</sup>", "Total^a, cells^(a,b), R^(max)"),
        ("<p>2<sup>nd</sup>, n<sup>th</sup>, (n+1)<sup>th</sup>, 1<sup>er</sup>", "2nd, nth, (n+1)th, 1er"),
        (
            "<p>XIX<sup>e</sup>, V<sup>e</sup>, 2<sup>ème</sup>, D<sup>r</sup>, S<sup>te</sup>",
            "XIXe, Ve, 2ème, Dr, Ste",
        ),
        (
            "<p>M<sup>lle</sup>, N<sup>o</sup> 1, 20 <sup>o</sup>C, 1<sup>a</sup>, oil<sup>TM</sup>",
            "Mlle, Nº 1, 20 ºC, 1ª, oil™",
        ),
        ("<p><sup>a</sup>/<sub>b</sub>, <sup>1</sup>/<sub>2</sub>, <sup>n+1</sup>/<sub>2</sub>", "a/b, ¹/₂, (n+1)/₂"),
        ("<p>Total<p><sup>a</sup> Small print<p><sub>All of it</sub>", "Total\n\na Small print\n\nAll of it"),
        ("<p>x<sup><i>[a]</i></sup>, y<sup>[1][2]</sup>, z<sup>a[i]</sup>", "x[a], y[1][2], z^(a[i])"),
        ("<p>1<sup><sup>st</sup></sup>, m<sup><span style='vertical-align:super'>2</span></sup>", "1st, m²"),
        ("<p>m<span style='Vertical-Align : super'>2</span>, H<span style='vertical-align:sub'>2</span>O", "m², H₂O"),
        ("<p>m<span style='font-size:9px;vertical-align:super'>n+1</span>", "m^(n+1)"),
        ("<header>Boats</header><main>One</main><footer>Two</footer>", "Boats\n\nOne\n\nTwo"),
        ("<nav>a</nav><aside>b</aside><form>c<fieldset><legend>d</legend>e</fieldset></form>", "a\n\nb\n\nc\n\nd\n\ne"),
        ("<details><summary>More</summary>Text</details><address>Street 1</address>x", "More\n\nText\n\nStreet 1\n\nx"),
        ("<figure><img src=a><figcaption>Cap</figcaption></figure>Text", "Cap\n\nText"),
        ("<span style='display:block'>One</span><span style='display: flex'>Two</span>", "One\n\nTwo"),
        ("<span>pre</span><span>fix</span>", "prefix"),
        ("<menu><li>oars<li>sails</menu>", "- oars\n- sails"),
        ("<button>Yes</button><button>No</button>", "Yes No"),
        ("<p><ruby>漢字<rp>(</rp><rt>かんじ</rt><rp>)</rp></ruby>です", "漢字(かんじ)です"),
        ("<p><input type=checkbox checked>paid <input type=checkbox>open", "☒ paid ☐ open"),
    ],
)
def test_html_keeps_separate_blocks_apart(markup: str, text: str) -> None:
    assert html(markup) == text


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


MATH = 'xmlns:m="http://schemas.openxmlformats.org/officeDocument/2006/math"'
SHAPE = 'xmlns:wps="http://schemas.microsoft.com/office/word/2010/wordprocessingShape"'
DRAWING = 'xmlns:a="http://schemas.openxmlformats.org/drawingml/2006/main"'
COMPATIBLE = 'xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"'
VML = 'xmlns:v="urn:schemas-microsoft-com:vml"'


EITHER = f"<mc:AlternateContent {COMPATIBLE}><mc:Choice>"
TEXT_BOX = f"<wps:txbx {SHAPE}>"


def raised(text: str, way: str = "superscript") -> str:
    return f"<w:r><w:rPr><w:vertAlign w:val='{way}'/></w:rPr><w:t>{text}</w:t></w:r>"


def mark(kind: str) -> str:
    return f"<w:r><w:fldChar w:fldCharType='{kind}'/></w:r>"


def instruction(text: str) -> str:
    return f"<w:r><w:instrText>{text}</w:instrText></w:r>"


def field(told: str, result: str) -> str:
    """A field: the instructions, which may hold others, and what is seen of it."""
    return mark("begin") + told + mark("separate") + result + mark("end")


def run(text: str) -> str:
    return f'<w:r><w:t xml:space="preserve">{text}</w:t></w:r>'


MERGED = field(instruction(" MERGEFIELD state "), run("paid"))
CHOSEN = instruction(" IF ") + MERGED + instruction(' = "paid" "Thanks." "Please pay." ')


def box(text: str) -> str:
    return f"<w:txbxContent><w:p>{run(text)}</w:p></w:txbxContent>"


@pytest.mark.parametrize(
    ("inner", "text"),
    [
        (
            run("The rent is ")
            + f'<w:fldSimple w:instr="MERGEFIELD rent">{run("1,250 EUR")}</w:fldSimple>'
            + run(" a month."),
            "The rent is 1,250 EUR a month.",
        ),
        (
            f"<w:r><w:ruby><w:rubyPr/><w:rt>{run('かんじ')}</w:rt><w:rubyBase>{run('漢字')}</w:rubyBase></w:ruby></w:r>"
            + run("です"),
            "漢字(かんじ)です",
        ),
        (f'<w:dir w:val="rtl">{run("שלום")}</w:dir><w:bdo w:val="ltr">{run(" 42")}</w:bdo>', "שלום 42"),
        (f'<w:dir w:val="rtl"><w:fldSimple w:instr="x">{run("both")}</w:fldSimple></w:dir>', "both"),
        ("<w:r><w:t>one</w:t><w:cr/><w:t>two</w:t><w:ptab/><w:t>three</w:t></w:r>", "one\ntwo three"),
        (
            f"{run('It is ')}<m:oMathPara {MATH}><m:oMath><m:f><m:num><m:r><m:t>1</m:t></m:r></m:num><m:den><m:r><m:t>2"
            "</m:t></m:r></m:den></m:f><m:sSup><m:e><m:r><m:t>x</m:t></m:r></m:e><m:sup><m:r><m:t>2</m:t></m:r></m:sup>"
            f"</m:sSup></m:oMath></m:oMathPara>{run('.')}",
            "It is 1/2x^2.",
        ),
        (
            f"{run('Text')}<w:r><w:drawing>{TEXT_BOX}{box('In a box')}</wps:txbx></w:drawing></w:r>",
            "Text\n\nIn a box",
        ),
        (
            f"{run('Text')}<w:r>{EITHER}<w:drawing>{TEXT_BOX}{box('In a box')}"
            f"</wps:txbx></w:drawing></mc:Choice></mc:AlternateContent></w:r>",
            "Text\n\nIn a box",
        ),
        (
            f"{run('Text')}<w:r>{EITHER}<w:drawing>{TEXT_BOX}{box('In a box')}"
            f"</wps:txbx></w:drawing></mc:Choice><mc:Fallback><w:pict><v:oval {VML}><v:textbox>{box('In a box')}"
            "</v:textbox></v:oval></w:pict></mc:Fallback></mc:AlternateContent></w:r>",
            "Text\n\nIn a box",
        ),
        (
            f"{run('Text')}<w:r><w:pict><v:textpath {VML} string='Art'/></w:pict></w:r>",
            "Text\n\nArt",
        ),
        (
            f"{run('Text')}<w:r><w:drawing><a:t {DRAWING}>Drawn</a:t></w:drawing></w:r>",
            "Text\n\nDrawn",
        ),
        (
            f"{run('Colour: ')}<w:r><w:fldChar w:fldCharType='begin'><w:ffData><w:ddList><w:result w:val='1'/>"
            "<w:listEntry w:val='red'/><w:listEntry w:val='blue'/></w:ddList></w:ffData></w:fldChar></w:r>"
            "<w:r><w:instrText> FORMDROPDOWN </w:instrText></w:r><w:r><w:fldChar w:fldCharType='end'/></w:r>",
            "Colour: blue",
        ),
        (raised("3") + run(" m"), "³ m"),
        (
            run("x") + raised("n") + raised("+1") + run(" a") + raised("i", "subscript") + raised("1", "subscript"),
            "x^(n+1) a_(i1)",
        ),
        (
            run("x") + raised("i,j", "subscript") + run(", 1") + raised("st") + run(", n") + raised("log n"),
            "x_(i,j), 1st, n^(log n)",
        ),
        (
            f"<m:oMath {MATH}><m:sSup><m:e><m:r><m:t>x</m:t></m:r></m:e><m:sup><m:r><m:t>n+1</m:t></m:r></m:sup>"
            "</m:sSup>"
            "<m:sSub><m:e><m:r><m:t>a</m:t></m:r></m:e><m:sub><m:r><m:t>ij</m:t></m:r></m:sub></m:sSub>"
            "<m:sSup><m:e><m:r><m:t>y</m:t></m:r></m:e><m:sup><m:r><m:t>10</m:t></m:r></m:sup></m:sSup></m:oMath>",
            "x^(n+1)a_(ij)y^(10)",
        ),
        (run("So: ") + field(CHOSEN, run("Thanks.")) + run(" Bye."), "So: Thanks. Bye."),
        (run("So: ") + mark("begin") + CHOSEN + mark("end") + run(" Bye."), "So: Bye."),
        (field(instruction(" IF ") + field(CHOSEN, run("no")), run("Thanks.") + MERGED), "Thanks.paid"),
        (
            "<w:r><w:fldChar w:fldCharType='begin'/><w:instrText>IF</w:instrText><w:fldChar w:fldCharType='begin'/>"
            "<w:fldChar w:fldCharType='separate'/><w:t>no</w:t><w:tab/><w:fldChar w:fldCharType='end'/>"
            "<w:fldChar w:fldCharType='separate'/><w:t>yes</w:t><w:fldChar w:fldCharType='end'/></w:r>",
            "yes",
        ),
        (
            field(
                f"<w:fldSimple w:instr='x'>{run('no')}</w:fldSimple><w:r><w:ruby><w:rt>{run('no')}</w:rt><w:rubyBase>"
                f"{run('no')}</w:rubyBase></w:ruby></w:r><m:oMath {MATH}><m:r><m:t>no</m:t></m:r></m:oMath>"
                f"<w:r><w:drawing>{TEXT_BOX}{box('no')}</wps:txbx></w:drawing></w:r>",
                run("yes"),
            ),
            "yes",
        ),
        (
            field(run("no") + "</w:p><w:p>" + run("no"), run("yes") + "</w:p><w:p>" + run("yes too")),
            "yes\n\nyes too",
        ),
        (run("It ") + mark("begin") + run("is not lost"), "It is not lost"),
        (mark("end") + mark("separate") + run("kept"), "kept"),
        (
            run("In ")
            + f"<w:r><w:drawing>{TEXT_BOX}<w:txbxContent><w:p>{mark('begin')}{run('a box')}</w:p></w:txbxContent>"
            + "</wps:txbx></w:drawing></w:r>"
            + run("it ")
            + field(run("no"), run("stays")),
            "In it stays\n\na box",
        ),
        (
            f"<w:del w:id='1'><w:r><w:fldChar w:fldCharType='begin'/></w:r></w:del>{run('kept')}"
            + field(run("no"), run(" too")),
            "kept too",
        ),
    ],
)
def test_text_in_any_element_of_word_is_read(inner: str, text: str) -> None:
    body = f"<w:body><w:p>{inner}</w:p>".encode()
    data = with_part(make_docx(lambda _: None), "word/document.xml", lambda xml: xml.replace(b"<w:body>", body))
    assert parsed("a.docx", data).replace("\t", " ").replace("  \n", "\n") == text


def test_unread_parts_of_a_word_document_are_named(caplog: pytest.LogCaptureFixture) -> None:
    inner = b"<w:body><w:altChunk/><w:p><w:r><w:t>Text</w:t><w:sym w:font='Own' w:char='F0AA'/></w:r></w:p>"
    data = with_part(make_docx(lambda _: None), "word/document.xml", lambda xml: xml.replace(b"<w:body>", inner))
    assert parsed("a.docx", data) == "Text"
    assert "a.docx is read, but for: a document within it; A w:sym element" in caplog.text
    assert "F0AA" in caplog.text
    caplog.clear()
    parsed("a.docx", make_docx(write))
    assert caplog.text == ""


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
def test_missing_package_is_named_with_file_and_remedy(
    path: str, data: bytes, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError) as caught:
        parsed(path, data)
    assert path in str(caught.value)
    assert "pip install 'cacheblend-rag[app]'" in str(caught.value)
