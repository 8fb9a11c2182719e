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
- ``few``: a span that was found before, in a prompt with less than ``min_tokens`` in chunks.
- ``border``: in other spans before, or in none.

Times are those of ``--model``: two servers, one of which finds nothing, get the last ``--timed`` prompts in turn. The
machine may have other work, so ratios are those of a prompt's two first tokens, one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import httpx
from transformers import LlamaConfig, LlamaForCausalLM

from cacheblend_rag.calibration.datasets import EvalCase, load_cases
from cacheblend_rag.config import DEFAULT_EMBEDDER, DEFAULT_MODEL
from cacheblend_rag.engine.segments import FOUND
from cacheblend_rag.models.loading import load_geometry
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

_PASSAGES = 4
_TURNS = 5
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


def conversations(cases: Sequence[EvalCase], count: int, seed: int, folder: Path) -> list[Turn]:
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
            found = index.store.similarity_search(case.question, k=_PASSAGES)
            passages = tuple(Passage(str(one.metadata["source"]), one.page_content) for one in found)
            turns.append(Turn(case.question, passages, tuple(before)))
            before.append((case.question, case.answers[0]))
    return turns


def _tiny_model(folder: Path, tokenizer: Any) -> Path:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
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


def measure_times(turns: Sequence[Turn], names: Sequence[str], model: str, timed: int, folder: Path) -> dict[str, Any]:
    """First tokens of the last prompts of some clients, with repeated text found and without, in turn."""
    keys, results = _keys(len(names)), dict[str, Any]()
    arguments = ["--model", model, "--docs", str(_no_documents(folder))]
    with ExitStack() as stack:
        on = stack.enter_context(served(_made(folder / "on"), keys, arguments))
        off = stack.enter_context(served(_made(folder / "off"), keys, [*arguments, "--find-repeated", "off"]))
        for name, key in zip(names, keys.values(), strict=True):
            client = CLIENTS[name]
            ways = {"found": _asking(on, key), "full prefill": _asking(off, key)}
            for turn in turns[:-timed]:
                ways["found"](client.messages(turn))
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for number, turn in enumerate(turns[-timed:]):
                for way in sorted(ways, reverse=bool(number % 2)):
                    made = ways[way](client.messages(turn))["cacheblend"][0]
                    seconds[way].append(made["ttft_s"])
            results[name] = seconds
            print(f"{name}: {seconds}", file=sys.stderr)
    return results


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def table_of(found: dict[str, Any]) -> str:
    """Shares, causes of loss and times by client."""
    rows, causes = [], ("beginning", "message", "few", "border")
    for name, one in found["clients"].items():
        of = max(1, one["passage_tokens"])
        row = [name, f"{one['passage_tokens']:,}", f"{one['share']:.3f}"]
        row += [f"{one['lost'].get(cause, 0) / of:.3f}" for cause in causes]
        row += [str(one["spans"]), str(one["wrong_spans"])]
        if times := found.get("seconds", {}).get(name):
            row += [f"{statistics.median(times[way]):.2f} s" for way in ("found", "full prefill")]
            row.append(f"{statistics.median(map(_ratio, times['found'], times['full prefill'])):.2f}")
        elif "seconds" in found:
            row += ["", "", ""]
        rows.append(row)
    head = ["client", "passage tokens", "share", *causes, "spans that hit", "wrong"]
    return table([*head, "first token", "full prefill", "ratio"] if "seconds" in found else head, rows)


def _ratio(found: float, full: float) -> float:
    return found / full


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    # What one prompt leaves is stored before the next one comes.
    os.environ["CACHEBLEND_RAG_WRITE_BACK"] = "inline"
    with tempfile.TemporaryDirectory() as name:
        folder, cases = Path(name), load_cases(options.data)
        seeds = range(options.seed, options.seed + options.draws)
        draws = [conversations(cases, options.questions, seed, _made(folder / f"draw-{seed}")) for seed in seeds]
        found: dict[str, Any] = {"questions": options.questions, "seeds": [*seeds], "date": f"{date.today()}"}
        if options.shares:
            found["clients"] = json.loads(Path(options.shares).read_text(encoding="utf-8"))["clients"]
        else:
            found["clients"] = measure_shares(draws, _made(folder / "tiny"))
        if options.timed:
            few = draws[0][: options.before + options.timed]
            found |= {"model": Path(options.model).name, "before": options.before}
            found["seconds"] = measure_times(few, options.timed_clients, options.model, options.timed, folder)
    return found


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
    parser.add_argument("--timed-clients", nargs="+", choices=CLIENTS, default=[*CLIENTS], metavar="NAME")
    parser.add_argument("--out", metavar="FILE")
    options = parser.parse_args(argv)

    def run() -> None:
        found = _measured(options)
        if options.out:
            write_json(options.out, found)
        print(table_of(found))

    return reported(parser, run)


if __name__ == "__main__":
    sys.exit(main())
