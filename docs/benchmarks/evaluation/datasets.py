"""Questions with their passages: our own JSON lines, and the published files of six data sets."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from cacheblend_rag.config import check_whole
from cacheblend_rag.errors import ConfigError, DatasetError

_T = TypeVar("_T")
EXAMPLES = 20
"""Worked examples a dialogue of SAMSum may be given."""
_NEWS_SEPARATORS = re.compile(r"\s*(?:\|\|\|\|\||story_separator_special_tag)\s*")
_LONGBENCH_PASSAGE = re.compile(r"^Passage \d+:\n", re.MULTILINE)
_LONGBENCH_EXAMPLE = re.compile(r"^(?=Dialogue:)", re.MULTILINE)
_SHOWN = 5


@dataclass(frozen=True)
class Passage:
    """A text that may stand in the prompt.

    Parameters
    ----------
    title, text : str
    support : bool
        Whether the answer needs it, as far as the data set says.
    """

    title: str
    text: str
    support: bool = False

    @property
    def chunk(self) -> str:
        """The chunk it becomes."""
        return f"{self.title}\n{self.text}" if self.title else self.text


@dataclass(frozen=True)
class EvalCase:
    """A question.

    Parameters
    ----------
    id : str
    question : str
        Empty where the task asks for a summary of all passages.
    answers : tuple of str
        Gold answers; the first is the one whose tokens are looked at.
    passages : tuple of Passage
        The prompt's chunks are chosen from these.
    kind : str
        Question kind, for results by kind; may be empty.
    task : {"qa", "summary", "examples"}
        A question to answer, passages to summarise, or worked examples before another of their kind.
    group : str
        Set of documents the question is about; questions of one set are not independent.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Passage, ...]
    kind: str = ""
    task: str = "qa"
    group: str = ""


Cases = Callable[[int], Sequence[EvalCase]]
"""Gives questions for prompts of so many chunks, each with at least as many passages where there are so many."""


def digest(cases: Iterable[EvalCase]) -> str:
    """Identity of some cases and their order: another file is another run."""
    hasher = hashlib.sha256()
    for case in cases:
        hasher.update(json.dumps(asdict(case), sort_keys=True).encode())
        hasher.update(b"\n")
    return hasher.hexdigest()[:16]


class _Malformed(Exception):  # noqa: N818
    """A record that cannot be used, and why; it never leaves the loaders."""


def text_of(record: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """A text of a record; without a default it must be there and not be empty."""
    found = record.get(key, default)
    if found is None:
        raise _Malformed(f"{key!r} is missing")
    if not isinstance(found, str):
        raise _Malformed(f"{key!r} is a {type(found).__name__}, not a text")
    if default is None and not found.strip():
        raise _Malformed(f"{key!r} is empty")
    return found


def _list_of(record: Mapping[str, Any], key: str, kind: type[_T]) -> list[_T]:
    """A list of a record, all of one type."""
    found = record.get(key)
    if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
        raise _Malformed(f"{key!r} must be a list of {'objects' if kind is dict else 'texts'}")
    return found


def _parse_musique(record: Mapping[str, Any]) -> EvalCase:
    """A line of ``musique_ans_v1.0_*.jsonl``; the kind is the number of hops, from the id."""
    passages = []
    for found in _list_of(record, "paragraphs", dict):
        text = text_of(found, "paragraph_text")
        passages.append(Passage(text_of(found, "title", ""), text, bool(found.get("is_supporting"))))
    aliases = _list_of(record, "answer_aliases", str) if "answer_aliases" in record else []
    name = text_of(record, "id", "")
    answers = (text_of(record, "answer"), *aliases)
    return EvalCase(name, text_of(record, "question"), answers, tuple(passages), name.split("__")[0])


def _parse_multihop(record: Mapping[str, Any]) -> EvalCase:
    """A record of 2WikiMultihopQA or HotpotQA (distractor), as published or as the hub's copies have it."""
    context, facts = record.get("context"), record.get("supporting_facts")
    if isinstance(context, dict):  # lists side by side
        sentences = "sentences" if "sentences" in context else "content"
        context = [
            list(pair) for pair in zip(_list_of(context, "title", str), context.get(sentences) or (), strict=False)
        ]
    if isinstance(facts, dict):
        facts = [[title] for title in _list_of(facts, "title", str)]
    if not isinstance(facts, list) or not all(isinstance(fact, list) and fact for fact in facts):
        raise _Malformed("'supporting_facts' must hold pairs of a title and a number")
    titles = [fact[0] for fact in facts]
    passages = []
    for entry in context if isinstance(context, list) else ():
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and _are_texts(entry[1])):
            raise _Malformed("'context' must hold pairs of a title and a list of sentences")
        title, texts = entry
        text = ("" if all(one[:1] == " " for one in texts[1:]) else " ").join(texts)
        passages.append(Passage(title, text.strip(), title in titles))
    if not passages:
        raise _Malformed("'context' is empty")
    name = str(record.get("_id", record.get("id", "")))
    kind = text_of(record, "type", "")
    return EvalCase(name, text_of(record, "question"), (text_of(record, "answer"),), tuple(passages), kind)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _parse_samsum(record: Mapping[str, Any]) -> EvalCase:
    """A dialogue with its summary; the passages, worked examples, come from the rest of the file."""
    dialogue = text_of(record, "dialogue").replace("\r\n", "\n")
    question = f"Dialogue: {dialogue}\nSummary:"
    return EvalCase(str(record.get("id", "")), question, (text_of(record, "summary"),), (), "", "examples")


