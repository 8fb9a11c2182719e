"""Read questions: our own JSON lines, and the published files of six data sets."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cacheblend_rag.calibration.evaluation.cases import EvalCase, Passage
from cacheblend_rag.calibration.evaluation.published import (
    Malformed,
    list_of,
    parse_longbench,
    parse_multihop,
    parse_multinews,
    parse_musique,
    parse_samsum,
    text_of,
    with_examples,
)
from cacheblend_rag.config import check_whole
from cacheblend_rag.errors import ConfigError, DatasetError

_SHOWN = 5


def parse_own(record: Mapping[str, Any]) -> EvalCase:
    """Our schema: ``id``, ``question``, ``answers``, ``passages`` of ``title``, ``text``, ``support``.

    ``kind``, ``task`` and ``group`` may be given too.
    """
    answers = list_of(record, "answers", str)
    if not answers or not all(answer.strip() for answer in answers):
        raise Malformed("'answers' must have at least one text, and none that is empty")
    passages = []
    for number, found in enumerate(list_of(record, "passages", dict)):
        support = found.get("support", False)
        if not isinstance(support, bool):
            raise Malformed(f"'support' of passage {number} must be true or false")
        passages.append(Passage(text_of(found, "title", ""), text_of(found, "text"), support))
    task = text_of(record, "task", "qa")
    if not passages:
        raise Malformed("'passages' is empty")
    question = text_of(record, "question", "" if task == "summary" else None)
    kind, group = text_of(record, "kind", ""), text_of(record, "group", "")
    return EvalCase(str(record.get("id", "")), question, tuple(answers), tuple(passages), kind, task, group)


# By name: keys a record of it has, and what reads one.
FORMATS: dict[str, tuple[frozenset[str], Callable[[Mapping[str, Any]], EvalCase]]] = {
    "own": (frozenset({"question", "answers", "passages"}), parse_own),
    "musique": (frozenset({"question", "answer", "paragraphs"}), parse_musique),
    "hotpotqa": (frozenset({"question", "answer", "context", "supporting_facts", "level"}), parse_multihop),
    "2wikimqa": (frozenset({"question", "answer", "context", "supporting_facts"}), parse_multihop),
    "longbench": (frozenset({"input", "context", "answers", "dataset"}), parse_longbench),
    "samsum": (frozenset({"dialogue", "summary"}), parse_samsum),
    "multinews": (frozenset({"document", "summary"}), parse_multinews),
}


def load_cases(path: str | os.PathLike[str], form: str = "auto", limit: int | None = None) -> list[EvalCase]:
    """Read a file of questions.

    Parameters
    ----------
    path : path
        JSON lines, a JSON list, or MultiNews' ``.src`` beside its ``.tgt``.
    form : str
        A key of `FORMATS`, or ``"auto"``: the first whose keys the first record has.
    limit : int, optional
        Only so many questions, from the beginning. The whole file is checked all the same.

    Raises
    ------
    DatasetError
        If the file cannot be read or has lines that cannot be used; the message has their numbers.
    ConfigError
        If the format is not known, or the limit is below 1.
    """
    path = Path(path)
    if limit is not None:
        check_whole("limit", limit, 1)
    if form != "auto" and form not in FORMATS:
        raise ConfigError("format", form, "use 'auto' or one of " + ", ".join(map(repr, FORMATS)))
    if path.suffix == ".src" or ".src." in path.name:
        where, records = "line", _two_files(path)
    else:
        where, records = _records(path)
    parse, cases, wrong = None, list[EvalCase](), list[str]()
    for number, record in records:
        try:
            if isinstance(record, Malformed):
                raise record
            if not isinstance(record, dict):
                raise Malformed(f"a {type(record).__name__} where an object is wanted")
            parse = parse or FORMATS[_form_of(record) if form == "auto" else form][1]
            case = parse(record)
            cases.append(case if case.id else dataclasses.replace(case, id=f"{where} {number}"))
        except Malformed as error:
            wrong.append(f"{where} {number}: {error}")
    if wrong:
        more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise DatasetError(f"{str(path)!r} cannot be used:\n  " + "\n  ".join(wrong[:_SHOWN]) + more)
    if not cases:
        raise DatasetError(f"{str(path)!r} has no questions")
    _refuse_repeated(path, cases)
    return with_examples(cases)[:limit]


def _refuse_repeated(path: Path, cases: list[EvalCase]) -> None:
    """Results are kept by id, so that an interrupted run can go on."""
    seen: set[str] = set()
    for number, case in enumerate(cases, 1):
        if case.id in seen:
            raise DatasetError(f"{str(path)!r}: question {number} has the id {case.id!r} of an earlier one")
        seen.add(case.id)


def _form_of(record: Mapping[str, Any]) -> str:
    for name, (keys, _) in FORMATS.items():
        if keys <= record.keys():
            return name
    known = "; ".join(f"{name}: {', '.join(sorted(keys))}" for name, (keys, _) in FORMATS.items())
    raise Malformed(f"keys {', '.join(sorted(map(str, record)))} are those of no known format ({known})")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{str(path)!r} cannot be read: {error}") from error


def _records(path: Path) -> tuple[str, Iterator[tuple[int, Any]]]:
    """What a number counts, and numbered records."""
    text = _read(path)
    if text.lstrip().startswith("["):
        try:
            return "record", iter(enumerate(json.loads(text), 1))
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{str(path)!r} is not JSON: {error}") from error
    return "line", _lines(text)


def _lines(text: str) -> Iterator[tuple[int, Any]]:
    # Not splitlines: a text may hold line separators of Unicode's.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            yield number, Malformed(f"not JSON: {error}")


def _two_files(path: Path) -> Iterator[tuple[int, Any]]:
    """MultiNews as published: one line of documents here, the line of the summary in the other file."""
    other = path.with_name(path.name.replace(".src", ".tgt"))
    documents, summaries = (_read(one).rstrip("\n").split("\n") for one in (path, other))
    if len(documents) != len(summaries):
        raise DatasetError(f"{str(path)!r} has {len(documents)} lines, {str(other)!r} {len(summaries)}")
    for number, (document, summary) in enumerate(zip(documents, summaries, strict=True), 1):
        yield number, {"document": document, "summary": summary}
