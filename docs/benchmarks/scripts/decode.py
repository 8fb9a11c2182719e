"""Seconds a token after the first: after a blend and by plain transformers, and by copies of weights in few bits.

``python -m docs.benchmarks.scripts.decode ways --shape qwen2.5-0.5b --chunks 4 --chunk-tokens 512``

All ways run in one process, in turn, round after round; ratios are of medians. Timed is from the
first token's logits to the last one's, so no prefill is in it. No token can come sooner than all weights are read once,
which is reckoned from how fast memory is read here. A stream generates on a thread of its
own, so transformers is also timed on one. Cold requests find none of the chunks stored; one keeps what
it computed in the background, which should cost its tokens nothing, and one keeps nothing.

``python -m docs.benchmarks.scripts.decode copies --model smollm2 --out decode-float16-smollm2.json``

The copies are weights packed in float16. One answer is made behind the bundled articles, and its tokens take turns: one
is computed by copies, the next without. Scores are of texts of the articles that are read token by token. A share of
each token's time is given, too: that of reading all weights once, at the rate at which memory is read here.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.generation import LogitsProcessor

from cacheblend_rag import BlendConfig
from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.cpu.products import Kernel, Products
from cacheblend_rag.prompt import Prompt
from docs.benchmarks.scripts.common import (
    BenchOptions,
    TokenClock,
    bench_model,
    bench_prompt,
    draw_ways,
    greedy,
    in_turn,
    machine,
    medians,
    prompt_parser,
    reported,
    run_bench,
    save_figure,
    script_parser,
    show_result,
    table,
    table_of_ways,
    timed_result,
    titled,
    warmed,
    write_json,
)

PLAIN = "transformers"
_NOT_KEPT, _KEPT = "cold, nothing kept", "cold, kept"


@dataclass(frozen=True)
class DecodingOptions(BenchOptions):
    """Options of the measurement.

    Parameters
    ----------
    new_tokens : int
        Tokens of an answer, the first one included.
    """

    new_tokens: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.new_tokens < 2:
            raise ConfigError("new_tokens", self.new_tokens, "use 2 or more; the first one is not timed")


def measure(options: DecodingOptions) -> dict[str, Any]:
    """Measure every way; a dictionary fit for JSON."""
    model, tokenizer = bench_model(options)
    prompt = bench_prompt(tokenizer, options)
    with (
        tempfile.TemporaryDirectory() as folder,
        warmed(model, tokenizer, prompt, folder, recompute_ratio=0.15) as (engine, _),
    ):
        report = engine.fuse(prompt).report
        ways = _ways(engine, prompt, options.new_tokens)
        seconds = in_turn({name: partial(_a_token, way) for name, way in ways.items()}, options.rounds)
        storing = engine.turns.write_back.seconds
    a_token = medians(seconds)
    reading = weight_bytes(model) / bandwidth(model.device)
    return {
        **timed_result(options, report, seconds),
        "reading_weights": reading,
        "of_bound": {name: reading / median for name, median in a_token.items()},
        "seconds_a_token": a_token,
        "to_transformers": {name: median / a_token[PLAIN] for name, median in a_token.items()},
        "kept_to_not_kept": a_token[_KEPT] / a_token[_NOT_KEPT],
        "storing_seconds": storing / (options.rounds + 1),
    }


def weight_bytes(model: nn.Module) -> int:
    """Bytes of weights that a token reads: of all linear layers, the output head too."""
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    return sum(int(weight.nbytes) for weight in weights)


def bandwidth(device: torch.device) -> float:
    """Bytes a second at which memory is read."""
    much = torch.ones(2**26, device=device)
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        float(much.sum())
        seconds.append(time.perf_counter() - began)
    return much.nbytes / statistics.median(seconds)


def _ways(engine: BlendEngine, prompt: Prompt, new_tokens: int) -> Mapping[str, Callable[[TokenClock], object]]:
    """Ways to answer a prompt by as many tokens."""
    ids = torch.tensor([engine.tokenize(prompt).input_ids], device=engine.adapter.device)
    config = greedy(engine.tokenizer, new_tokens)

    def plain(clock: TokenClock) -> None:
        mask = torch.ones_like(ids)
        engine.model.generate(ids, attention_mask=mask, generation_config=config, logits_processor=[clock])

    def blended(clock: TokenClock) -> None:
        engine.generate(prompt, generation_config=config, logits_processor=[clock])

    def streamed(clock: TokenClock) -> None:
        for _ in engine.stream(prompt, generation_config=config, logits_processor=[clock]):
            pass

    def plain_on_a_thread(clock: TokenClock) -> None:
        thread = threading.Thread(target=plain, args=(clock,))
        thread.start()
        thread.join()

    def cold(clock: TokenClock, write_back: str) -> None:
        engine.forget(prompt.chunks)
        asked = engine.with_config(write_back=write_back)
        asked.generate(prompt, generation_config=config, logits_processor=[clock])
        asked.flush()
        engine.warm(prompt.chunks, progress=False)  # for the others

    return {
        PLAIN: plain,
        "blended": blended,
        "transformers on a thread": plain_on_a_thread,
        "blended, streamed": streamed,
        _NOT_KEPT: partial(cold, write_back="off"),
        _KEPT: partial(cold, write_back="background"),
    }


def _a_token(way: Callable[[TokenClock], object]) -> float:
    """Seconds a token of one answer."""
    clock = TokenClock()
    way(clock)
    return (clock.times[-1] - clock.times[0]) / (len(clock.times) - 1)


def show(options: DecodingOptions, plot: str | None = None) -> None:
    """Measure and print a table, drawn into a file if one is named; the last line is JSON."""

    def tell(result: Mapping[str, Any]) -> str:
        return (
            f"storing what a cold request computed takes {result['storing_seconds']:.3f} s afterwards; "
            f"its tokens take {result['kept_to_not_kept']:.3f} of the time they take if nothing is kept\n"
            f"reading all weights once takes {1e3 * result['reading_weights']:.1f} ms, "
            f"{result['of_bound']['blended']:.0%} of a token after a blend\n\n"
            f"{options.shape}, {options.dtype}, {result['prompt_tokens']} tokens, "
            f"then {options.new_tokens} new ones\n"
        ) + table_of_ways(("way", "a token", "to transformers"), result, "seconds_a_token", "to_transformers")

    show_result(plot, lambda: measure(options), tell, draw)


def draw(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """Seconds a token after the first, beside transformers."""
    figure = draw_ways(pyplot, result, result["spread"], "to_transformers")
    detail = f"{result['options']['new_tokens']} new tokens behind {result['prompt_tokens']:,}"
    titled(figure, "Decoding, beside transformers", result, detail)
    save_figure(pyplot, figure, path)


def ways(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table and JSON."""
    parser = prompt_parser("decode ways", __doc__, shape="qwen2.5-0.5b", rounds=5)
    parser.add_argument("--new-tokens", type=int, default=32)
    return run_bench(parser, arguments, DecodingOptions, show)


