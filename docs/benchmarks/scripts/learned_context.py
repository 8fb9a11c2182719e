"""Trains the KV of one context, so that chunks behind it need less recompute: a trial, not part of the package.

``python -m docs.benchmarks.scripts.learned_context --data squad.jsonl --steps 150 --out runs/learned.jsonl``

The context begins as the KV of plain prose. A step takes one prompt. Its chunks are computed behind the context and
reused in full, and full prefill's answer is forced. The loss is the KL divergence of each token's distribution from
full prefill's. It needs no labels. The model itself stays as it is. Prompts are of the half on which rules were chosen.
Some of its groups are held back, and show what the context is worth. Each line of the result is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from cacheblend_rag.calibration.evaluation.cases import EvalCase
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.fusor.teacher_forcing import answer_log_probs, kl_divergence
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.kv import SegmentKV
from cacheblend_rag.models.modules import cache_argument
from cacheblend_rag.models.rope import unrotate
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.contexts import Contexts
from docs.benchmarks.scripts.common import reported, script_parser
from docs.benchmarks.scripts.yardstick import FullAnswer, Yardstick, in_prompt, of_half, open_cases, parse_method

__all__ = ["LearnedContext", "Lesson", "main", "train"]

_ANSWER_TOKENS = 24
_OF_QUESTION = 0.3  # weight of the question's tokens beside the answer's
_WARM_UP = 10  # steps


class LearnedContext:
    """KV of a context that can be trained.

    Parameters
    ----------
    adapter : ModelAdapter
        Its model's weights are not trained.
    ids : sequence of int
        What the context is at first.
    """

    def __init__(self, adapter: ModelAdapter, ids: Sequence[int]) -> None:
        self._adapter, self._decoder = adapter, adapter.model.model
        layers = adapter.prefill(ids).cache.layers
        self.keys = torch.stack([layer.keys[0] for layer in layers]).clone().requires_grad_()
        self.values = torch.stack([layer.values[0] for layer in layers]).clone().requires_grad_()

    def run(self, rows: Sequence[Sequence[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer, ``[rows, kv_heads, longest row, head_dim]``, each row behind the context."""
        count, longest, tokens = len(rows), max(map(len, rows)), self.keys.shape[2]
        cache = DynamicCache()
        for number, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            cache.update(keys.expand(count, -1, -1, -1), values.expand(count, -1, -1, -1), number)
        padded = torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in rows])
        self._decoder(padded, use_cache=True, **{cache_argument(self._decoder): cache})
        return [(layer.keys[:, :, tokens:], layer.values[:, :, tokens:]) for layer in cache.layers]

    @torch.no_grad()
    def compute(self, text: str, before: tuple[int, ...], ids: tuple[int, ...], regime: int) -> SegmentKV:
        """KV of a chunk; see `ComputeKV`."""
        rotaries = self._adapter.rotary(len(ids), self.keys.shape[2] + len(before))
        layers = [
            (keys[..., len(before) :, :], values[0, :, len(before) :]) for keys, values in self.run([before + ids])
        ]
        keys = tuple(unrotate(layer, rotaries.of_keys(number))[0] for number, (layer, _) in enumerate(layers))
        return SegmentKV(keys, tuple(values for _, values in layers), rotated=False)


@dataclass(frozen=True)
class Lesson:
    """A prompt to learn from.

    Parameters
    ----------
    prefix : list of (Tensor, Tensor)
        Full prefill's keys and values before the first chunk, of each layer.
    chunks : list of list of int
        Ids of each chunk, with what stands between it and the next.
    starts : list of int
        Position of each.
    tail : Tensor, [1, tokens]
        The question and the answer, but for its last token.
    question : int
        Tokens of the tail before the one that gives the answer's first token.
    full : Tensor, [tokens, vocab]
        Log-probabilities of full prefill behind each token of the tail.
    """

    prefix: list[tuple[torch.Tensor, torch.Tensor]]
    chunks: list[list[int]]
    starts: list[int]
    tail: torch.Tensor
    question: int
    full: torch.Tensor


def lesson_of(yardstick: Yardstick, prompt: Prompt) -> Lesson:
    """What full prefill does on a prompt."""
    tokens, full = yardstick.tokenizer.tokenize(prompt), yardstick.full_answer(prompt, _ANSWER_TOKENS)
    ids, end = list(tokens.input_ids), tokens.suffix.start
    cuts, known = [*(span.start for span in tokens.chunks), end], DynamicCache()
    for number, layer in enumerate(full.cache.layers):
        known.update(layer.keys[:, :, :end].clone(), layer.values[:, :, :end].clone(), number)
    prefix = [(layer.keys[:, :, : cuts[0]].clone(), layer.values[:, :, : cuts[0]].clone()) for layer in known.layers]
    tail = ids[end:] + full.answer[:-1]
    said = yardstick.adapter.extend(known, tail).log_softmax(dim=-1)
    pieces = [ids[start:stop] for start, stop in pairwise(cuts)]
    return Lesson(prefix, pieces, cuts[:-1], torch.tensor([tail]), len(ids) - end - 1, said.half())


