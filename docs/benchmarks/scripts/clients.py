"""How much of what real clients send is found again: their prompts, replayed through a server.

``python -m docs.benchmarks.scripts.clients --data squad.jsonl --out clients.json``

The passages of ``--data`` are joined to articles and split into 1,000 characters with 100 in common, and the starter
embedder finds four for each question, as in `retrieved`. Questions come in conversations of five. Each client is a
tenant of its own of one server, and sends the same questions, in the form of its template.

Shares are measured on a model of random weights with the starter's tokenizer. A passage's tokens are counted from its
third sight on. They are reused if they lie in a span that hit, or in the beginning that the engine kept of an earlier
prompt. A span that hit is wrong if no record in the store has its ids, or if no earlier prompt has its text. Of tokens
that are not reused it is said why:

- ``beginning``: in all earlier prompts the passage stood behind the same text, so that it counted once.
- ``message``: one message alone held it so far, which the client sent again.
- ``few``: a span that was found before, in a prompt that has less than ``min_tokens`` in chunks, or of which too little
  is stored to be worth reading.
- ``border``: in other spans before, or in none.

Times are those of ``--model``, of one process, which answers each of the last ``--timed`` prompts in two ways in turn:
with repeated text found, and without. The machine may have other work, so ratios are those of a prompt's two first
tokens, one after the other, in time and in processor time. Prompts before the timed ones are looked through, and of
what repeats in them, KV is stored where a timed prompt has it. They are not answered.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.calibration.datasets import EvalCase, load_cases
from cacheblend_rag.config import DEFAULT_EMBEDDER, DEFAULT_MODEL
from cacheblend_rag.engine.pipeline import Lookup, chunks_of
from cacheblend_rag.engine.segments import FOUND
from cacheblend_rag.engine.write_back import run_all
from cacheblend_rag.models.loading import load_geometry
from cacheblend_rag.prompt.repeated import said_in
from cacheblend_rag.report import BlendReport
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.index import build_index
from cacheblend_rag.retrieval.splitting import SplitSettings
from cacheblend_rag.store import DiskStore
from docs.benchmarks.scripts.client_prompts import CLIENTS, Client, Messages, Passage, Turn
from docs.benchmarks.scripts.common import reported, script_parser, write_json
from docs.benchmarks.scripts.measuring import table
from docs.benchmarks.scripts.retrieved import joined_articles
from docs.benchmarks.scripts.served import served

__all__ = ["Replay", "main", "replay"]

_TURNS = 5
# Share of a prompt's tokens that are read, from which on it counts as one that hits.
_HALF = 0.5
_THIRD = 2  # sights before


@dataclass
class Replay:
    """Result of the prompts of one client.

    Attributes
    ----------
    prompts, prompt_tokens : int
    passage_tokens, reused_tokens, found_tokens : int
        Of passages from their third sight on: all, those that were reused, and those of them in spans that hit.
    spans : list of tuple of int
        Ids of each span that hit.
    unseen : int
        Spans that hit whose text no earlier prompt has.
    lost : Counter of str
        Tokens that were not reused, by their causes; see the module.
    """

    prompts: int = 0
    prompt_tokens: int = 0
    passage_tokens: int = 0
    reused_tokens: int = 0
    found_tokens: int = 0
    spans: list[tuple[int, ...]] = field(default_factory=list)
    unseen: int = 0
    lost: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """Of the passages' tokens, those that were reused."""
        return self.reused_tokens / max(1, self.passage_tokens)

    def wrong(self, stored: set[tuple[int, ...]]) -> int:
        """How many spans are wrong, if the store has records of these ids."""
        return self.unseen + sum(one not in stored for one in self.spans)


