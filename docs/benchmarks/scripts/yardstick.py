"""How far blended answers are from full prefill's on real text: conditions and rules, and the noise that users accept.

``python -m docs.benchmarks.scripts.yardstick run --data squad.jsonl --half test --out runs/squad.jsonl``

Each prompt is prefilled in full, and answers greedily. Each method then fuses the same prompt and is compared with that
answer, token by token. A method is written ``condition/rule@ratio``, such as ``context/boundary@0.1``:

- ``sink``: a chunk is computed behind what opens a text;
- ``prefix``: behind the prompt's own prefix;
- ``plain``: behind passages about nothing in particular;
- ``context``, ``context1``: behind two stretches, or one, of the chunks next to it in the corpus;
- ``together``: behind two stretches of the chunks of its own prompt, in another order.

``--noise`` adds what changes an answer without any blending: other separators, another order, a passage left out,
weights of 8 bits, another element type. Methods named by ``--answers`` also write their own answers, and so does full
prefill under each noise. ``--only-right`` measures only prompts that full prefill answers rightly, and passes over the
others. Runs over parts of the prompts (``--part 0/2``) may be made side by side; ``show`` joins them: a table, its
JSON, and a plot. ``models`` compares the results of several models on the same prompts. ``retrieve`` writes long
prompts: questions with the six chunks that ``cacheblend-rag ask`` would retrieve for them.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from langchain_core.documents import Document

from cacheblend_rag.app.collection import ARTICLES_PATH, QUESTIONS_PATH
from cacheblend_rag.calibration.prompts import ChatFrame
from cacheblend_rag.calibration.quality import answer_log_probs, kl_divergence, shared_cache
from cacheblend_rag.calibration.statistics import interval
from cacheblend_rag.config import DEFAULT_EMBEDDER, DTYPES, LEAST_RATIO
from cacheblend_rag.engine.decode import end_ids_of
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.selection import RULES, SelectionRule
from cacheblend_rag.models.adapter import ContextKV, ModelAdapter
from cacheblend_rag.prompt import Prompt, PromptTokenizer
from cacheblend_rag.prompt.contexts import Contexts
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.index import FolderIndex, build_index
from cacheblend_rag.retrieval.splitting import SplitSettings
from docs.benchmarks.evaluation.datasets import EvalCase, Passage, load_cases
from docs.benchmarks.evaluation.passages import build_prompt
from docs.benchmarks.evaluation.prepared import ComputeKV, Corpus, PreparedPrompt, greedy_answer
from docs.benchmarks.evaluation.runner import GreedyAnswers, rule_of
from docs.benchmarks.scripts.common import pyplot_for, save_figure, script_parser, unboxed, write_json

NOISE = ("separator", "order", "one passage less", "8-bit weights", "bfloat16", "float32")
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
    """

    def __init__(self, adapter: ModelAdapter, tokenizer: PromptTokenizer, corpus: Sequence[str]) -> None:
        self._adapter, self._tokenizer = adapter, tokenizer
        self._texts = corpus
        self._kept: dict[str, ComputeKV] = {}

    def compute(self, condition: str, prompt: Prompt) -> ComputeKV | None:
        """For the chunks of a prompt; None where they are computed behind what opens a text.

        What does not depend on the prompt is kept for other prompts with the same chunks.
        """
        if condition == "sink":
            return None
        if condition == "prefix":
            tokens = self._tokenizer.tokenize(prompt)
            return _behind(ContextKV(self._adapter, [tokens.ids(tokens.prefix)]))
        if condition == "together":
            return Corpus(self._adapter, self._tokenizer, prompt.chunks).compute
        return self._of(condition)

    def _of(self, condition: str) -> ComputeKV:
        """What does not depend on the prompt."""
        if condition not in self._kept:
            self._kept[condition] = lru_cache(_KEPT_CHUNKS)(self._of_corpus(condition))
        return self._kept[condition]

    def _of_corpus(self, condition: str) -> ComputeKV:
        if condition == "plain":
            return _behind(ContextKV(self._adapter, Contexts(self._tokenizer, (), 2).ids))
        match = re.fullmatch("context([12]?)", condition)
        if match is None:
            names = "'sink', 'prefix', 'plain', 'context', 'context1', 'together'"
            raise ConfigError("condition", condition, f"use {names}")
        return Corpus(self._adapter, self._tokenizer, self._texts, int(match[1] or 2)).compute


def _behind(contexts: ContextKV) -> ComputeKV:
    """Chunks behind all of some contexts."""
    return lambda text, before, ids, regime: contexts.segments_kv([(*before, *ids)], regime, [len(before)])[0]


# Methods ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Method:
    name: str
    condition: str
    rule: SelectionRule