# Copies of weights in few bits ------------------------------------------------------------------

_COPIES = ("copies", "without")
_READ = 160  # tokens of a text before those whose scores are compared


class _Switch:
    """Hides the kernel of few rows from products for the way without copies."""

    def __init__(self, name: str) -> None:
        self.way, self._name, self._form = _COPIES[0], name, Products.form

    def form(self, products: Products, kernel: Kernel, *which: Any) -> Any:
        """See `Products.form`."""
        hidden = kernel.name == self._name and self.way != _COPIES[0]
        return None if hidden else self._form(products, kernel, *which)


class _TakingTurns(LogitsProcessor):  # type: ignore[misc]
    """Chooses the way of the next token, and notes what the last one took."""

    def __init__(self, switch: _Switch) -> None:
        self._switch = switch
        self.seconds: dict[str, list[float]] = {way: [] for way in _COPIES}
        self._count, self._began = 0, 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See `LogitsProcessor`."""
        if self._count > len(_COPIES):  # the first turn of each warms up
            self.seconds[self._switch.way].append(time.perf_counter() - self._began)
        self._switch.way = _COPIES[self._count % len(_COPIES)]
        self._count += 1
        self._began = time.perf_counter()
        return scores


def tokens(engine: BlendEngine, switch: _Switch, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of tokens behind a prompt."""
    ids = engine.tokenizer("\n\n".join(_texts())).input_ids[: options.prompt_tokens]
    turns = _TakingTurns(switch)
    engine.generate(
        engine.tokenizer.decode(ids),
        generation_config=greedy(engine.tokenizer, len(_COPIES) * (options.tokens + 1) + 1),
        logits_processor=[turns],
    )
    medians = {way: 1e3 * statistics.median(each) for way, each in turns.seconds.items()}
    pairs = zip(*turns.seconds.values(), strict=True)
    return {"ms_a_token": medians, "ratio": statistics.median(one / other for one, other in pairs)}


