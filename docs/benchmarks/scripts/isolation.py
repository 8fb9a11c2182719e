"""Guess from hits, times and counts what another tenant asked: ``python -m docs.benchmarks.scripts.isolation``.

Two passages of a shared collection are drawn. One tenant asks about one of them. The other asks about both, in an order
drawn by chance, and guesses which it was. Where nothing shows, half of the guesses are right.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import comb
from pathlib import Path
from typing import Any

import httpx

from docs.benchmarks.scripts.common import script_parser
from docs.benchmarks.scripts.measuring import machine
from docs.benchmarks.scripts.served import served
from docs.benchmarks.scripts.tenants import WORDS

__all__ = ["Found", "Guesses", "main", "watch"]

KEYS = {name: f"{name}-0123456789abcdef" for name in ("ada", "ben")}
BY = ("hits", "ttft_s", "split_s", "look_up_s", "load_s", "fuse_s", "first_token_s", "whole request")
"""Ways to guess: more hits, or less of a time."""
BOUND = 0.001
"""A probability of as many right guesses by chance that is lower than this, for all ways together, is a finding."""
# What a report says of one question differs by its text, and by chance.
_OF_TEXT = (
    "ttft_s",
    "parts",
    "prompt",
    "tokens",
    "recomputed",
    "verification",
    "finish_reason",
    "stopped_by",
    "reused",
)
# Counts of this process that grow by themselves.
_OF_ALL = re.compile(r"^(process_|python_)|_created")


@dataclass
class Guesses:
    """Guesses of one kind; one that nothing speaks for is drawn by chance.

    Parameters
    ----------
    right, of, undecided : int
    """

    right: int = 0
    of: int = 0
    undecided: int = 0

    @property
    def p_value(self) -> float:
        """Probability that as many at least, or as few, are right by chance."""
        far = max(self.right, self.of - self.right)
        tail = sum(comb(self.of, count) for count in range(far, self.of + 1)) / 2**self.of
        return min(1.0, 2 * tail) if far * 2 > self.of else 1.0


@dataclass
class Found:
    """All that was seen.

    Parameters
    ----------
    questions : int
        Of the tenant that is watched.
    guesses : dict of str to Guesses
        By what they were made; see `BY`.
    differing : list of str
        Fields of reports that differed between the passage that was asked about and the other.
    counted : list of str
        Counts of the one who watches that changed while the other asked.
    """

    questions: int = 0
    guesses: dict[str, Guesses] = field(default_factory=lambda: {name: Guesses() for name in BY})
    differing: list[str] = field(default_factory=list)
    counted: list[str] = field(default_factory=list)

    def add(self, other: Found) -> None:
        """Count what was seen of other questions, too."""
        self.questions += other.questions
        self.differing += other.differing
        self.counted += other.counted
        for name, one in other.guesses.items():
            own = self.guesses[name]
            self.guesses[name] = Guesses(own.right + one.right, own.of + one.of, own.undecided + one.undecided)

    @property
    def least_p(self) -> float:
        """The least probability of all ways of guessing, times their number (Bonferroni)."""
        return min(1.0, min(one.p_value for one in self.guesses.values()) * len(self.guesses))


def watch(
    watched: httpx.Client,
    watcher: httpx.Client,
    passages: Sequence[str],
    settle: Callable[[], object],
    collection: str = "archive",
    seed: int = 0,
) -> Found:
    """Let one tenant ask about one of each two passages, and the other guess about which.

    Parameters
    ----------
    watched, watcher : httpx.Client
        With the keys of the two.
    passages : sequence of str
        Of the shared collection, of about the same length. Each is asked about in two questions at most.
    settle : callable
        Waits until nothing is left to be done in the background.
    collection : str
    seed : int
        Of chance.
    """
    chance, found = random.Random(seed), Found()
    order = list(passages)
    chance.shuffle(order)
    # The first questions of a server take longer than all others.
    for client in (watched, watcher):
        for text in order[:2]:
            _asked(client, collection, text)
    settle()
    for one, other in zip(order[2::2], order[3::2], strict=False):
        pair = [one, other]
        before = _counts(watcher)
        secret = chance.randrange(2)
        _asked(watched, collection, pair[secret])
        settle()
        found.questions += 1
        found.counted += [name for name, value in _counts(watcher).items() if before.get(name) != value]
        seen: dict[int, tuple[dict[str, Any], float]] = {}
        for number in chance.sample(range(2), 2):
            seen[number] = _asked(watcher, collection, pair[number])
        settle()
        (report, _), (other_report, _) = seen[secret], seen[1 - secret]
        found.differing += [
            name for name, value in report.items() if name not in _OF_TEXT and other_report[name] != value
        ]
        for by, guesses in found.guesses.items():
            shown = [_sign(by, *seen[number]) for number in range(2)]
            guesses.of += 1
            guesses.undecided += shown[0] == shown[1]
            guess = chance.randrange(2) if shown[0] == shown[1] else shown.index(max(shown))
            guesses.right += guess == secret
    return found


def _sign(by: str, report: Mapping[str, Any], took: float) -> float:
    """How much speaks for it that a passage was asked about before."""
    if by == "hits":
        return float(report["hits"])
    if by == "whole request":
        return -took
    return -float(report["ttft_s"] if by == "ttft_s" else report["parts"][by])


def _asked(client: httpx.Client, collection: str, passage: str) -> tuple[dict[str, Any], float]:
    """The report of a question about a passage, and the seconds of the request."""
    body = {"question": passage, "k": 1, "max_tokens": 2, "stream": False, "show_prompt": False}
    began = time.perf_counter()
    answer = client.post(f"/api/collections/{collection}/ask", json=body)
    took = time.perf_counter() - began
    answer.raise_for_status()
    found = answer.json()
    if found["sources"][0]["text"].strip() != passage.strip():
        raise SystemExit("a question found another passage than the one it holds")
    report: dict[str, Any] = found["report"]
    for chunk in report["chunks"]:  # their length is that of the text
        del chunk["bytes"], chunk["tokens"]
    return report, took


def _counts(client: httpx.Client) -> dict[str, str]:
    """All that a tenant is told of the server, without counts of its own requests."""
    metrics = [line.rpartition(" ") for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
    own = {name: value for name, _, value in metrics if not _OF_ALL.search(name) and not _of_asking(name)}
    return {**own, "state": client.get("/api/state").text}


def _of_asking(name: str) -> bool:
    """Whether a count is of requests and bytes, which looking at the counts adds to."""
    return "tenant_requests" in name or "tenant_bytes" in name


def write_passages(folder: Path, count: int, words: int = 60, seed: int = 0) -> list[str]:
    """Documents of as many passages, all of as many words."""
    chance, texts = random.Random(seed), list[str]()
    folder.mkdir(parents=True)
    for number in range(count):
        texts.append(f"Passage {number:04}\n" + " ".join(chance.choices(WORDS, k=words)))
        (folder / f"passage-{number:04}.md").write_text(texts[-1] + "\n", encoding="utf-8")
    return texts


def summary(found: Found) -> dict[str, Any]:
    """What was found, as it is written."""
    guesses = {name: {**asdict(one), "p_value": round(one.p_value, 4)} for name, one in found.guesses.items()}
    return {
        "questions": found.questions,
        "guesses": guesses,
        "least_p_of_all": round(found.least_p, 4),
        "fields_that_differ": dict(Counter(found.differing)),
        "counts_that_change": dict(Counter(found.counted)),
    }


def _round(stored_ahead: bool, questions: int, seed: int) -> Found:
    """A server of its own with random weights, and what one tenant saw of the other there."""
    from tests import tiny
    from tests.toy import EMBEDDER_PATH

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny.model(num_hidden_layers=4, max_position_embeddings=2048).save_pretrained(folder / "model")
        tiny.tokenizer().save_pretrained(folder / "model")
        passages = write_passages(folder / "docs", 2 * questions + 2, seed=seed)
        (folder / "options.toml").write_text(
            '[engine]\nmin_tokens = 0\nrecompute_ratio = 0.3\nsize_limit = "%s"\n' % ("2GB" if stored_ahead else "8MB")
        )
        options = ["--docs", folder / "docs", "--model", folder / "model", "--embedder", EMBEDDER_PATH]
        options += ["--config", folder / "options.toml", "--top-k", "1", "--requests-per-minute", "1000000"]
        with (
            served(folder, KEYS, list(map(str, options))) as url,
            httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEYS['ada']}"}, timeout=60) as ada,
            httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEYS['ben']}"}, timeout=60) as ben,
        ):
            _until_stored(ben, stored_ahead, folder / "log")
            return watch(ada, ben, passages, lambda: time.sleep(0.15), seed=seed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write what was found; 1 if anything of one tenant shows to the other."""
    parser = script_parser("isolation", __doc__)
    parser.add_argument("--questions", type=int, default=200, help="of the tenant that is watched, each round")
    parser.add_argument("--rounds", type=int, default=1, help="each over other passages, in another order")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parsed = parser.parse_args(arguments)
    runs = []
    for stored_ahead in (True, False):
        found = Found()
        for seed in range(parsed.rounds):
            found.add(_round(stored_ahead, parsed.questions, seed))
        runs.append({"stored_ahead": stored_ahead, "rounds": parsed.rounds, "machine": machine(), **summary(found)})
        print(json.dumps(runs[-1], indent=1), flush=True)
    if parsed.json:
        parsed.json.write_text(json.dumps({"bound": BOUND, "runs": runs}, indent=1) + "\n")
    shows = any(one["least_p_of_all"] < BOUND or one["fields_that_differ"] or one["counts_that_change"] for one in runs)
    return int(shows)


def _until_stored(client: httpx.Client, whole: bool, log: Path) -> None:
    """Wait until the collection is stored ahead, or found too large for it."""
    said = "is stored for all tenants" if whole else "raise size_limit"
    ends = time.monotonic() + 60
    while said not in log.read_text():
        if time.monotonic() > ends:
            raise SystemExit(f"the server never said that it {said}: {log.read_text()[-2000:]}")
        time.sleep(0.2)
    client.get("/api/state").raise_for_status()


if __name__ == "__main__":
    sys.exit(main())
