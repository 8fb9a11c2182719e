"""The page when the server refuses, is busy, goes away, or asks for a key."""

from __future__ import annotations

import re
import time

import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect

from cacheblend_rag.app.server.problems import Problem
from cacheblend_rag.app.server.security.tenants import TokenQuota
from tests.app.server.page.conftest import open_page
from tests.app.server.page.driving import (
    File,
    ask,
    compare_off,
    delete_conversation,
    drop,
    easy_questions,
    events,
    probe,
    refuse,
    stream,
    upload_to_new_collection,
)

ASK, STATE = re.compile("/ask$"), re.compile("/api/state$")


def type_and_send(page: Page, question: str) -> None:
    compare_off(page)
    page.locator("#question").fill(question)
    page.locator("#question").press("Enter")


def test_busy_server_is_asked_again(page: Page, problems: list[str]) -> None:
    full = "too many requests wait already; try again later"
    page.route(ASK, lambda route: refuse(route, 429, "busy", full, **{"Retry-After": "7"}), times=1)
    question = easy_questions()[0]
    type_and_send(page, question.question)
    status = page.locator(".turn .status")
    expect(status).to_contain_text("Too many requests wait already. Try again in 7 s.")
    expect(status.get_by_role("alert")).to_be_visible()
    expect(page.locator("#ttft .hint")).to_have_text("No figures: the answer did not end.")
    problems.clear()  # the browser notes every refusal
    status.get_by_role("button", name="Try again").click()
    expect(page.locator(".turn").last.locator(".words")).to_contain_text(question.answers[0], ignore_case=True)


def test_used_up_quota_is_named(page: Page, problems: list[str]) -> None:
    quota = TokenQuota(2_000)
    quota.take("ada", 1_900)
    with pytest.raises(Problem) as caught:
        quota.check("ada", 900)
    wait = {"Retry-After": str(caught.value.retry_after)}
    page.route(ASK, lambda route: refuse(route, 429, caught.value.code, caught.value.message, **wait))
    type_and_send(page, "Anything?")
    told = r"This could take 900 tokens, and 1\d\d of your 2,000 a minute are left\. Try again in 2\d s\."
    expect(page.locator(".turn .status")).to_contain_text(re.compile(told))
    problems.clear()  # the browser notes every refusal


def test_page_shows_the_servers_words_about_a_failure(page: Page) -> None:
    failure = {"code": "timeout", "message": "Took too long."}
    told = [("sources", []), ("token", {"text": " Half of"}), ("error", failure)]
    page.route(ASK, lambda route: stream(route, *told, ("done", {})))
    type_and_send(page, "Anything?")
    expect(page.locator(".turn .words")).to_have_text("Half of")
    expect(page.locator(".turn .status")).to_contain_text("Took too long.")


def test_broken_off_answer_is_marked_as_unfinished(page: Page) -> None:
    page.route(ASK, lambda route: stream(route, ("token", {"text": " Half of"})))
    type_and_send(page, "Anything?")
    expect(page.locator(".turn")).to_have_attribute("data-status", "failed")
    expect(page.locator(".turn .status")).to_contain_text("connection was lost")


def test_answer_can_be_stopped(page: Page) -> None:
    held: list[Route] = []
    page.route(ASK, lambda route: held.append(route))
    type_and_send(page, "Anything?")
    expect(page.locator(".turn .status")).to_have_text("Looking for passages…")
    expect(page.locator(".turn .answer")).to_have_attribute("aria-busy", "true")
    expect(page.locator("#ttft .hint")).to_have_text("The figures come with the answer.")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".turn .status")).to_contain_text("Stopped before the end.")
    expect(page.locator("#send")).to_have_text("Ask")
    assert len(held) == 1


def test_page_waits_for_a_server_that_is_away(context: BrowserContext, address: str, problems: list[str]) -> None:
    page = context.new_page()
    page.route(STATE, lambda route: route.abort("connectionrefused"), times=1)
    page.goto(address)
    expect(page.get_by_role("heading", name="The server does not answer")).to_be_visible()
    expect(page.get_by_text("The server cannot be reached.")).to_be_visible()
    problems.clear()
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("heading", name="Ask the articles")).to_be_visible()


