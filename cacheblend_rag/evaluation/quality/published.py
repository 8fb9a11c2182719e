"""Records of published data sets, each turned into an `EvalCase`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from cacheblend_rag.evaluation.quality.cases import EvalCase, Passage

__all__ = [
    "EXAMPLES",
    "Malformed",
    "list_of",
    "parse_longbench",
    "parse_multihop",
    "parse_multinews",
    "parse_musique",
    "parse_samsum",
    "text_of",
    "with_examples",
]

_T = TypeVar("_T")
EXAMPLES = 20
"""Worked examples a dialogue of SAMSum may be given."""
_NEWS_SEPARATORS = re.compile(r"\s*(?:\|\|\|\|\||story_separator_special_tag)\s*")
_LONGBENCH_PASSAGE = re.compile(r"^Passage \d+:\n", re.MULTILINE)
_LONGBENCH_EXAMPLE = re.compile(r"^(?=Dialogue:)", re.MULTILINE)


class Malformed(Exception):  # noqa: N818
    """A record that cannot be used, and why; it never leaves the loaders."""


def text_of(record: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """A text of a record; without a default it must be there and not be empty."""
    found = record.get(key, default)
    if found is None:
        raise Malformed(f"{key!r} is missing")
    if not isinstance(found, str):
        raise Malformed(f"{key!r} is a {type(found).__name__}, not a text")
    if default is None and not found.strip():
        raise Malformed(f"{key!r} is empty")
    return found


def list_of(record: Mapping[str, Any], key: str, kind: type[_T]) -> list[_T]:
    """A list of a record, all of one type."""
    found = record.get(key)
    if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
        raise Malformed(f"{key!r} must be a list of {'objects' if kind is dict else 'texts'}")
    return found


def parse_musique(record: Mapping[str, Any]) -> EvalCase:
    """A line of ``musique_ans_v1.0_*.jsonl``; the kind is the number of hops, from the id."""
    passages = []
    for found in list_of(record, "paragraphs", dict):
        text = text_of(found, "paragraph_text")
        passages.append(Passage(text_of(found, "title", ""), text, bool(found.get("is_supporting"))))
    answers = [text_of(record, "answer"), *list_of({"aliases": [], **_renamed(record)}, "aliases", str)]
    name = text_of(record, "id", "")
    return EvalCase(name, text_of(record, "question"), tuple(answers), tuple(passages), name.split("__")[0])


def _renamed(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"aliases": record["answer_aliases"]} if "answer_aliases" in record else {}


def parse_multihop(record: Mapping[str, Any]) -> EvalCase:
    """A record of 2WikiMultihopQA or HotpotQA (distractor), as published or as the hub's copies have it."""
    context, facts = record["context"], record["supporting_facts"]
    if isinstance(context, dict):  # lists side by side
        sentences = context.get("sentences", context.get("content"))
        context = list(zip(context.get("title", ()), sentences or (), strict=False))
    titles = facts.get("title", ()) if isinstance(facts, dict) else [fact[0] for fact in facts if fact]
    passages = []
    for entry in context if isinstance(context, list) else ():
        if len(entry) != 2 or not isinstance(entry[0], str) or not isinstance(entry[1], (list, tuple)):
            raise Malformed("'context' must hold pairs of a title and a list of sentences")
        text = "".join(map(str, entry[1])) if all(str(s)[:1] == " " for s in entry[1][1:]) else " ".join(entry[1])
        passages.append(Passage(entry[0], text.strip(), entry[0] in titles))
    if not passages:
        raise Malformed("'context' is empty")
    name = str(record.get("_id", record.get("id", "")))
    kind = text_of(record, "type", "")
    return EvalCase(name, text_of(record, "question"), (text_of(record, "answer"),), tuple(passages), kind)


def parse_samsum(record: Mapping[str, Any]) -> EvalCase:
    """A dialogue with its summary; the passages, worked examples, come from the rest of the file."""
    dialogue = text_of(record, "dialogue").replace("\r\n", "\n")
    question = f"Dialogue: {dialogue}\nSummary:"
    return EvalCase(str(record.get("id", "")), question, (text_of(record, "summary"),), (), "", "examples")


def with_examples(cases: list[EvalCase]) -> list[EvalCase]:
    """Give each case without passages the ones after it, with their answers, as worked examples."""
    if not any(case.task == "examples" and not case.passages for case in cases):
        return cases
    examples = [Passage("", f"{case.question} {case.answers[0]}") for case in cases]
    found = []
    for number, case in enumerate(cases):
        after = (examples[number + 1 :] + examples[:number])[:EXAMPLES]
        found.append(dataclasses.replace(case, passages=tuple(after)) if not case.passages else case)
    return found


def parse_multinews(record: Mapping[str, Any]) -> EvalCase:
    """Several news articles in one text, and the summary of them all."""
    documents = _NEWS_SEPARATORS.split(text_of(record, "document").replace("NEWLINE_CHAR", "\n"))
    passages = tuple(Passage("", text.strip()) for text in documents if text.strip())
    summary = text_of(record, "summary").lstrip("–- ")
    return EvalCase(str(record.get("id", "")), "", (summary,), passages, "", "summary")


def parse_longbench(record: Mapping[str, Any]) -> EvalCase:
    """A line of LongBench: its multi-document tasks, SAMSum, MultiNews, or any other as one passage."""
    context, answers = text_of(record, "context"), list_of(record, "answers", str)
    if not answers:
        raise Malformed("'answers' is empty")
    dataset = text_of(record, "dataset")
    question = text_of(record, "input", "").strip()
    task = "qa"
    if dataset.startswith("samsum"):
        task, pieces = "examples", _LONGBENCH_EXAMPLE.split(context)
    else:
        pieces = _LONGBENCH_PASSAGE.split(context)
        task = "summary" if not question else "qa"
    passages = tuple(Passage("", piece.strip()) for piece in pieces if piece.strip())
    return EvalCase(str(record.get("_id", "")), question, tuple(answers), passages, dataset, task)