def _of_bound(engine: BlendEngine, ms_a_token: Mapping[str, float]) -> dict[str, float]:
    """Share of a token's time that reading its weights takes: two bytes of each packed in float16, or four."""
    wide = 1e3 * weight_bytes(engine.model) / bandwidth(engine.model.device)
    return {way: wide / (2 if way == _COPIES[0] else 1) / each for way, each in ms_a_token.items()}


@torch.no_grad()
def scores(engine: BlendEngine, switch: _Switch, options: argparse.Namespace) -> dict[str, Any]:
    """Divergence of next tokens from those of float32, in nats, and how many choices are the same."""
    exact = AutoModelForCausalLM.from_pretrained(engine.model.config._name_or_path, dtype=torch.float32).eval()
    away: dict[str, list[float]] = {way: [] for way in _COPIES}
    same = dict.fromkeys(_COPIES, 0)
    for text in _texts()[: options.texts]:
        ids = torch.tensor([engine.tokenizer(text).input_ids[: _READ + options.tokens]])
        wanted = _read(exact, ids)
        for way in _COPIES:
            switch.way = way
            with engine.products(decoding=True):
                found = _read(engine.model, ids)
            away[way] += (wanted.exp() * (wanted - found)).sum(-1).tolist()
            same[way] += int((wanted.argmax(-1) == found.argmax(-1)).sum())
    return {
        "tokens": len(away[_COPIES[0]]),
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


def _run(options: argparse.Namespace) -> None:
    """Measure, print a table, and write JSON."""
    torch.set_num_threads(options.threads)
    config = BlendConfig(prompt_cache=0, write_back="off")
    switch = _Switch("float16")
    with (
        BlendEngine.from_pretrained(
            options.model, device="cpu", dtype="float32", backend="torch", config=config
        ) as engine,
        mock.patch.object(Products, "form", lambda *which: switch.form(*which)),
    ):
        result = {"options": vars(options), "machine": machine("cpu"), **tokens(engine, switch, options)}
        result["of_bound"] = _of_bound(engine, result["ms_a_token"])
        if options.texts:
            result["scores"] = scores(engine, switch, options)
    print(table(("way", "a token"), [(way, f"{one:.1f} ms") for way, one in result["ms_a_token"].items()]))
    print(f"ratio {result['ratio']:.2f}, of the bound {result.get('of_bound')}, {result.get('scores')}")
    if options.out:
        write_json(options.out, result)


def copies(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = script_parser("decode copies", __doc__)
    parser.add_argument("--model", default="smollm2")
    for name, default in (("prompt-tokens", 3000), ("tokens", 40), ("texts", 10), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out")
    return reported(parser, lambda: _run(parser.parse_args(arguments)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one of the parts, and print a table and JSON."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parts = {"ways": ways, "copies": copies}
    parser = script_parser("decode", __doc__)
    parser.add_argument("part", choices=parts)
    return parts[parser.parse_args(given[:1]).part](given[1:])


if __name__ == "__main__":
    sys.exit(main())
