"""Prompts as real clients write them: passages are found in each template, and no span is a wrong one."""

from __future__ import annotations

import pytest

from cacheblend_rag.prompt.repeated import RepeatedText, Said
from tests.app.server.client_prompts import CLIENTS, Passage, Turn
from tests.integrations.test_repeated import passage

PASSAGES = [Passage(f"file-{number % 2}.md", passage(300 + number, 9)) for number in range(6)]
# In each place other passages, and other neighbours.
ORDERS = ([0, 1, 2, 3], [4, 2, 0, 5], [3, 5, 1, 4], [2, 4, 3, 1], [5, 0, 4, 2], [1, 3, 5, 0])


def said_of(text: str, contents: list[tuple[str, str]]) -> list[Said]:
    """Where each message stands."""
    found, at = list[Said](), 0
    for role, content in contents:
        start = text.index(content, at)
        at = start + len(content)
        found.append(Said(start, at, role))
    return found


@pytest.mark.parametrize("name", [one for one in CLIENTS if one != "LangChain, rlm/rag-prompt"])
def test_passages_of_a_client_are_found_from_their_third_sight_on(name: str) -> None:
    client, finder = CLIENTS[name], RepeatedText()
    known, earlier = set[str](), list[str]()
    all_of_it = found_of_it = 0
    for number, order in enumerate(ORDERS):
        turn = Turn(f"Which one falls, is it number {number}?", tuple(PASSAGES[at] for at in order))
        contents = [(str(one["role"]), str(one["content"])) for one in client.messages(turn) if one["content"]]
        text = "\n".join(content for _, content in contents)
        spans = [text[one.start : one.stop] for one in finder.find(text, said_of(text, contents))]
        assert all(any(span in one for one in earlier) for span in spans)
        hits = [span for span in spans if span in known]
        for at in order:
            written = client.written(PASSAGES[at].text)
            # Behind the same beginning it is no further sight: all of that is read from memory.
            if len({one[: one.index(written)] for one in earlier if written in one}) >= 2:
                all_of_it += len(written)
                found_of_it += len(written) if any(written in span for span in hits) else 0
        known.update(spans)
        earlier.append(text)
    assert all_of_it > 0
    assert found_of_it == all_of_it