def test_key_is_asked_for_and_sent(context: BrowserContext, address: str, problems: list[str]) -> None:
    page, seen = context.new_page(), []

    def guarded(route: Route) -> None:
        given = route.request.headers.get("authorization")
        seen.append(given)
        if given == "Bearer the-right-key":
            route.continue_()
        else:
            refuse(route, 401, "unauthorized", "a key is needed")

    page.route(re.compile("/api/"), guarded)
    page.goto(address)
    dialog = page.get_by_role("dialog", name="This server asks for a key")
    page.get_by_label("API key").fill("the-right-key…")  # no header can carry this
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("alert")).to_have_text("The server did not accept this key.")
    assert "…" not in kept_texts(page)
    page.get_by_label("API key").fill("a wrong one")
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("alert")).to_have_text("The server did not accept this key.")
    page.keyboard.press("Escape")  # nothing works without it
    page.get_by_label("API key").fill("the-right-key")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Ask the articles")).to_be_visible()
    expect(page.locator("#question")).to_be_focused()
    assert seen[0] is None
    assert seen[-1] == "Bearer the-right-key"
    assert "the-right-key" not in page.evaluate("() => JSON.stringify(localStorage)")
    problems.clear()
    page.reload()
    page.locator("body[data-ready]").wait_for()  # kept for the tab


def kept_texts(page: Page) -> str:
    return str(page.evaluate("() => JSON.stringify([localStorage, sessionStorage])"))


def test_nothing_of_one_key_is_left_for_the_next(context: BrowserContext, address: str, problems: list[str]) -> None:
    """Neither on the page behind the question for a key, nor in what the browser keeps, nor in another tab."""
    page, accepted = context.new_page(), ["Bearer of-ada"]

    def guarded(route: Route) -> None:
        if route.request.headers.get("authorization") in accepted:
            route.continue_()
        else:
            refuse(route, 401, "unauthorized", "a key is needed")

    context.route(re.compile("/api/"), guarded)
    page.goto(address)
    page.get_by_label("API key").fill("of-ada")
    page.keyboard.press("Enter")
    page.locator("body[data-ready]").wait_for()
    compare_off(page)
    question = "Which company does Lars Mardahl work for on Tuesdays?"
    turn = ask(page, question)
    answer = turn.locator(".words").inner_text()
    turn.locator(".source").first.click()
    expect(page.locator("#passage")).to_be_visible()
    page.keyboard.press("Escape")
    page.reload()
    expect(page.locator(".turn .question")).to_have_text(question)  # she goes on in this tab
    assert question not in str(page.evaluate("() => JSON.stringify(localStorage)"))
    other = context.new_page()
    other.goto(address)
    expect(other.locator("#key")).to_be_visible()
    assert question not in kept_texts(other)
    accepted[:] = ["Bearer of-ben"]
    page.get_by_role("button", name="Documents").click()
    expect(page.locator("#key")).to_be_visible()
    assert not page.locator("main").is_visible()
    assert not page.locator("#documents").is_visible()
    for text in (question, answer):
        assert text not in kept_texts(page)
        assert text not in page.locator("#turns").inner_html()
    assert question not in page.content()
    page.get_by_label("API key").fill("of-ben")
    with page.expect_navigation():  # the page begins anew with the key
        page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Ask the articles")).to_be_visible()
    assert question not in kept_texts(page)
    problems.clear()


def test_two_tabs_keep_the_questions_of_both(context: BrowserContext, address: str) -> None:
    first, second = open_page(context, address), open_page(context, address)
    compare_off(first)
    one, other, third = (easy.question for easy in easy_questions()[:3])
    ask(first, one)
    first.close()
    ask(second, other)
    again = open_page(context, address)
    again.get_by_role("button", name="History").click()
    expect(again.locator(".past .name")).to_have_count(2)
    delete_conversation(again, one)
    expect(again.locator(".past .name")).to_have_count(1)
    again.keyboard.press("Escape")
    ask(second, third)
    second.close()
    again.reload()
    again.get_by_role("button", name="History").click()
    expect(again.locator(".past .name")).to_have_text([other])  # what one tab deletes no other brings back


def test_deleted_text_is_not_kept_by_the_browser(page: Page) -> None:
    compare_off(page)
    secret = "The heron Ottilie lives in the green tower of Wexby."
    upload_to_new_collection(page, "Birds", [File("heron.md", secret), File("owl.md", "The owl lives in the barn.")])
    ask(page, "Where does the heron live?")
    page.reload()
    page.locator("body[data-ready]").wait_for()
    assert "green tower" in kept_texts(page)
    page.get_by_role("button", name="Documents").click()
    page.get_by_role("button", name="Delete heron.md").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator("#files-list li")).to_have_count(1)
    assert secret not in kept_texts(page)
    assert "heron Ottilie" not in kept_texts(page)