def loss_of(context: LearnedContext, lesson: Lesson, model: Any) -> tuple[torch.Tensor, float]:
    """The loss of full KV reuse, and of it the mean divergence over the answer."""
    tokens, cache = context.keys.shape[2], DynamicCache()
    layers = zip(lesson.prefix, context.run(lesson.chunks), strict=True)
    for number, ((keys, values), (computed, others)) in enumerate(layers):
        turned = [
            _turned(computed[row : row + 1, :, : len(chunk)], model.model.rotary_emb.inv_freq, start - tokens)
            for row, (chunk, start) in enumerate(zip(lesson.chunks, lesson.starts, strict=True))
        ]
        kept = [others[row : row + 1, :, : len(chunk)] for row, chunk in enumerate(lesson.chunks)]
        cache.update(torch.cat([keys, *turned], dim=2), torch.cat([values, *kept], dim=2), number)
    said = model(lesson.tail, use_cache=True, **{cache_argument(model): cache}).logits[0].log_softmax(dim=-1)
    apart = kl_divergence(lesson.full.float(), said)
    answer = apart[lesson.question :].mean()
    return answer + _OF_QUESTION * apart.mean(), float(answer.detach())


def _turned(keys: torch.Tensor, frequencies: torch.Tensor, by: int) -> torch.Tensor:
    """Keys moved by so many positions."""
    angles = torch.cat([frequencies, frequencies]) * by
    first, second = keys.chunk(2, dim=-1)
    return keys * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


def held_out(
    yardstick: Yardstick, context: LearnedContext, answers: Sequence[tuple[Prompt, FullAnswer]], rules: Sequence[str]
) -> dict[str, float]:
    """Mean divergence of each rule from full prefill's answers; its condition is ``learned`` or a yardstick's."""
    found: dict[str, list[float]] = {}
    adapter = yardstick.adapter
    for prompt, full in answers:
        for method in map(parse_method, rules):
            compute = context.compute if method.condition == "learned" else None
            fusion = yardstick.prepared(method.condition, prompt, compute).fuse(method.rule).fusion
            said = answer_log_probs(adapter, adapter.new_cache(fusion.layers), fusion.logits, full.answer)
            found.setdefault(method.name, []).append(float(kl_divergence(full.rows, said).mean()))
    return {name: round(sum(values) / len(values), 4) for name, values in found.items()}


def train(context: LearnedContext, lessons: Sequence[Lesson], model: Any, steps: int, rate: float) -> list[float]:
    """Train a context; divergence over the answer at each step."""
    model.requires_grad_(False)
    optimizer, found = torch.optim.Adam([context.keys, context.values], lr=rate), list[float]()
    for step in range(steps):
        falling = 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / _WARM_UP) * falling
        loss, answer = loss_of(context, lessons[step % len(lessons)], model)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        found.append(answer)
    return found


def run(options: argparse.Namespace) -> None:
    """Train, and hold the result against other conditions."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    cases: list[EvalCase] = of_half(all_cases := open_cases(options.data), "dev")
    random.Random("learned").shuffle(cases)
    groups = sorted({case.group or case.id for case in cases})
    random.Random(1).shuffle(groups)
    held = [case for case in cases if (case.group or case.id) in set(groups[: len(groups) // 4])][: options.judged]
    taught = [case for case in cases if (case.group or case.id) not in set(groups[: len(groups) // 4])]
    with BlendEngine.from_pretrained(options.model, dtype="float32") as engine, Path(options.out).open("a") as file:
        yardstick = Yardstick(engine, all_cases, [], options.chunks)
        prompts = [yardstick.prompt(in_prompt(case, options.chunks)) for case in held]
        answers = [(prompt, yardstick.full_answer(prompt)) for prompt in prompts]
        ids = Contexts(yardstick.tokenizer, (), 1, options.tokens).ids[0]
        context = LearnedContext(engine.adapter, ids)

        def note(**what: Any) -> None:
            print(json.dumps(what), file=file, flush=True)

        others = ["sink/none", "sink/boundary@0.1", "plain/none", "plain/boundary@0.1", "context/none"]
        learned = ["learned/none", "learned/boundary@0.1"]
        note(step=0, **held_out(yardstick, context, answers, [*others, "context/boundary@0.1", *learned]))
        started = time.perf_counter()
        lessons = [
            lesson_of(yardstick, yardstick.prompt(in_prompt(case, options.chunks)))
            for case in taught[: options.prompts]
        ]
        losses = train(context, lessons, engine.model, options.steps, options.rate)
        seconds = round(time.perf_counter() - started)
        tens = [round(sum(losses[at : at + 10]) / len(losses[at : at + 10]), 4) for at in range(0, len(losses), 10)]
        note(step=options.steps, seconds=seconds, losses=tens, **held_out(yardstick, context, answers, learned))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = script_parser("learned_context", __doc__)
    parser.add_argument("--data", required=True, metavar="FILE", help="questions with passages")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=128, help="of the context")
    parser.add_argument("--chunks", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=100, help="to learn from")
    parser.add_argument("--judged", type=int, default=8, help="prompts held back")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rate", type=float, default=0.003)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    return reported(parser, lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
