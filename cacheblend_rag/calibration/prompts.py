"""Prompts made of a user's own chunks, without labels, and of questions in a file."""

from __future__ import annotations

import json
import math
import os
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.errors import ConfigError, DatasetError
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.chat import STUFF, render_turns

if TYPE_CHECKING:
    from langchain_core.documents import Document

_NAME = re.compile(r"\b[A-Z][\w’'-]+(?: [A-Z][\w’'-]+)*")
_WORD = re.compile(r"\w+")
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
_QUESTIONS = (
    "What is said about {a}?",
    "Who or what is {a}, and what happened?",
    "How are {a} and {b} connected?",
    "What do the passages say about {a} and about {b}?",
    "Summarise in one sentence what is known about {a}.",
)


def chunk_prompts(chunks: Sequence[Document], count: int, per_prompt: int = 6, seed: int = 0) -> list[Prompt]:
    """Prompts that ask about names in chunks, next to other chunks in random order.

    Chunks that follow one another in a document stand in the same prompt where there are any, since
    what refers to another chunk most often refers to a neighbour.

    Parameters
    ----------
    chunks : sequence of Document
        As the index splits them, in the order of the files.
    count : int
        Prompts wanted.
    per_prompt : int
        Chunks in each, as far as there are so many.
    seed : int

    Raises
    ------
    ConfigError
        If there are fewer than two chunks.
    """
    if len(chunks) < 2:
        raise ConfigError("docs", f"{len(chunks)} chunks", "use documents of at least two chunks")
    chooser = random.Random(f"calibrate/{seed}")
    texts = [chunk.page_content for chunk in chunks]
    words = WordRanker(texts)
    anchors = [
        place for _ in range(-(-count // len(chunks))) for place in chooser.sample(range(len(chunks)), len(chunks))
    ]
    found = []
    for anchor in anchors[:count]:
        beside = [place for place in (anchor - 1, anchor + 1) if 0 <= place < len(chunks)]
        file = chunks[anchor].metadata.get("source")
        beside = [place for place in beside if chunks[place].metadata.get("source") == file]
        rest = [place for place in range(len(chunks)) if place != anchor and place not in beside]
        others = [*beside, *chooser.sample(rest, min(len(rest), max(0, per_prompt - 1 - len(beside))))]
        places = [anchor, *others][:per_prompt]
        question = chooser.choice(_QUESTIONS).format(
            a=_subject(texts[anchor], words, chooser), b=_subject(texts[places[1]], words, chooser)
        )
        chooser.shuffle(places)
        found.append(_prompt([texts[place] for place in places], question))
    return found


def question_prompts(chunks: Sequence[Document], questions: Sequence[str], per_prompt: int = 6) -> list[Prompt]:
    """Prompts of a user's own questions, each with the chunks that share the most words with it.

    Raises
    ------
    ConfigError
        If there are no questions or no chunks.
    """
    queries = [question.strip() for question in questions if question.strip()]
    if not queries or not chunks:
        raise ConfigError("questions", list(questions)[:3], "use at least one question and one chunk")
    texts = [chunk.page_content for chunk in chunks]
    words = WordRanker(texts)
    return [_prompt([texts[place] for place in words.rank(one, texts)[:per_prompt]], one) for one in queries]


@dataclass(frozen=True)
class Question:
    """A question of a file.

    Parameters
    ----------
    question : str
    passages : tuple of str
        The prompt's chunks are chosen from these.
    answers : tuple of str
        The right answers.
    """

    question: str
    passages: tuple[str, ...]
    answers: tuple[str, ...]


def read_questions(path: str | os.PathLike[str]) -> list[Question]:
    """Questions of a file of JSON lines: ``question``, ``passages`` with ``title`` and ``text``, and ``answers``.

    A passage may lack its title. Other keys are not looked at.

    Raises
    ------
    DatasetError
        If the file cannot be read, has no questions, or has a line that cannot be used; the message has its number.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{str(path)!r} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(_question(json.loads(line)))
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
            form = '{"question": "…", "passages": [{"title": "…", "text": "…"}, …], "answers": ["…", …]}'
            raise DatasetError(f"line {number} of {str(path)!r} cannot be used; write it as {form}") from error
    if not found:
        raise DatasetError(f"{str(path)!r} has no questions")
    return found


def _question(record: Any) -> Question:
    """A question of a line; one of several errors if it is none."""
    question, answers = record["question"].strip(), tuple(one.strip() for one in record["answers"])
    passages = [(one.get("title", "").strip(), one["text"].strip()) for one in record["passages"]]
    if isinstance(record["answers"], str) or not (question and answers and all(answers) and passages):
        raise ValueError(question)
    return Question(question, tuple(f"{title}\n{text}" if title else text for title, text in passages), answers)


def file_prompts(
    path: str | os.PathLike[str], count: int, per_prompt: int = 6, seed: int = 0
) -> tuple[list[Prompt], list[tuple[str, ...]]]:
    """Prompts of questions of a file drawn by chance, each with its nearest passages in random order, and the answers.

    Raises
    ------
    DatasetError
        If the file cannot be used.
    """
    questions, chooser = read_questions(path), random.Random(f"calibrate/{seed}")
    chooser.shuffle(questions)
    words, prompts = WordRanker(text for one in questions for text in one.passages), []
    for one in questions[:count]:
        places = words.rank(one.question, one.passages)[:per_prompt]
        chooser.shuffle(places)
        prompts.append(_prompt([one.passages[place] for place in places], one.question))
    return prompts, [one.answers for one in questions[:count]]


class WordRanker:
    """Ranks passages by the words that they share with the question, weighted by rarity; needs no model.

    Parameters
    ----------
    texts : iterable of str
        All passages, by which a word is rare or not.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts, self._in = 0, Counter[str]()
        for text in texts:
            self._texts += 1
            self._in.update(set(_words(text)))

    def rank(self, question: str, texts: Sequence[str]) -> list[int]:
        """Numbers of the texts, nearest to the question first."""
        wanted = set(_words(question))
        scores = [sum(map(self.rarity, wanted & set(_words(text)))) for text in texts]
        return sorted(range(len(texts)), key=lambda number: -scores[number])

    def rarity(self, word: str) -> float:
        """Weight of a word: the logarithm of the number of passages divided by the number that contain it."""
        return math.log((self._texts + 1) / (self._in[word] + 0.5))


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


class ChatFrame:
    """Text of a chat template before and after the user's message.

    Parameters
    ----------
    tokenizer : transformers tokenizer

    Raises
    ------
    ConfigError
        If it has no chat template, or one that does not give the text back.
    PromptError
        If that template refuses a single question.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("chat", True, "leave it out; this tokenizer has no chat template")
        said = [{"role": "user", "content": _MARK}]
        text = render_turns(tokenizer, said)
        if text.count(_MARK) != 1:
            raise ConfigError("chat", True, "leave it out; this tokenizer's chat template does not repeat the text")
        self.before, self.after = text.split(_MARK)


def frame_prompts(prompts: Sequence[Prompt], tokenizer: Any) -> list[Prompt]:
    """The prompts within the model's chat template, if the tokenizer has one."""
    if not getattr(tokenizer, "chat_template", None):
        return list(prompts)
    chat = ChatFrame(tokenizer)
    return [
        replace(prompt, prefix=chat.before + prompt.prefix, suffix=prompt.suffix + chat.after) for prompt in prompts
    ]


def _prompt(chunks: Sequence[str], question: str) -> Prompt:
    return Prompt(STUFF.prefix, chunks, STUFF.suffix.replace("{q}", question))


def _subject(text: str, words: WordRanker, chooser: random.Random) -> str:
    """A name in a text, or else one of its rarest words."""
    inner = text[text.find(" ") + 1 :]  # the first word has a capital letter whatever it is
    names: list[str] = [name for name in dict.fromkeys(_NAME.findall(inner)) if len(name) > 3]
    if not names:
        names = sorted(set(re.findall(r"\w{4,}", text)) or {text[:20]})
    names.sort(key=lambda name: (-max(map(words.rarity, name.lower().split())), name))
    return chooser.choice(names[:5])