def replay(client: Client, turns: Sequence[Turn], ask: Callable[[Messages], dict[str, Any]], tokenizer: Any) -> Replay:
    """Ask all questions, and count what was reused of their passages.

    Parameters
    ----------
    client : Client
    turns : sequence of Turn
    ask : callable
        Gives a server's answer to messages, once all that is to be stored of the prompt is stored.
    tokenizer : tokenizer
        The server's.
    """
    result, texts, known = Replay(), list[str](), set[str]()
    stood: dict[str, list[tuple[str, str]]] = {}
    for turn in turns:
        messages = client.messages(turn)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        answer = ask(messages)
        if answer["usage"]["prompt_tokens"] != len(ids):
            raise SystemExit(f"the server reads {answer['usage']['prompt_tokens']} tokens, not {len(ids)}")
        made = answer["cacheblend"][0]
        found = {range(one["start"], one["start"] + one["tokens"]): one["hit"] for one in made["found"]}
        words = {at: text[offsets[at.start][0] : offsets[at.stop - 1][1]].strip() for at in found}
        for at in (at for at, hit in found.items() if hit):
            result.spans.append(tuple(ids[at.start : at.stop]))
            result.unseen += not any(words[at] in earlier for earlier in texts)
        hits = {at for one, hit in found.items() if hit for at in one}
        few = {at for one in found if words[one] in known for at in one}
        for passage in dict.fromkeys(turn.passages):
            written = client.written(passage.text)
            start = text.index(written)
            sights = stood.setdefault(passage.text, [])
            if len(sights) >= _THIRD:
                within = [
                    at for at, (first, last) in enumerate(offsets) if first >= start and last <= start + len(written)
                ]
                result.passage_tokens += len(within)
                result.found_tokens += sum(at in hits for at in within)
                lost = [at for at in within if at not in hits and at >= made["resumed"]]
                result.reused_tokens += len(within) - len(lost)
                result.lost.update(_cause(sights, at in few) for at in lost)
            held = next(str(one["content"]) for one in messages if written in str(one["content"]))
            sights.append((text[:start], held))
        known |= {*words.values()}
        texts.append(text)
        result.prompts += 1
        result.prompt_tokens += len(ids)
    return result


def _cause(sights: Sequence[tuple[str, str]], few: bool) -> str:
    """Why a token of a passage was not reused, from what stood before it in earlier prompts, and in which messages."""
    befores, messages = ({*one} for one in zip(*sights, strict=True))
    if few:
        return "few"
    if len(befores) == 1:
        return "beginning"
    return "message" if len(messages) == 1 else "border"


def conversations(cases: Sequence[EvalCase], count: int, seed: int, folder: Path, passages: int = 4) -> list[Turn]:
    """So many questions with what is retrieved for each, in conversations about one article each."""
    documents = folder / "documents"
    documents.mkdir()
    for title, text in joined_articles(cases).items():
        documents.joinpath(title.replace("/", "-") + ".txt").write_text(text, encoding="utf-8")
    embedder = SentenceTransformerEmbeddings(DEFAULT_EMBEDDER)
    sizes = SplitSettings(chunk_size=1_000, chunk_overlap=100)
    index = build_index(documents, embedder=embedder, index_dir=folder / "index", settings=sizes).index
    drawn, by_title = random.Random(seed), dict[str, list[EvalCase]]()
    for case in cases:
        by_title.setdefault(case.passages[0].title, []).append(case)
    turns = list[Turn]()
    while len(turns) < count:
        chosen = drawn.sample(by_title[drawn.choice(sorted(by_title))], _TURNS)
        before = list[tuple[str, str]]()
        for case in chosen[: count - len(turns)]:
            found = index.store.similarity_search(case.question, k=passages)
            read = tuple(Passage(str(one.metadata["source"]), one.page_content) for one in found)
            turns.append(Turn(case.question, read, tuple(before)))
            before.append((case.question, case.answers[0]))
    return turns


