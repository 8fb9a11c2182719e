"""Text that repeats, from the first prompt to the hit at the third, through every way to a model."""

from __future__ import annotations

import asyncio
import html
import json
import textwrap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from llama_index.core.llms import ChatMessage
from transformers import LogitsProcessor

from cacheblend_rag import BlendEngine, Prompt
from cacheblend_rag.engine.segments import FOUND
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


def of_langchain(model: Any, text: str) -> BlendReport:
    model.invoke(text)
    return model.last_report


def finding(**options: Any) -> BlendEngine:
    """A tiny engine that finds text that repeats."""
    return tiny_engine(**options).with_finder(RepeatedTexts())


async def awaited(model: Any, text: str) -> None:
    await model.ainvoke(text)


WAYS: dict[str, Callable[[BlendEngine, str], Any]] = {
    "engine": lambda engine, text: engine.generate(text, max_new_tokens=2),
    "engine, streamed": lambda engine, text: [*engine.stream(text, max_new_tokens=2)],
    "LangChain": lambda engine, text: CacheBlendLLM(engine=engine, max_new_tokens=2).invoke(text),
    "LangChain, streamed": lambda engine, text: [*CacheBlendLLM(engine=engine, max_new_tokens=2).stream(text)],
    "LangChain, async": lambda engine, text: asyncio.run(awaited(CacheBlendLLM(engine=engine, max_new_tokens=2), text)),
    "LangChain chat": lambda engine, text: ChatCacheBlend(engine=engine, max_new_tokens=2).invoke(text),
    "LlamaIndex": lambda engine, text: LlamaIndexLLM(engine=engine, max_new_tokens=2).complete(text),
    "LlamaIndex chat": lambda engine, text: LlamaIndexLLM(engine=engine, max_new_tokens=2).chat(
        [ChatMessage(role="system", content=OPENING), ChatMessage(role="user", content=text)]
    ),
    "LlamaIndex chat, streamed": lambda engine, text: [
        *LlamaIndexLLM(engine=engine, max_new_tokens=2).stream_chat([ChatMessage(role="user", content=text)])
    ],
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
    return {key for key, _ in engine.store.infos(FOUND)}


@pytest.mark.parametrize("way", WAYS)
def test_passages_that_move_hit_at_their_third_sight(way: str, reports: list[BlendReport]) -> None:
    engine = finding()
    for number, texts in enumerate(PROMPTS):
        WAYS[way](engine, stuffed(texts, number))
    first, second, third = reports
    assert first.found == ()
    assert first.plain
    assert [one.hit for one in second.found] == [False, False]
    assert [one.hit for one in third.found] == [True, True]
    assert third.hits == 2
    tokens = len(engine.tokenizer(A + B)["input_ids"])
    assert sum(one.tokens for one in third.found) > 0.9 * tokens
    assert third.reused_tokens >= sum(one.tokens for one in third.found)
    assert third.prefix_tokens <= 1, "nothing that only one prompt held is a prefix, which would be stored"
    assert len(found_keys(engine)) == 2
    assert {key for key, _ in engine.store.infos("")} == found_keys(engine)


def test_nothing_is_found_without_a_finder(reports: list[BlendReport]) -> None:
    engine = tiny_engine()
    for number, way in enumerate(WAYS.values()):
        way(engine, stuffed(PROMPTS[number % 3], number))
    assert not any(one.found for one in reports)
    assert not [*engine.store.infos("")]


def test_found_text_of_prompts_with_too_few_chunk_tokens_is_stored_for_those_with_more(
    reports: list[BlendReport],
) -> None:
    engine = finding(min_tokens=150)
    for number, texts in enumerate(([A, B, C], [D, A], [E, B, F], [B, A])):
        engine.generate(stuffed(texts, number), max_new_tokens=2)
    assert [one.plain for one in reports] == [True, True, True, False]
    assert [[use.hit for use in one.found] for one in reports[1:3]] == [[False], [False]]
    assert [one.hit for one in reports[3].found] == [True, True]
    assert all(key in found_keys(engine) for key, _ in engine.store.infos("")), "nothing else is stored"
    for options in ({"write_back": "off"}, {"selection": "all"}):
        engine = finding(min_tokens=150, **options)
        for number, texts in enumerate(([A, B, C], [D, A])):
            engine.generate(stuffed(texts, number), max_new_tokens=2)
        assert not found_keys(engine)


def test_prompt_of_which_little_was_found_is_prefilled(reports: list[BlendReport]) -> None:
    engine, others = finding(min_tokens=1), map(passage, range(7, 11))
    for number, texts in enumerate(([A, B, C], [D, A, E], [F, *others, A])):
        engine.generate(stuffed(texts, number), max_new_tokens=2)
    assert [one.plain for one in reports] == [True] * 3
    assert [one.plain_reason != "" for one in reports] == [False, True, True]
    assert [[use.hit for use in one.found] for one in reports] == [[], [False], [False]], "A was stored"


def states(report: BlendReport) -> list[tuple[str, str]]:
    return [(one.state, one.reason) for one in report.found]


NOT_YET = "its KV was not stored yet"
LITTLE = "too little of it is stored to be worth reading"


def test_each_found_text_says_whether_it_is_stored_and_why_it_was_not_read(reports: list[BlendReport]) -> None:
    engine, others = finding(min_tokens=1), [*map(passage, range(7, 11))]
    for number, texts in enumerate(([A, B, C], [D, A, E], [F, *others, A], [G, B, *others, A], [A, B])):
        engine.generate(stuffed(texts, number), max_new_tokens=2)
    assert states(reports[1]) == [("storing", NOT_YET)]
    assert states(reports[2]) == [("stored", LITTLE)], "it was said to be stored, and the prompt to be prefilled"
    assert reports[2].plain_reason == LITTLE
    assert states(reports[4]) == [("read", "")] * 2
    assert [one.hit for one in reports[4].found] == [True] * 2
    for report in reports:
        wanted = {one.start for one in report.found if one.state == "storing"}
        assert report.tokens_to_store == sum(one.tokens for one in report.found if one.start in wanted)
    assert reports[1].tokens_to_store > 64
    assert reports[2].tokens_to_store == reports[4].tokens_to_store == 0, "nothing of it is missing"


def test_found_texts_say_why_nothing_was_read_or_stored(reports: list[BlendReport], tmp_path: Path) -> None:
    few = "fewer than min_tokens=150 tokens in chunks were left to be read"
    cases: dict[str, tuple[dict[str, Any], str, str]] = {
        "few": ({"min_tokens": 150}, "storing", NOT_YET),
        "off": ({"write_back": "off"}, "not stored", "write_back='off' stores nothing"),
        "all": ({"selection": "all"}, "not stored", "selection='all' reads and stores nothing"),
        "held": ({"verify": "held"}, "not stored", "verify='held' lets full prefill answer"),
    }
    for options, state, reason in cases.values():
        engine = finding(**options)
        for number, texts in enumerate(([A, B, C], [D, A])):
            engine.generate(stuffed(texts, number), max_new_tokens=2)
        assert states(reports[-1]) == [(state, reason)]
        assert bool(found_keys(engine)) == (state == "storing") == (reports[-1].tokens_to_store > 0)
    engine = finding(min_tokens=150)
    for number, texts in enumerate(([A, B, C], [D, A], [E, A])):
        engine.generate(stuffed(texts, number), max_new_tokens=2)
    assert states(reports[-1]) == [("stored", few)]
    assert reports[-1].tokens_to_store == 0
    with finding(store=DiskStore(tmp_path)) as engine:
        for number, texts in enumerate(([A, B, C], [D, A])):
            engine.generate(stuffed(texts, number), max_new_tokens=2)
        engine.flush()
        engine.with_config(selection="all").generate(stuffed([E, A], 3), max_new_tokens=2)
        assert states(reports[-1]) == [("stored", "selection='all' reads and stores nothing")]


def test_adapters_tell_the_states_of_found_texts_and_what_goes_into_the_store() -> None:
    engine = finding()
    chat, llm = ChatCacheBlend(engine=engine, max_new_tokens=2), LlamaIndexLLM(engine=engine, max_new_tokens=2)
    chat.invoke(stuffed(PROMPTS[0], 0))
    second, third = chat.invoke(stuffed(PROMPTS[1], 1)), llm.complete(stuffed(PROMPTS[2], 2))
    found = second.response_metadata["found"]
    assert [one["state"] for one in found] == ["storing"] * 2
    assert all(one["reason"] == NOT_YET and not one["hit"] for one in found)
    told = sum(one["tokens"] for one in found)
    assert second.usage_metadata is not None
    assert second.usage_metadata["input_token_details"]["cache_creation"] == told
    assert second.response_metadata["tokens_to_store"] == told
    assert [(one["state"], one["hit"]) for one in third.raw["found"]] == [("read", True)] * 2
    assert third.raw["tokens_to_store"] == 0


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


def test_answers_after_a_lost_record_are_those_of_a_run_where_it_was_never_stored() -> None:
    engine, other = (finding() for _ in range(2))
    for number, texts in enumerate(PROMPTS[:2]):
        for one in (engine, other):
            one.generate(stuffed(texts, number), max_new_tokens=2)
    for one in (engine, other):
        for key in found_keys(one):
            one.store.delete(key)
    other.chunks.pipeline.segments.finder.forget("", [A, B])
    last = stuffed(PROMPTS[2], 2)
    missed, plain = engine.fuse(last), other.fuse(last)
    assert (missed.report.hits, missed.report.misses) == (0, 2)
    assert plain.report.plain
    assert_logits_close(missed.logits, plain.logits, engine.model, len(missed.input_ids))


def test_tenants_share_nothing(reports: list[BlendReport]) -> None:
    engine = finding()
    mine, theirs = engine.with_config(salt="mine"), engine.with_config(salt="theirs")
    for number, texts in enumerate(PROMPTS):
        mine.generate(stuffed(texts, number), max_new_tokens=2)
    kept = found_keys(engine)
    theirs.generate(stuffed(PROMPTS[2], 7), max_new_tokens=2)
    assert reports[-1].found == ()
    theirs.generate(stuffed(PROMPTS[1], 8), max_new_tokens=2)
    assert [one.hit for one in reports[-1].found] == [False, False], "it was computed for them alone"
    assert len(found_keys(engine)) == 2 * len(kept)
    theirs.forget([A])
    assert kept <= found_keys(engine)
    assert len(found_keys(engine)) < 2 * len(kept)
    mine.generate(stuffed([C, D, A, B], 9), max_new_tokens=2)
    assert any(one.hit for one in reports[-1].found)


@pytest.mark.parametrize("text", [A, A[len(A) // 4 : -len(A) // 4], f"{D}\n\n{A}\n\n{E}"], ids=["all", "part", "more"])
def test_erasing_a_text_erases_what_holds_it_and_what_is_part_of_it(text: str, reports: list[BlendReport]) -> None:
    engine = finding()
    for number, texts in enumerate(PROMPTS):
        engine.generate(stuffed(texts, number), max_new_tokens=2)
    ids = tuple(engine.tokenizer(" " + A, add_special_tokens=False)["input_ids"])

    def holds_some(key: str, info: Any) -> bool:
        held = info.token_ids + info.behind
        return any(held[at : at + 24] == ids[40:64] for at in range(len(held)))

    assert any(holds_some(*one) for one in engine.store.infos(""))
    CacheBlendLLM(engine=engine).forget([text])
    assert not any(holds_some(*one) for one in engine.store.infos(""))
    engine.generate(stuffed([G, A, C], 4), max_new_tokens=2)
    assert not any(holds_some(*one) for one in engine.store.infos("")), "it must be seen twice again"


QUOTED = "\n".join(f'Er sagte "{tiny.text(5, 900 + at)}" – nämlich\t{tiny.text(4, 950 + at)}.' for at in range(9))
FORMS: dict[str, Callable[[str], str]] = {
    "JSON": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "JSON in ASCII": lambda text: json.dumps(text)[1:-1],
    "JSON in JSON": lambda text: json.dumps(json.dumps(text)[1:-1])[1:-1],
    "one line": lambda text: " ".join(text.split()),
    "wrapped": lambda text: "\n> ".join(textwrap.wrap(text, 30)).replace("> ", "  "),
    "HTML": html.escape,
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


def test_waiting_records_of_an_erased_text_are_not_stored() -> None:
    engine = finding(write_back="background")
    engine.generate(stuffed(PROMPTS[0], 0), max_new_tokens=2)
    release = threading.Event()
    holding = threading.Thread(target=lambda: _hold(engine, release))
    holding.start()
    worker = threading.Thread(target=lambda: engine.generate(stuffed(PROMPTS[1], 1), max_new_tokens=2))
    worker.start()
    release.set()
    worker.join()
    holding.join()
    engine.forget([A])
    engine.flush()
    ids = tuple(engine.tokenizer(" " + A, add_special_tokens=False)["input_ids"])[40:64]
    for _, info in engine.store.infos(""):
        held = info.token_ids + info.behind
        assert all(held[at : at + 24] != ids for at in range(len(held)))


def _hold(engine: BlendEngine, release: threading.Event) -> None:
    with engine.turns.in_turn():
        release.wait(20)


def bytes_of(ids: Sequence[int], width: int) -> bytes:
    return b"".join(number.to_bytes(width, "little") for number in ids)


def test_questions_asked_in_a_hundred_chats_are_nowhere_on_the_disk(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    engine = finding(store=store)
    model = ChatCacheBlend(engine=engine, max_new_tokens=1)
    question = f"My secret is this.\n{passage(50, 9)}\n{passage(51, 9)}\nWhat do you say to that?"
    texts = [A, B, C, D, E, F, G]
    for number in range(100):
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


def quoting(number: int, question: str, texts: Sequence[str]) -> list[Any]:
    """A chat whose earlier answer is a few words that stand in a passage, with the passages in the last message."""
    quoted = A[20:52].strip()
    sources = "\n".join(f"[{at}] {text}" for at, text in enumerate(texts, 1))
    before = [SystemMessage(f"{number}. {OPENING}"), HumanMessage(f"What is {number}?"), AIMessage(quoted)]
    return [*before, HumanMessage(f"{sources}\n\n{question}")]


def test_short_earlier_answers_break_no_passage_and_leave_no_prefix(reports: list[BlendReport]) -> None:
    engine = finding()
    model = ChatCacheBlend(engine=engine, max_new_tokens=2)
    for number, texts in enumerate(PROMPTS):
        model.invoke(quoting(number, f"Which one falls, number {number}?", texts))
    assert [[one.hit for one in made.found] for made in reports] == [[], [False, False], [True, True]]
    assert reports[-1].prefix_tokens <= 1, "what only one chat holds is stored behind no quotation"
    tokens = len(engine.tokenizer(A + B)["input_ids"])
    assert sum(one.tokens for one in reports[-1].found) > 0.9 * tokens
    asked = engine.tokenizer("Which one falls, number 1?", add_special_tokens=False)["input_ids"][2:]
    assert not any(str(asked)[1:-1] in str(info.token_ids + info.behind) for _, info in engine.store.infos(""))


def test_long_earlier_answers_keep_their_prefix_and_passages_behind_it_are_found(reports: list[BlendReport]) -> None:
    engine = finding()
    model = ChatCacheBlend(engine=engine, max_new_tokens=2)
    for number, texts in enumerate(PROMPTS):
        first, *others = quoting(number, f"Which one falls, number {number}?", texts)
        model.invoke([first, others[0], AIMessage([passage(70), passage(71), passage(72)][number]), others[2]])
    assert [[one.hit for one in made.found] for made in reports] == [[], [False, False], [True, True]]
    assert all(made.prefix_tokens > 1 for made in reports), "the system prompt, as before"


def test_questions_of_a_hundred_chats_with_short_answers_are_nowhere_on_the_disk_and_tenants_share_nothing(
    tmp_path: Path,
) -> None:
    store = DiskStore(tmp_path)
    engine = finding(store=store)
    mine, theirs = (engine.with_config(salt=name) for name in ("mine", "theirs"))
    model, other = (ChatCacheBlend(engine=one, max_new_tokens=1) for one in (mine, theirs))
    question = f"My secret is this. {passage(50, 9)} {passage(51, 9)} What do you say to that?"
    texts = [A, B, C, D, E, F, G]
    for number in range(100):
        model.invoke(quoting(number, question, [texts[(number + step) % 7] for step in (0, 2, 3)]))
    engine.flush()
    kept = found_keys(engine)
    assert len(kept) >= 7
    ids = engine.tokenizer(question, add_special_tokens=False)["input_ids"]
    wanted = [ids[at : at + 8] for at in range(0, len(ids) - 8, 24)]
    for _, info in store.infos(""):
        held = str(info.token_ids + info.behind)[1:-1]
        assert not any(str(one)[1:-1] in held for one in wanted)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name.endswith("-wal") for path in files), "the write-ahead log is among them"
    on_disk = b"".join(path.read_bytes() for path in files)
    assert not any(question[at : at + 40].encode() in on_disk for at in range(0, len(question) - 40, 40))
    for width in (2, 4, 8):
        assert not any(bytes_of(one, width) in on_disk for one in wanted)
    assert other.invoke(quoting(100, question, [A, B, C])).response_metadata["found"] == []
    assert found_keys(engine) == kept
    store.close()


class Says(LogitsProcessor):
    """Makes a model say some ids."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = iter(ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, next(self._ids)] = 0
        return forced


ANSWERS: dict[str, Callable[[BlendEngine, str, dict[str, Any]], Any]] = {
    "engine": lambda engine, text, options: engine.generate(text, **options),
    "engine, streamed": lambda engine, text, options: [*engine.stream(text, **options)],
    "LangChain chat, streamed": lambda engine, text, options: [*ChatCacheBlend(engine=engine, **options).stream(text)],
    "LlamaIndex chat, streamed": lambda engine, text, options: [
        *LlamaIndexLLM(engine=engine, **options).stream_chat([ChatMessage(role="user", content=text)])
    ],
}


@pytest.mark.parametrize("way", ANSWERS)
def test_answers_that_a_client_sends_again_as_text_are_not_found(way: str, reports: list[BlendReport]) -> None:
    engine = finding()
    answer, asked = passage(90, 8), "What is told of the harbour?"
    ids = engine.tokenizer(answer, add_special_tokens=False)["input_ids"]
    ANSWERS[way](engine, asked, {"max_new_tokens": len(ids), "logits_processor": [Says(ids)]})
    for number in range(3):
        chat = f"{number} is the number of a task.\n<chat>\nUSER: {asked}\nASSISTANT: {answer}\n</chat>\n{A}"
        engine.generate(f"{chat}\n\nWhich title has it, number {number}?", max_new_tokens=2)
    assert [[one.hit for one in made.found] for made in reports[-2:]] == [[False], [True]], "the passage alone"
    tokens = len(engine.tokenizer(A)["input_ids"])
    assert reports[-1].found[0].tokens <= tokens + 2


@pytest.mark.parametrize("way", ["engine", "LangChain", "LlamaIndex", "LangChain chat"])
def test_chats_that_a_client_has_written_out_hit_and_leave_no_question(way: str, reports: list[BlendReport]) -> None:
    """A program that knows the model's template, or another, and sends one text."""
    engine, secret = finding(), f"My secret is this.\n{passage(50, 9)}\nWhat do you say?"
    for number, texts in enumerate(PROMPTS):
        asked = "\n\n".join([*texts, secret])
        WAYS[way](engine, f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n")
        begun = f"<|im_start|>user\n{secret}<|im_end|>\n<|im_start|>assistant\nIt is {number}.<|im_end|>\n"
        WAYS[way](engine, f"{begun}<|im_start|>user\nAnd {number}?<|im_end|>\n<|im_start|>assistant\n")
    assert [[one.hit for one in made.found] for made in reports[::2]] == [[], [False, False], [True, True]]
    held = [engine.tokenizer.decode(info.token_ids + info.behind) for _, info in engine.store.infos("")]
    assert len(held) == 2
    assert not any(passage(50, 9)[:40].lower() in one.lower() for one in held)


def test_tool_answers_of_agents_and_schemas_that_move_are_found(reports: list[BlendReport]) -> None:
    engine = finding()
    model = ChatCacheBlend(engine=engine, max_new_tokens=2)
    tool = {"type": "function", "function": {"name": "find", "description": passage(60), "parameters": {}}}
    for number in range(3):
        call = {"name": "find", "args": {}, "id": f"call-{number}"}
        messages = [
            SystemMessage(f"It is {number} o'clock."),
            HumanMessage(f"What about number {number}?"),
            AIMessage("", tool_calls=[call]),
            ToolMessage(f"Result {number}:\n{A}\n{[B, C, D][number]}", tool_call_id=f"call-{number}"),
        ]
        model.bind(tools=[tool]).invoke(messages)
    assert [one.hit for one in reports[1].found] == [False]
    assert [one.hit for one in reports[2].found] == [True]


def test_known_texts_take_precedence_and_documents_keep_their_places(reports: list[BlendReport]) -> None:
    engine = finding()
    model = CacheBlendLLM(engine=engine, max_new_tokens=2)
    for number, texts in enumerate(PROMPTS[:2]):
        model.invoke(stuffed(texts, number))
    model.warm([B])
    seen = engine.chunks.pipeline.with_found(model.match_chunks(stuffed(PROMPTS[2], 2)))
    assert seen.chunks[0] == B
    assert len(seen.chunks) == 2
    assert seen.found == (1,)
    assert seen.written("").text == stuffed(PROMPTS[2], 2)
    model.invoke(stuffed(PROMPTS[2], 2))
    assert reports[-1].hits == 2
    assert [one.hit for one in reports[-1].found] == [True]


def test_prompts_that_are_too_long_lose_retrieved_chunks_and_no_text_of_messages() -> None:
    engine = finding(overflow="drop_chunks")
    window = engine.context_window
    assert window is not None
    many = [passage(200 + number) for number in range(window // 60)]
    first = Prompt("Sources:", [many[0], *many[1:]], f"\n{A}\nWhat?", ["\n"] * (len(many) - 1))
    parts = first.written("").text
    found = Prompt("Sources:", [*many, A], "\nWhat?", ["\n"] * len(many), found=[len(many)])
    assert found.written("").text == parts
    fit = engine.fitted(found, 4)
    assert fit.prompt.found == ()
    assert fit.prompt.suffix == first.suffix
    assert fit.left_out == tuple(range(len(fit.prompt.chunks), len(many)))


def test_many_threads_find_and_store_without_harm(reports: list[BlendReport]) -> None:
    engine = finding(write_back="background", max_concurrent=2)
    texts, errors = [A, B, C, D, E, F, G], list[BaseException]()

    def work(offset: int) -> None:
        try:
            for number in range(4):
                some = [texts[(offset + number * step) % 7] for step in (1, 2, 3)]
                engine.generate(stuffed(some, 10 * offset + number), max_new_tokens=2)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    engine.flush()
    assert not errors
    assert len(reports) == 16
    engine.generate(stuffed([C, A, B], 99), max_new_tokens=2)
    assert torch.isfinite(torch.tensor([reports[-1].work])).all()
    assert any(one.hit for one in reports[-1].found)