@pytest.mark.parametrize("width", [1280, 390])
def test_name_of_a_file_that_failed_can_be_read(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 860})
    failed = {"id": "f1", "name": "contract of 1893.pdf", "chunks": 0, "bytes": 5, "state": "failed"}
    failed["error"] = "the file cannot be read as PDF: " + "it is damaged in a way that takes long to tell; " * 4
    page.route(re.compile("/documents$"), lambda route: route.fulfill(json=[failed]))
    page.get_by_role("button", name="Documents").click()
    box = page.locator("#files-list li.failed .name").bounding_box()
    assert box is not None
    assert box["width"] > 140


@pytest.mark.parametrize("width", [1280, 390])
def test_name_of_a_file_stands_whole_above_the_question_whether_to_delete_it(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 860})
    name = "minutes_of_the_town_council_and_of_all_its_committees_from_the_year_of_1987_until_the_end_of_1993.md"
    upload_to_new_collection(page, "Birds", [File(name, "The owl lives in the barn."), File("owl.md", "An owl.")])
    page.locator("#open-documents").click()
    for one in (name, "owl.md"):
        page.get_by_role("button", name=f"Delete {one}").click()
        shown = page.locator("#files-list .name", has_text=one)
        asked = page.get_by_role("group", name="Delete with its KV?")
        assert shown.evaluate("(node) => node.scrollWidth <= node.clientWidth")
        above, below = shown.bounding_box(), asked.bounding_box()
        assert above is not None
        assert below is not None
        assert above["y"] + above["height"] <= below["y"]
        page.keyboard.press("Escape")


def test_question_whether_to_delete_stays_open_while_other_files_come(page: Page) -> None:
    upload_to_new_collection(page, "Birds", [File("owl.md", "An owl."), File("heron.md", "A heron.")])
    page.locator("#open-documents").click()
    page.get_by_role("button", name="Delete collection Birds").click()
    page.get_by_role("button", name="Delete owl.md").click()
    drop(page, [File("kite.md", "A kite.")])
    expect(page.locator("#files-list li.ready .name")).to_have_text(["heron.md", "kite.md", "owl.md"])
    expect(page.get_by_text("2 documents, 2 passages")).to_have_count(0)
    page.get_by_role("group", name="Delete with its KV?").get_by_role("button", name="Delete").click()
    expect(page.locator("#files-list li.ready .name")).to_have_text(["heron.md", "kite.md"])


def test_verdict_does_not_quote_the_answer_above_it(page: Page) -> None:
    rows = [
        {"method": one, "answer": "Yes.", "ttft_s": 0.5, "same_as_full": one == "full"} for one in ("full", "blend")
    ]
    page.route(ASK, lambda route: stream(route, ("token", {"text": " Yes."}), ("done", {})))
    body = [*(("row", row) for row in rows), ("done", {})]
    page.route(re.compile("/compare$"), lambda route: stream(route, *body))
    page.locator("#question").fill("Anything?")
    page.locator("#question").press("Enter")
    expect(page.locator(".verdict")).to_contain_text("The answer above is that of full recompute.")
    expect(page.locator(".verdict q")).to_have_count(0)


def test_address_of_a_link_cannot_be_turned_around(page: Page) -> None:
    text = "See [moc.knab\u202e//:sptth](https://evil.example/) and [https://evil.example/\u202emoc.knab](https://evil.example/)."
    page.route(ASK, lambda route: stream(route, ("token", {"text": text}), ("done", {})))
    type_and_send(page, "Where?")
    expect(page.locator(".words bdi[dir=ltr]")).to_have_text([" (evil.example)"] * 2)
    for one in page.locator(".words bdi a").all():
        assert "(evil.example)" not in one.inner_text()


def test_saved_conversation_loads_nothing(page: Page) -> None:
    text = "A ![picture](https://evil.example/p.png) and <img src='https://evil.example/q.png'>."
    page.route(ASK, lambda route: stream(route, ("token", {"text": text}), ("done", {})))
    type_and_send(page, "What is in <b>it</b>?")
    expect(page.locator(".turn")).to_have_attribute("data-status", "done")
    page.get_by_role("button", name="History").click()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save conversation").click()
    written = saved.value.path().read_text(encoding="utf-8")
    assert "\\![picture](https://evil.example/p.png) and &lt;img" in written
    assert not re.search(r"(?<!\\)!\[|<[a-z/]", written)


