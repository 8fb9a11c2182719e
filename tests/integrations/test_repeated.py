"""Text that repeats, from the first prompt to the hit at the third, through every way to a model."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from llama_index.core.llms import ChatMessage

from cacheblend_rag import BlendEngine
from cacheblend_rag.engine.segments import Kind
from cacheblend_rag.langchain import CacheBlendLLM, ChatCacheBlend
from cacheblend_rag.llama_index import CacheBlendLLM as LlamaIndexLLM
from cacheblend_rag.prompt.repeated import RepeatedTexts
from cacheblend_rag.report import BlendReport
from cacheblend_rag.store import DiskStore
from tests import tiny
from tests.integrations.langchain.models import tiny_engine
from tests.tolerance import assert_layers_close, assert_logits_close

OPENING = "Answer from the sources."


def passage(seed: int, sentences: int = 6) -> str:
    return " ".join(tiny.text(12, 100 * seed + number).capitalize() + "." for number in range(sentences))


A, B, C, D, E, F, G = (passage(seed) for seed in range(7))
PROMPTS = ([A, B, C], [D, A, E, B], [B, F, A, G])


def stuffed(texts: Sequence[str], number: int) -> str:
    sources = "\n".join(f"[{at}] {text}" for at, text in enumerate(texts, 1))
    return f"{OPENING}\n\n{sources}\n\nQuestion: Which one falls, number {number}?\nAnswer:"


def finding(**options: Any) -> BlendEngine:
    """A tiny engine that finds text that repeats."""
    return tiny_engine(**options).of_tenant("", RepeatedTexts())


WAYS: dict[str, Callable[[BlendEngine, str], Any]] = {
    "engine": lambda engine, text: engine.generate(text, max_new_tokens=2),
    "LangChain, streamed": lambda engine, text: [*CacheBlendLLM(engine=engine, max_new_tokens=2).stream(text)],
    "LangChain chat": lambda engine, text: ChatCacheBlend(engine=engine, max_new_tokens=2).invoke(text),
    "LlamaIndex chat": lambda engine, text: LlamaIndexLLM(engine=engine, max_new_tokens=2).chat(
        [ChatMessage(role="system", content=OPENING), ChatMessage(role="user", content=text)]
    ),
}


class Reports:
    """An engine's reports, in the order of its answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all: list[BlendReport] = []
        from cacheblend_rag.engine import answering

        made = answering.report_of

        def noted(*args: Any) -> BlendReport:
            self.all.append(made(*args))
            return self.all[-1]

        monkeypatch.setattr(answering, "report_of", noted)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[BlendReport]:
    return Reports(monkeypatch).all


def found_keys(engine: BlendEngine) -> set[str]:
    return {key for key, _ in engine.store.infos(Kind.FOUND)}


def test_passages_that_move_hit_at_their_third_sight_where_a_finder_is_given(reports: list[BlendReport]) -> None:
    for name, way in WAYS.items():
        engine = finding()
        for number, texts in enumerate(PROMPTS):
            way(engine, stuffed(texts, number))
        assert [one.found for one in reports] == [(), (False, False), (True, True)], name
        third = reports[-1]
        assert reports[0].plain
        assert third.hits == 2
        assert third.reused_tokens > 0.9 * len(engine.tokenizer(A + B)["input_ids"]), name
        assert third.prefix_tokens <= 1, "nothing that only one prompt held is a prefix, which would be stored"
        assert len(found_keys(engine)) == 2
        assert {key for key, _ in engine.store.infos("")} == found_keys(engine), name
        reports.clear()
    plain = tiny_engine()
    for number, texts in enumerate(PROMPTS):
        plain.generate(stuffed(texts, number), max_new_tokens=2)
    assert not any(one.found for one in reports)
    assert not [*plain.store.infos("")]


def test_ids_are_those_of_the_plain_model_and_ratio_one_is_its_full_prefill() -> None:
    engine = finding(recompute_ratio=1.0)
    for number, texts in enumerate(PROMPTS):
        text = stuffed(texts, number)
        fused = engine.fuse(text)
        ids = engine.tokenizer(text)["input_ids"]
        assert fused.input_ids == ids
        plain = tiny.full_prefill(engine.model, ids)
        assert_logits_close(fused.logits, plain.logits[0, -1], engine.model, len(ids))
        assert_layers_close(fused.cache.layers, tiny.cache_of(plain).layers, engine.model)
    assert fused.report.hits == 2