def parse_method(text: str) -> _Method:
    """``condition/rule@ratio``, a rule with options as ``hkvd:check_layers=2``."""
    match = re.fullmatch(r"(\w+)/(\w+)((?::\w+=[\w.+-]+)*)(?:@([\d.]+))?", text)
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
    ) -> None:
        self._engine, self.adapter, self._chunks = engine, engine.adapter, chunks
        self._answers, self._noise, self._only_right = answers, noise, only_right
        self.tokenizer = PromptTokenizer(engine.tokenizer, engine.config.separator)
        self._chat = ChatFrame(engine.tokenizer) if engine.tokenizer.chat_template else None
        self._methods = [parse_method(name) for name in methods]
        texts = corpus or [passage.chunk for case in cases for passage in case.passages]
        self._conditions = Conditions(self.adapter, self.tokenizer, texts)
        self.end_ids = end_ids_of(engine.model.generation_config, engine.tokenizer)
        self._other_models: dict[str, Any] = {}

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
            prepared = self.prepared(condition, prompt)
            for method in self._methods:
                if method.condition == condition:
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
            model = self._engine.model if name in prompts else self._other_model(name)
            yield name, *self._moved(model, prompts.get(name) or self.prompt(case), full)

    def _moved(self, model: Any, prompt: Prompt, full: FullAnswer) -> tuple[list[float], str | None]:
        device = self.adapter.device
        ids = torch.tensor([self.tokenizer.tokenize(prompt).input_ids], device=device)
        with torch.no_grad():
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
    cases = keys_cases(options.count) if options.data == "keys" else open_cases(options.data)
    corpus = None
    if options.corpus:
        corpus = [json.loads(line) for line in Path(options.corpus).read_text(encoding="utf-8").splitlines()]
    part, parts = map(int, options.part.split("/"))
    chosen = of_half(cases, options.half)
    random.Random(options.seed).shuffle(chosen)
    answers, noise, right = options.answers, options.noise, options.only_right
    how = (answers, noise, right, corpus)
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
    lines = ["| method | work | divergence, nats a token | 95th percentile | first token |", "|---|---|---|---|---|"]
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
}


_SAID = {
    "order": "full prefill, passages in another order",
    "one passage less": "full prefill, one passage left out",
    "separator": "full prefill, another separator",
    "8-bit weights": "full prefill, 8-bit weights",
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


CHUNKS = 6


def joined_articles(cases: Sequence[EvalCase]) -> dict[str, str]:
    """The passages of questions as articles by their titles, each passage once.

    Passages that a question needs stand in the order of their groups, ``NAME-NUMBER``; others follow.
    """
    articles: dict[str, list[str]] = {}
    for case in sorted(cases, key=_paragraph):
        for passage in case.passages:
            if passage.support:
                articles.setdefault(passage.title, []).append(passage.text)
    for case in cases:
        for passage in case.passages:
            articles.setdefault(passage.title, []).append(passage.text)
    return {title: "\n\n".join(dict.fromkeys(texts)) for title, texts in articles.items()}


def _paragraph(case: EvalCase) -> tuple[str, int]:
    name, _, number = case.group.rpartition("-")
    return name, int(number) if number.isdigit() else 0


def with_retrieved(cases: Sequence[EvalCase], index: FolderIndex, count: int = CHUNKS) -> Iterator[EvalCase]:
    """Questions with the chunks that are nearest to them, where one of these has an answer in it."""
    for case in cases:
        found: list[Document] = index.store.similarity_search(case.question, k=count)
        passages = tuple(Passage("", one.page_content, is_right(one.page_content, case.answers)) for one in found)
        if any(passage.support for passage in passages):
            yield replace(case, passages=passages)


def _bundled_questions() -> list[EvalCase]:
    found = []
    for number, line in enumerate(QUESTIONS_PATH.read_text(encoding="utf-8").splitlines()):
        one = json.loads(line)
        answers = (one["answer"], *one["aliases"])
        found.append(EvalCase(f"bundled-{number}", one["question"], answers, (), "bundled", group=one["files"][0]))
    return found


def retrieve(options: argparse.Namespace) -> None:
    """Write questions with the chunks that would be retrieved for them, and all chunks."""
    cases = load_cases(options.data)
    with tempfile.TemporaryDirectory() as folder:
        documents = Path(folder, "documents")
        documents.mkdir()
        for title, text in joined_articles(cases).items():
            documents.joinpath(title.replace("/", "-") + ".txt").write_text(text, encoding="utf-8")
        for article in ARTICLES_PATH.iterdir():
            documents.joinpath(article.name).write_bytes(article.read_bytes())
        embedder = SentenceTransformerEmbeddings(DEFAULT_EMBEDDER)
        sizes = SplitSettings(chunk_size=2_000)
        index = build_index(documents, embedder=embedder, index_dir=Path(folder, "index"), settings=sizes).index
        wanted = [case for case in cases if any(p.support and p.title in options.titles for p in case.passages)]
        found = list(with_retrieved(wanted if options.titles else _bundled_questions(), index))
        chunks = [chunk.page_content for chunk in index.chunks()]
    with Path(options.out).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(case)) + "\n" for case in found)
    if options.corpus:
        Path(options.corpus).write_text("".join(json.dumps(text) + "\n" for text in chunks), encoding="utf-8")
    print(f"{len(found)} questions, {len(chunks)} chunks")


