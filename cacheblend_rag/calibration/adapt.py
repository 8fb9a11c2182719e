"""``cacheblend-rag adapt``: learn what a model's chunks are best computed behind, from its own prompts without labels.

The KV of one context is trained, and nothing of the model. A step takes one prompt: its chunks are computed behind the
context and reused, and full prefill's own answer is forced. The loss is the KL divergence of each token's distribution
from full prefill's. Prompts that were held back say what the context is worth beside the neighbours of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from cacheblend_rag.calibration.progress import Progress
from cacheblend_rag.calibration.prompts import Corpus
from cacheblend_rag.calibration.trials import FullAnswers, TrialSet, TriedRule
from cacheblend_rag.config import BlendConfig, check_above_zero, check_whole
from cacheblend_rag.engine.decode import end_ids_of
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.selection import SelectionRule, SelectNone, make_rule
from cacheblend_rag.fusor.teacher_forcing import greedy_answer, kl_divergence, prefill_layerwise
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.contexts import LearnedContext
from cacheblend_rag.models.kv import LayerKV, SegmentKV
from cacheblend_rag.models.plain import check_blends
from cacheblend_rag.models.rope import Rotaries, rotate, unrotate
from cacheblend_rag.prompt import Prompt, PromptTokenizer
from cacheblend_rag.prompt.contexts import Contexts

_OF_QUESTION = 0.3  # weight of the question's tokens beside the answer's
_WARM_UP = 10  # steps
# In most steps the first tokens of each chunk are right already, as if they had been recomputed: such shares.
_STARTS = (0.0, 0.0, 0.1, 0.15, 0.2)


@dataclass(frozen=True, kw_only=True)
class AdaptOptions:
    """How a context is learned.

    Parameters
    ----------
    steps : int
        Each takes one prompt; prompts come again where there are fewer.
    tokens : int
        Rows of the context on each layer.
    rate : float
        Learning rate of Adam at its highest; it falls along a cosine.
    answer_tokens : int
        Tokens of each answer of full prefill that are compared.
    held_back : int
        Prompts that only judge the result.
    """

    steps: int = 150
    tokens: int = 128
    rate: float = 0.003
    answer_tokens: int = 24
    held_back: int = 16

    def __post_init__(self) -> None:
        for name in ("steps", "tokens", "answer_tokens", "held_back"):
            check_whole(name, getattr(self, name), 1)
        check_above_zero("rate", self.rate)


@dataclass(frozen=True)
class TriedCondition:
    """How far answers are from full prefill's under one condition, on prompts that were held back.

    Parameters
    ----------
    reuse, blended : TriedRule
        With nothing recomputed, and by the engine's rule and recompute ratio.
    """

    reuse: TriedRule
    blended: TriedRule


@dataclass(frozen=True)
class AdaptResult:
    """A learned context, and what it is worth.

    Parameters
    ----------
    context : LearnedContext
    losses : list of float
        Mean KL divergence over the answer at each step.
    neighbours, learned : TriedCondition
        Chunks computed behind chunks next to them, which is the default, and behind the context as well.
    ratio : float
        Recompute ratio of what was blended.
    """

    context: LearnedContext
    losses: list[float]
    neighbours: TriedCondition
    learned: TriedCondition
    ratio: float

    @property
    def nearer(self) -> bool:
        """Whether the context brings answers nearer to full prefill, by the engine's rule."""
        return self.learned.blended.divergence.mean < self.neighbours.blended.divergence.mean


