"""Tries blending once on a model that nothing is known of, with the user's own chunks, when nothing else waits.

A dozen prompts are made of prompts that were answered: one of their questions, one of its chunks, other chunks beside
it. Each is prefilled in full, prefilled with its chunks in another order, and blended, over the first tokens of full
prefill's own answer. A model on which blending is poor gets more recompute, as much as it takes, or full prefill. The
result is kept with the store, without any text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cacheblend_rag.config import BlendConfig, options_of
from cacheblend_rag.engine.decode import end_ids_of
from cacheblend_rag.engine.judgement import Moved, TrialResult, is_near, is_poor, keep_result, kept_result, mean_of
from cacheblend_rag.engine.pipeline import LoadingKV, Pipeline
from cacheblend_rag.engine.ratio_policy import next_ratio
from cacheblend_rag.engine.scheduler import idle_seconds
from cacheblend_rag.engine.streaming import interpreter_ends
from cacheblend_rag.engine.turns import Turns
from cacheblend_rag.errors import CacheBlendError, GenerationError
from cacheblend_rag.fusor.teacher_forcing import answer_log_probs, greedy_answer
from cacheblend_rag.models.memory import is_out_of_memory
from cacheblend_rag.prompt import Prompt

_log = logging.getLogger(__name__)
QUIET_SECONDS = 10.0
"""How long nobody must have wanted the model before it begins."""
# Chunks of one tenant that must have been in prompts, prompts that are remembered for it, and prompts that are made.
_CHUNKS, _REMEMBERED, _PROMPTS = 8, 32, 12
# With fewer prompts whose chunks are all stored, nothing is said.
_LEAST = 6
# Most chunks and tokens of a prompt that is made, and tokens of its answer.
_CHUNKS_EACH, _TOKENS, _ANSWER_TOKENS = 6, 1024, 8


@dataclass(frozen=True)
class Asked:
    """A blended prompt that was answered. It stays in memory, and only until blending was tried.

    Parameters
    ----------
    name : str
        Stands for the model and the options that its KV depends on.
    prompt : Prompt
    pipeline : Pipeline
    turns : Turns
    tokenizer : transformers tokenizer
    """

    name: str
    prompt: Prompt
    pipeline: Pipeline
    turns: Turns
    tokenizer: Any

    @property
    def whose(self) -> tuple[str, str]:
        """Model with options, and tenant."""
        return self.name, self.pipeline.config.salt


def is_to_be_tried(pipeline: Pipeline) -> bool:
    """Whether the ratio was left to us, and nothing was measured for the model."""
    policy = pipeline.policy
    return pipeline.config.try_blending and policy.free and policy.settings is None


def name_of(pipeline: Pipeline) -> str:
    """Name of a model under the options that the KV of its blended prompts depends on."""
    segments, config = pipeline.segments, pipeline.config
    names = [one.name for one in options_of(BlendConfig) if one.identity == "kv"]
    values = config.asdict()
    known = [segments.model.fingerprint, segments.condition, segments.learned_digest, config.codec]
    known += [config.salt] * bool(config.salt)  # each tenant's trial is over prompts of its own
    return hashlib.sha256(json.dumps([known, [values[name] for name in names]]).encode()).hexdigest()[:32]


class BlendingTrial:
    """Tries blending once for each model and its options, in the background of the scheduler.

    Parameters
    ----------
    owner : weak reference
        To what closes the trial. That stays in memory while blending is tried.
    """

    def __init__(self, owner: weakref.ref[Any]) -> None:
        self.owner = owner
        self.result: TrialResult | None = None
        """The latest result, or the one that was kept with the store; None before."""
        self._lock = threading.Lock()
        self._asked = deque[Asked](maxlen=_REMEMBERED)
        self._settled = set[str]()
        self._thread: threading.Thread | None = None
        self._under_way: Sequence[Asked] = ()
        self._closed = self._unwanted = False
        self._wake = threading.Event()
        weakref.finalize(self, self._wake.set).atexit = False

    def recall(self, pipeline: Pipeline) -> None:
        """Act on what was found of this model before, if it is kept with the store."""
        if is_to_be_tried(pipeline) and (found := kept_result(pipeline.store.traits.folder, name_of(pipeline))):
            self._settle(pipeline, name_of(pipeline), found)

    def note(self, prompt: Prompt, pipeline: Pipeline, turns: Turns, tokenizer: Any) -> None:
        """A prompt was blended and answered; with enough of them, blending is tried once the model is idle."""
        if self._closed or not is_to_be_tried(pipeline) or (name := name_of(pipeline)) in self._settled:
            return
        with self._lock:
            self._asked.append(Asked(name, prompt, pipeline, turns, tokenizer))
            if not self._ready() or (self._thread is not None and self._thread.is_alive()):  # after a fork it is not
                return
            given = weakref.ref(self), self._wake
            thread = threading.Thread(target=_wait_for_quiet, args=given, name="blending-trial", daemon=True)
            with contextlib.suppress(RuntimeError):  # the system lets no thread begin
                thread.start()
                self._thread = thread

    def forget(self, salt: str | None, texts: Collection[str]) -> None:
        """Remember no prompt of a tenant that holds one of these texts, and give up a trial that does.

        Without a salt, none of any tenant.
        """

        def holds(one: Asked) -> bool:
            return salt in (None, one.pipeline.config.salt) and hold_some(one.prompt.chunks, texts)

        with self._lock:
            self._asked = deque((one for one in self._asked if not holds(one)), maxlen=_REMEMBERED)
            self._unwanted = self._unwanted or any(map(holds, self._under_way))

    def wait(self) -> None:
        """Wait until nothing is being tried or waits for it."""
        if (thread := self._thread) is not None and thread is not threading.current_thread():
            thread.join()

    def close(self) -> None:
        """Give up what is under way at its next layer or token."""
        self._closed = True
        self._wake.set()
        self.wait()
        with self._lock:
            self._asked.clear()

    def step(self) -> float | None:
        """Try blending if nobody has wanted the model for a while.

        Returns
        -------
        float or None
            Seconds after which to look again; None if there is nothing to be tried.
        """
        with self._lock:
            self._under_way = () if self._closed or interpreter_ends() else self._ready()
            if not self._under_way:
                self._thread = None
                return None
            self._unwanted = False
        left = QUIET_SECONDS - idle_seconds(self._under_way[-1].turns.scheduler)
        if left <= 0:
            self._try(self._under_way)
        with self._lock:
            self._under_way = ()
        return max(0.0, left)

    def _ready(self) -> Sequence[Asked]:
        """Prompts of one tenant that have chunks enough."""
        for whose in dict.fromkeys(one.whose for one in self._asked):
            asked = [one for one in self._asked if one.whose == whose]
            if len({chunk for one in asked for chunk in one.prompt.chunks}) >= _CHUNKS:
                return asked
        return ()

    def _ends(self) -> bool:
        return self._closed or self._unwanted or interpreter_ends()

    def _try(self, asked: Sequence[Asked]) -> None:
        """Try blending on these prompts. What fails is not tried again."""
        pipeline, name = asked[-1].pipeline, asked[-1].name
        folder, found = pipeline.store.traits.folder, None
        try:
            found = kept_result(folder, name)  # another process may have done it
            if found is None and (found := try_blending(asked, self._ends)) is None:
                return self._drop(name)  # their chunks are not stored; those of later prompts may be
            if folder is not None and not pipeline.store.traits.read_only:
                keep_result(folder, name, found)
        except CacheBlendError as error:
            if self._ends():
                return None
            _log.info("blending was not tried: %s", error)
        except BaseException as error:
            if not is_out_of_memory(error):
                _log.exception("trying blending failed")
        return self._settle(pipeline, name, found)

    def _settle(self, pipeline: Pipeline, name: str, found: TrialResult | None) -> None:
        self._settled.add(name)
        self._drop(name)
        if found is not None:
            self.result = found
            pipeline.policy.minimum.raise_to(found.least_ratio)
            _log.log(logging.WARNING if found.least_ratio else logging.INFO, "%s", found.words)

    def _drop(self, name: str) -> None:
        with self._lock:
            self._asked = deque((one for one in self._asked if one.name != name), maxlen=_REMEMBERED)


def _wait_for_quiet(trial: weakref.ref[BlendingTrial], wake: threading.Event) -> None:
    """The thread: while it waits it holds nothing of the engine."""
    left: float | None = 0.0
    while left is not None:
        wake.wait(left)
        if (one := trial()) is None or (owner := one.owner()) is None:
            return
        left = one.step()
        del one, owner


# One trial --------------------------------------------------------------------------------------


def try_blending(asked: Sequence[Asked], ends: Callable[[], bool]) -> TrialResult | None:
    """Compare blending with full prefill on prompts made of others, and find the least ratio at which it is near.

    Parameters
    ----------
    asked : sequence of Asked
        Of one model and tenant, the latest last.
    ends : callable
        Whether to give it up.

    Returns
    -------
    TrialResult or None
        None if too few prompts can be made whose chunks are all stored.

    Raises
    ------
    GenerationError
        If it was given up.
    """
    began, trial = time.perf_counter(), _Trial(asked[-1], ends)
    answered: list[_Answered] = []
    blended: list[tuple[Moved, float]] = []
    for prompt in made_prompts([one.prompt for one in asked], _PROMPTS):
        if (fitting := trial.fitting(prompt)) is not None:
            answered.append(trial.answered(fitting))
            blended.append(trial.blended(answered[-1]))
    if len(answered) < _LEAST:
        return None
    noise, moved, ratios = [one.reordered for one in answered], [one for one, _ in blended], [at for _, at in blended]
    least = 0.0
    if is_poor(moved, noise):
        least = next_ratio(max(ratios))
        while least < 1 and not is_near([trial.blended(one, least)[0] for one in answered], noise):
            least = next_ratio(least)
    ours, other = mean_of(moved), mean_of(noise)
    figures = (ours.divergence, ours.changed, other.divergence, other.changed)
    return TrialResult(len(answered), min(ratios), least, *figures, seconds=time.perf_counter() - began)


def made_prompts(asked: Sequence[Prompt], count: int) -> Iterator[Prompt]:
    """Prompts made of others: a question with one of its chunks among chunks of all, in random order.

    Parameters
    ----------
    asked : sequence of Prompt
        With at least two chunks in all.
    count : int
    """
    chooser = random.Random(0)
    known = list(dict.fromkeys(chunk for prompt in asked for chunk in prompt.chunks))
    for number in range(count):
        prompt = asked[-1 - number % len(asked)]
        size = min(max(2, len(prompt.chunks)), _CHUNKS_EACH, len(known))
        own = chooser.choice(prompt.chunks)
        chunks = [own, *chooser.sample([chunk for chunk in known if chunk != own], size - 1)]
        chooser.shuffle(chunks)
        yield with_chunks(prompt, chunks)


def with_chunks(prompt: Prompt, chunks: Sequence[str]) -> Prompt:
    """A prompt with other chunks; what stood between the old ones stands between these."""
    between = None
    if prompt.between is not None:  # the shortest: another may hold a turn of a conversation
        between = (min(prompt.between, key=len, default="\n\n"),) * (len(chunks) - 1)
    return Prompt(prompt.prefix, chunks, prompt.suffix, between, preamble=prompt.preamble)


def another_order(prompt: Prompt) -> Prompt:
    """The same prompt with its chunks, of which two differ at least, in another order."""
    chunks, chooser = list(prompt.chunks), random.Random(0)
    while tuple(chunks) == prompt.chunks:
        chooser.shuffle(chunks)
    return Prompt(prompt.prefix, chunks, prompt.suffix, prompt.between, preamble=prompt.preamble)


@dataclass(frozen=True)
class _Answered:
    """A prompt, the first tokens of full prefill's own answer, and what another order of the chunks does to them.

    Parameters
    ----------
    prompt : Prompt
    ids : list of int
        The tokens.
    log_probs : Tensor, [tokens, vocab]
        Log-probabilities that they were chosen from, on the CPU.
    reordered : Moved
    """

    prompt: Prompt
    ids: list[int]
    log_probs: torch.Tensor
    reordered: Moved


class _Trial:
    """Passes over prompts, each in the background, and each given up where the whole is."""

    def __init__(self, asked: Asked, ends: Callable[[], bool]) -> None:
        config = dataclasses.replace(asked.pipeline.config, prompt_cache=0)  # nobody asked this before
        self._pipeline, self._turns, self._ends = asked.pipeline.with_config(config), asked.turns, ends
        self._model = self._pipeline.segments.model
        self._fingerprint = self._model.fingerprint
        self._end_ids = end_ids_of(self._model.adapter.model.generation_config, asked.tokenizer)
        self._pauses = self._turns.pauses_in_background(ends)

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the model, which is to be as it was."""
        with self._turns.in_background():
            self._go_on()
            if self._model.fingerprint != self._fingerprint or self._model.adapter.model.training:
                raise GenerationError("the model has changed meanwhile")
            with self._model.products():
                yield

    def _go_on(self) -> None:
        if self._ends():
            raise GenerationError("it was given up")

    def _pause(self) -> None:
        self._turns.scheduler.step_aside()
        self._go_on()

    def fitting(self, prompt: Prompt) -> Prompt | None:
        """The prompt, with fewer chunks where it is long; None if it would not be blended from stored KV alone."""
        with self._held():
            while len(prompt.chunks) > 2 and self._tokens(prompt) > _TOKENS:
                prompt = with_chunks(prompt, prompt.chunks[:-1])
            with self._pipeline.look_up(self._pipeline.split(prompt, _ANSWER_TOKENS)) as lookup:
                return prompt if lookup.hits and all(lookup.hits) and lookup.kept is None else None

    def _tokens(self, prompt: Prompt) -> int:
        return len(self._ids(prompt))

    def answered(self, prompt: Prompt) -> _Answered:
        """The first tokens of full prefill's own answer."""
        adapter = self._model.blended
        with self._held():
            full = adapter.prefill(self._ids(prompt), *self._pauses)
            ids, log_probs = greedy_answer(adapter, full.cache, full.logits, _ANSWER_TOKENS, self._end_ids, self._pause)
            log_probs = log_probs.cpu()
            del full  # the other order needs the memory
            self._pause()
            other = adapter.prefill(self._ids(another_order(prompt)), *self._pauses)
            return _Answered(prompt, ids, log_probs, self._moved(log_probs, ids, other.cache, other.logits))

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        return self._pipeline.split(prompt, _ANSWER_TOKENS).split.input_ids

    def blended(self, one: _Answered, least: float = 0.0) -> tuple[Moved, float]:
        """How far blending moves an answer, and at which recompute ratio, which is no lower than the least one."""
        # Whether it takes long does not count here.
        pipeline = self._pipeline.with_config(dataclasses.replace(self._pipeline.config, min_tokens=0))
        with self._held(), pipeline.look_up(pipeline.split(one.prompt, _ANSWER_TOKENS)) as lookup:
            loading = pipeline.load(lookup, self._ends)
            if not isinstance(loading, LoadingKV):
                raise GenerationError("its chunks are not stored any more")
            loading.choice = pipeline.policy.at_least(loading.choice, least)
            blend = pipeline.fuse(loading, self._pauses)
            return self._moved(one.log_probs, one.ids, blend.cache, blend.logits), loading.choice.ratio

    def _moved(self, full: torch.Tensor, ids: Sequence[int], cache: Any, logits: torch.Tensor) -> Moved:
        return Moved.between(full, answer_log_probs(self._model.blended, cache, logits, ids).cpu())


def hold_some(chunks: Iterable[str], texts: Collection[str]) -> bool:
    """Whether a chunk holds one of some texts, or is part of one."""
    return any(text in chunk or chunk in text for chunk in chunks if chunk for text in texts if text)
