"""Files of questions: what is read, and what is refused with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.errors import DatasetError
from docs.benchmarks.evaluation.datasets import Passage, digest, load_cases
from tests.calibration.conftest import question, write_questions


def write(path: Path, *records: Any) -> Path:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_our_own_schema(tmp_path: Path) -> None:
    path = write_questions(tmp_path / "questions.jsonl", 3)
    cases = load_cases(path)
    assert [case.id for case in cases] == ["q0", "q1", "q2"]
    assert cases[1].answers[1] == "an owl"
    assert cases[1].kind == "b"
    assert cases[1].task == "qa"
    assert [passage.support for passage in cases[1].passages] == [True, True] + [False] * 6
    assert cases[1].passages[0].chunk == f"T1.0\n{question(1)['passages'][0]['text']}"
    assert load_cases(path, limit=2) == cases[:2]
    assert digest(cases) == digest(load_cases(path)) != digest(cases[:2])


def test_malformed_lines_are_refused_with_their_numbers(tmp_path: Path) -> None:
    good = question(0)
    path = write(
        tmp_path / "bad.jsonl",
        good,
        "{not json",
        "",
        {**question(1), "answers": []},
        {**question(2), "passages": [{"title": "no text"}]},
        {**question(3), "question": "  "},
        ["a list"],
    )
    with pytest.raises(DatasetError) as caught:
        load_cases(path)
    lines = str(caught.value).splitlines()
    assert "bad.jsonl" in lines[0]
    starts = [
        "line 2: not JSON",
        "line 4: 'answers'",
        "line 5: 'text' is missing",
        "line 6: 'question'",
        "line 7: a list",
    ]
    assert [line.strip()[: len(start)] for line, start in zip(lines[1:], starts, strict=True)] == starts


def test_musique(tmp_path: Path) -> None:
    record = {
        "id": "2hop__1_2",
        "paragraphs": [
            {"idx": 0, "title": "Owls", "paragraph_text": "An owl watched.", "is_supporting": True},
            {"idx": 1, "title": "Oaks", "paragraph_text": "An oak fell.", "is_supporting": False},
        ],
        "question": "Who watched?",
        "answer": "an owl",
        "answer_aliases": ["the owl"],
        "answerable": True,
    }
    (case,) = load_cases(write(tmp_path / "musique_ans_v1.0_dev.jsonl", record))
    assert (case.kind, case.answers) == ("2hop", ("an owl", "the owl"))
    assert case.passages == (Passage("Owls", "An owl watched.", True), Passage("Oaks", "An oak fell.", False))
    with pytest.raises(DatasetError, match="line 1: 'paragraph_text'"):
        load_cases(write(tmp_path / "bad.jsonl", {**record, "paragraphs": [{"title": "Owls"}]}))


HOTPOT = {
    "_id": "h1",
    "question": "Who watched?",
    "answer": "an owl",
    "type": "bridge",
    "level": "hard",
    "supporting_facts": [["Owls", 0]],
    "context": [["Owls", ["An owl watched.", " It was grey."]], ["Oaks", ["An oak fell."]]],
}
HUB = {
    **{key: value for key, value in HOTPOT.items() if key != "_id"},
    "id": "h1",
    "supporting_facts": {"title": ["Owls"], "sent_id": [0]},
    "context": {"title": ["Owls", "Oaks"], "sentences": [["An owl watched.", "It was grey."], ["An oak fell."]]},
}
WIKI = {key: value for key, value in HOTPOT.items() if key != "level"}


def test_hotpotqa_and_2wikimultihopqa(tmp_path: Path) -> None:
    for suffix, record in (("json", [HOTPOT]), ("jsonl", HUB), ("jsonl", WIKI)):
        (case,) = load_cases(write(tmp_path / f"dev.{suffix}", record))
        assert (case.id, case.kind, case.answers) == ("h1", "bridge", ("an owl",))
        assert case.passages == (
            Passage("Owls", "An owl watched. It was grey.", True),
            Passage("Oaks", "An oak fell.", False),
        )


def test_longbench(tmp_path: Path) -> None:
    common = {"answers": ["an owl"], "length": 9, "language": "en", "all_classes": None}
    passages = "Passage 1:\nOwls\nAn owl watched.\n\nPassage 2:\nOaks\nAn oak fell.\n"
    shots = "Dialogue: A: hi\nSummary: They greet.\nDialogue: B: bye\nSummary: They part."
    records = [
        {**common, "_id": "a", "dataset": "musique", "input": "Who watched?", "context": passages},
        {**common, "_id": "b", "dataset": "multi_news", "input": "", "context": passages},
        {**common, "_id": "c", "dataset": "samsum", "input": "Dialogue: C: so\nSummary: ", "context": shots},
    ]
    qa, news, chat = load_cases(write(tmp_path / "bench.jsonl", *records))
    assert [passage.text for passage in qa.passages] == ["Owls\nAn owl watched.", "Oaks\nAn oak fell."]
    assert (qa.task, qa.kind, news.task, chat.task) == ("qa", "musique", "summary", "examples")
    assert [passage.text for passage in chat.passages] == [
        "Dialogue: A: hi\nSummary: They greet.",
        "Dialogue: B: bye\nSummary: They part.",
    ]
    assert chat.question.endswith("Summary:")
