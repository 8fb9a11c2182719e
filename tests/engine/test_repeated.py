"""Text that repeats in one tenant's prompts: what is found, what never counts, and what it costs."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.prompt.hash_table import HashTable
from cacheblend_rag.prompt.quoted_chats import Said
from cacheblend_rag.prompt.repeated import RepeatedText, said_in


@cache
def passages() -> tuple[str, ...]:
    """Passages of real articles, each of one or several paragraphs and too long for one sentence."""
    found, passage = [], ""
    for path in sorted(ARTICLES_PATH.glob("*.md")):
        for paragraph in path.read_text(encoding="utf-8").split("\n\n"):
            passage = f"{passage}\n\n{paragraph}".strip()
            if len(passage) > 700:
                found.append(passage)
                passage = ""
    return tuple(found)


def joined(texts: Sequence[str], question: str) -> str:
    return "Answer from this context.\n\n" + "\n\n".join(texts) + f"\n\nQuestion: {question}\nAnswer:"


def tagged(texts: Sequence[str], question: str) -> str:
    sources = "\n".join(f'<source id="{n}" name="a.md">{text}</source>' for n, text in enumerate(texts, 1))
    return f"Cite sources as [id].\n\n<context>\n{sources}\n</context>\n\n{question}"


def numbered(texts: Sequence[str], question: str) -> str:
    return "Context:\n" + "\n".join(f"[{n}] {text}" for n, text in enumerate(texts, 1)) + f"\n\n{question}"


def listed(texts: Sequence[str], question: str) -> str:
    return "\n".join(f"{n}. {text}" for n, text in enumerate(texts, 1)) + f"\n\n{question}"


def quoted(texts: Sequence[str], question: str) -> str:
    return "\n\n".join("> " + text.replace("\n", "\n> ") for text in texts) + f"\n\n{question}"


def fenced(texts: Sequence[str], question: str) -> str:
    return "\n".join(f"```docs/{n}.md\n{text}\n```" for n, text in enumerate(texts)) + f"\n\n{question}"


def as_json(texts: Sequence[str], question: str) -> str:
    return json.dumps([{"id": n, "text": text} for n, text in enumerate(texts)]) + f"\n\n{question}"


def with_metadata(texts: Sequence[str], question: str) -> str:
    nodes = "\n\n".join(f"page_label: 3\nfile_path: a{len(text) % 5}.md\n\n{text}" for text in texts)
    return f"Context is below.\n-----\n{nodes}\n-----\nAnswer the query.\nQuery: {question}\nAnswer: "


TEMPLATES = (joined, tagged, numbered, listed, quoted, fenced, as_json, with_metadata)


def found_in(finder: RepeatedText, text: str, said: Sequence[Said] | None = None) -> list[str]:
    return [text[one.start : one.stop] for one in finder.find(text, said)]


def chat(*turns: tuple[str, ...]) -> tuple[str, list[Said]]:
    """A conversation as a chat template writes it, and its messages."""
    text = "\n".join(f"<|{role}|>{content}" for role, content, *_ in turns)
    written = [{"role": role, "content": content, "tool_call_id": "".join(call)} for role, content, *call in turns]
    return text, said_in(text, written)


def form_in(template: Callable[[Sequence[str], str], str], passage: str) -> str:
    """A passage as a template writes it, without what stands around it."""
    if template is as_json:
        return json.dumps(passage)[1:-1]
    return passage.replace("\n", "\n> ") if template is quoted else passage


@pytest.mark.parametrize("template", TEMPLATES)
def test_moved_passages_are_found_at_their_second_sight_and_are_the_same_at_the_third(template):
    a, b, c, d, e, f, g = passages()[:7]
    finder = RepeatedText()
    assert finder.find(template([a, b, c], "Who was it?")) == []
    second = found_in(finder, template([d, a, e, b], "Where was that?"))
    third = found_in(finder, template([b, f, a, g], "And when did it happen?"))
    assert len(second) == 2
    assert sorted(second) == sorted(third)
    for passage, span in zip((a, b), second, strict=True):
        own = form_in(template, passage)
        assert len(own) * 0.95 < len(span) < len(own) + 40, "a span is a passage, with at most its title around it"


@pytest.mark.parametrize("template", TEMPLATES)
def test_nearly_all_of_what_is_retrieved_again_was_found_before(template):
    draw = random.Random(5)
    topics = [draw.sample(passages()[:30], 7) for _ in range(12)]
    finder, seen, known = RepeatedText(), dict[str, int](), set[str]()
    wanted = reused = 0
    for number in range(50):
        texts = [one for one in draw.choice(topics) if draw.random() < 0.7]
        prompt = template(texts, f"What is question number {number} about?")
        spans = finder.find(prompt)
        at = 0
        for text in texts:
            own = form_in(template, text)
            at = prompt.index(own, at)
            if seen.get(text, 0) >= 2:
                wanted += len(own)
                inside = [one for one in spans if prompt[one.start : one.stop] in known]
                reused += sum(max(0, min(one.stop, at + len(own)) - max(one.start, at)) for one in inside)
            seen[text] = seen.get(text, 0) + 1
        known |= {prompt[one.start : one.stop] for one in spans}
    assert wanted > 50_000
    assert reused / wanted > 0.94


def test_ten_thousand_edits_are_never_taken_for_the_passage_and_what_is_unchanged_is_still_found():
    draw, texts = random.Random(7), passages()
    finder, earlier = RepeatedText(), list[str]()
    for order in (texts, texts[::-1], texts[1::2] + texts[::2]):
        earlier.append(joined(order, "What is this?"))
        finder.find(earlier[-1])
    edits = unchanged = covered = 0
    while edits < 10_000:
        pieces, kept = [], []
        for text in draw.choices(texts, k=50):
            at = draw.randrange(len(text))
            edit = draw.randrange(6)
            if edit == 0:  # moved
                pieces.append(text)
                kept.append(text)
            elif edit == 1:  # cut
                pieces.append(text[:at])
                kept.append(text[:at])
            elif edit == 2:  # wrapped
                pieces.append(f'<document index="{at}">{text}</document>')
                kept.append(text)
            elif edit == 3:  # numbered
                pieces.append(f"[{at}] {text}")
                kept.append(text)
            elif edit == 4:  # quoted, where it is one paragraph
                pieces.append("> " + text.replace("\n\n", f" {at}"))
            else:  # a letter is another
                pieces.append(text[:at] + "§" + text[at + 1 :])
                kept += [text[:at], text[at + 1 :]]
        edits += len(pieces)
        prompt = joined(pieces, f"Is this number {edits}?")
        spans = found_in(finder, prompt)
        # The plain twin: all of a span stood in an earlier prompt, word for word.
        assert all(any(span in before for before in earlier) for span in spans)
        earlier.append(prompt)
        lengths = [len(one) for one in kept if len(one) > 650]
        unchanged += sum(lengths)
        covered += sum(map(len, spans))
    assert covered > 0.9 * unchanged


def test_common_beginnings_are_no_span_however_often_they_come():
    a, b, c = passages()[:3]
    finder = RepeatedText()
    for number in range(5):
        assert finder.find(joined([a, b, c], f"Is this the question number {number}?")) == []


def test_words_that_one_message_alone_has_held_are_no_span_wherever_it_is_sent_again():
    long = "\n\n".join(passages()[:2])
    finder = RepeatedText()
    for number in range(5):  # a client leaves out what was said first, so that all that follows moves
        turns = [("system", f"It is {number} o'clock. Be kind."), ("user", long + "\nWhat is this?")]
        turns += [("assistant", passages()[5]), ("user", f"And number {number}?")]
        assert finder.find(*chat(*turns[number % 2 :])) == []


def test_questions_asked_in_a_hundred_chats_are_no_span_and_the_passages_beside_them_are():
    question = "Please tell me all of it.\n" + passages()[9] + "\n" + passages()[10] + "\nWhat do you say to that?"
    draw, finder, found = random.Random(3), RepeatedText(), list[str]()
    for number in range(100):
        turns = [("system", "Be kind."), ("user", tagged(draw.sample(passages()[:9], 3), question))]
        if number % 3 == 1:
            turns[1:] = [("user", question)]
        if number % 3 == 2:  # the next turn of a client that keeps no passages
            turns[1:] = [("user", question), ("assistant", f"Well, {number}."), ("user", "Why?")]
        found += found_in(finder, *chat(*turns))
    assert len(found) > 60
    assert all(any(span in passage for passage in passages()[:9]) for span in found)


def test_text_of_answers_and_of_messages_that_were_not_found_counts_for_nothing():
    a, b = passages()[:2]
    finder = RepeatedText()
    for number in range(4):
        text, said = chat(("user", f"Hello {number}"), ("assistant", f"{number}\n{a}\n{b}"), ("user", "Go on"))
        assert finder.find(text, said) == []
        assert said_in(text, [{"role": "user", "content": "rewritten by the template"}]) == []
        assert finder.find(f"{number}\n{a}\n{b}\nWhat is it?", []) == []


QUESTIONS = {
    "one line": lambda: passages()[9].replace("\n", " "),
    "several lines": lambda: f"My secret.\n{passages()[9]}\n{passages()[10]}\nWhat do you say to that?",
    "a long last line": lambda: f"My secret.\n{passages()[9]}\n" + passages()[10].replace("\n", " "),
    "a short last line": lambda: passages()[9].replace("\n", " ") + "\nWhat now?",
}


@pytest.mark.parametrize(("form", "searches"), list(zip(QUESTIONS, [False, True, False, True], strict=True)))
def test_chats_that_a_client_sends_again_as_text_are_no_span_and_their_passages_are(form: str, searches: bool) -> None:
    """As Open WebUI does it: it asks for a search before a chat, and for a title, tags and more questions behind it."""
    question, draw, finder, found = QUESTIONS[form](), random.Random(1), RepeatedText(), list[str]()

    def asked(*turns: tuple[str, str]) -> None:
        found.extend(found_in(finder, *chat(*turns)))

    for number in range(12):
        told = f"<chat_history>\nUSER: {question}\n"
        if searches:
            asked(("user", f"### Task:\nMake queries for a search.\n{told}</chat_history>\n\n### Output:\nJSON"))
        asked(("user", tagged(draw.sample(passages()[:6], 3), question)))
        answer = f"In the case of {number}: {passages()[11 + number % 3]}"
        finder.hear(answer)
        for task in ("Find a title of 3 words", "Find 1-3 broad tags", "Suggest what may be asked next"):
            asked(("user", f"### Task:\n{task}.\n### Chat History:\n{told}ASSISTANT: {answer}\n</chat_history>"))
        later = tagged(draw.sample(passages()[:6], 3), f"And {number}?")
        asked(("user", question), ("assistant", answer), ("user", later))
    assert len(found) > 50
    assert all(any(span in passage for passage in passages()[:6]) for span in found)


QUOTED = {
    "one text": "{earlier}Human: {question}\nAI:",
    "one text, system": "System: It is {number} o'clock. Be kind.\n{earlier}Human: {question}\nAI:",
    "histories": "It is {number}.\n<histories>\n{earlier}Human: {question}\n</histories>\nFollow up: Go on, {number}.",
    "condensed": "Number {number}.\nChat History:\n{earlier}Human: {question}\nAssistant: Yes.\nInput: Go on?\nOutput:",
}


@pytest.mark.parametrize("form", QUOTED)
def test_chats_as_one_text_are_no_span_whoever_answered(form: str) -> None:
    finder, found = RepeatedText(), list[str]()
    for number in range(6):
        asked = [f"My letter.\n{passages()[at]}\nWhat is this, {at}?" for at in range(number + 1)]
        earlier = "".join(f"Human: {one}\nAI: {passages()[9 + at]}\n" for at, one in enumerate(asked[:-1]))
        prompt = QUOTED[form].format(number=number, earlier=earlier, question=asked[-1])
        found += found_in(finder, prompt) + found_in(finder, *chat(("user", prompt)))
    assert found == []


# How templates write the system's words, then each earlier turn, then what is asked.
RAW = {
    "ChatML": (
        "<|im_start|>system\n{}<|im_end|>\n",
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n",
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n",
    ),
    "Llama 3": (
        "<|start_header_id|>system<|end_header_id|>\n\n{}<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n{}<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "Llama 2": ("<<SYS>>\n{}\n<</SYS>>\n\n", "[INST] {} [/INST] {} </s>", "[INST] {} [/INST]"),
    "Phi": (
        "<|system|>\n{}<|end|>\n",
        "<|user|>\n{}<|end|>\n<|assistant|>\n{}<|end|>\n",
        "<|user|>\n{}\n<|assistant|>\n",
    ),
    "Alpaca": ("{}\n\n", "### Instruction:\n{}\n\n### Response:\n{}\n\n", "### Instruction:\n{}\n\n### Response:\n"),
    "names": ("{}\n\n", "User: {}\nAssistant: {}\n", "User: {}\nAssistant:"),
    "letters": ("{}\n\n", "Q: {}\nA: {}\n\n", "Q: {}\nA:"),
    "in one line": ("{} ", "USER: {} ASSISTANT: {}</s>", "USER: {} ASSISTANT:"),
}


def raw(template: str, system: str, turns: Sequence[tuple[str, str]], asked: str) -> str:
    """A conversation as one text."""
    first, turn, last = RAW[template]
    return first.format(system) + "".join(turn.format(*one) for one in turns) + last.format(asked)


@pytest.mark.parametrize("template", RAW)
def test_passages_in_chats_that_are_one_text_hit_at_their_third_sight(template: str) -> None:
    in_system = len(template) % 2 == 0
    draw, finder, known = random.Random(2), RepeatedText(), set[str]()
    sights, wanted, reused = dict[str, int](), 0, 0
    for number in range(8):
        turns: list[tuple[str, str]] = []
        for turn in range(3):
            texts, question = draw.sample(passages()[:9], 3), f"What is meant by {number}, {turn}?"
            block = "\n\n".join(texts)
            asked = question if in_system else f"{block}\n\nQuestion: {question}"
            text = raw(template, f"Be kind.\n\n{block}" if in_system else "Be kind.", turns, asked)
            spans = finder.find(text)
            for one in texts:
                sights[one] = sights.get(one, 0) + 1
                if sights[one] > 2:
                    at, wanted = text.rindex(one), wanted + len(one)
                    inside = [span for span in spans if text[span.start : span.stop] in known]
                    reused += sum(max(0, min(span.stop, at + len(one)) - max(span.start, at)) for span in inside)
            known |= {text[span.start : span.stop] for span in spans}
            turns.append((asked, f"It is {number} and {turn}."))
            finder.hear(turns[-1][1])
    assert reused / wanted > 0.9


@pytest.mark.parametrize("template", RAW)
def test_questions_of_chats_that_are_one_text_are_no_span_whoever_answered(template: str) -> None:
    form = [*QUESTIONS][len(template) % len(QUESTIONS)]
    question, draw, finder, found = QUESTIONS[form](), random.Random(3), RepeatedText(), list[str]()
    for number in range(8):
        turns: list[tuple[str, str]] = []
        for asked in (question, f"And what of {number}?"):
            texts = draw.sample(passages()[:6], 3)
            found += found_in(finder, raw(template, "Be kind.", turns, tagged(texts, asked)))
            turns.append((asked, f"In the case of {number}: {passages()[11 + number % 3]}"))
    assert len(found) > 20
    assert all(any(span in passage for passage in passages()[:6]) for span in found)


def test_passages_beside_quoted_chats_are_found():
    a, b, c, d, e = passages()[:5]
    for form in (
        "{context}\n\nChat history:\nHuman: Hello?\nAI: Well, {number}.\n\nQuestion: And {number}?\nAnswer:",
        "<chat>\nUSER: Hello, {number}?\n</chat>\n{context}\n\nAnd {number}?",
        "System: Use this.\n{context}\nHuman: And {number}?\nAI:",
        "Human: Use this.\n{context}\n\nQuestion: And {number}?\nAI:",
    ):
        finder = RepeatedText()
        for number, texts in enumerate(([a, b, c], [d, a, e], [b, e, a])):
            prompt = form.format(number=number, context=tagged(texts, "Read it well."))
            spans = found_in(finder, prompt) if number % 2 else found_in(finder, *chat(("user", prompt)))
        assert any(a[100:300] in span for span in spans), form


def test_words_that_were_found_before_an_answer_quotes_them_are_found_still():
    a, b, c, d = passages()[:4]
    finder = RepeatedText()
    for number, texts in enumerate(([a, b], [c, a], [d, c, a])):
        spans = found_in(finder, tagged(texts, f"Is it number {number}?"))
        finder.hear(f"It says: {a}")
    assert any(a[100:300] in span for span in spans)


def test_passages_directly_before_a_cue_are_found_once_they_stood_elsewhere():
    a, b, c, d, e = (one.replace("\n", " ") for one in passages()[:5])
    finder = RepeatedText()
    for number, texts in enumerate(([a, b, c], [d, a, b], [c, e, a])):
        spans = found_in(finder, f"Question: Is it {number}?\nContext: " + "\n\n".join(texts) + " \nAnswer:")
    assert any(a[-200:] in span for span in spans)
    for question in (a, f"Question: {a}\nAnswer:"):  # the same words as a question are computed
        assert all(a[-200:] not in span for span in found_in(finder, f"{b}\n\n{d}\n\n{question}"))


def test_templates_own_words_are_no_part_of_a_passage():
    a, b, c, d, e, f = passages()[:6]
    finder = RepeatedText()
    head, foot = "Here is what was found in your files.", "Use only this, and say so if you do not know."
    for number, texts in enumerate(([a, b, c], [d, e, f], [c, a, b], [b, d, a])):
        messages = [("system", f"{head}\n\n" + "\n\n".join(texts) + f"\n\n{foot}"), ("user", f"Is it {number}?")]
        spans = found_in(finder, *chat(*messages))
        assert all(head not in span and foot not in span for span in spans)
    assert spans


def test_tools_answers_count_by_their_calls_and_schemas_that_move_are_found():
    a, schema = passages()[0], json.dumps({"name": "search", "description": passages()[1]})
    finder = RepeatedText()

    def asked(number: int, call: str) -> list[str]:
        tools = f"Version {number}.\nTools:\n{schema}\n"
        text, _ = chat(("system", f"It is {number} o'clock."), ("user", "Look it up"), ("tool", a, call))
        turns = [("system", f"It is {number} o'clock.", ""), ("user", "Look it up", ""), ("tool", a, call)]
        said = said_in(tools + text, [{"role": r, "content": c, "tool_call_id": i} for r, c, i in turns])
        return found_in(finder, tools + text, said)

    assert asked(1, "call-1") == []
    for number in (2, 3):
        (span,) = asked(number, "call-1")
        assert passages()[1][:40] in span, "the same call sent again is the same message"
    other, span = asked(4, "call-2")
    assert passages()[1][:40] in other
    assert span in a


def test_spans_of_erased_text_and_those_that_hold_it_must_be_seen_twice_again():
    a, b, c, d = passages()[:4]
    finder = RepeatedText()
    finder.find(joined([a, b, c], "First?"))
    finder.find(joined([d, a, b], "Second?"))
    finder.forget([b])
    assert all(b[:200] not in span for span in found_in(finder, joined([c, a, b, d], "Third, is it?")))
    assert any(b[-200:] in span for span in found_in(finder, joined([a, c, b], "And the fourth one?")))


@pytest.mark.parametrize("part", ["half a piece to another half", "the middle of a piece", "a hundred pieces"])
def test_erased_text_that_stood_in_longer_pieces_must_be_seen_twice_again(part):
    a, b, c, d = passages()[:4]
    long = " ".join(f"word{number} of one sentence that goes on" for number in range(12)) + "."
    inner = {"half a piece to another half": f"{long[200:]} {b} {long[:200]}", "the middle of a piece": long[100:300]}
    b = f"{long} {b} {long}"
    finder = RepeatedText()
    finder.find(joined([a, b, c], "First?"))
    finder.find(joined([d, a, b], "Second?"))
    finder.forget([inner.get(part, b)])
    # Only what shares nothing with the erased text may be found.
    spans = found_in(finder, joined([c, a, b, d], "Third, is it?"))
    assert all(long[100:300] not in span and long[220:] not in span for span in spans)


def test_text_that_is_erased_three_hundred_times_or_before_much_other_text_is_not_known_again():
    a, b, c, d = passages()[:4]
    for others in ([], [" ".join(f"Sentence {at} {number} is." for number in range(100)) for at in range(60)]):
        finder = RepeatedText(4000)
        finder.find(joined([a, b, c], "First?"))
        finder.find(joined([d, a, b], "Second?"))
        for _ in range(1 if others else 256):
            finder.forget([b])
        finder.forget(others)
        assert all(b[:200] not in span for span in found_in(finder, joined([c, a, b, d], "Third, is it?")))


@pytest.mark.parametrize("text", ["\\", "a\n", "Name:\n", "\n[a", "<b ", "." + ")" * 50, '"' + " " * 50])
def test_looking_at_hostile_text_takes_time_and_room_by_its_length_alone(text):
    finder, seconds = RepeatedText(20_000), list[float]()
    for characters in (30_000, 120_000):
        prompt = text * (characters // len(text)) + "\n\nWhat is it?"
        finder.find(f"1\n{prompt}")
        started = time.thread_time()
        finder.find(f"2\n{prompt}")
        seconds.append(time.thread_time() - started)
    assert seconds[1] < 12 * max(seconds[0], 0.02), "four times the text"
    assert finder.nbytes < 64 * 20_000


def test_full_tables_forget_what_was_not_seen_for_longest_and_takes_no_more_room():
    table = HashTable(1000, value=np.uint32)
    kept = np.arange(2, 102, dtype=np.uint64) << np.uint64(50)
    table.enter(kept, np.ones(100, dtype=bool))
    draw = np.random.default_rng(0)
    for _ in range(50):
        more = draw.integers(2**40, 2**64, size=100, dtype=np.uint64)
        table.enter(np.concatenate([more, kept]), np.ones(200, dtype=bool))
        slots, known = table.enter(kept, np.zeros(100, dtype=bool))
        assert known.all()
        assert (table.young.keys[slots] == kept).all()
        assert len(table) <= 2000


def test_tables_agree_with_a_dict():
    table, plain, draw = HashTable(10_000, value=np.uint32), dict[int, int](), np.random.default_rng(1)
    for _ in range(40):
        keys = draw.integers(2, 2000, size=100, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        slots, known = table.enter(keys, np.ones(100, dtype=bool))
        assert known.tolist() == [int(key) in plain for key in keys]
        values = draw.integers(1, 2**31, size=100)
        unique = {int(key): int(value) for key, value in zip(keys, values, strict=True)}
        table.young.values["value"][slots] = [unique[int(key)] for key in keys]
        plain |= unique
        keys = np.array([*plain], dtype=np.uint64)
        slots, known = table.enter(keys, np.zeros(len(keys), dtype=bool))
        assert known.all()
        assert table.young.values["value"][slots].tolist() == [*plain.values()]


def test_looking_is_quick_and_the_index_small_with_a_million_windows_known():
    finder, draw = RepeatedText(1_000_000), np.random.default_rng(0)
    for table, entries in ((finder._windows, 1_000_000), (finder._spans, 250_000)):
        for _ in range(entries // 50_000):
            keys = draw.integers(2, 2**64, size=50_000, dtype=np.uint64)
            table.enter(keys, np.ones(50_000, dtype=bool))
    assert len(finder) == 250_000
    assert finder.nbytes / len(finder) <= 100, "bytes a span of the shortest length"
    prompt = joined((passages() * 2)[:44], "What is all of this?")
    assert len(prompt) > 32_000
    seconds = []
    for number in range(10):
        started = time.thread_time()
        finder.find(f"{number}\n{prompt}")
        seconds.append(time.thread_time() - started)
    assert min(seconds) < 0.02, "4 ms on an idle machine"


def test_threads_find_what_one_thread_finds():
    draw, finder, errors = random.Random(2), RepeatedText(2000), list[BaseException]()
    prompts = [joined(draw.sample(passages(), 5), f"Number {number}?") for number in range(80)]

    def work(some: Sequence[str]) -> None:
        try:
            for prompt in some:
                spans = finder.find(prompt)
                assert all(a.stop <= b.start for a, b in pairwise(spans))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(prompts[number::4],)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not errors
    alone = RepeatedText(2000)
    for prompt in prompts:
        alone.find(prompt)
    last = joined(passages()[:3], "At last?")
    assert set(found_in(finder, last)) == set(found_in(alone, last))


@pytest.mark.parametrize("text", ["", "\n\n", "word", "a" * 5000, "字。" * 900, "\ud800" * 400, "x \n" * 2000])
def test_odd_texts_are_looked_at_without_harm(text):
    finder = RepeatedText()
    for before in ("", "1\n", "22\n", "333\n"):
        prompt = f"{before}{text}\n\nWhat is it?"
        assert all(prompt[one.start : one.stop] for one in finder.find(prompt))
