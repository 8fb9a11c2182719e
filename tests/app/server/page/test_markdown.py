"""Answers in Markdown: shown as elements, and never as markup."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from tests.app.server.page.driving import answer_with, ask, told

MARKDOWN = """## Heights

Mount *Everest* is **8,849** metres high, `snow_line` aside. See notes.md or https://example.org/b.

1. First
   - inner
2. Second

| peak | metres |
|---|--:|
| Everest | 8,849 |

```python
print("<b>not bold</b>")
```

<img src=x onerror="window.taken = 4"> [a](javascript:window.taken=5) ![p](http://localhost/x.png) [site](https://example.org/a)
"""


def test_markdown_is_shown_as_elements_and_never_as_markup(page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    answer_with(page, *told(MARKDOWN, hits=0, misses=0))
    words = ask(page, "How high?").locator(".words")
    expect(words.locator(".head")).to_have_text("Heights")
    expect(words.locator("strong")).to_have_text("8,849")
    expect(words.locator("p > code")).to_have_text("snow_line")
    expect(words.locator("ol > li > ul > li")).to_have_text("inner")
    assert words.locator("td").all_text_contents() == ["Everest", "8,849"]
    assert words.locator("td").last.evaluate("(cell) => getComputedStyle(cell).textAlign") in ("end", "right")
    expect(words.locator("pre code")).to_have_text('print("<b>not bold</b>")')
    expect(words).to_contain_text('<img src=x onerror="window.taken = 4"> [a](javascript:window.taken=5)')
    bare, picture, link = words.locator("a").all()
    assert [one.text_content() for one in (bare, picture, link)] == ["https://example.org/b", "p", "site"]
    expect(link).to_have_attribute("href", "https://example.org/a")
    expect(link).to_have_attribute("rel", "noopener noreferrer nofollow")
    expect(words).to_contain_text("p (localhost) site (example.org)")
    assert words.locator(":is(img, script, b, iframe, h1, h2, h3)").count() == 0
    assert page.evaluate("() => window.taken") is None
    assert not [url for url in asked if "x.png" in url]


# Each tries to run something, to load something, or to lead elsewhere than it says.
ATTACKS = [
    "<script>window.taken = 1</script>",
    "<img src=x onerror=window.taken=1>",
    "<svg onload=window.taken=1><animate onbegin=window.taken=1>",
    "<svg><style><img src=x onerror=window.taken=1></style></svg>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=x onerror=window.taken=1&gt;'>",
    "<noscript><p title='</noscript><img src=x onerror=window.taken=1>'>",
    "<iframe srcdoc='<script>parent.taken=1</script>'></iframe>",
    "<a href=javascript:window.taken=1>here</a> <form action=javascript:window.taken=1><button>go</button></form>",
    "[a](javascript:window.taken=1) [b](JaVaScRiPt:window.taken=1) [c](javascript&colon;window.taken=1)",
    "[d](data:text/html,<script>window.taken=1</script>) [e](data:text/html;base64,PHNjcmlwdD4=)",
    "[f](vbscript:x) [g](file:///etc/passwd) [h](blob:http://other.example/x) [i](//other.example/x) [j](api/state)",
    "[k](\x01javascript:window.taken=1) [l](java\nscript:window.taken=1) [m]( javascript:window.taken=1)",
    "<javascript:window.taken=1> <data:text/html,x>",
    "![n](javascript:window.taken=1) ![o](data:image/svg+xml,<svg onload=window.taken=1>) ![p](http://other.example/x.png)",
    "[q]: javascript:window.taken=1 'x'\n\n[q] [r](https://other.example/ \"' onmouseover='window.taken=1\")",
    "`<img src=x onerror=window.taken=1>` **<img src=x onerror=window.taken=1>**",
    "```html\n<img src=x onerror=window.taken=1><script>window.taken = 1</script>\n```",
    "```<img src=x onerror=window.taken=1>\nx\n```",
    "| <img src=x onerror=window.taken=1> | b |\n|---|:-:|\n| </td><script>window.taken = 1</script> | c |",
    "&lt;img src=x onerror=window.taken=1&gt; &#60;script&#62;window.taken = 1&#60;/script&#62;",
    "[https://good.example/](https://other.example/) [https://good.example@other.example/](https://other.example/)",
]
ALLOWED = "a, p, span, div, pre, code, ol, ul, li, blockquote, table, thead, tbody, tr, th, td, strong, em, s, hr, br"
ALLOWED += ", button, bdi"


def test_page_shows_attacks_as_text(page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    answer_with(page, *told("\n\n".join(ATTACKS)))
    words = ask(page, "Is it safe?").locator(".words")
    assert words.locator(f":not({ALLOWED})").count() == 0
    attributes = words.evaluate("(words) => [...words.querySelectorAll('*')].flatMap((one) => one.getAttributeNames())")
    assert not [name for name in attributes if name.startswith("on") or name in ("src", "style", "srcset", "action")]
    for link in words.locator("a").all():
        link.dispatch_event("mouseover")
        assert re.match(r"https?://(good\.example@)?other\.example/", link.get_attribute("href") or "")
        expect(link.locator("xpath=../..")).to_contain_text("other.example")
    assert page.evaluate("() => window.taken") is None
    assert not [url for url in asked if "other.example" in url or url.endswith("/x")]


def test_address_of_a_link_cannot_be_turned_around(page: Page) -> None:
    text = "See [moc.knab\u202e//:sptth](https://evil.example/) and [https://evil.example/\u202emoc.knab](https://evil.example/)."
    answer_with(page, *told(text))
    ask(page, "Where?")
    expect(page.locator(".words bdi[dir=ltr]")).to_have_text([" (evil.example)"] * 2)
    for one in page.locator(".words bdi a").all():
        assert "(evil.example)" not in one.inner_text()


def test_answer_and_code_are_copied_as_they_were_written(page: Page) -> None:
    answer_with(page, *told(MARKDOWN))
    turn = ask(page, "How high?")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for name, text in (("Copy the code", 'print("<b>not bold</b>")'), ("Copy the answer", MARKDOWN.strip())):
        turn.get_by_role("button", name=name).click()
        expect(turn.get_by_role("button", name=name)).to_have_attribute("data-label", "Copied")
        assert page.evaluate("() => navigator.clipboard.readText()") == text