def _with_examples(cases: list[EvalCase]) -> list[EvalCase]:
    """Give each case without passages the ones after it, with their answers, as worked examples."""
    if not any(case.task == "examples" and not case.passages for case in cases):
        return cases
    examples = [Passage("", f"{case.question} {case.answers[0]}") for case in cases]
    found = []
    for number, case in enumerate(cases):
        after = (examples[number + 1 :] + examples[:number])[:EXAMPLES]
        found.append(dataclasses.replace(case, passages=tuple(after)) if not case.passages else case)
    return found


def _parse_multinews(record: Mapping[str, Any]) -> EvalCase:
    """Several news articles in one text, and the summary of them all."""
    documents = _NEWS_SEPARATORS.split(text_of(record, "document").replace("NEWLINE_CHAR", "\n"))
    passages = tuple(Passage("", text.strip()) for text in documents if text.strip())
    summary = text_of(record, "summary").lstrip("–- ")
    return EvalCase(str(record.get("id", "")), "", (summary,), passages, "", "summary")


def _parse_longbench(record: Mapping[str, Any]) -> EvalCase:
    """A line of LongBench: its multi-document tasks, SAMSum, MultiNews, or any other as one passage."""
    context, answers = text_of(record, "context"), _list_of(record, "answers", str)
    if not answers:
        raise _Malformed("'answers' is empty")
    dataset = text_of(record, "dataset")
    question = text_of(record, "input", "").strip()
    if dataset.startswith("samsum"):
        task, pieces = "examples", _LONGBENCH_EXAMPLE.split(context)
    else:
        task, pieces = "qa" if question else "summary", _LONGBENCH_PASSAGE.split(context)
    passages = tuple(Passage("", piece.strip()) for piece in pieces if piece.strip())
    return EvalCase(str(record.get("_id", "")), question, tuple(answers), passages, dataset, task)


def _parse_own(record: Mapping[str, Any]) -> EvalCase:
    """Our schema: ``id``, ``question``, ``answers``, ``passages`` of ``title``, ``text``, ``support``.

    ``kind``, ``task`` and ``group`` may be given too.
    """
    answers = _list_of(record, "answers", str)
    if not answers or not all(answer.strip() for answer in answers):
        raise _Malformed("'answers' must have at least one text, and none that is empty")
    passages = []
    for number, found in enumerate(_list_of(record, "passages", dict)):
        support = found.get("support", False)
        if not isinstance(support, bool):
            raise _Malformed(f"'support' of passage {number} must be true or false")
        passages.append(Passage(text_of(found, "title", ""), text_of(found, "text"), support))
    task = text_of(record, "task", "qa")
    if not passages:
        raise _Malformed("'passages' is empty")
    question = text_of(record, "question", "" if task == "summary" else None)
    kind, group = text_of(record, "kind", ""), text_of(record, "group", "")
    return EvalCase(str(record.get("id", "")), question, tuple(answers), tuple(passages), kind, task, group)


# By name: keys a record of it has, and what reads one.
FORMATS: dict[str, tuple[frozenset[str], Callable[[Mapping[str, Any]], EvalCase]]] = {
    "own": (frozenset({"question", "answers", "passages"}), _parse_own),
    "musique": (frozenset({"question", "answer", "paragraphs"}), _parse_musique),
    "hotpotqa": (frozenset({"question", "answer", "context", "supporting_facts", "level"}), _parse_multihop),
    "2wikimqa": (frozenset({"question", "answer", "context", "supporting_facts"}), _parse_multihop),
    "longbench": (frozenset({"input", "context", "answers", "dataset"}), _parse_longbench),
    "samsum": (frozenset({"dialogue", "summary"}), _parse_samsum),
    "multinews": (frozenset({"document", "summary"}), _parse_multinews),
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
            if isinstance(record, _Malformed):
                raise record
            if not isinstance(record, dict):
                raise _Malformed(f"a {type(record).__name__} where an object is wanted")
            parse = parse or FORMATS[_form_of(record) if form == "auto" else form][1]
            case = parse(record)
            cases.append(case if case.id else dataclasses.replace(case, id=f"{where} {number}"))
        except _Malformed as error:
            wrong.append(f"{where} {number}: {error}")
    if wrong:
        more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise DatasetError(f"{str(path)!r} cannot be used:\n  " + "\n  ".join(wrong[:_SHOWN]) + more)
    if not cases:
        raise DatasetError(f"{str(path)!r} has no questions")
    _refuse_repeated(path, cases)
    return _with_examples(cases)[:limit]


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
    raise _Malformed(f"keys {', '.join(sorted(map(str, record)))} are those of no known format ({known})")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{str(path)!r} cannot be read: {error}") from error


def _records(path: Path) -> tuple[str, Iterator[tuple[int, Any]]]:
    """The noun for a count, and numbered records."""
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
            yield number, _Malformed(f"not JSON: {error}")


def _two_files(path: Path) -> Iterator[tuple[int, Any]]:
    """MultiNews as published: one line of documents here, the line of the summary in the other file."""
    other = path.with_name(path.name.replace(".src", ".tgt"))
    documents, summaries = (_read(one).rstrip("\n").split("\n") for one in (path, other))
    if len(documents) != len(summaries):
        raise DatasetError(f"{str(path)!r} has {len(documents)} lines, {str(other)!r} {len(summaries)}")
    for number, (document, summary) in enumerate(zip(documents, summaries, strict=True), 1):
        yield number, {"document": document, "summary": summary}
