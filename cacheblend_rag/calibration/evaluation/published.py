"""Records of published data sets, each turned into an `EvalCase`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from cacheblend_rag.calibration.evaluation.cases import EvalCase, Passage

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
    aliases = list_of(record, "answer_aliases", str) if "answer_aliases" in record else []
    name = text_of(record, "id", "")
    answers = (text_of(record, "answer"), *aliases)
    return EvalCase(name, text_of(record, "question"), answers, tuple(passages), name.split("__")[0])


def parse_multihop(record: Mapping[str, Any]) -> EvalCase:
    """A record of 2WikiMultihopQA or HotpotQA (distractor), as published or as the hub's copies have it."""
    context, facts = record.get("context"), record.get("supporting_facts")
    if isinstance(context, dict):  # lists side by side
        sentences = "sentences" if "sentences" in context else "content"
        context = [
            list(pair) for pair in zip(list_of(context, "title", str), context.get(sentences) or (), strict=False)
        ]
    if isinstance(facts, dict):
        facts = [[title] for title in list_of(facts, "title", str)]
    if not isinstance(facts, list) or not all(isinstance(fact, list) and fact for fact in facts):
        raise Malformed("'supporting_facts' must hold pairs of a title and a number")
    titles = [fact[0] for fact in facts]
    passages = []
    for entry in context if isinstance(context, list) else ():
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and _are_texts(entry[1])):
            raise Malformed("'context' must hold pairs of a title and a list of sentences")
        title, texts = entry
        text = ("" if all(one[:1] == " " for one in texts[1:]) else " ").join(texts)
        passages.append(Passage(title, text.strip(), title in titles))
    if not passages:
        raise Malformed("'context' is empty")
    name = str(record.get("_id", record.get("id", "")))
    kind = text_of(record, "type", "")
    return EvalCase(name, text_of(record, "question"), (text_of(record, "answer"),), tuple(passages), kind)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


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
    if dataset.startswith("samsum"):
        task, pieces = "examples", _LONGBENCH_EXAMPLE.split(context)
    else:
        task, pieces = "qa" if question else "summary", _LONGBENCH_PASSAGE.split(context)
    passages = tuple(Passage("", piece.strip()) for piece in pieces if piece.strip())
    return EvalCase(str(record.get("_id", "")), question, tuple(answers), passages, dataset, task)