def adapt(
    engine: BlendEngine,
    prompts: Sequence[Prompt],
    options: AdaptOptions | None = None,
    *,
    corpus: Sequence[str] = (),
    progress: bool | None = None,
) -> AdaptResult:
    """Learn a context for a model.

    Parameters
    ----------
    engine : BlendEngine
        Its model, tokenizer, separator, rule and number of contexts. Its store is not used. The model stays as it is.
    prompts : sequence of Prompt
        As they will be asked; no answers are needed. The last ones are held back.
    options : AdaptOptions, optional
    corpus : sequence of str
        All chunks, those of a document one after another, as they are warmed; by default those of the prompts.
    progress : bool, optional
        Say what will be done, how long that may take, and how far it is. By default a bar shows the last on a terminal,
        and elsewhere a line every half a minute. False says nothing.

    Raises
    ------
    UnsupportedModelError
        If the model is answered plainly.
    ConfigError
        If there are too few prompts to hold some back, or none is of a length at which KV can be learned. Or if the
        model's quantised layers pass no gradients.
    """
    check_blends(engine.adapter)
    options = options or AdaptOptions()
    if not engine.adapter.passes_gradients():
        method = "its quantised layers pass no gradients here"
        raise ConfigError("model", method, "use TorchAoConfig(Int8WeightOnlyConfig()), or do without a learned context")
    adapter, tokenizer = engine.adapter, PromptTokenizer(engine.tokenizer, engine.config.separator)
    taught, held_back = prompts[: -options.held_back], prompts[-options.held_back :]
    taught = [prompt for prompt in taught if adapter.regime(len(tokenizer.tokenize(prompt).input_ids)) == 0]
    if not taught:
        remedy = f"use more than {options.held_back}, which are held back, of ordinary length"
        raise ConfigError("prompts", len(prompts), remedy)
    end_ids = end_ids_of(engine.model.generation_config, engine.tokenizer)
    about = (
        f"{len(prompts)} prompts: {len(taught)} are learned from in {options.steps} steps, {len(held_back)} held back"
    )
    passes = options.steps + 2 * 3 * len(held_back)
    with Progress("adapting", about, passes, exact=True, shown=progress) as bar:
        chunks, count = [*corpus, *(chunk for prompt in prompts for chunk in prompt.chunks)], engine.config.contexts
        training = ContextTraining(adapter, tokenizer, options, end_ids)
        losses = []
        with training.model_frozen():
            for step in range(options.steps):
                losses.append(training.step(taught[step % len(taught)]))
                bar.update()
        context = training.context()
        full = FullAnswers(adapter, options.answer_tokens, end_ids)
        neighbours = Corpus(adapter, tokenizer, chunks, count or BlendConfig.default("contexts"))
        behind = Corpus(adapter, tokenizer, chunks, count, context)
        rule = make_rule(engine.config).fit(adapter.num_layers)
        with engine.products():
            sets = [  # both at once: they share what full prefill answers
                TrialSet(adapter, tokenizer, held_back, full=full, compute=one.compute, on_prompt=bar.update)
                for one in (neighbours, behind)
            ]
            before, after = (_try_condition(one, rule) for one in sets)
        return AdaptResult(context, losses, before, after, engine.config.ratio)


def _try_condition(trials: TrialSet, rule: SelectionRule) -> TriedCondition:
    return TriedCondition(trials.try_rule(SelectNone()), trials.try_rule(rule))


