"""How far blended answers are from full prefill's on real text: conditions and rules, and the noise that users accept.

``python -m docs.benchmarks.scripts.yardstick run --data squad.jsonl --half test --out runs/squad.jsonl``

Each prompt is prefilled in full, and answers greedily. Each method then fuses the same prompt and is held against that
answer, token by token. A method is written ``condition/rule@ratio``, such as ``context/boundary@0.1``:

- ``sink``: a chunk is computed behind what opens a text;
- ``prefix``: behind the prompt's own prefix;
- ``plain``: behind passages about nothing in particular;
- ``context``, ``context1``: behind two stretches, or one, of the chunks next to it in the corpus;
- ``learned``, ``learned1``, ``learned0``: behind two of these, one or none, and what ``cacheblend-rag adapt`` learned;
- ``together``: behind two stretches of the chunks of its own prompt, in another order;
- ``variant``: behind what stood before it in the prompt of another question, the best-fitting one of the same half;
- ``fitting``: the same, where it has half of what stands before the chunk; ``both``: the mean over it and ``context``.

``context+int8`` and the like reads the chunks from records that a codec wrote.

``--noise`` adds what changes an answer without any blending: other separators, another order, a passage left out,
weights of 8 bits, ``int8_prefill``, another element type. With ``--int8-prefill`` methods multiply so, and are held
against full prefill that does not. Methods named by ``--answers`` also write their own answers, and so does full
prefill under each noise. ``--only-right`` measures only prompts that full prefill answers rightly, and passes over the
others. Runs over parts of the prompts (``--part 0/2``) may be made side by side; ``show`` joins them: a table, its
JSON, and a plot.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.calibration.comparison import shared_cache
from cacheblend_rag.calibration.datasets import EvalCase, Passage, load_cases
from cacheblend_rag.calibration.passages import ChatFrame, build_prompt
from cacheblend_rag.calibration.prompts import Corpus
from cacheblend_rag.calibration.statistics import interval
from cacheblend_rag.calibration.trials import ComputeKV, PreparedPrompt
from cacheblend_rag.config import DTYPES, LEAST_RATIO
from cacheblend_rag.engine.decode import end_ids_of
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.selection import RULES, SelectionRule
from cacheblend_rag.fusor.teacher_forcing import answer_log_probs, greedy_answer, kl_divergence
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.contexts import ContextKV, LearnedContext
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.prompt import Prompt, PromptTokenizer
from cacheblend_rag.prompt.contexts import Contexts
from cacheblend_rag.store.base import KVRecord
from cacheblend_rag.store.learned import kept_context
from cacheblend_rag.store.record import RecordFormat, as_written
from docs.benchmarks.evaluation.answers import GreedyAnswers
from docs.benchmarks.evaluation.methods import rule_of
from docs.benchmarks.scripts.common import script_parser, write_json
from docs.benchmarks.scripts.plots import pyplot_for, save_figure
from docs.benchmarks.scripts.variants import Variants

__all__ = ["Conditions", "Yardstick", "main", "parse_method"]

NOISE = ("separator", "order", "one passage less", "8-bit weights", "int8 prefill", "bfloat16", "float32")
_ANSWER_TOKENS = 32
_KEPT_CHUNKS = 256  # of each condition, in memory
_KEYS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "jasper", "kestrel", "lagoon")


# Prompts ---------------------------------------------------------------------------------------


def open_cases(path: str) -> list[EvalCase]:
    """Questions of a file; of one of texts without questions, such as country articles, questions that are made."""
    first = json.loads(Path(path).read_text(encoding="utf-8").split("\n", 1)[0])
    return load_cases(path) if "question" in first else _country_cases(path)


def _country_cases(path: str) -> list[EvalCase]:
    """Articles cut so that one chunk has the name and the next ones say "the country", and numbers to be found."""
    articles: dict[str, list[dict[str, str]]] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        articles.setdefault(entry["title"], []).append(entry)
    found = []
    titles = sorted(title for title, parts in articles.items() if len(parts) > 3)
    for number, title in enumerate(titles):
        chooser = random.Random(title)
        own = articles[title]
        about = chooser.choice(own[1:])
        text = re.sub(rf"\b{re.escape(title)}('s)?\b", lambda m: "the country" + (m[1] or ""), about["text"])
        passages = [
            Passage("", f"{title}. The sections that follow describe the country. {_words(own[0]['text'], 45)}", True),
            Passage("", f"{about['section']} of the country. {_words(text, 90)}", True),
        ]
        for other in chooser.sample(titles, 6):
            part = chooser.choice(articles[other][1:])
            passages.append(Passage("", f"{other}, {part['section']}. {_words(part['text'], 90)}"))
        question = f"What do the passages say about the {about['section'].lower()} of {title}?"
        found.append(EvalCase(f"country-{number}", question, (title,), tuple(passages), "country", group=title))
    return found


def keys_cases(count: int) -> list[EvalCase]:
    """Numbers to be found among others like them (as RULER's retrieval with several keys, arXiv 2404.06654)."""
    found = []
    for number in range(count):
        chooser = random.Random(f"keys/{number}")
        names = chooser.sample(_KEYS, len(_KEYS))
        values = {name: str(chooser.randrange(1000, 9999)) for name in names}
        passages = []
        for at in range(6):
            pair = names[2 * at : 2 * at + 2]
            said = " ".join(f"The number of the {name} room is {values[name]}." for name in pair)
            passages.append(Passage("", f"On floor {at + 1} there are two rooms, and a corridor between them. {said}"))
        asked = chooser.choice(names)
        question = f"What is the number of the {asked} room?"
        found.append(EvalCase(f"keys-{number}", question, (values[asked],), tuple(passages), "keys"))
    return found


def _words(text: str, count: int) -> str:
    return " ".join(text.split()[:count])


def of_half(cases: Sequence[EvalCase], half: str) -> list[EvalCase]:
    """The questions of a half, by what they are about, so that no text is in both."""
    if half == "all":
        return list(cases)
    wanted = {"dev": 0, "test": 1}[half]
    return [case for case in cases if hashlib.md5((case.group or case.id).encode()).digest()[0] % 2 == wanted]


def in_prompt(case: EvalCase, chunks: int, order: str = "0") -> EvalCase:
    """A question with the passages of its prompt, those it needs among them, in random order."""
    needed = sorted(case.passages, key=lambda passage: not passage.support)[:chunks]
    random.Random(f"{order}/{case.id}").shuffle(needed)
    return replace(case, passages=tuple(needed))


def another_order(passages: Sequence[Passage], seed: str) -> tuple[Passage, ...]:
    """The same passages in a random order that is not the given one, if there is another."""
    chooser, found = random.Random(seed), list(passages)
    chooser.shuffle(found)
    while found == list(passages) and any(one != found[0] for one in found):
        chooser.shuffle(found)
    return tuple(found)


class Conditions:
    """The corpus that computes the chunks of a prompt, by the name of a condition.

    Parameters
    ----------
    adapter : ModelAdapter
    tokenizer : PromptTokenizer
    corpus : sequence of str
        All chunks; those of a document one after another.
    learned : LearnedContext, optional
        What the model was adapted to.
    earlier : sequence of Prompt
        Prompts that left variants of their chunks.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        tokenizer: PromptTokenizer,
        corpus: Sequence[str],
        learned: LearnedContext | None = None,
        earlier: Sequence[Prompt] = (),
    ) -> None:
        self._adapter, self._tokenizer, self._learned = adapter, tokenizer, learned
        self._variants = Variants(adapter, tokenizer, earlier)
        self._texts = corpus
        self._kept: dict[str, ComputeKV] = {}

    def compute(self, condition: str, prompt: Prompt) -> ComputeKV | None:
        """For the chunks of a prompt; None where they are computed behind what opens a text.

        What does not depend on the prompt is kept for other prompts with the same chunks.
        """
        condition, _, codec = condition.partition("+")
        if codec:
            computed = self.compute(condition, prompt) or self._alone
            return lambda *chunk: _coded(computed(*chunk), codec)
        if condition == "sink":
            return None
        if condition == "prefix":
            tokens = self._tokenizer.tokenize(prompt)
            return _behind(ContextKV(self._adapter, [tokens.ids(tokens.prefix)]))
        if condition == "together":
            return Corpus(self._adapter, self._tokenizer, prompt.chunks, 2).compute
        if condition in ("variant", "fitting", "both"):
            least = 0.5 if condition == "fitting" else 0.0
            return self._variants.compute(prompt, self._of("context"), condition == "both", least)
        return self._of(condition)

    def _of(self, condition: str) -> ComputeKV:
        """What does not depend on the prompt."""
        if condition not in self._kept:
            self._kept[condition] = lru_cache(_KEPT_CHUNKS)(self._of_corpus(condition))
        return self._kept[condition]

    def _alone(self, text: str, before: tuple[int, ...], ids: tuple[int, ...], regime: int) -> SegmentKV:
        return self._adapter.segment_kv(before, ids, regime)

    def _of_corpus(self, condition: str) -> ComputeKV:
        if condition == "plain":
            return _behind(ContextKV(self._adapter, Contexts(self._tokenizer, (), 2).ids))
        match = re.fullmatch("(context|learned)([0-2]?)", condition)
        if match is None or condition == "context0":
            names = "'sink', 'prefix', 'plain', 'context', 'context1', 'learned', 'learned1', 'learned0', 'together'"
            names += ", 'variant', 'fitting', 'both'"
            raise ConfigError("condition", condition, f"use {names}")
        learned = self._learned if match[1] == "learned" else None
        if learned is None and match[1] == "learned":
            raise ConfigError("condition", condition, "name the folder given to `cacheblend-rag adapt` with --data-dir")
        return Corpus(self._adapter, self._tokenizer, self._texts, int(match[2] or 2), learned).compute


def _behind(contexts: ContextKV) -> ComputeKV:
    """Chunks behind all of some contexts."""
    return lambda text, before, ids, regime: contexts.segments_kv([(*before, *ids)], regime, [len(before)])[0]


def _coded(kv: SegmentKV, name: str) -> SegmentKV:
    """KV as it is read from a record that a codec wrote."""
    record = KVRecord.describe(kv, fingerprint="", context_ids=(), token_ids=range(kv.keys[0].shape[1]))
    return as_written(record, RecordFormat(name)).kv


# Methods ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Method:
    name: str
    condition: str
    rule: SelectionRule


def parse_method(text: str) -> _Method:
    """``condition/rule@ratio``, a rule with options as ``hkvd:check_layers=2``."""
    match = re.fullmatch(r"(\w+(?:\+\w+)?)/(\w+)((?::\w+=[\w.+-]+)*)(?:@([\d.]+))?", text)
    if match is None or match[2] not in RULES:
        raise ConfigError("methods", text, "write condition/rule@ratio, such as context/boundary@0.1")
    ratio = float(match[4]) if match[4] else LEAST_RATIO
    return _Method(text, match[1], rule_of(match[2] + match[3], ratio))


@dataclass(frozen=True)
class FullAnswer:
    """Full prefill's result for a prompt.

    Parameters
    ----------
    ids : sequence of int
        The prompt.
    cache : transformers Cache
        KV of the prompt alone.
    logits : Tensor, [vocab]
        Of its last position.
    answer : list of int
        The greedy answer.
    rows : Tensor, [answer tokens, vocab]
        Log-probabilities where each token of the answer stands.
    text : str
        The answer.
    """

    ids: Sequence[int]
    cache: Any
    logits: torch.Tensor
    answer: list[int]
    rows: torch.Tensor
    text: str


class Yardstick:
    """Holds methods against full prefill, prompt by prompt.

    Parameters
    ----------
    engine : BlendEngine
    cases : sequence of EvalCase
        All of the file.
    methods : sequence of str
    chunks : int
        Passages of each prompt.
    answers : sequence of str
        Methods whose own answers are written too.
    noise : sequence of str
        Of `NOISE`, what is measured of what users accept anyway. Where answers are written, so are those
        to other prompts.
    only_right : bool
        Whether only prompts are measured that full prefill answers rightly.
    corpus : sequence of str, optional
        All chunks, those of a document one after another; by default the passages of the questions.
    earlier : sequence of EvalCase
        Questions that were asked before, for the conditions that take KV from their prompts.
    int8_prefill : bool
        Whether methods multiply in 8 bits. Full prefill never does.
    """

    def __init__(
        self,
        engine: BlendEngine,
        cases: Sequence[EvalCase],
        methods: Sequence[str],
        chunks: int = 6,
        answers: Sequence[str] = (),
        noise: Sequence[str] = (),
        only_right: bool = False,
        corpus: Sequence[str] | None = None,
        earlier: Sequence[EvalCase] = (),
        int8_prefill: bool = False,
    ) -> None:
        self._engine, self.adapter, self._chunks = engine, engine.adapter, chunks
        self._answers, self._noise, self._only_right = answers, noise, only_right
        self.tokenizer = PromptTokenizer(engine.tokenizer, engine.config.separator)
        self._chat = ChatFrame(engine.tokenizer) if engine.tokenizer.chat_template else None
        self._methods = [parse_method(name) for name in methods]
        texts = corpus or [passage.chunk for case in cases for passage in case.passages]
        before = [self.prompt(in_prompt(case, chunks)) for case in earlier]
        self._conditions = Conditions(self.adapter, self.tokenizer, texts, engine.learned, before)
        self.end_ids = end_ids_of(engine.model.generation_config, engine.tokenizer)
        self._other_models: dict[str, Any] = {}
        in_int8 = engine.with_config(int8_prefill=True) if int8_prefill or "int8 prefill" in noise else engine
        self._in_int8: Callable[[], AbstractContextManager[None]] = in_int8.products
        self._multiplying = self._in_int8 if int8_prefill else nullcontext

    def prompt(self, case: EvalCase, between: str = "\n\n") -> Prompt:
        """The prompt that LangChain's ``RetrievalQA`` writes, in the model's chat template."""
        made = build_prompt(case, "stuff", self._chat)
        separator = made.prefix if made.prefix.endswith("\n\n") else made.prefix + "\n\n"
        count = max(0, len(made.chunks) - 1)
        return Prompt(separator, made.chunks, "\n\n" + made.suffix.lstrip("\n"), (between,) * count)

    def full_answer(self, prompt: Prompt, most: int = _ANSWER_TOKENS) -> FullAnswer:
        """Full prefill of a prompt, and what it answers greedily."""
        ids = self.tokenizer.tokenize(prompt).input_ids
        full = self.adapter.prefill(ids)
        prefilled = shared_cache(full.cache)  # the other grows by the answer
        answer, rows = greedy_answer(self.adapter, full.cache, full.logits, most, self.end_ids)
        text = self._engine.tokenizer.decode(answer, skip_special_tokens=True)
        return FullAnswer(ids, prefilled, full.logits, answer, rows, text)

    def prepared(self, condition: str, prompt: Prompt, compute: ComputeKV | None = None) -> PreparedPrompt:
        """A prompt whose chunks are computed as a condition says, or by what is given."""
        compute = compute or self._conditions.compute(condition, prompt)
        return PreparedPrompt(self.adapter, self.tokenizer, prompt, compute)

    def measure(self, case: EvalCase, order: str) -> dict[str, Any]:
        """The results of each method for a prompt."""
        asked = in_prompt(case, self._chunks, order)
        prompt = self.prompt(asked)
        full = self.full_answer(prompt)
        row: dict[str, Any] = {
            "id": f"{case.id}/{order}",
            "group": case.group or case.id,
            "tokens": len(full.ids),
            "answer": full.text,
            "right": is_right(full.text, case.answers),
        }
        if self._only_right and not row["right"]:
            return row
        gold = self._engine.tokenizer.encode(" " + case.answers[0], add_special_tokens=False)[:_ANSWER_TOKENS]
        gold_full = self._gold(shared_cache(full.cache), full.logits, gold)
        greedy = GreedyAnswers(self._engine, full.ids, _ANSWER_TOKENS)
        found: dict[str, Any] = {}
        for condition in dict.fromkeys(method.condition for method in self._methods):
            with self._multiplying():
                prepared = self.prepared(condition, prompt)
            for method in self._methods:
                if method.condition == condition:
                    with self._multiplying():
                        fused = prepared.fuse(method.rule)
                    cache = self.adapter.new_cache(fused.fusion.layers)
                    logits = fused.fusion.logits
                    gold_here = self._gold(shared_cache(cache), logits, gold)
                    held = answer_log_probs(self.adapter, shared_cache(cache), logits, full.answer)
                    found[method.name] = {
                        "work": round(fused.work, 5),
                        "kl": _short(kl_divergence(full.rows, held)),
                        "gold": round(gold_here - gold_full, 5),
                    }
                    if method.name in self._answers:
                        text = greedy.text(cache, logits, full.answer, held.argmax(dim=-1).tolist())
                        same = text.strip() == full.text.strip()
                        found[method.name] |= {"right": is_right(text, case.answers), "same": same}
        noises = list(self._noises(asked, full))
        said = {name: text for name, _, text in noises if text is not None}
        row |= {"methods": found, "noise": {name: kl for name, kl, _ in noises}}
        row["noise_right"] = {name: is_right(text, case.answers) for name, text in said.items()}
        return {**row, "noise_same": {name: text.strip() == full.text.strip() for name, text in said.items()}}

    def _gold(self, cache: Any, logits: torch.Tensor, gold: Sequence[int]) -> float:
        """Mean log-likelihood of the gold answer's tokens."""
        rows = answer_log_probs(self.adapter, cache, logits, gold)
        return float(rows[range(len(gold)), list(gold)].mean())

    def _noises(self, case: EvalCase, full: FullAnswer) -> Iterator[tuple[str, list[float], str | None]]:
        """How far full prefill moves from itself by what users accept anyway, and its answer then if it is wanted."""
        prompts = self._other_prompts(case)
        for name in self._noise:
            products = self._in_int8 if name == "int8 prefill" else nullcontext
            model = self._engine.model if name in prompts or name == "int8 prefill" else self._other_model(name)
            yield name, *self._moved(model, prompts.get(name) or self.prompt(case), full, products)

    def _moved(
        self, model: Any, prompt: Prompt, full: FullAnswer, products: Callable[[], AbstractContextManager[None]]
    ) -> tuple[list[float], str | None]:
        device = self.adapter.device
        ids = torch.tensor([self.tokenizer.tokenize(prompt).input_ids], device=device)
        with torch.no_grad():
            with products():
                cache = model(ids[:, :-1], logits_to_keep=1, use_cache=True).past_key_values
            last = torch.tensor([[int(ids[0, -1]), *full.answer[:-1]]], device=device)
            logits = model(last, past_key_values=shared_cache(cache)).logits[0]
        moved = _short(kl_divergence(full.rows, logits.float().log_softmax(dim=-1)))
        if not self._answers:
            return moved, None
        if logits.argmax(dim=-1).tolist() == full.answer:  # greedy decoding writes the same
            return moved, full.text
        options = {"max_new_tokens": _ANSWER_TOKENS, "do_sample": False, "eos_token_id": self.end_ids or None}
        options |= {"past_key_values": cache, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
        said = model.generate(ids, **options)[0, ids.shape[1] :]
        return moved, str(self._engine.tokenizer.decode(said, skip_special_tokens=True))

    def _other_prompts(self, case: EvalCase) -> dict[str, Prompt]:
        others = [passage for passage in case.passages if not passage.support]
        left_out = replace(case, passages=tuple(p for p in case.passages if p is not others[0])) if others else case
        return {
            "separator": self.prompt(case, "\n # # \n"),
            "order": self.prompt(replace(case, passages=another_order(case.passages, f"noise/{case.id}"))),
            "one passage less": self.prompt(left_out),
        }

    def _other_model(self, name: str) -> Any:
        if name not in self._other_models:
            own = self._engine.model
            model = copy.deepcopy(own)
            if name in DTYPES:
                model = model.to(getattr(torch, name))
            else:
                for module in model.modules():
                    if isinstance(module, torch.nn.Linear) and module is not model.lm_head:
                        module.weight.data = _in_steps(module.weight.data)
            self._other_models[name] = model
        return self._other_models[name]


def _in_steps(rows: torch.Tensor) -> torch.Tensor:
    """Each row on 255 even steps of its own."""
    scale = rows.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny) / 127
    return (rows / scale).round() * scale


def is_right(text: str, answers: Sequence[str]) -> bool:
    """Whether an answer has a gold answer's words in it, letters and digits alone counting."""
    said = f" {_plain(text)} "
    return any(f" {_plain(answer)} " in said for answer in answers if _plain(answer))


def _plain(text: str) -> str:
    words = re.findall(r"\w+", text.lower())
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def _short(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]


# Running ---------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> None:
    """Measure prompts that the file of results does not have yet, one line each."""
    torch.set_num_threads(options.threads)
    engine = BlendEngine.from_pretrained(options.model, dtype=options.dtype)
    if options.data_dir:
        learned = kept_context(Path(options.data_dir) / "kv", engine.fingerprint, engine.adapter)
        if learned is None:
            remedy = f"adapt this model there first: cacheblend-rag adapt --dtype {options.dtype}"
            raise ConfigError("data_dir", options.data_dir, remedy)
        engine = engine.with_learned(learned)
    cases = keys_cases(options.count) if options.data == "keys" else open_cases(options.data)
    corpus = None
    if options.corpus:
        corpus = [json.loads(line) for line in Path(options.corpus).read_text(encoding="utf-8").splitlines()]
    part, parts = map(int, options.part.split("/"))
    chosen = of_half(cases, options.half)
    random.Random(options.seed).shuffle(chosen)
    earlier = chosen[::-1][: options.earlier]  # from the end: the others are asked from the beginning
    answers, noise, right = options.answers, options.noise, options.only_right
    how = (answers, noise, right, corpus, earlier, options.int8_prefill)
    yardstick = Yardstick(engine, cases, options.methods, options.chunks, *how)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    known = {json.loads(line)["id"] for line in out.open(encoding="utf-8")} if out.exists() else set()
    with out.open("a", encoding="utf-8") as file:
        for case in chosen[: options.count][part::parts]:
            for order in options.orders:
                if f"{case.id}/{order}" not in known:
                    file.write(json.dumps(yardstick.measure(case, order)) + "\n")
                    file.flush()


# Results ---------------------------------------------------------------------------------------


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over prompts with their 95% intervals, whole groups of questions drawn.

    Prompts that were passed over, because full prefill answers them wrongly, only count as asked.
    """
    asked, rows = len(rows), [row for row in rows if "methods" in row]
    groups = [row["group"] for row in rows]
    rightly = [row["group"] for row in rows if row["right"]]
    methods: dict[str, Any] = {}
    for name in _of_all(rows):
        found = [row["methods"][name] for row in rows]
        methods[name] = {
            "work": _mean([one["work"] for one in found]),
            "kl": _spread([_mean(one["kl"]) for one in found], groups),
            "kl_p95": _p95([value for one in found for value in one["kl"]]),
            "first_token": _mean([one["kl"][0] for one in found]),
            "gold_log_likelihood": _spread([one["gold"] for one in found], groups),
        }
        if "right" in found[0]:
            right = [one for one, row in zip(found, rows, strict=True) if row["right"]]
            methods[name] |= {
                "same_answer": _mean([one["same"] for one in found]),
                "lost_of_right": sum(not one["right"] for one in right),
                "right": sum(one["right"] for one in found),
            }
            if right:
                methods[name]["lost"] = _spread([float(not one["right"]) for one in right], rightly)
    noise: dict[str, Any] = {}
    for name in NOISE:
        moved = [(_mean(row["noise"][name]), row["group"]) for row in rows if name in row["noise"]]
        if moved:
            noise[name] = {"prompts": len(moved), "kl": _spread([one for one, _ in moved], [at for _, at in moved])}
        lost = [
            float(not row["noise_right"][name]) for row in rows if row["right"] and name in row.get("noise_right", ())
        ]
        if lost:
            noise[name] |= {"lost_of_right": int(sum(lost)), "lost": _spread(lost, rightly)}
    return {
        "asked": asked,
        "prompts": len(rows),
        "mean_tokens": round(_mean([row["tokens"] for row in rows])),
        "right": sum(row["right"] for row in rows),
        "methods": methods,
        "noise": noise,
    }


def differences(rows: Sequence[dict[str, Any]], method: str) -> dict[str, dict[str, float]]:
    """How much further each other method is from full prefill than one, paired by prompt."""
    rows = [row for row in rows if "methods" in row]
    own = [_mean(row["methods"][method]["kl"]) for row in rows]
    groups = [row["group"] for row in rows]
    return {
        name: _spread([_mean(row["methods"][name]["kl"]) - one for row, one in zip(rows, own, strict=True)], groups)
        for name in _of_all(rows)
        if name != method
    }


def lost_more(rows: Sequence[dict[str, Any]], method: str) -> dict[str, dict[str, float]]:
    """How much more of the right answers than one method each other one loses, and each noise, paired by prompt."""
    rows = [row for row in rows if row["right"] and "right" in row.get("methods", {}).get(method, ())]
    if not rows:
        return {}
    lost = [
        {name: not one["right"] for name, one in row["methods"].items() if "right" in one}
        | {f"full prefill, {name}": not right for name, right in row["noise_right"].items()}
        for row in rows
    ]
    groups = [row["group"] for row in rows]
    return {
        name: _spread([float(one[name]) - float(one[method]) for one in lost], groups)
        for name in lost[0]
        if name != method and all(name in one for one in lost)
    }


def _of_all(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The methods that every prompt was measured by, since sets may have others besides."""
    return [name for name in rows[0]["methods"] if all(name in row["methods"] for row in rows)]


def _mean(values: Sequence[float]) -> float:
    return float(f"{sum(values) / len(values):.5g}")


def _p95(values: Sequence[float]) -> float:
    return float(f"{sorted(values)[int(0.95 * len(values))]:.4g}")


def _spread(values: Sequence[float], groups: Sequence[str]) -> dict[str, float]:
    found = interval(values, groups=groups)
    return {name: float(f"{getattr(found, name):.4g}") for name in ("mean", "low", "high")}


def table(found: dict[str, Any]) -> str:
    """A summary in Markdown."""
    lines = [
        "| method | work | divergence, nats a token | 95th percentile | first token |",
        "|---|---|---|---|---|",
    ]
    for name, one in sorted(found["methods"].items(), key=lambda item: -item[1]["kl"]["mean"]):
        kl = one["kl"]
        spread = f"{kl['mean']:.3f} [{kl['low']:.3f}, {kl['high']:.3f}]"
        lines.append(f"| `{name}` | {one['work']:.1%} | {spread} | {one['kl_p95']:.3f} | {one['first_token']:.3f} |")
    for name, one in found["noise"].items():
        kl = one["kl"]
        spread = f"{kl['mean']:.3f} [{kl['low']:.3f}, {kl['high']:.3f}]"
        lines.append(f"| full prefill, {name} ({one['prompts']} prompts) | | {spread} | | |")
    return "\n".join([*lines, *_answers_table(found)])


def _answers_table(found: dict[str, Any]) -> list[str]:
    """How many answers of each method are no longer right, where answers were written."""
    methods = {name: one for name, one in found["methods"].items() if "lost" in one}
    others = {f"full prefill, {name}": one for name, one in found["noise"].items() if "lost" in one}
    if not methods:
        return []
    lines = ["", f"| of {found['right']} right answers | lost | in 100 | the same answer |", "|---|---|---|---|"]
    for name, one in sorted({**methods, **others}.items(), key=lambda item: -item[1]["lost"]["mean"]):
        lost = one["lost"]
        spread = f"{100 * lost['mean']:.1f} [{100 * lost['low']:.1f}, {100 * lost['high']:.1f}]"
        same = f"{one['same_answer']:.0%}" if "same_answer" in one else ""
        lines.append(f"| {name if name in others else f'`{name}`'} | {one['lost_of_right']} | {spread} | {same} |")
    return lines


_LINES = {
    "sink/hkvd": ("the paper's rule: highest KV deviation", "tab:red", "s"),
    "sink/boundary": ("first tokens of chunks", "tab:orange", "^"),
    "sink/query": ("what the question attends to", "tab:brown", "v"),
    "context/boundary": ("behind contexts: first tokens of chunks", "tab:cyan", "v"),
    "context/query": ("behind contexts: what the question attends to (default)", "tab:blue", "o"),
    "learned/boundary": ("behind contexts and a learned one: first tokens of chunks", "tab:green", "D"),
}


_SAID = {
    "order": "full prefill, passages in another order",
    "one passage less": "full prefill, one passage left out",
    "separator": "full prefill, another separator",
    "8-bit weights": "full prefill, 8-bit weights",
    "int8 prefill": "full prefill in 8 bits",
}


def draw(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """Divergence over work, every kind of method a line from full KV reuse on, with what users accept anyway.

    The prompts are those of the set on which the latter was measured.
    """
    found = result["sets"][result["drawn"]]
    figure, axes = pyplot.subplots(figsize=(7.5, 4.8), layout="constrained")
    methods = found["methods"]
    for begins, (label, colour, marker) in _LINES.items():
        names = [name for name in methods if name.startswith((begins + "@", begins + ":"))]
        if not names:
            continue
        reuse = [name for name in methods if name == begins.split("/")[0] + "/none"]
        points = sorted(((methods[name]["work"], methods[name]["kl"]) for name in (*reuse, *names)), key=lambda p: p[0])
        work, kl = [100 * at for at, _ in points], [one["mean"] for _, one in points]
        low = [one["mean"] - one["low"] for _, one in points]
        high = [one["high"] - one["mean"] for _, one in points]
        axes.errorbar(work, kl, yerr=[low, high], label=label, color=colour, marker=marker, capsize=3, linewidth=1.4)
    for name, one in found["noise"].items():
        axes.axhline(one["kl"]["mean"], color="0.55", linestyle="--", linewidth=1)
        place = (0.995, one["kl"]["mean"])
        look: dict[str, Any] = {"ha": "right", "va": "bottom", "fontsize": "small", "color": "0.35"}
        axes.annotate(_SAID.get(name, name), place, xycoords=("axes fraction", "data"), **look)
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.set_xlabel("work, % of a full prefill's, question included")
    axes.set_ylabel("KL divergence from full prefill, nats a token")
    axes.set_title(f"{result['options']['about']}: {found['prompts']} prompts of {result['drawn']}", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False)
    save_figure(pyplot, figure, path)


def show(options: argparse.Namespace) -> None:
    """Print tables, and write their JSON and a plot of all prompts together."""
    sets: dict[str, list[dict[str, Any]]] = {}
    for path in map(Path, options.results):
        name = re.sub(r"-\d+$", "", path.stem)
        sets.setdefault(name, []).extend(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
    together = [row for rows in sets.values() for row in rows]
    result: dict[str, Any] = {"options": {"about": options.about, "date": options.date, "machine": options.machine}}
    result["drawn"] = max(sets, key=lambda name: sum(bool(row.get("noise")) for row in sets[name]))
    result["sets"] = {name: summary(rows) for name, rows in sets.items()}
    result["together"] = summary(together)
    if options.against:
        result["further_than"] = {options.against: differences(together, options.against)}
        result["lost_more_than"] = {options.against: lost_more(together, options.against)}
    for name, found in {**result["sets"], "together": result["together"]}.items():
        print(f"\n{name}: {found['prompts']} prompts, {found['mean_tokens']} tokens, {found['right']} right\n")
        print(table(found))
    if options.out:
        write_json(options.out, result)
    if options.plot:
        draw(pyplot_for(options.plot), result, Path(options.plot))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = script_parser("yardstick", __doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    actions = parser.add_subparsers(required=True)
    add = actions.add_parser("run", help="measure prompts")
    add.add_argument("--data", required=True, metavar="FILE", help="questions, texts of countries, or 'keys'")
    add.add_argument("--corpus", metavar="FILE", help="all chunks, one JSON string a line; by default the passages")
    add.add_argument("--methods", nargs="+", required=True, metavar="METHOD")
    add.add_argument("--answers", nargs="*", default=[], metavar="METHOD", help="of these, which write answers")
    add.add_argument("--half", choices=("dev", "test", "all"), default="dev")
    add.add_argument("--count", type=int, default=1000, help="most questions")
    add.add_argument("--chunks", type=int, default=6)
    add.add_argument("--orders", nargs="+", default=["0"], help="each puts the passages in another order")
    add.add_argument("--part", default="0/1", help="which part of the questions")
    add.add_argument("--model", default="smollm2")
    add.add_argument("--dtype", default="float32")
    add.add_argument("--data-dir", metavar="FOLDER", help="as given to `cacheblend-rag adapt`")
    add.add_argument("--threads", type=int, default=1)
    add.add_argument("--seed", default="0")
    add.add_argument("--noise", nargs="*", choices=NOISE, default=[], help="what to measure without any blending")
    add.add_argument("--int8-prefill", action="store_true", help="let methods multiply in 8 bits, full prefill not")
    add.add_argument("--only-right", action="store_true", help="pass over prompts that full prefill answers wrongly")
    add.add_argument("--earlier", type=int, metavar="COUNT", help="most questions asked before")
    add.add_argument("--out", required=True, metavar="FILE")
    add.set_defaults(action=run)
    join = actions.add_parser("show", help="join results: a table, its JSON and a plot")
    join.add_argument("results", nargs="+", metavar="FILE")
    join.add_argument("--against", metavar="METHOD", help="pair all others with this one")
    join.add_argument("--about", default="")
    join.add_argument("--date", default="")
    join.add_argument("--machine", default="")
    join.add_argument("--out", metavar="FILE", help="JSON")
    join.add_argument("--plot", metavar="FILE", help="SVG")
    join.set_defaults(action=show)
    options = parser.parse_args(arguments)
    options.action(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