def _tiny_model(folder: Path, tokenizer: Any) -> Path:
    """A narrow model whose attention and scoring pass have about the shares of the work that the starter's have."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8192,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _keys(count: int) -> dict[str, str]:
    return {f"client-{number}": f"key-of-client-number-{number}" for number in range(count)}


def _asking(url: str, key: str) -> Callable[[Messages], dict[str, Any]]:
    client = httpx.Client(base_url=url, timeout=600, headers={"Authorization": f"Bearer {key}"})
    model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]

    def ask(messages: Messages) -> dict[str, Any]:
        body = {"model": model, "messages": messages, "max_tokens": 1}
        answer = client.post("/v1/chat/completions", json=body).raise_for_status()
        return dict(answer.json())

    return ask


def measure_shares(draws: Sequence[Sequence[Turn]], folder: Path) -> dict[str, Any]:
    """What each client's prompts reuse, on a tiny model; in each draw of questions it is another tenant."""
    tokenizer = load_geometry(DEFAULT_MODEL)[1]
    model, keys = _tiny_model(folder / "model", tokenizer), _keys(len(CLIENTS) * len(draws))
    results: dict[str, list[Replay]] = {name: [] for name in CLIENTS}
    left = iter(keys.values())
    with served(folder, keys, ["--model", str(model), "--docs", str(_no_documents(folder))]) as url:
        for turns in draws:
            for name, client in CLIENTS.items():
                results[name].append(replay(client, turns, _asking(url, next(left)), tokenizer))
                print(f"{name}: {results[name][-1].share:.3f}", file=sys.stderr)
    (at,) = {path.parent for path in (folder / "served").rglob("cache.db")}
    with closing(DiskStore(at)) as store:
        stored = {tuple(info.token_ids) for _, info in store.infos(FOUND)}
    return {name: _summed(of, stored) for name, of in results.items()}


def _summed(draws: Sequence[Replay], stored: set[tuple[int, ...]]) -> dict[str, Any]:
    """The prompts of a client in all draws."""
    names = ("prompts", "prompt_tokens", "passage_tokens", "reused_tokens", "found_tokens")
    whole = {name: sum(getattr(one, name) for one in draws) for name in names}
    lost = sum((one.lost for one in draws), Counter[str]())
    return {
        **whole,
        "share": whole["reused_tokens"] / max(1, whole["passage_tokens"]),
        "shares": [one.share for one in draws],
        "lost": dict(lost),
        "spans": sum(len(one.spans) for one in draws),
        "wrong_spans": sum(one.wrong(stored) for one in draws),
    }


def _no_documents(folder: Path) -> Path:
    """A folder with one short document: nothing of the corpus is known to the server."""
    made = folder / "own"
    made.mkdir(exist_ok=True)
    made.joinpath("note.txt").write_text("The office opens at nine.", encoding="utf-8")
    return made


@dataclass(frozen=True)
class Timed:
    """A prompt's two first tokens.

    Attributes
    ----------
    prompt_tokens : int
    passage_tokens : int
        Of its passages.
    found_tokens, stored_tokens, read_tokens : int
        In spans that an earlier prompt had; of these, those that were stored; of these, those that were read.
    begun_tokens : int
        At its beginning, that both ways read from memory: those of the full prefill.
    seconds, processor_seconds : dict of str to float
        To the first token, by way; looking for repeated text is part of it.
    """

    prompt_tokens: int
    passage_tokens: int
    found_tokens: int
    stored_tokens: int
    read_tokens: int
    begun_tokens: int
    seconds: dict[str, float]
    processor_seconds: dict[str, float]

    @property
    def share(self) -> float:
        """Of all tokens that the full prefill computes, those that were read in its place."""
        return self.read_tokens / max(1, self.prompt_tokens - self.begun_tokens)


_WAYS = ("found", "full prefill")