_DEFAULT = "context/query@0.15"
_LEAST = 1e-4  # what is nearer is drawn here
_OF_MODEL = {
    "context/query@0.15": "the default",
    "context/none": "contexts, nothing recomputed",
    "sink/none": "alone, nothing recomputed",
    "sink/hkvd@0.15": "alone, the paper's rule 15%",
    "context/boundary@0.15": "contexts, chunk starts 15%",
    "context/hkvd@0.15": "contexts, the paper's rule 15%",
    "order": "full prefill, another order",
    "8-bit weights": "full prefill, 8-bit weights",
}


def model_summary(rows: Sequence[Mapping[str, Any]], names: Sequence[str], against: str = _DEFAULT) -> dict[str, Any]:
    """What was found of one model.

    Parameters
    ----------
    rows : sequence of mapping
        As `yardstick run` writes them.
    names : sequence of str
        The methods, and what moves full prefill.
    against : str
        The method that all others are paired with.
    """
    groups, right = [row["group"] for row in rows], [bool(row["right"]) for row in rows]

    def spread(values: Sequence[float], at: Sequence[str] = groups) -> dict[str, float]:
        found = interval(values, groups=at)
        return {name: float(f"{getattr(found, name):.4g}") for name in ("mean", "low", "high")}

    def each(name: str) -> list[float]:
        return [fmean(_of(row, name)["kl"]) for row in rows]

    def one(name: str) -> dict[str, Any]:
        found, kl = [_of(row, name) for row in rows], each(name)
        values: dict[str, Any] = {
            "divergence": spread(kl),
            "median": _rounded(median(kl)),
            "p95": _rounded(sorted(kl)[ceil(0.95 * len(kl)) - 1]),
            "worst": _rounded(max(kl)),
            "first_token": _rounded(fmean(row["kl"][0] for row in found)),
            "further": spread([mine - other for mine, other in zip(kl, each(against), strict=True)]),
            "each": [_rounded(value) for value in kl],
        }
        if "work" in found[0]:
            values["work"] = _rounded(fmean(row["work"] for row in found))
        if all("same" in row for row in found):
            now = [bool(row["right"]) for row in found]
            values["same"] = spread([float(row["same"]) for row in found])
            values["lost"] = sum(was and not still for was, still in zip(right, now, strict=True))
            values["gained"] = sum(still and not was for was, still in zip(right, now, strict=True))
        return values

    return {
        "prompts": len(rows),
        "groups": len(set(groups)),
        "mean_tokens": round(fmean(row["tokens"] for row in rows)),
        "right": sum(right),
        "methods": {name: one(name) for name in names},
    }


