"""The quality guard: some requests are held against full prefill afterwards, when nothing else waits.

::

    engine = BlendEngine(model, tokenizer, config=BlendConfig(guard_share=0.01), store="blend_data/kv")
    ...
    engine.guard.status  # how far answers were from full prefill, and whether the ratio was raised
"""

from __future__ import annotations

import dataclasses
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cacheblend_rag.engine.pipeline import Pipeline
from cacheblend_rag.engine.scheduler import Scheduler
from cacheblend_rag.engine.write_back import Job, WriteBack
from cacheblend_rag.errors import CacheBlendError, GenerationError
from cacheblend_rag.fusor.teacher_forcing import answer_log_probs, kl_divergence, prefill_layerwise
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.report import Generation

_log = logging.getLogger(__name__)
# Checks that may wait, how often one gives way to requests before it is dropped, answer tokens looked at.
_WAITING, _TRIES, _TOKENS = 8, 5, 64
# Checks since the last raise that are averaged, and how few of them say nothing yet.
_WINDOW, _LEAST = 8, 3


@dataclass(frozen=True)
class GuardStatus:
    """State of a guard.

    Parameters
    ----------
    requests : int
        Blended requests.
    sampled : int
        Of them, chosen for a check.
    measured : int
        Checks that were done.
    dropped : int
        Checks that were given up: too many waited, requests kept coming, or the store had changed.
    mean, worst, last : float
        KL divergence from full prefill over the answer's tokens, in nats a token: over all checks,
        the highest, and the latest.
    raised : int
        How often the ratio was raised.
    least_ratio : float
        Below this the ratio no longer falls; 0 if it was never raised.
    """

    requests: int = 0
    sampled: int = 0
    measured: int = 0
    dropped: int = 0
    mean: float = 0.0
    worst: float = 0.0
    last: float = 0.0
    raised: int = 0
    least_ratio: float = 0.0


class QualityGuard:
    """Samples requests, measures them in the background, and raises the ratio when they are too far off.

    An engine and all its views share one. ``guard_share`` and ``guard_bound`` of whichever answered a request say how
    likely it is checked, and how far off checks may be when its own is done. A raised ratio holds for all of them.

    Notes
    -----
    A check blends the prompt again from the store and prefills it in full, both compared over the tokens
    of the answer that was given. It gives way to a request at its next layer and begins again later.
    """

    def __init__(self) -> None:
        self._chooser = random.Random(0)
        self._lock = threading.Lock()
        self._status, self._waiting = GuardStatus(), 0
        self._recent: deque[float] = deque(maxlen=_WINDOW)

    @property
    def status(self) -> GuardStatus:
        """State of the guard."""
        return self._status

    def watch(
        self, prompt: Prompt, answer: Generation, pipeline: Pipeline, scheduler: Scheduler, background: WriteBack
    ) -> None:
        """Take note of an answered request, and perhaps queue a check of it."""
        report, share = answer.report, pipeline.config.guard_share
        # Only what came from the store can be wrong, and what continued a kept prompt cannot be repeated.
        if not share or report.plain or not report.reused_tokens or report.resumed_tokens:
            return
        with self._lock:
            sampled = self._chooser.random() < share
            self._add(requests=1, sampled=int(sampled))
            if not sampled:
                return
            if self._waiting >= _WAITING:
                self._add(dropped=1)
                return
            self._waiting += 1
        check = _Check(prompt, tuple(answer.token_ids[:_TOKENS]), report.hits, pipeline, lambda: scheduler.waiting > 0)
        if not self._queue(check, background, tries=_TRIES):
            self._finish(check, None)

    def _queue(self, check: _Check, background: WriteBack, tries: int) -> bool:
        job = Job(lambda: self._run(check, background, tries))
        return background.submit(f"check {id(check)}, {tries} tries left", job)

    def _run(self, check: _Check, background: WriteBack, tries: int) -> None:
        found, again = None, False
        try:
            if not background.closed:
                found = check.divergence()
        except GenerationError:  # a request came
            again = tries > 1 and self._queue(check, background, tries - 1)
        except CacheBlendError as error:
            _log.warning("a quality check failed: %s", error)
        finally:
            if not again:
                self._finish(check, found)

    def _finish(self, check: _Check, divergence: float | None) -> None:
        """Count a check that waits no longer, by what it measured if it did."""
        with self._lock:
            self._waiting -= 1
            if divergence is None:
                self._add(dropped=1)
            else:
                self._note(divergence, check)

    def _note(self, divergence: float, check: _Check) -> None:
        """Count a divergence, and raise the ratio if the latest ones are past the bound."""
        before, bound = self._status, check.pipeline.config.guard_bound
        mean = (before.mean * before.measured + divergence) / (before.measured + 1)
        self._status = dataclasses.replace(before, mean=mean, worst=max(before.worst, divergence), last=divergence)
        self._add(measured=1)
        _log.info("quality check: KL divergence from full prefill %.4g nats a token", divergence)
        self._recent.append(divergence)
        recent = sum(self._recent) / len(self._recent)
        if len(self._recent) < _LEAST or recent <= bound:
            return
        self._recent.clear()
        least = max(check.ratio, before.least_ratio)
        if least >= 1:
            return
        ratio = round(min(1.0, max(1.5 * least, least + 0.05)), 4)
        check.pipeline.policy.minimum.raise_to(ratio)
        self._status = dataclasses.replace(self._status, least_ratio=ratio)
        self._add(raised=1)
        _log.warning(
            "answers are %.3g nats a token from full prefill, past the bound of %g: the recompute ratio is raised "
            "from %.3g to %.3g; run `cacheblend-rag calibrate` on your documents",
            recent,
            bound,
            least,
            ratio,
        )

    def _add(self, **counts: int) -> None:
        status = self._status
        self._status = dataclasses.replace(status, **{name: getattr(status, name) + by for name, by in counts.items()})


class _Check:
    """One request, to be blended again and prefilled in full."""

    def __init__(
        self,
        prompt: Prompt,
        answer_ids: Sequence[int],
        hits: int,
        pipeline: Pipeline,
        awaited: Callable[[], bool],
    ) -> None:
        self.pipeline, self.ratio = pipeline, 0.0
        self._prompt, self._answer_ids, self._hits, self._awaited = prompt, answer_ids, hits, awaited

    def divergence(self) -> float | None:
        """Mean KL divergence over the answer's tokens; None if the store no longer gives the same prompt.

        Raises
        ------
        GenerationError
            If a request came meanwhile.
        """
        # Kept prompts are left aside: this very one may be among them.
        segments = self.pipeline.segments
        config = dataclasses.replace(segments.config, session_cache=False)
        plain = dataclasses.replace(self.pipeline, segments=dataclasses.replace(segments, config=config))
        blend, adapter = plain.blend(self._prompt, self._awaited), segments.model.adapter
        if blend.choice is None or sum(blend.lookup.hits) != self._hits:
            return None
        self.ratio = blend.choice.ratio
        blended = answer_log_probs(adapter, blend.cache, blend.logits, self._answer_ids)
        fusion = prefill_layerwise(adapter, blend.input_ids, self._awaited)
        full = answer_log_probs(adapter, adapter.new_cache(fusion.layers), fusion.logits, self._answer_ids)
        return float(kl_divergence(full, blended).mean())
