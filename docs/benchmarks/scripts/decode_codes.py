"""Tokens by copies of weights in few bits and without: milliseconds of each, and how far scores are from float32's.

``python -m docs.benchmarks.scripts.decode_codes --model smollm2 --out decode-codes.json``

In bfloat16 the copies are codes of 4 bits, and the model a starter or a GGUF file of 4 bits. With ``--dtype float32``
they are weights packed in float16. One answer is made behind the bundled articles, and its tokens take turns: one is
computed by copies, the next without. Scores are of texts of the articles that are read token by token. For float32, a
share of each token's time is given, too: that of reading all weights once, at the rate at which memory is read here.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM
from transformers.generation import LogitsProcessor

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.models.cpu import float16_copies, int4_linear, weight_prepacking
from docs.benchmarks.scripts.common import greedy, reported, script_parser, write_json
from docs.benchmarks.scripts.decode import bandwidth, weight_bytes
from docs.benchmarks.scripts.measuring import machine, table

WAYS = ("copies", "without")
_READ = 160  # tokens of a text before those whose scores are compared


class _Switch:
    """Stands for what says whether rows are few, and says no for the way without copies."""

    def __init__(self, are_few: Callable[[torch.Tensor], bool]) -> None:
        self.way, self._are_few = WAYS[0], are_few

    def __call__(self, rows: torch.Tensor) -> bool:
        return self.way == WAYS[0] and self._are_few(rows)


class _TakingTurns(LogitsProcessor):  # type: ignore[misc]
    """Chooses the way of the next token, and notes what the last one took."""

    def __init__(self, switch: _Switch) -> None:
        self._switch = switch
        self.seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        self._count, self._began = 0, 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See `LogitsProcessor`."""
        if self._count > len(WAYS):  # the first turn of each warms up
            self.seconds[self._switch.way].append(time.perf_counter() - self._began)
        self._switch.way = WAYS[self._count % len(WAYS)]
        self._count += 1
        self._began = time.perf_counter()
        return scores


def tokens(engine: BlendEngine, switch: _Switch, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of tokens behind a prompt."""
    ids = engine.tokenizer("\n\n".join(_texts())).input_ids[: options.prompt_tokens]
    turns = _TakingTurns(switch)
    engine.generate(
        engine.tokenizer.decode(ids),
        generation_config=greedy(engine.tokenizer, len(WAYS) * (options.tokens + 1) + 1),
        logits_processor=[turns],
    )
    medians = {way: 1e3 * statistics.median(each) for way, each in turns.seconds.items()}
    pairs = zip(*turns.seconds.values(), strict=True)
    return {"ms_a_token": medians, "ratio": statistics.median(one / other for one, other in pairs)}


def _of_bound(engine: BlendEngine, ms_a_token: Mapping[str, float]) -> dict[str, float]:
    """Share of a token's time that reading its weights takes: two bytes of each packed in float16, or four."""
    wide = 1e3 * weight_bytes(engine.model) / bandwidth(engine.model.device)
    return {way: wide / (2 if way == WAYS[0] else 1) / each for way, each in ms_a_token.items()}


@torch.no_grad()
def scores(engine: BlendEngine, switch: _Switch, options: argparse.Namespace) -> dict[str, Any]:
    """Divergence of next tokens from those of float32, in nats, and how many choices are the same."""
    exact = AutoModelForCausalLM.from_pretrained(engine.model.config._name_or_path, dtype=torch.float32).eval()
    away: dict[str, list[float]] = {way: [] for way in WAYS}
    same = dict.fromkeys(WAYS, 0)
    for text in _texts()[: options.texts]:
        ids = torch.tensor([engine.tokenizer(text).input_ids[: _READ + options.tokens]])
        wanted = _read(exact, ids)
        for way in WAYS:
            switch.way = way
            with engine.products(decoding=True):
                found = _read(engine.model, ids)
            away[way] += (wanted.exp() * (wanted - found)).sum(-1).tolist()
            same[way] += int((wanted.argmax(-1) == found.argmax(-1)).sum())
    return {
        "tokens": len(away[WAYS[0]]),
        "divergence": {way: statistics.mean(each) for way, each in away.items()},
        "worst": {way: max(each) for way, each in away.items()},
        "same_choice": same,
    }


def _texts() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(ARTICLES_PATH.glob("*.md"))]


def _read(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities behind each of the last tokens, which are read one by one, ``[tokens, vocabulary]``."""
    found = model(ids[:, :_READ], use_cache=True)
    rows = []
    for at in range(_READ, ids.shape[1]):
        found = model(ids[:, at : at + 1], past_key_values=found.past_key_values, use_cache=True)
        rows.append(found.logits[0, -1].float().log_softmax(-1))
    return torch.stack(rows)


def run(options: argparse.Namespace) -> None:
    """Measure, print a table, and write JSON."""
    torch.set_num_threads(options.threads)
    wide = options.dtype == "float32"
    prepack = "auto" if wide else True
    config = BlendConfig(prepack_weights=prepack, prompt_lookup=0, prompt_cache=0, write_back="off")
    switch = _Switch(float16_copies.are_few if wide else int4_linear.are_few)
    with (
        BlendEngine.from_pretrained(options.model, device="cpu", dtype=options.dtype, config=config) as engine,
        mock.patch.object(float16_copies if wide else weight_prepacking, "are_few", switch),
    ):
        result = {"options": vars(options), "machine": machine("cpu"), **tokens(engine, switch, options)}
        if wide:
            result["of_bound"] = _of_bound(engine, result["ms_a_token"])
        if options.texts:
            result["scores"] = scores(engine, switch, options)
    print(table(("way", "a token"), [(way, f"{one:.1f} ms") for way, one in result["ms_a_token"].items()]))
    print(f"ratio {result['ratio']:.2f}, of the bound {result.get('of_bound')}, {result.get('scores')}")
    if options.out:
        write_json(options.out, result)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = script_parser("decode_codes", __doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    for name, default in (("prompt-tokens", 3000), ("tokens", 40), ("texts", 10), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out")
    return reported(parser, lambda: run(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main())