def test_erasing_a_text_erases_what_holds_it_and_what_is_part_of_it(reports: list[BlendReport]) -> None:
    for text in (A, A[len(A) // 4 : -len(A) // 4], f"{D}\n\n{A}\n\n{E}"):
        engine = finding()
        for number, texts in enumerate(PROMPTS):
            engine.generate(stuffed(texts, number), max_new_tokens=2)
        ids = tuple(engine.tokenizer(" " + A, add_special_tokens=False)["input_ids"])[40:64]

        def holds_some(engine: BlendEngine, ids: tuple[int, ...] = ids) -> bool:
            held = [info.token_ids + info.behind for _, info in engine.store.infos("")]
            return any(one[at : at + 24] == ids for one in held for at in range(len(one)))

        assert holds_some(engine)
        CacheBlendLLM(engine=engine).forget([text])
        assert not holds_some(engine)
        engine.generate(stuffed([G, A, C], 4), max_new_tokens=2)
        assert not holds_some(engine), "it must be seen twice again"


QUOTED = "\n".join(f'Er sagte "{tiny.text(5, 900 + at)}" – nämlich\t{tiny.text(4, 950 + at)}.' for at in range(9))
FORMS: dict[str, Callable[[str], str]] = {
    "JSON": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "JSON in JSON": lambda text: json.dumps(json.dumps(text)[1:-1])[1:-1],
    "wrapped": lambda text: "\n> ".join(textwrap.wrap(text, 30)).replace("> ", "  "),
    "as it is": str,
}


@pytest.mark.parametrize("form", FORMS)
def test_erasing_a_text_erases_the_forms_in_which_messages_held_it(form: str, reports: list[BlendReport]) -> None:
    engine = finding(prompt_cache="auto")
    written = FORMS[form](QUOTED)
    for number, texts in enumerate(([A, written, C], [D, E, written])):
        engine.generate(stuffed(texts, number), max_new_tokens=2)

    def holding() -> list[str]:
        texts = [engine.tokenizer.decode(info.token_ids + info.behind) for _, info in engine.store.infos("")]
        texts += [engine.tokenizer.decode(one.token_ids) for one in engine.prompts._kept]
        return [one for one in texts if tiny.text(5, 904) in one.replace("\n", "").replace("  ", " ")]

    assert holding()
    engine.forget([QUOTED])
    assert not holding()
    engine.generate(stuffed([G, written, F], 2), max_new_tokens=2)
    assert reports[-1].found == (), "it must be seen twice again"
    assert not [key for key, _ in engine.store.infos("")]


def bytes_of(ids: Sequence[int], width: int) -> bytes:
    return b"".join(number.to_bytes(width, "little") for number in ids)


def test_questions_asked_in_many_chats_are_nowhere_on_the_disk(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    engine = finding(store=store)
    model = ChatCacheBlend(engine=engine, max_new_tokens=1)
    question = f"My secret is this.\n{passage(50, 9)}\n{passage(51, 9)}\nWhat do you say to that?"
    texts = [A, B, C, D, E, F, G]
    for number in range(12):
        some = [texts[(number + step) % 7] for step in (0, 2, 3)]
        sources = "\n".join(f"[{at}] {text}" for at, text in enumerate(some, 1))
        messages = [SystemMessage(f"{number}. {OPENING}"), HumanMessage(f"{sources}\n\n{question}")]
        if number % 3 == 0:  # the next turn: the question stands alone in the history
            messages[1:] = [HumanMessage(question), AIMessage(f"So {number}."), HumanMessage(f"And {number}?")]
        model.invoke(messages)
    engine.flush()
    assert len(found_keys(engine)) >= 7
    ids = engine.tokenizer(question, add_special_tokens=False)["input_ids"]
    wanted = [ids[at : at + 8] for at in range(20, len(ids) - 20, 40)]
    for _, info in store.infos(""):
        held = str(info.token_ids + info.behind)[1:-1]
        assert not any(str(one)[1:-1] in held for one in wanted)
    on_disk = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    secret = [word.encode() for word in (question[:60], passage(50, 9)[:60], passage(51, 9)[40:90])]
    assert not any(one in on_disk for one in secret)
    for width in (2, 4, 8):
        assert not any(bytes_of(one, width) in on_disk for one in wanted)
    store.close()