class ContextTraining:
    """A context under training. It begins as the KV of plain prose.

    Parameters
    ----------
    adapter : ModelAdapter
    tokenizer : PromptTokenizer
    options : AdaptOptions
    end_ids : sequence of int
        Tokens that end an answer.
    """

    def __init__(
        self, adapter: ModelAdapter, tokenizer: PromptTokenizer, options: AdaptOptions, end_ids: Sequence[int]
    ) -> None:
        self._adapter, self._tokenizer, self._options, self._end_ids = adapter, tokenizer, options, end_ids
        (ids,) = Contexts(tokenizer, (), 1, options.tokens).ids
        layers = adapter.context_kv(ids)
        self._keys = [layer.keys.float().clone().requires_grad_() for layer in layers]  # [1, kv_heads, tokens, dim]
        self._values = [layer.values.float().clone().requires_grad_() for layer in layers]
        self._optimizer = torch.optim.Adam([*self._keys, *self._values], lr=options.rate)
        self._steps = 0

    @contextmanager
    def model_frozen(self) -> Iterator[None]:
        """Within this the model's weights want no gradients; afterwards they do as before."""
        wanting = [parameter for parameter in self._adapter.model.parameters() if parameter.requires_grad]
        for parameter in wanting:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in wanting:
                parameter.requires_grad_()

    def step(self, prompt: Prompt) -> float:
        """Learn from a prompt; the mean divergence over its answer before that."""
        done, starts = self._steps / self._options.steps, _STARTS[self._steps % len(_STARTS)]
        self._steps += 1
        rate = self._options.rate * min(1.0, self._steps / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * done))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        divergence, question = self.divergence(prompt, starts)
        answer = divergence[question:].mean()
        self._optimizer.zero_grad()
        (answer + _OF_QUESTION * divergence.mean()).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return float(answer.detach())

    def context(self) -> LearnedContext:
        """The context as learned so far."""
        rotaries, dtype = self._adapter.rotary(self._options.tokens), self._adapter.dtype
        keys = tuple(
            unrotate(layer.detach()[0], rotaries.of_keys(number)).to(dtype) for number, layer in enumerate(self._keys)
        )
        return LearnedContext(SegmentKV(keys, tuple(layer.detach()[0].to(dtype) for layer in self._values), False))

    def divergence(self, prompt: Prompt, starts: float = 0.0) -> tuple[torch.Tensor, int]:
        """KL divergence from full prefill behind each token of question and answer.

        Rows between chunks are taken from full prefill.

        Parameters
        ----------
        prompt : Prompt
        starts : float
            Share of each chunk whose KV is taken from full prefill, from its beginning.

        Returns
        -------
        Tensor [tokens], int
            The divergence, and how many of these tokens come before the answer's.
        """
        adapter, tokens = self._adapter, self._tokenizer.tokenize(prompt)
        end, ids = tokens.suffix.start, list(tokens.input_ids)
        full = prefill_layerwise(adapter, ids)
        before = [LayerKV(kv.keys[:, :, :end].clone(), kv.values[:, :, :end].clone()) for kv in full.layers]
        cache = adapter.new_cache(full.layers)
        answer, _ = greedy_answer(adapter, cache, full.logits, self._options.answer_tokens, self._end_ids)
        tail = ids[end:] + answer[:-1]
        wanted = adapter.extend(_cache_of(before), tail).float().log_softmax(dim=-1)
        own = [chunk for chunk in tokens.located if len(chunk.span)]
        openings = [self._tokenizer.context_ids(chunk.text) + chunk.head for chunk in own]
        computed = adapter.segments_kv(
            (),
            [(*opening, *tokens.ids(chunk.span)) for opening, chunk in zip(openings, own, strict=True)],
            heads=list(map(len, openings)),
            behind=[
                LayerKV(keys.to(adapter.dtype), values.to(adapter.dtype))
                for keys, values in zip(self._keys, self._values, strict=True)
            ],
            gradients=True,
        )
        spans = [range(chunk.span.start + round(starts * len(chunk.span)), chunk.span.stop) for chunk in own]
        reused = _with_chunks(before, spans, computed, adapter.rotary(end))
        said = adapter.extend(_cache_of(reused), tail, gradients=True).float().log_softmax(dim=-1)
        return kl_divergence(wanted, said), len(ids) - end - 1


def _with_chunks(
    layers: Sequence[LayerKV], spans: Sequence[range], chunks: Sequence[SegmentKV], rotaries: Rotaries
) -> list[LayerKV]:
    """KV of a prompt with the last tokens of each chunk put into its span; gradients flow to the chunks."""
    found = []
    for number, layer in enumerate(layers):
        rotary = rotaries.of_keys(number)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        at = 0
        for span, chunk in zip(spans, chunks, strict=True):
            first = chunk.keys[number].shape[1] - len(span)
            places = None if rotary is None else rotary.at(slice(span.start, span.stop))
            keys += [layer.keys[0, :, at : span.start], rotate(chunk.keys[number][:, first:], places)]
            values += [layer.values[0, :, at : span.start], chunk.values[number][:, first:]]
            at = span.stop
        keys.append(layer.keys[0, :, at:])
        values.append(layer.values[0, :, at:])
        found.append(LayerKV(torch.cat(keys, dim=1)[None], torch.cat(values, dim=1)[None]))
    return found


def _cache_of(layers: Sequence[LayerKV]) -> Any:
    """A cache that nothing is written into: it grows by joining tensors, through which gradients flow."""
    cache = DynamicCache()
    for number, layer in enumerate(layers):
        cache.update(layer.keys, layer.values, number)
    return cache


def adapt_report(adapted: AdaptResult) -> str:
    """The result of adapting, in words."""
    prompts = len(adapted.learned.blended.divergences)
    lines = [
        f"KL divergence from full prefill, nats a token, on {prompts} prompts that were held back",
        f"{'chunks computed behind':<28}nothing recomputed   {adapted.ratio:.0%} recomputed",
    ]
    for name, found in (("their neighbours", adapted.neighbours), ("and the learned context", adapted.learned)):
        reuse, blended = found.reuse.divergence, found.blended.divergence
        lines.append(f"  {name:<26}{reuse.mean:>18.4f}   {blended.mean:>14.4f}")
    return "\n".join(lines)