def _of(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A method or noise of a prompt, both in the same form; empty if it was not measured."""
    if name in row["methods"]:
        return dict(row["methods"][name])
    if name not in row["noise"]:
        return {}
    found = {"kl": row["noise"][name]}
    for field in ("right", "same"):
        if name in row.get(f"noise_{field}", ()):
            found[field] = row[f"noise_{field}"][name]
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def model_table(found: Mapping[str, Any]) -> str:
    """One model's model_summary in Markdown."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "work": lambda one: f"{one['work']:.1%}" if "work" in one else "",
        "divergence": lambda one: _bracketed(one["divergence"]),
        "median": lambda one: f"{one['median']:.3f}",
        "95th percentile": lambda one: f"{one['p95']:.3f}",
        "worst": lambda one: f"{one['worst']:.3f}",
        "first token": lambda one: f"{one['first_token']:.3f}",
        "further than the default, paired": lambda one: (
            _bracketed(one["further"]) if any(one["further"].values()) else "–"
        ),
        "word for word": lambda one: _percent(one["same"]) if "same" in one else "",
        "right answers lost, gained": lambda one: f"{one['lost']}, {one['gained']}" if "lost" in one else "",
    }
    lines = ["| method | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for name, one in found["methods"].items():
        lines.append(f"| {_OF_MODEL.get(name, name)} | " + " | ".join(write(one) for write in columns.values()) + " |")
    return "\n".join(lines)


def _bracketed(one: Mapping[str, float]) -> str:
    return f"{one['mean']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"


def _percent(one: Mapping[str, float]) -> str:
    return f"{one['mean']:.0%} [{100 * one['low']:.0f}, {100 * one['high']:.0f}]"


def draw_models(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """A panel for each model: every prompt's divergence a dot, the mean with its interval above, the median a line."""
    models = result["models"]
    names = list(next(iter(models.values()))["methods"])
    form: dict[str, Any] = {"figsize": (2.2 + 3.2 * len(models), 1.6 + 0.42 * len(names)), "layout": "constrained"}
    figure, panels = pyplot.subplots(1, len(models), sharex=True, sharey=True, squeeze=False, **form)
    for axis, (model, found) in zip(panels[0], models.items(), strict=True):
        for place, name in enumerate(names):
            one = found["methods"][name]
            colour = "tab:blue" if name == result["options"]["against"] else "0.35" if "work" in one else "tab:green"
            values = [max(_LEAST, value) for value in one["each"]]
            axis.scatter(values, [place + 0.12] * len(values), s=9, color=colour, alpha=0.35, linewidths=0)
            axis.vlines(max(_LEAST, one["median"]), place - 0.02, place + 0.26, color=colour, linewidth=1.5)
            mean = one["divergence"]
            bars = [[mean["mean"] - mean["low"]], [mean["high"] - mean["mean"]]]
            axis.errorbar([mean["mean"]], [place - 0.2], xerr=bars, fmt="D", markersize=4, capsize=3, color=colour)
        axis.set_xscale("log")
        axis.set_title(f"{model}: {found['prompts']} prompts", fontsize="small")
        axis.set_xlabel("KL divergence, nats a token")
        axis.grid(axis="x", alpha=0.3)
        unboxed(axis)
    panels[0][0].set_yticks(range(len(names)), [_OF_MODEL.get(name, name) for name in names])
    panels[0][0].invert_yaxis()
    title = "How far answers move from full prefill's: dots are prompts, a line the median, diamonds the mean"
    figure.suptitle(title, fontsize="medium")
    save_figure(pyplot, figure, path)


def models(options: argparse.Namespace) -> None:
    """Print a table of each model, and write their JSON and a picture."""
    said = {name: getattr(options, name) for name in ("about", "against", "date", "machine")}
    result: dict[str, Any] = {"options": said, "models": {}}
    rows = {
        name: [json.loads(line) for file in files for line in Path(file).read_text(encoding="utf-8").splitlines()]
        for name, *files in options.model
    }
    every = [row for found in rows.values() for row in found]
    names = [name for name in (*every[0]["methods"], *every[0]["noise"]) if all(_of(row, name) for row in every)]
    for name in rows:
        found = result["models"][name] = model_summary(rows[name], names, options.against)
        print(f"\n{name}: {found['prompts']} prompts, {found['mean_tokens']} tokens, {found['right']} right\n")
        print(model_table(found))
    if options.out:
        write_json(options.out, result)
    if options.plot:
        draw_models(pyplot_for(options.plot), result, Path(options.plot))


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
    add.add_argument("--threads", type=int, default=1)
    add.add_argument("--seed", default="0")
    add.add_argument("--noise", nargs="*", choices=NOISE, default=[], help="what to measure without any blending")
    add.add_argument("--only-right", action="store_true", help="pass over prompts that full prefill answers wrongly")
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
    beside = actions.add_parser("models", help="compare models: a table of each, their JSON and a picture")
    beside.add_argument("--model", nargs="+", action="append", required=True, metavar=("NAME", "FILE"))
    beside.add_argument("--against", default=_DEFAULT, metavar="METHOD", help="pair all others with this one")
    for name in ("about", "date", "machine"):
        beside.add_argument(f"--{name}", default="")
    beside.add_argument("--out", metavar="FILE", help="JSON")
    beside.add_argument("--plot", metavar="FILE", help="SVG")
    beside.set_defaults(action=models)
    long = actions.add_parser("retrieve", help="write long prompts, as `ask` retrieves them")
    long.add_argument("--data", required=True, metavar="FILE", help="questions with passages")
    long.add_argument("--titles", nargs="*", default=[], help="articles whose questions are taken; else those bundled")
    long.add_argument("--out", required=True, metavar="FILE", help="questions with their chunks")
    long.add_argument("--corpus", metavar="FILE", help="all chunks, one JSON string a line")
    long.set_defaults(action=retrieve)
    options = parser.parse_args(arguments)
    options.action(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
