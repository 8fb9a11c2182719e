"""The page's suggested questions, asked of a server as the page asks them.

``python -m docs.benchmarks.scripts.suggested``

A server with the starter models and the bundled articles is asked each suggested question by itself, in the page's
order and with its default settings, then every method of *Compare*. Then it is asked all of them as one conversation,
which a newcomer has who tries one after another; and again by full prefill. An answer is right if it has one of the
answers in the file of questions. ``--all`` asks every bundled question by full prefill alone, which a question must
pass before the page suggests it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from cacheblend_rag.app.collection import QUESTIONS_PATH
from docs.benchmarks.scripts.common import script_parser
from docs.benchmarks.scripts.measuring import machine, table
from docs.benchmarks.scripts.served import served
from docs.benchmarks.scripts.yardstick import is_right

_KEY = "ada-0123456789abcdef"
_PATH = "/api/collections/archive"
_FOLLOWED = 6  # turns that the page sends with a question
_COMPARED = ("full", "prefix", "reuse", "blend")
WAYS = (*_COMPARED, "first", "conversation", "conversation_full")


class _Asking:
    """A server that questions are asked of."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def ask(self, question: str, ratio: float | None = None, history: Sequence[Mapping[str, Any]] = ()) -> Any:
        """What the page gets for a question; ``ratio`` is the server's default if left out."""
        body = {"question": question, "k": 6, "stream": False, "history": list(history)[-_FOLLOWED:]}
        answer = self._client.post(f"{_PATH}/ask", json=body | ({} if ratio is None else {"ratio": ratio}))
        return answer.raise_for_status().json()

    def compare(self, question: str) -> dict[str, str]:
        """Each method's answer; the rounds that time them are not waited for."""
        found: dict[str, str] = {}
        with self._client.stream("POST", f"{_PATH}/compare", json={"question": question, "k": 6}) as events:
            for line in events.raise_for_status().iter_lines():
                if line.startswith("data: ") and "method" in (row := json.loads(line.removeprefix("data: "))):
                    found[row["method"]] = row["answer"]
                if len(found) == len(_COMPARED):
                    break
        return found

    def converse(self, questions: Sequence[str], ratio: float | None = None) -> Iterator[Any]:
        """Questions one after another; each goes with those before it."""
        history = list[dict[str, Any]]()
        for question in questions:
            got = self.ask(question, ratio, history)
            yield got
            refs = [{"document_id": one["document_id"], "chunk": one["chunk"]} for one in got["sources"]]
            turn = {"question": question, "answer": got["answer"], "sources": refs}
            history.append(turn | {"stands_alone": got["report"]["stands_alone"]})


@contextmanager
def _server(arguments: Sequence[str]) -> Iterator[_Asking]:
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder), {"ada": _KEY}, arguments) as url,
        httpx.Client(base_url=url, headers={"Authorization": f"Bearer {_KEY}"}, timeout=600) as client,
    ):
        yield _Asking(client)


def _judged(one: Mapping[str, Any], got: Mapping[str, Any]) -> dict[str, Any]:
    """An answer beside what the file of questions says."""
    accepted, report = [one["answer"], *one["aliases"]], got["report"]
    texts = [source["text"] for source in got["sources"] if source["document"] in one["files"]]
    return {
        "answer": got["answer"].strip(),
        "right": is_right(got["answer"], accepted),
        "found": any(is_right(text, accepted) for text in texts),
        "files_found": len({source["document"] for source in got["sources"]} & set(one["files"])),
        "passages": len(got["sources"]),
        "prompt_tokens": sum(report["tokens"].values()),
        **{name: report[name] for name in ("hits", "misses", "resumed", "ratio", "plain", "stands_alone")},
    }


def _by_itself(one: Mapping[str, Any], server: _Asking, full: bool) -> dict[str, Any]:
    """A question's answers; with ``full``, that of full prefill alone."""
    found = {"first": _judged(one, server.ask(one["question"], 1.0 if full else None))}
    for method, answer in {} if full else server.compare(one["question"]).items():
        found[method] = {"answer": answer, "right": is_right(answer, [one["answer"], *one["aliases"]])}
    return found


def _rows(found: Sequence[Mapping[str, Any]], ways: Sequence[str]) -> Iterator[list[str]]:
    def mark(one: Mapping[str, Any], way: str) -> str:
        return "" if way not in one else "right" if one[way]["right"] else "wrong"

    for one in found:
        first = one["first"]
        known = [one["question"], "yes" if first["found"] else "no", str(first["prompt_tokens"])]
        yield known + [mark(one, way) for way in ways]
    yield ["right", "", "", *(str(sum(mark(one, way) == "right" for one in found)) for way in ways)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = script_parser("suggested", __doc__)
    parser.add_argument("--all", action="store_true", help="every bundled question, by full prefill alone")
    parser.add_argument("--also", action="append", default=[], metavar="QUESTION", help="asked by itself; repeatable")
    parser.add_argument("--serve", action="append", default=[], metavar="ARGUMENT", help="for the server; repeatable")
    options = parser.parse_args(arguments)
    questions = [json.loads(line) for line in QUESTIONS_PATH.read_text(encoding="utf-8").splitlines()]
    ways, found = ("first",) if options.all else WAYS, list[dict[str, Any]]()
    if not options.all:
        questions = [one for one in questions if one["suggested"] or one["question"] in options.also]
    with _server(options.serve) as server:
        for one in questions:
            found.append(
                {"question": one["question"], "suggested": one["suggested"]} | _by_itself(one, server, options.all)
            )
            print(one["question"], file=sys.stderr, flush=True)
        offered = [pair for pair in zip(questions, found, strict=True) if pair[0]["suggested"] and not options.all]
        for way, ratio in (("conversation", None), ("conversation_full", 1.0)):
            turns = server.converse([one["question"] for one, _ in offered], ratio)
            for (one, row), got in zip(offered, turns, strict=True):
                row[way] = _judged(one, got)
    print(table(["question", "found", "tokens", *ways], list(_rows(found, ways))))
    print(json.dumps({"machine": machine("cpu"), "questions": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
