"""Text that repeats in one tenant's prompts: what is found, what never counts, and what it costs."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise

from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.prompt.repeated import RepeatedText, RepeatedTexts, Said, said_in


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
    spans = finder.find(text, [Said(0, len(text))] if said is None else said)
    assert all(one.stop <= other.start for one, other in pairwise(spans))
    return [text[one.start : one.stop] for one in spans]


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


def test_moved_passages_are_found_at_their_second_sight_and_are_the_same_at_the_third() -> None:
    a, b, c, d, e, f, g = passages()[:7]
    for template in TEMPLATES:
        finder = RepeatedText()
        assert found_in(finder, template([a, b, c], "Who was it?")) == []
        second = found_in(finder, template([d, a, e, b], "Where was that?"))
        third = found_in(finder, template([b, f, a, g], "And when did it happen?"))
        assert len(second) == 2, template
        assert sorted(second) == sorted(third), template
        for passage, span in zip((a, b), second, strict=True):
            own = form_in(template, passage)
            assert len(own) * 0.95 < len(span) < len(own) + 40, "a span is a passage, with at most its title around it"


def test_nearly_all_of_what_is_retrieved_again_was_found_before() -> None:
    for template in TEMPLATES:
        draw = random.Random(5)
        topics = [draw.sample(passages()[:30], 7) for _ in range(12)]
        finder, seen, known = RepeatedText(), dict[str, int](), set[str]()
        wanted = reused = 0
        for number in range(50):
            texts = [one for one in draw.choice(topics) if draw.random() < 0.7]
            prompt = template(texts, f"What is question number {number} about?")
            spans = finder.find(prompt, [Said(0, len(prompt))])
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
        assert reused / wanted > 0.94, template


def test_edited_passages_are_never_taken_for_the_passage_and_what_is_unchanged_is_found() -> None:
    draw, texts = random.Random(7), passages()
    finder, earlier = RepeatedText(), list[str]()
    for order in (texts, texts[::-1], texts[1::2] + texts[::2]):
        earlier.append(joined(order, "What is this?"))
        found_in(finder, earlier[-1])
    unchanged = covered = 0
    for number in range(20):
        pieces, kept = list[str](), list[str]()
        for text in draw.choices(texts, k=50):
            at = draw.randrange(len(text))
            edits = {
                "moved": (text, [text]),
                "cut": (text[:at], [text[:at]]),
                "wrapped": (f'<document index="{at}">{text}</document>', [text]),
                "a letter is another": (text[:at] + "§" + text[at + 1 :], [text[:at], text[at + 1 :]]),
            }
            edited, left = edits[draw.choice([*edits])]
            pieces.append(edited)
            kept += left
        prompt = joined(pieces, f"Is this number {number}?")
        spans = found_in(finder, prompt)
        assert all(any(span in before for before in earlier) for span in spans), "word for word"
        earlier.append(prompt)
        unchanged += sum(len(one) for one in kept if len(one) > 650)
        covered += sum(map(len, spans))
    assert covered > 0.9 * unchanged


def test_words_that_one_message_alone_has_held_and_common_beginnings_are_no_span() -> None:
    a, b, c = passages()[:3]
    finder = RepeatedText()
    for number in range(5):  # a client leaves out what was said first, so that all that follows moves
        turns = [("system", f"It is {number} o'clock. Be kind."), ("user", f"{a}\n{b}\nWhat is this?")]
        turns += [("assistant", passages()[5]), ("user", f"And number {number}?")]
        assert found_in(finder, *chat(*turns[number % 2 :])) == []
    finder = RepeatedText()
    for number in range(5):
        assert found_in(finder, joined([a, b, c], f"Is this the question number {number}?")) == []


def test_text_of_answers_and_of_messages_that_were_not_found_counts_for_nothing() -> None:
    a, b = passages()[:2]
    finder = RepeatedText()
    for number in range(4):
        text, said = chat(("user", f"Hello {number}"), ("assistant", f"{number}\n{a}\n{b}"), ("user", "Go on"))
        assert found_in(finder, text, said) == []
        assert said_in(text, [{"role": "user", "content": "rewritten by the template"}]) == []
        assert found_in(finder, f"{number}\n{a}\n{b}\nWhat is it?", []) == []


QUESTIONS = {
    "one line": lambda: passages()[9].replace("\n", " "),
    "several lines": lambda: f"My secret.\n{passages()[9]}\n{passages()[10]}\nWhat do you say to that?",
    "a long last line": lambda: f"My secret.\n{passages()[9]}\n" + passages()[10].replace("\n", " "),
    "a short last line": lambda: passages()[9].replace("\n", " ") + "\nWhat now?",
}
"""Private questions: each holds passages 9 and 10 or a part of them, which no context does."""


def assert_passages_alone(found: Sequence[str], form: str, least: int = 20) -> None:
    """What was found is passages of the context, and nothing of a question or an answer."""
    assert len(found) > least, form
    assert all(any(span in passage for passage in passages()[:9]) for span in found), form


def test_questions_asked_in_a_hundred_chats_are_no_span_and_the_passages_beside_them_are() -> None:
    for form, question in QUESTIONS.items():
        draw, finder, found = random.Random(3), RepeatedText(), list[str]()
        for number in range(100):
            turns = [("system", "Be kind."), ("user", tagged(draw.sample(passages()[:9], 3), question()))]
            if number % 3 == 1:
                turns[1:] = [("user", question())]
            if number % 3 == 2:  # the next turn of a client that keeps no passages
                turns[1:] = [("user", question()), ("assistant", f"Well, {number}."), ("user", "Why?")]
            found += found_in(finder, *chat(*turns))
        assert_passages_alone(found, form)


def test_chats_that_a_client_sends_again_as_text_are_no_span_and_their_passages_are() -> None:
    """As Open WebUI does it: it asks for a search before a chat, and for a title, tags and more questions behind it."""
    for (form, question), searches in zip(QUESTIONS.items(), (False, True, False, True), strict=True):
        draw, finder, found = random.Random(1), RepeatedText(), list[str]()
        for number in range(12):
            told = f"<chat_history>\nUSER: {question()}\n"
            if searches:
                task = f"### Task:\nMake queries for a search.\n{told}</chat_history>\n\n### Output:\nJSON"
                found += found_in(finder, *chat(("user", task)))
            found += found_in(finder, *chat(("user", tagged(draw.sample(passages()[:6], 3), question()))))
            answer = f"In the case of {number}: {passages()[11 + number % 3]}"
            finder.hear(answer)
            for task in ("Find a title of 3 words", "Find 1-3 broad tags", "Suggest what may be asked next"):
                task = f"### Task:\n{task}.\n### Chat History:\n{told}ASSISTANT: {answer}\n</chat_history>"
                found += found_in(finder, *chat(("user", task)))
            later = tagged(draw.sample(passages()[:6], 3), f"And {number}?")
            found += found_in(finder, *chat(("user", question()), ("assistant", answer), ("user", later)))
        assert_passages_alone(found, form)


def test_questions_and_answers_that_come_again_without_a_mark_of_a_chat_are_no_span() -> None:
    for form, question in QUESTIONS.items():
        draw, finder, found = random.Random(2), RepeatedText(), list[str]()
        for number in range(12):
            found += found_in(finder, *chat(("user", tagged(draw.sample(passages()[:6], 3), question()))))
            answer = f"In the case of {number}: {passages()[11 + number % 3]}"
            finder.hear(answer)
            for task in ("Find a title", "Find some tags"):
                told = f"{task}, {number}.\nIt was asked:\n{question()}\nIt was said:\n{answer}\nNow?"
                found += found_in(finder, told)
        assert_passages_alone(found, form)


# How templates and programs write the system's words, then each earlier turn, then what is asked.
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
    "Gemma": ("{}", "<start_of_turn>user\n{}<start_of_turn>model\n{}", "<start_of_turn>user\n{}<start_of_turn>model"),
    "Phi": (
        "<|system|>\n{}<|end|>\n",
        "<|user|>\n{}<|end|>\n<|assistant|>\n{}<|end|>\n",
        "<|user|>\n{}\n<|assistant|>\n",
    ),
    "Alpaca": ("{}\n\n", "### Instruction:\n{}\n\n### Response:\n{}\n\n", "### Instruction:\n{}\n\n### Response:\n"),
    "names": ("{}\n\n", "User: {}\nAssistant: {}\n", "User: {}\nAssistant:"),
    "Human": ("System: {}\n", "Human: {}\nAI: {}\n", "Human: {}\nAI:"),
    "letters": ("{}\n\n", "Q: {}\nA: {}\n\n", "Q: {}\nA:"),
    "in one line": ("{} ", "USER: {} ASSISTANT: {}</s>", "USER: {} ASSISTANT:"),
    "history": ("{}\n<histories>\n", "Human: {}\nAI: {}\n", "Human: {}\n</histories>\nFollow up: Go on."),
}


def test_chats_that_are_one_text_are_left_alone_and_their_words_are_no_span_elsewhere() -> None:
    for template, (first, turn, last) in RAW.items():
        draw, finder = random.Random(3), RepeatedText()
        question = QUESTIONS[[*QUESTIONS][len(template) % len(QUESTIONS)]]()
        for number in range(8):
            said = ""
            for asked in (question, f"And what of {number}?"):
                asked = tagged(draw.sample(passages()[:6], 3), asked)
                prompt = first.format(f"Be kind, {number}.") + said + last.format(asked)
                assert found_in(finder, prompt) == [], template
                said += turn.format(asked, f"In the case of {number}: {passages()[11 + number % 3]}")
            assert found_in(finder, f"{number}\n{question}\nIs it {number}?") == [], template


def test_words_that_were_found_before_an_answer_quotes_them_are_found_still() -> None:
    a, b, c, d = passages()[:4]
    finder = RepeatedText()
    for number, texts in enumerate(([a, b], [c, a], [d, c, a])):
        spans = found_in(finder, tagged(texts, f"Is it number {number}?"))
        finder.hear(f"It says: {a}")
    assert any(a[100:300] in span for span in spans)


def test_templates_own_words_are_no_part_of_a_passage() -> None:
    a, b, c, d, e, f = passages()[:6]
    finder = RepeatedText()
    head, foot = "Here is what was found in your files.", "Use only this, and say so if you do not know."
    for number, texts in enumerate(([a, b, c], [d, e, f], [c, a, b], [b, d, a])):
        messages = [("system", f"{head}\n\n" + "\n\n".join(texts) + f"\n\n{foot}"), ("user", f"Is it {number}?")]
        spans = found_in(finder, *chat(*messages))
        assert all(head not in span and foot not in span for span in spans)
    assert spans


def test_tools_answers_count_by_their_calls_and_schemas_that_move_are_found() -> None:
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


def test_finders_of_tenants_share_nothing_and_forget_all_of_one_or_of_all() -> None:
    a, b, c, d = passages()[:4]
    finders = RepeatedTexts()
    for salt in ("mine", "theirs"):
        found_in(finders.of(salt), joined([a, b, c], "First?"))
        assert found_in(finders.of(salt), joined([d, a, b], "Second?"))
    finders.forget("mine")
    assert found_in(finders.of("mine"), joined([c, a, b, d], "Third, is it?")) == []
    assert found_in(finders.of("theirs"), joined([c, a, b, d], "Third, is it?"))
    finders.forget(None)
    assert found_in(finders.of("theirs"), joined([b, a, d, c], "Fourth, is it?")) == []
    for number in range(200):
        finders.of(str(number))
    assert len(finders._finders) <= 64


def test_looking_at_hostile_and_odd_text_takes_time_and_room_by_its_length_alone() -> None:
    hostile = ("\\", "a\n", "Name:\n", "\n[a", "<b ", "." + ")" * 50, '"' + " " * 50, "\nUser", "\ud800", "字。")
    for text in hostile:
        finder, seconds = RepeatedText(10_000), list[float]()
        for characters in (10_000, 40_000):
            prompt = text * (characters // len(text)) + "\n\nWhat is it?"
            for number in range(2):
                started = time.thread_time()
                found_in(finder, f"{number}\n{prompt}")
                seconds.append(time.thread_time() - started)
        assert seconds[3] < 16 * max(seconds[1], 0.05), (text, "four times the text")
        assert len(finder) <= 20_000
    for text in ("", "\n\n", "word", "a" * 5000):
        for before in ("", "1\n", "22\n"):
            found_in(finder, f"{before}{text}\n\nWhat is it?")


def test_threads_find_what_one_thread_finds() -> None:
    draw, finder, alone = random.Random(2), RepeatedText(2000), RepeatedText(2000)
    prompts = [joined(draw.sample(passages(), 5), f"Number {number}?") for number in range(40)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(partial(found_in, finder), prompts))
    for prompt in prompts:
        found_in(alone, prompt)
    last = joined(passages()[:3], "At last?")
    assert set(found_in(finder, last)) == set(found_in(alone, last))