def test_deleting_says_that_it_waits(page: Page) -> None:
    upload_to_new_collection(page, "Birds", [File("owl.md", "The owl lives in the barn.")])
    held: list[Route] = []
    page.route(re.compile("/documents/[0-9a-f]+$"), lambda route: held.append(route))
    page.get_by_role("button", name="Documents").click()
    page.get_by_role("button", name="Delete owl.md").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.get_by_role("status").filter(has_text="Deleting, once no answer is under way")).to_be_visible()
    held[0].continue_()
    expect(page.locator("#files-list li")).to_have_count(0)


@pytest.mark.parametrize("width", [1280, 390])
def test_page_says_why_nothing_can_be_asked(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 860})
    page.get_by_role("button", name="Documents").click()
    page.get_by_label("New collection").fill("Empty")
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.get_by_role("radio", name="Empty")).to_be_checked()
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_be_disabled()
    expect(page.locator("#hint")).to_be_visible()
    expect(page.locator("#hint")).to_have_text("“Empty” holds no documents yet: add some to ask about.")


def test_failed_comparison_leaves_the_answer(page: Page) -> None:
    row = {"method": "full", "answer": "Some.", "ttft_s": 0.5, "same_as_full": True}
    body = [("row", row), ("error", {"code": "failed", "message": "No room."}), ("done", {})]
    page.route(re.compile("/compare$"), lambda route: stream(route, *body))
    turn = ask(page, easy_questions()[0].question)
    expect(page.locator("#compare [role=alert]")).to_have_text("No room.")
    expect(page.locator("#compare .methods > li")).to_have_count(1)
    expect(turn).to_have_attribute("data-status", "done")


def row_of(method: str, seconds: float, rounds: int) -> tuple[str, object]:
    given = {"method": method, "answer": "Yes.", "ttft_s": seconds, "same_as_full": True, "rounds": rounds}
    return "row", given


def test_comparison_says_how_long_it_takes_and_can_be_cancelled(page: Page) -> None:
    compare_off(page)
    turn = ask(page, easy_questions()[0].question)
    panel = page.locator("#compare")
    expect(panel.locator(".hint")).to_have_text(re.compile(r"^Takes at least \d+ s\.$"))
    methods = ("full", "prefix", "reuse", "blend")
    told = [row_of(one, 5.0, 0) for one in methods]
    probe(page, "holdStream", {"path": "/compare", "events": [events(one) for one in (*told, ("done", {}))]})
    panel.get_by_role("button", name="Compare this answer").click()
    expect(panel.locator(".left")).to_have_text(re.compile(r"^(at least \d+ s left|longer than estimated)$"))
    probe(page, "letGo", 4)
    expect(panel.locator(".left")).to_have_text("about 60 s left")  # three rounds of four methods of five seconds
    panel.get_by_role("button", name="Cancel").click()
    expect(panel.get_by_role("status")).to_have_text("Cancelled.")
    expect(panel.locator(".methods > li")).to_have_count(4)
    expect(panel.get_by_role("alert")).to_have_count(0)
    expect(turn).to_have_attribute("data-status", "done")


def test_cancelling_a_comparison_closes_its_request(page: Page) -> None:
    ask(page, easy_questions()[0].question)
    cancel = page.locator("#compare").get_by_role("button", name="Cancel")
    expect(cancel).to_be_visible()
    compare_off(page)  # the switch cancels, too
    expect(page.locator("#compare .busy")).to_have_count(0)
    gone = 'path="/api/collections/{id}/compare",status="499"'
    page.wait_for_function("async (gone) => (await (await fetch('metrics')).text()).includes(gone)", arg=gone)


def test_the_estimate_is_that_of_the_latest_comparison(page: Page) -> None:
    ask(page, easy_questions()[0].question)
    expect(page.locator("#compare .hint")).to_contain_text("median of 3 rounds")
    compare_off(page)
    ask(page, easy_questions()[1].question)
    expect(page.locator("#compare .hint")).to_have_text(re.compile(r"^Takes about \d+ s, as the latest one did\.$"))


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


