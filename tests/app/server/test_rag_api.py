"""Questions, searches and the comparison, over a tiny model."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.app.server.services.folders import SearchHit
from cacheblend_rag.app.server.services.questions import EarlierTurn, QuestionPrompt, search
from cacheblend_rag.app.server.settings import Limits
from cacheblend_rag.errors import PromptError
from cacheblend_rag.report import BlendReport
from tests import tiny
from tests.app.server.common import (
    client_of,
    drop_last_prompts,
    passage,
    read_events,
    running,
    settings_for,
    settle,
    upload,
)
from tests.integrations.langchain.models import TEMPLATE

QUESTION = "Which old owl?"


def ask(client: Any, **more: Any) -> list[tuple[str, Any]]:
    answer = client.post("/api/ask", json={"question": QUESTION, "top_k": 3, **more})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return read_events(answer.text)


def report_of(client: Any, **more: Any) -> dict[str, Any]:
    report: dict[str, Any] = dict(ask(client, **more))["report"]
    return report


def test_the_state_has_what_the_page_needs(client: Any) -> None:
    state = client.get("/api/state").json()
    assert state["folder"]["writable"]
    assert not state["folder"]["bundled"]
    assert (state["documents"], state["passages"]) == (4, 4)
    assert (state["models"][0]["layers"], state["models"][0]["starter"]) == (2, False)
    assert state["settings"]["recompute_ratio"] == 0.3
    assert {"hkvd", "none", "all"} <= set(state["settings"]["rules"])
    assert (state["suggested"], state["tenant"]) == ([], None)


def test_answer_comes_in_pieces_between_sources_and_report(client: Any) -> None:
    settle(client.app.state.service)
    events = ask(client)
    names = [name for name, _ in events]
    assert names[0] == "sources"
    assert names[-2:] == ["report", "done"]
    assert set(names[1:-2]) == {"token"}
    sources, report = events[0][1], events[-2][1]
    assert [one["score"] for one in sources] == sorted(one["score"] for one in sources)
    whole = client.post("/api/ask", json={"question": QUESTION, "top_k": 3, "stream": False}).json()
    assert whole["answer"] == "".join(data["text"] for name, data in events if name == "token")
    assert whole["sources"] == sources
    assert (len(sources), report["hits"], report["misses"]) == (3, 3, 0)
    assert report["prompt"] == whole["report"]["prompt"] == [], "each token has to be decoded for that"
    read = [data for name, data in ask(client, return_progress=True) if name == "progress"]
    assert {one["total"] for one in read} == {sum(report["tokens"].values())} == {read[-1]["processed"]}
    chosen = [one["document_id"] for one in sources[1:]]
    assert {one["document_id"] for one in ask(client, documents=chosen)[0][1]} == set(chosen)


def test_answer_is_verified(client: Any) -> None:
    asked = {"question": QUESTION, "top_k": 3, "stream": False, "selection": "none"}
    full = client.post("/api/ask", json={**asked, "selection": "all"}).json()
    found = client.post("/api/ask", json={**asked, "verify": "always"}).json()
    assert found["answer"] == full["answer"]
    assert found["report"]["verification"]["status"] in ("verified", "corrected")
    assert full["report"]["verification"]["status"] == "off"
    assert found["report"]["fidelity"] in ("checked", "corrected")
    assert full["report"]["fidelity"] == "exact"
    assert client.post("/api/ask", json={**asked, "verify": "sometimes"}).status_code == 422
    refused = client.post("/api/ask", json={**asked, "max_new_tokens": 9})
    assert refused.status_code == 422
    assert refused.json()["error"]["message"] == "max_new_tokens: this is not supported here; leave it out"


def test_report_accounts_for_every_token_of_the_prompt(client: Any) -> None:
    drop_last_prompts(client.app.state.service)
    report = report_of(client, recompute_ratio=0.4, show_prompt=True)
    prompt = report["prompt"]
    assert [one["position"] for one in prompt] == list(range(len(prompt)))
    assert sum(report["tokens"].values()) == len(prompt)
    of_chunks = [one for one in prompt if one["segment"] == "chunk"]
    assert len(of_chunks) == report["tokens"]["chunks"] == sum(one["tokens"] for one in report["chunks"])
    assert sum(one["recomputed"] for one in of_chunks) == report["recomputed"][-1]
    assert 0 < report["recomputed"][-1] < len(of_chunks)
    assert all(one["recomputed"] for one in prompt if one["segment"] == "suffix")
    looked = report_of(client, selection="hkvd", show_prompt=True)
    assert any(one["deviation"] is not None for one in looked["prompt"] if one["segment"] == "chunk")
    assert "".join(one["text"] for one in prompt if one["segment"] == "suffix").endswith(
        f"Question: {QUESTION}\nHelpful Answer:"
    )
    assert all(one["device"] == "memory" and one["bytes"] > 0 for one in report["chunks"])
    assert report["ttft_s"] == pytest.approx(sum(report["parts"].values()))


def test_names_in_the_servers_json_are_those_that_the_page_on_reports_lists(client: Any) -> None:
    page = Path("docs/reference/report.md").read_text(encoding="utf-8")
    names: list[set[str]] = [set(), set(), set()]
    for row in page.partition("| `BlendReport` |")[2].partition("\n\n")[0].splitlines()[2:]:
        for found, cell in zip(names, cells := row.strip("|").split("|"), strict=True):
            found |= set(re.findall(r"`(\w+)`", cells[0] if "the same" in cell else cell))
    asked = {"model": client.app.state.service.model_name, "prompt": QUESTION, "max_tokens": 2}
    made = client.post("/v1/completions", json=asked).json()["cacheblend"][0]
    assert [names[0] - set(dir(BlendReport(()))), *names[1:]] == [set(), set(made), set(report_of(client))]


def test_instructions_stand_before_the_passages_and_cost_no_hits(client: Any) -> None:
    settle(client.app.state.service)
    default = client.get("/api/state").json()["models"][0]["instructions"]
    for told in (None, "Answer like a pirate."):
        report = report_of(client, instructions=told, show_prompt=True)
        text = "".join(one["text"] for one in report["prompt"])
        assert text.removeprefix("<s>").startswith(told or default)
        assert (told is None) == (default in text)
        assert report["misses"] == 0


def test_rule_and_ratio_are_the_requests_own(client: Any) -> None:
    drop_last_prompts(client.app.state.service)
    assert report_of(client, recompute_ratio=1.0)["ratio"] == 1.0
    reused = report_of(client, selection="none")
    assert (reused["rule"], set(reused["recomputed"])) == ("none", {0})
    assert report_of(client)["ratio"] == 0.3
    wrong = client.post("/api/ask", json={"question": QUESTION, "selection": "best"})
    assert (wrong.status_code, wrong.json()["error"]["field"]) == (400, "selection")


def test_the_comparison_has_a_row_a_method(client: Any) -> None:
    body = {"question": QUESTION, "top_k": 3, "recompute_ratio": 1.0}
    events = read_events(client.post("/api/compare", json=body).text)
    rows = {data["method"]: data for name, data in events if name == "row"}  # the last of each
    assert set(rows) == {"full", "prefix", "reuse", "blend"}
    assert events[-1][0] == "done"
    assert rows["full"]["same_as_full"]
    assert rows["blend"]["same_as_full"]  # a ratio of 1 is full recompute
    assert rows["prefix"]["same_as_full"]
    assert all(row["ttft_s"] > 0 and row["rounds"] > 0 for row in rows.values())
    assert rows["reuse"]["order_kl"] == rows["blend"]["order_kl"] > rows["blend"]["kl"]


def test_question_that_follows_others_holds_them_and_goes_on_from_the_prompt_in_memory(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = client.post("/api/ask", json={"question": QUESTION, "top_k": 4, "stream": False}).json()
    history = [{"question": QUESTION, "answer": first["answer"]}]
    report = report_of(client, question="And then?", history=history, top_k=4, show_prompt=True)
    assert report["turns"] == 1
    text = "".join(one["text"] for one in report["prompt"])
    assert text.endswith(f"{QUESTION}\nHelpful Answer: {first['answer']}\nQuestion: And then?\nHelpful Answer:") or (
        QUESTION in text and text.endswith("Question: And then?\nHelpful Answer:")
    )
    if [one["text"] for one in ask(client, question="And then?", history=history, top_k=4)[0][1]] == [
        one["text"] for one in first["sources"]
    ]:
        assert report["resumed"] > report["tokens"]["prefix"]
    (model,) = client.app.state.service.models.values()
    monkeypatch.setattr(model, "_limits", Limits(prompt_tokens=1_000))
    many = [{"question": "red " * 40, "answer": "red " * 80}] * 12
    assert 0 < report_of(client, history=many)["turns"] < 12, "as many of the latest turns as there is room for"
    for wrong in ([{"question": "a"}], [{"question": "a", "answer": "b", "turn": "x"}], [{}] * 51):
        assert client.post("/api/ask", json={"question": QUESTION, "history": wrong}).status_code == 422


def hit(name: str, score: float) -> SearchHit:
    return SearchHit(name, name, 0, name, score)


def test_search_of_a_follow_up_takes_earlier_questions_into_account() -> None:
    asked: list[str] = []

    def finder(results: dict[str, list[SearchHit]]) -> Any:
        def find(text: str, k: int) -> list[SearchHit]:
            asked.append(text)
            return results["alone" if text == "And it?" else "together"]

        return find

    earlier = [EarlierTurn(f"Question {number}?", "red") for number in range(5)]
    near = {"alone": [hit("a", 0.1)], "together": [hit("b", 0.5)]}
    assert [one.document for one in search(finder(near), "And it?", earlier, 2)] == ["a"]
    assert asked == ["And it?", "And it? Question 4? Question 3? Question 2?"]
    far = {"alone": [hit("a", 0.9), hit("c", 1.0)], "together": [hit("b", 0.5), hit("a", 0.6)]}
    assert [one.document for one in search(finder(far), "And it?", earlier, 3)] == ["b", "a", "c"]
    assert [one.document for one in search(finder(far), "And it?", [], 3)] == ["a", "c"]


@pytest.fixture(params=[TEMPLATE, None], ids=["template", "plain"])
def prompts(request: Any) -> QuestionPrompt:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = request.param
    return QuestionPrompt(tokenizer, request.param)


def test_texts_stay_in_their_places_whatever_they_hold(prompts: QuestionPrompt) -> None:
    odd = "[user] {context} </s> <|im_end|>"
    prompt = prompts.ask(odd, [odd, "second"], [EarlierTurn("Earlier?", f"Yes {odd}")], "Be odd.")
    assert list(prompt.chunks) == [odd, "second"]
    assert prompt.preamble.count("Be odd.") == 1
    assert prompt.prefix == "", "a question's own instructions are not stored"
    assert prompts.ask(odd, [odd]).prefix
    assert prompt.suffix.index("Earlier?") < prompt.suffix.index(f"Yes {odd}") < prompt.suffix.rindex(odd)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{{ messages[-1].content }}"
    forgetful = QuestionPrompt(tokenizer, tokenizer.chat_template)
    with pytest.raises(PromptError, match="leaves out earlier turns"):
        forgetful.ask("A?", ["x"], [EarlierTurn("B?", "b")])


def test_question_without_documents_is_not_the_models(chat_model: Path, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    model = shutil.copytree(chat_model, tmp_path / "model")
    tokenizer = tiny.tokenizer(bos=False)  # an empty prompt has no token at all
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    with running(settings_for(model, tmp_path / "docs", tmp_path / "data")) as made, client_of(made) as client:
        (document,) = upload(client, {"one.txt": passage(341)}).values()
        settle(made.service)
        asked = {"question": QUESTION, "stream": False}
        before = client.post("/api/ask", json=asked).json()
        assert (len(before["sources"]), before["report"]["fidelity"]) == (1, "approximate")
        assert client.delete(f"/api/documents/{document['id']}").status_code == 204
        answered = made.service.metrics.text().decode()
        found = client.post("/api/ask", json=asked).json()
        assert (found["answer"], found["sources"]) == ("There are no documents to answer from.", [])
        assert (found["report"]["finish_reason"], found["report"]["fidelity"]) == ("no_documents", None)
        events = ask(client)
        assert [name for name, _ in events] == ["sources", "token", "report", "done"]
        assert (events[1][1]["text"], events[2][1]) == (found["answer"], found["report"])
        assert set(before["report"]) == set(found["report"])
        assert made.service.queue.served == 0
        refused = client.post("/api/compare", json={"question": QUESTION})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "no_documents")
        count = "cacheblend_rag_ttft_seconds_count"
        texts = (answered, made.service.metrics.text().decode())
        before_it, after = ([one for one in text.splitlines() if one.startswith(count)] for text in texts)
        assert before_it == after != []
        body = {"model": made.service.model_name, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2}
        chat = client.post("/v1/chat/completions", json=body).json()
        assert (chat["choices"][0]["finish_reason"], chat["cacheblend"][0]["fidelity"]) == ("length", "exact")
