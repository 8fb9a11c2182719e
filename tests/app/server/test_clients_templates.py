"""Prompts as real clients write them: passages are found in each template, and no span is a wrong one.

Marks and their order are those of each client's default template. Instructions are shortened: they are the same in
every prompt, so they belong to the common beginning.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from cacheblend_rag.prompt.repeated import RepeatedText, Said
from tests.integrations.test_repeated import passage

PASSAGES = [(f"file-{number % 2}.md", passage(300 + number, 9)) for number in range(6)]
# In each place other passages, and other neighbours.
ORDERS = ([0, 1, 2, 3], [4, 2, 0, 5], [3, 5, 1, 4], [2, 4, 3, 1], [5, 0, 4, 2], [1, 3, 5, 0])


def open_webui(question: str, passages: list[tuple[str, str]]) -> list[tuple[str, str]]:
    numbers = {name: at for at, name in enumerate(dict.fromkeys(name for name, _ in passages), 1)}
    sources = "\n".join(f'<source id="{numbers[name]}" name="{name}">{text}</source>' for name, text in passages)
    guide = "### Task:\nRespond to the user query using the provided context, with inline citations in the format [id]."
    return [("user", f"{guide}\n\n<context>\n{sources}\n</context>\n\n{question}")]


def anything_llm(question: str, passages: list[tuple[str, str]]) -> list[tuple[str, str]]:
    blocks = (f"[CONTEXT {at}]:\n{text}\n[END CONTEXT {at}]\n\n" for at, (_, text) in enumerate(passages))
    guide = "Given the conversation and context, answer the user.\nContext:\n"
    return [("system", guide + "".join(blocks)), ("user", question)]


def n8n(question: str, passages: list[tuple[str, str]]) -> list[tuple[str, str]]:
    def written(value: object) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    found = [
        {"type": "text", "text": written({"pageContent": text, "metadata": {"source": name}})}
        for name, text in passages
    ]
    return [("system", "You are a helpful assistant"), ("user", question), ("tool", written(found))]


def twice_in_json(text: str) -> str:
    for _ in range(2):
        text = json.dumps(text, ensure_ascii=False)[1:-1]
    return text


def said_of(text: str, contents: list[tuple[str, str]]) -> list[Said]:
    """Where each message stands."""
    found, at = list[Said](), 0
    for role, content in contents:
        start = text.index(content, at)
        at = start + len(content)
        found.append(Said(start, at, role))
    return found


@pytest.mark.parametrize(("client", "write"), [(open_webui, str), (anything_llm, str), (n8n, twice_in_json)])
def test_passages_of_a_client_are_found_from_their_third_sight_on(
    client: Callable[[str, list[tuple[str, str]]], list[tuple[str, str]]], write: Callable[[str], str]
) -> None:
    finder, known, earlier = RepeatedText(), set[str](), list[str]()
    all_of_it = found_of_it = 0
    for number, order in enumerate(ORDERS):
        contents = client(f"Which one falls, is it number {number}?", [PASSAGES[at] for at in order])
        text = "\n".join(content for _, content in contents)
        spans = [text[one.start : one.stop] for one in finder.find(text, said_of(text, contents))]
        assert all(any(span in one for one in earlier) for span in spans)
        hits = [span for span in spans if span in known]
        for at in order:
            written = write(PASSAGES[at][1])
            # Behind the same beginning it is no further sight: all of that is read from memory.
            if len({one[: one.index(written)] for one in earlier if written in one}) >= 2:
                all_of_it += len(written)
                found_of_it += len(written) if any(written in span for span in hits) else 0
        known.update(spans)
        earlier.append(text)
    assert all_of_it > 0
    assert found_of_it == all_of_it