class Chat:
    """Answers a client's messages within this process.

    Parameters
    ----------
    engine : BlendEngine
        Looks for text that repeats, or not; stores nothing.
    """

    def __init__(self, engine: BlendEngine) -> None:
        self.engine, self.pipeline = engine, engine.chunks.pipeline

    def prompt(self, messages: Messages) -> Prompt:
        """The prompt as a server would make it; it counts as seen."""
        text = self.engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.engine.chunks.with_repeated(Prompt(suffix=text), said_in(text, messages))

    def _chunks(self, prompt: Prompt) -> tuple[Lookup, dict[str, str]]:
        """All chunks of a prompt, none of them read, and the text of each by its key."""
        fit = self.pipeline.split(prompt)
        chunks = chunks_of(self.pipeline.segments, fit, fit.split)
        texts = {one.key: located.text for one, located in zip(chunks, fit.split.located, strict=True)}
        return Lookup(fit, fit.split, chunks=chunks), texts

    def store(self, prompt: Prompt, wanted: set[str]) -> None:
        """Store chunks of a prompt, as far as they are wanted."""
        lookup, texts = self._chunks(prompt)
        run_all({key: job for key, job in self.pipeline.chunk_jobs(lookup).items() if texts[key] in wanted})

    def stored(self, prompt: Prompt) -> int:
        """Tokens of a prompt's chunks that are stored."""
        lookup, _ = self._chunks(prompt)
        pairs = zip(lookup.split.chunks, lookup.chunks, strict=True)
        return sum(len(span) for span, one in pairs if self.engine.store.contains(one.key))

    def first_token(self, messages: Messages) -> tuple[Prompt, BlendReport, float, float]:
        """The prompt, the report, and the time and the processor time of its first token."""
        began, spent = time.perf_counter(), time.process_time()
        prompt = self.prompt(messages)
        report = self.engine.generate(prompt, max_new_tokens=1).report
        return prompt, report, time.perf_counter() - began, time.process_time() - spent


def measure_times(engine: BlendEngine, client: Client, turns: Sequence[Turn], timed: int, name: str) -> list[Timed]:
    """First tokens of the last prompts of a client, with repeated text found and without, in turn.

    Parameters
    ----------
    engine : BlendEngine
        Of which each way is a tenant.
    client : Client
    turns : sequence of Turn
    timed : int
    name : str
        Of the client.
    """
    chats = {way: Chat(engine.with_config(salt=f"{name} {way}", find_repeated=way == "found")) for way in _WAYS}
    wanted, here = _wanted(Chat(engine.with_config(salt=name)), client, turns, timed), chats["found"]
    for turn in turns[:-timed]:
        here.store(here.prompt(client.messages(turn)), wanted)
    result = list[Timed]()
    for number, turn in enumerate(turns[-timed:]):
        messages, made = client.messages(turn), dict[str, tuple[Prompt, BlendReport, float, float]]()
        for way in sorted(_WAYS, reverse=bool(number % 2)):
            made[way] = chats[way].first_token(messages)
        prompt, report, *_ = made["found"]
        text = engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if list(report.input_ids) != engine.tokenizer(text, add_special_tokens=False)["input_ids"]:
            raise SystemExit("the engine reads other tokens than the chat template gives")
        passages = [client.written(one.text) for one in dict.fromkeys(turn.passages)]
        result.append(
            Timed(
                report.prompt_tokens,
                sum(len(engine.tokenizer(one, add_special_tokens=False)["input_ids"]) for one in passages),
                sum(one.tokens for one in report.found),
                here.stored(prompt),
                sum(one.tokens for one in report.found if one.hit),
                made["full prefill"][1].resumed_tokens,
                {way: made[way][2] for way in _WAYS},
                {way: made[way][3] for way in _WAYS},
            )
        )
        here.store(prompt, wanted)
        print(f"{name}: {result[-1]}", file=sys.stderr)
    return result


def _wanted(chat: Chat, client: Client, turns: Sequence[Turn], timed: int) -> set[str]:
    """The chunks that timed prompts will have: no other is read, so no other is stored."""
    prompts = [chat.prompt(client.messages(turn)) for turn in turns]
    return {one.text for prompt in prompts[-timed:] for one in chat.pipeline.split(prompt).split.located}


def summary_of(timed: Sequence[Timed]) -> dict[str, Any]:
    """Medians of the ratios of prompts that hit, and of the others, to full prefill."""
    parts = {
        "half or more read": [one for one in timed if one.share >= _HALF],
        "less read": [one for one in timed if one.share < _HALF],
    }
    return {name: _ratios(of) for name, of in parts.items() if of}


