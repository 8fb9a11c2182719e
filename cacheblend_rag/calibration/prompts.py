"""Prompts made of a user's own chunks, without labels: something to be asked, and KV computed as warming does it."""

from __future__ import annotations

import random
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

from langchain_core.documents import Document

from cacheblend_rag.calibration.datasets import EvalCase, load_cases
from cacheblend_rag.calibration.passages import ChatFrame, WordRanker, build_prompt, choose
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.contexts import ContextKV
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.prompt import Prompt, PromptTokenizer
from cacheblend_rag.prompt.chat import STUFF
from cacheblend_rag.prompt.contexts import CONTEXTS, contexts_beside

_KEPT = 8  # groups whose contexts' KV stays in memory
_NAME = re.compile(r"\b[A-Z][\w’'-]+(?: [A-Z][\w’'-]+)*")
_QUESTIONS = (
    "What is said about {a}?",
    "Who or what is {a}, and what happened?",
    "How are {a} and {b} connected?",
    "What do the passages say about {a} and about {b}?",
    "Summarise in one sentence what is known about {a}.",
)


class Corpus:
    """A corpus whose chunks are computed behind contexts.

    Parameters
    ----------
    adapter : ModelAdapter
    tokenizer : PromptTokenizer
    chunks : sequence of str
        Those of a document one after another.
    count : int
        How many contexts each chunk has.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        tokenizer: PromptTokenizer,
        chunks: Sequence[str],
        count: int = CONTEXTS,
    ) -> None:
        self._adapter = adapter
        texts = list(dict.fromkeys(text.strip() for text in chunks))
        sizes = [len(tokenizer.chunk(text).ids) for text in texts]
        beside = contexts_beside(tokenizer, texts, sizes, count, adapter.context_window)
        self._contexts = dict(zip(texts, beside, strict=True))
        self._known: OrderedDict[str, ContextKV] = OrderedDict()
        # Rows that a prompt still holds, for other prompts with the same chunk.
        self._held: WeakValueDictionary[tuple[object, ...], SegmentKV] = WeakValueDictionary()

    def compute(self, text: str, before: tuple[int, ...], ids: tuple[int, ...], regime: int = 0) -> SegmentKV:
        """KV of a chunk of the corpus; see `ComputeKV`."""
        key = (text.strip(), before, ids, regime)
        if (held := self._held.get(key)) is None:
            held = self._held[key] = self._compute(*key)
        return held

    def _compute(self, text: str, before: tuple[int, ...], ids: tuple[int, ...], regime: int) -> SegmentKV:
        contexts = self._contexts[text]
        if contexts.digest not in self._known:
            self._known[contexts.digest] = ContextKV(self._adapter, contexts.ids)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(contexts.digest)
        kv = self._known[contexts.digest]
        return kv.segments_kv([(*before, *ids)], regime, [len(before)], [contexts.numbers_for(ids)])[0]


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
        beside = [place for place in (anchor - 1, anchor + 1) if _same_file(chunks, anchor, place)]
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
    """Prompts of a user's own questions, each with the chunks that share most words with it.

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


def case_prompts(data: str, count: int, per_prompt: int = 6, seed: int = 0, style: str = "paper") -> list[Prompt]:
    """Prompts of a file of questions, passages in random order; answers are not looked at.

    The style is one of `build_prompt`.

    Raises
    ------
    DatasetError
        If the file cannot be used.
    """
    return [build_prompt(case, style) for case in _drawn_cases(data, count, per_prompt, seed)]


def case_golds(data: str, count: int, per_prompt: int = 6, seed: int = 0) -> list[tuple[str, ...]]:
    """The right answers to the prompts that `case_prompts` makes of the same arguments."""
    return [case.answers for case in _drawn_cases(data, count, per_prompt, seed)]


def _drawn_cases(data: str, count: int, per_prompt: int, seed: int) -> list[EvalCase]:
    """Questions drawn by chance, each with the passages of its prompt."""
    cases = load_cases(data)
    random.Random(f"calibrate/{seed}").shuffle(cases)
    words = WordRanker(passage.chunk for case in cases for passage in case.passages)
    return [choose(case, per_prompt, order="random", ranker=words, seed=seed) for case in cases[:count]]


def frame_prompts(prompts: Sequence[Prompt], tokenizer: Any) -> list[Prompt]:
    """The prompts as a chat model is asked them: within its template, if the tokenizer has one."""
    if not getattr(tokenizer, "chat_template", None):
        return list(prompts)
    chat = ChatFrame(tokenizer)
    return [
        replace(prompt, prefix=chat.before + prompt.prefix, suffix=prompt.suffix + chat.after) for prompt in prompts
    ]


def _prompt(chunks: Sequence[str], question: str) -> Prompt:
    return Prompt(STUFF.prefix, chunks, STUFF.suffix.replace("{q}", question))


def _same_file(chunks: Sequence[Document], one: int, other: int) -> bool:
    inside = 0 <= other < len(chunks)
    return inside and chunks[one].metadata.get("source") == chunks[other].metadata.get("source")


def _subject(text: str, words: WordRanker, chooser: random.Random) -> str:
    """A name in a text, or else one of its rarest words."""
    inner = text[text.find(" ") + 1 :]  # the first word has a capital letter whatever it is
    names: list[str] = [name for name in dict.fromkeys(_NAME.findall(inner)) if len(name) > 3]
    if not names:
        names = sorted(set(re.findall(r"\w{4,}", text)) or {text[:20]})
    names.sort(key=lambda name: (-max(map(words.rarity, name.lower().split())), name))
    return chooser.choice(names[:5])