def answer_with(page: Page, text: str, pieces: int = 12) -> None:
    """Answer the next question with this text, piece by piece."""
    size = len(text) // pieces + 1
    told = [("token", {"text": text[at : at + size]}) for at in range(0, len(text), size)]
    page.route(ASK, lambda route: stream(route, ("sources", []), *told, ("done", {})), times=1)


def test_markdown_is_shown_as_elements_and_never_as_markup(page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    compare_off(page)
    answer_with(page, MARKDOWN)
    words = ask(page, "How high?").locator(".words")
    expect(words.locator(".head")).to_have_text("Heights")
    expect(words.locator("strong")).to_have_text("8,849")
    expect(words.locator("p > code")).to_have_text("snow_line")
    expect(words.locator("ol > li > ul > li")).to_have_text("inner")
    assert words.locator("td").all_text_contents() == ["Everest", "8,849"]
    assert words.locator("td").last.evaluate("(cell) => getComputedStyle(cell).textAlign") in ("end", "right")
    expect(words.locator("pre code")).to_have_text('print("<b>not bold</b>")')
    expect(words.locator("pre code .is-string")).to_have_text('"<b>not bold</b>"')
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
    compare_off(page)
    answer_with(page, "\n\n".join(ATTACKS), pieces=60)
    words = ask(page, "Is it safe?").locator(".words")
    expect(words.locator("code .is-tag").first).to_be_visible()  # code has its colours
    assert words.locator(f":not({ALLOWED})").count() == 0
    attributes = words.evaluate("(words) => [...words.querySelectorAll('*')].flatMap((one) => one.getAttributeNames())")
    assert not [name for name in attributes if name.startswith("on") or name in ("src", "style", "srcset", "action")]
    for link in words.locator("a").all():
        link.dispatch_event("mouseover")
        assert re.match(r"https?://(good\.example@)?other\.example/", link.get_attribute("href") or "")
        expect(link.locator("xpath=../..")).to_contain_text("other.example")
    assert page.evaluate("() => window.taken") is None
    assert not [url for url in asked if "other.example" in url or url.endswith("/x")]


def test_code_is_copied_by_itself(page: Page) -> None:
    compare_off(page)
    answer_with(page, MARKDOWN)
    turn = ask(page, "How high?")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    turn.get_by_role("button", name="Copy the code").click()
    expect(turn.locator(".copy-code")).to_have_attribute("data-label", "Copied")
    assert page.evaluate("() => navigator.clipboard.readText()") == 'print("<b>not bold</b>")'


def test_long_answer_is_shown_as_fluently_as_it_is_written(page: Page) -> None:
    compare_off(page)
    part = "Mount *Everest* is **8,849** metres high.\n\n- one\n- two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    text = (part * 50)[:4_000]
    told = [("token", {"text": text[at : at + 4]}) for at in range(0, len(text), 4)]
    probe(page, "holdStream", {"path": "/ask", "events": [events(one) for one in (*told, ("done", {}))]})
    page.locator("#question").fill("How high?")
    page.locator("#question").press("Enter")
    expect(page.locator(".turn .status")).to_be_visible()
    began = time.monotonic()
    probe(page, "letGo", len(told) + 1)
    expect(page.locator(".turn")).to_have_attribute("data-status", "done")
    assert time.monotonic() - began < 10, "a thousand tokens, drawn one by one"


def test_text_made_to_be_slow_is_shown_in_good_time(page: Page) -> None:
    compare_off(page)
    slow = ["**a " * 4_000, "[a](" * 4_000, "> " * 4_000 + "x", "*a _b `" * 2_000, "|-" * 3_000 + "\n" + "|-" * 3_000]
    began = time.monotonic()
    for text in slow:
        answer_with(page, text, pieces=3)
        expect(ask(page, "Slow?").locator(".words")).not_to_be_empty()
    assert time.monotonic() - began < 30


def test_blocks_that_are_written_stay_the_elements_they_are(page: Page) -> None:
    compare_off(page)
    told = [("token", {"text": text}) for text in ("First *one*.\n\n", "Second", " two.\n\n- a", "\n- b")]
    probe(page, "holdStream", {"path": "/ask", "events": [events(one) for one in (*told, ("done", {}))]})
    page.locator("#question").fill("Which?")
    page.locator("#question").press("Enter")
    probe(page, "letGo", 1)
    first = page.locator(".words > p").first
    expect(first).to_have_text("First one.")
    first.evaluate("(one) => (one.dataset.seen = 'before')")
    probe(page, "letGo", 4)
    expect(page.locator(".words li")).to_have_text(["a", "b"])
    expect(first).to_have_attribute("data-seen", "before")


def test_answer_is_copied_as_it_was_written(page: Page) -> None:
    compare_off(page)
    answer_with(page, MARKDOWN)
    turn = ask(page, "How high?")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    turn.get_by_role("button", name="Copy the answer").click()
    expect(turn.locator(".copy")).to_have_text("Copied")
    assert page.evaluate("() => navigator.clipboard.readText()") == MARKDOWN.strip()
    expect(turn.locator(".copy")).to_have_text("Copy")
    # Where the newer way is not to be had, as on a page that was not sent securely.
    page.evaluate("() => (navigator.clipboard.writeText = () => Promise.reject(new Error('no')))")
    turn.get_by_role("button", name="Copy the answer").click()
    expect(turn.locator(".copy")).to_have_text("Copied")


PASSAGES = [
    "Surtsey is an island off the south coast of Iceland. The eruption was first seen on 14 November 1963.",
    "Mount Everest is 8,849 metres high. Junko Tabei was the first woman on its summit.",
]
CITED = """The eruption was first seen in **1963**. It was first seen in 1862. Nothing else is known about bananas.

- Junko Tabei stood on the summit first.
"""


def test_sentence_leads_to_the_passage_that_has_its_words(page: Page) -> None:
    compare_off(page)
    sources = [
        {"document_id": "d", "document": f"{at}.md", "chunk": at, "text": text, "score": 1.0}
        for at, text in enumerate(PASSAGES)
    ]
    told = [("sources", sources), ("token", {"text": CITED}), ("done", {})]
    page.route(ASK, lambda route: stream(route, *told))
    page.route(
        re.compile("/chunks/"),
        lambda route: route.fulfill(
            json={
                "text": PASSAGES[1],
                "document": "1.md",
                "title": "",
                "before": f"Before. {PASSAGES[1][:30]}",
                "after": None,
            }
        ),
    )
    words = ask(page, "When was it seen?").locator(".words")
    marks = words.locator(".cite")
    assert [mark.get_attribute("data-number") for mark in marks.all()] == ["1", "2"]
    expect(marks.first).to_have_accessible_name("From passage 1: 0.md, open it")
    # Behind its sentence, and no part of the text.
    assert marks.first.evaluate("(one) => one.previousSibling.textContent") == "."
    assert (words.text_content() or "").startswith("The eruption was first seen in 1963. It was first seen in 1862. No")
    assert probe(page, "widthsThatPart", ".words .cite") == [], "a mark stands in the line of its word"
    marks.last.click()
    expect(page.locator("#passage .passage-text")).to_have_text(PASSAGES[1])
    expect(page.locator("#passage .neighbour")).to_have_text("Before. ")  # what both hold is shown once
    expect(page.locator("#passage mark").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(marks.last).to_be_focused()


def test_full_reuse_that_answers_otherwise_is_named_in_the_conversation(page: Page) -> None:
    answers = {"full": "In Wexholm.", "prefix": "In Wexholm.", "reuse": "In Norddale.", "blend": "In Wexholm."}
    seconds = {"full": 0.08, "prefix": 0.06, "reuse": 0.01, "blend": 0.02}
    rows = [
        ("row", {"method": one, "answer": text, "ttft_s": seconds[one], "same_as_full": text == answers["full"]})
        for one, text in answers.items()
    ]
    page.route(re.compile("/compare$"), lambda route: stream(route, *rows, ("done", {})))
    turn = ask(page, easy_questions()[0].question)
    expect(turn.locator(".verdict")).to_have_text(
        "Blending answers as full recompute does, 4.0× sooner. Full KV reuse says: In Norddale."
    )
    expect(page.locator("[data-method=reuse] .badge")).to_have_text("differs")


def test_bars_are_drawn_when_the_methods_were_timed_and_move_with_each_round(page: Page) -> None:
    methods = ("full", "prefix", "reuse", "blend")
    told = [row_of(one, 9.0, 0) for one in methods]
    told += [row_of(one, seconds, 1) for one, seconds in zip(methods, (0.8, 0.7, 0.1, 0.9), strict=True)]
    told += [row_of(one, seconds, 2) for one, seconds in zip(methods, (0.8, 0.6, 0.1, 0.2), strict=True)]
    probe(page, "holdStream", {"path": "/compare", "events": [events(one) for one in (*told, ("done", {}))]})
    turn = ask(page, easy_questions()[0].question)
    panel, rows, took = page.locator("#compare"), page.locator("#compare .methods > li"), page.locator("#compare .took")
    probe(page, "letGo", 4)
    expect(panel.locator(".busy")).to_contain_text("All have answered. Timing them, round 1")
    expect(took.first).to_have_text("First token: timed when all have answered")
    expect(panel.locator(".thin")).to_have_count(0)
    expect(turn.locator(".verdict")).to_have_text("Blending answers as full recompute does.")
    probe(page, "letGo", 4)
    expect(panel.locator(".busy")).to_contain_text("round 2")
    expect(took.last).to_have_text("First token 900 ms · 1.1× later")
    probe(page, "letGo", 5)
    expect(rows).to_have_count(4)
    expect(took.last).to_have_text("First token 200 ms · 4.0× sooner")
    expect(panel.locator(".hint")).to_contain_text("median of 2 rounds")
    expect(turn.locator(".verdict")).to_have_text("Blending answers as full recompute does, 4.0× sooner.")


def test_upload_shows_every_stage_and_its_failure(page: Page) -> None:
    jobs = re.compile("/jobs/.*/events$")
    told = [("progress", {"stage": "failed", "file": "a.md", "done": 0, "total": 1, "error": "a.md is not text."})]

    def taken(route: Route) -> None:
        if route.request.method == "POST":
            route.fulfill(status=202, json={"job": "j"})
        else:
            route.continue_()

    page.route(re.compile("/documents$"), taken)
    page.route(jobs, lambda route: stream(route, *told))
    page.get_by_role("button", name="Documents").click()
    page.locator("#files").set_input_files({"name": "a.md", "mimeType": "text/markdown", "buffer": b"x"})
    expect(page.locator("#jobs [role=alert]")).to_have_text("a.md is not text.")
    expect(page.locator("#said")).to_have_text("a.md: a.md is not text.")


def test_the_room_that_there_is_stands_beside_what_documents_and_their_kv_take(page: Page) -> None:
    page.get_by_role("button", name="Documents").click()
    expect(page.locator("#room")).to_have_text(re.compile(r"^Your documents take [\d.]+ k?B of 5\.0 GB\.$"))
    size = page.locator("#kv-size")
    expect(size).to_have_text(
        re.compile(r"^KV of its passages takes about [\d.]+ [kM]B\. The store keeps .* in all\.$")
    )
    much = {"passages": 40, "kv_bytes": 23 * 10**12}
    page.route(re.compile("/estimate$"), lambda route: route.fulfill(json=much))
    page.get_by_label("New collection").fill("Large")
    page.get_by_role("button", name="Create", exact=True).click()
    expect(size).to_have_text(re.compile(r"takes about 23 TB\. The store keeps .* in all, what was used last\.$"))
    page.route(re.compile("/estimate$"), lambda route: route.fulfill(json=much | {"passages": 0}))
    page.get_by_role("radio").first.check()
    expect(size).to_have_text("")


@pytest.mark.parametrize(
    "kept",
    [
        '{"theme": 3, "conversations": ',
        '{"theme": 3, "conversations": 4, "jobs": {}}',
        "null",
        "3",
        '{"conversations": [null, 3, {"id": "a"}, {"id": "a", "collection": "archive", "turns": [null, {"id": 1}]}]}',
        '{"ratio": "half", "rule": {}, "passages": [], "tokens": "x", "selected": {}, "points": [null], "jobs": [3]}',
    ],
)
def test_storage_that_holds_rubbish_does_no_harm(context: BrowserContext, address: str, kept: str) -> None:
    put = f"localStorage.setItem('cacheblend-rag/1', {kept!r})"
    context.add_init_script(f"if (location.protocol === 'http:') {put}")
    page = context.new_page()
    page.goto(address)
    expect(page.get_by_role("heading", name="Ask the articles")).to_be_visible()


def test_full_storage_gives_up_prompts_before_answers(page: Page) -> None:
    compare_off(page)
    question = easy_questions()[0].question
    probe(page, "fillStorage", 20_000)
    ask(page, question)
    page.reload()
    page.locator("body[data-ready]").wait_for()
    expect(page.locator(".turn .question")).to_have_text(question)
    expect(page.locator("#prompt .hint")).to_contain_text("kept for the latest answers only")
    expect(page.locator("#ttft .bar")).to_be_visible()