def _ratios(of: Sequence[Timed]) -> dict[str, Any]:
    def ratio(seconds: dict[str, float]) -> float:
        return seconds["found"] / seconds["full prefill"]

    return {
        "prompts": len(of),
        "ratio": statistics.median(ratio(one.seconds) for one in of),
        "processor_ratio": statistics.median(ratio(one.processor_seconds) for one in of),
        "worst_processor_ratio": max(ratio(one.processor_seconds) for one in of),
    }


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def table_of(found: dict[str, Any]) -> str:
    """Shares and causes of loss by client."""
    rows, causes = [], ("beginning", "message", "few", "border")
    for name, one in found["clients"].items():
        of = max(1, one["passage_tokens"])
        row = [name, f"{one['passage_tokens']:,}", f"{one['share']:.3f}"]
        row += [f"{one['lost'].get(cause, 0) / of:.3f}" for cause in causes]
        rows.append([*row, str(one["spans"]), str(one["wrong_spans"])])
    return table(["client", "passage tokens", "share", *causes, "spans that hit", "wrong"], rows)


def table_of_times(found: dict[str, Any]) -> str:
    """Ratios of first tokens by client and by what was read."""
    rows = [
        [name, part, str(one["prompts"]), *(f"{one[kind]:.2f}" for kind in _KINDS)]
        for name, parts in found["times"].items()
        for part, one in parts["summary"].items()
    ]
    return table(["client", "of its tokens", "prompts", "time", "processor time", "at most"], rows)


_KINDS = ("ratio", "processor_ratio", "worst_processor_ratio")


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    # What one prompt leaves is stored before the next one comes.
    os.environ["CACHEBLEND_RAG_WRITE_BACK"] = "inline"
    with tempfile.TemporaryDirectory() as name:
        folder, cases = Path(name), load_cases(options.data)
        seeds = range(options.seed, options.seed + (options.draws if not options.shares else 1))
        draws = [
            conversations(cases, options.questions, seed, _made(folder / f"draw-{seed}"), options.passages)
            for seed in seeds
        ]
        found: dict[str, Any] = {"questions": options.questions, "seeds": [*seeds], "date": f"{date.today()}"}
        if options.shares:
            found = json.loads(Path(options.shares).read_text(encoding="utf-8"))
        else:
            found["clients"] = measure_shares(draws, _made(folder / "tiny"))
        if options.timed:
            found |= {"model": Path(options.model).name, "before": options.before, "passages": options.passages}
            found["times"] = _times(options, draws[0][: options.before + options.timed], folder)
    return found


def _times(options: argparse.Namespace, turns: Sequence[Turn], folder: Path) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    config = BlendConfig(find_repeated=True, write_back="off", try_blending=False, check_model=False)
    result = dict[str, Any]()
    with BlendEngine.from_pretrained(options.model, config=config, store=_made(folder / "kv")) as engine:
        for name in options.timed_clients:
            timed = measure_times(engine, CLIENTS[name], turns, options.timed, name)
            result[name] = {"prompts": [dataclasses.asdict(one) for one in timed], "summary": summary_of(timed)}
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write the JSON."""
    parser = script_parser("clients", __doc__)
    parser.add_argument("--data", required=True, metavar="FILE", help="questions with passages")
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--draws", type=int, default=3, help="draws of so many questions each, with seeds from --seed on"
    )
    parser.add_argument("--shares", metavar="FILE", help="an earlier run whose shares are taken over")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose first tokens are timed")
    parser.add_argument("--before", type=int, default=20, help="prompts before those that are timed")
    parser.add_argument("--timed", type=int, default=5, help="prompts that are timed; 0 for none")
    parser.add_argument("--passages", type=int, default=4, help="passages of a prompt")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="while first tokens are timed")
    parser.add_argument("--timed-clients", nargs="+", choices=CLIENTS, default=[*CLIENTS], metavar="NAME")
    parser.add_argument("--out", metavar="FILE")
    options = parser.parse_args(argv)

    def run() -> None:
        found = _measured(options)
        if options.out:
            write_json(options.out, found)
        print(table_of(found))
        if "times" in found:
            print(table_of_times(found))

    return reported(parser, run)


if __name__ == "__main__":
    sys.exit(main())
