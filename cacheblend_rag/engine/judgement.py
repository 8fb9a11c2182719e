"""Whether blending is poor on a model: how far it moves answers, beside another order of the same chunks.

No figure in nats is good or bad by itself: a sure model is moved by little, an unsure one by a rounding. What another
order of the same chunks does is what a user of retrieval accepts anyway, on the user's own model and documents.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean

import torch

from cacheblend_rag.engine.intervals import interval, paired
from cacheblend_rag.errors import StoreError
from cacheblend_rag.fusor.teacher_forcing import kl_divergence
from cacheblend_rag.store.files import write_whole


@dataclass(frozen=True)
class Moved:
    """How far full prefill's answer to one prompt is moved, over its first tokens.

    Parameters
    ----------
    divergence : float
        Mean KL divergence from full prefill, in nats a token.
    changed : float
        Share of the tokens in whose place another one would be chosen.
    """

    divergence: float
    changed: float

    @classmethod
    def between(cls, full: torch.Tensor, found: torch.Tensor) -> Moved:
        """Of log-probabilities where each token of the answer stands, ``[tokens, vocab]``."""
        other = full.argmax(dim=-1) != found.argmax(dim=-1)
        return cls(float(kl_divergence(full, found).mean()), float(other.float().mean()))


def mean_of(moved: Sequence[Moved]) -> Moved:
    """The mean over prompts."""
    return Moved(fmean(one.divergence for one in moved), fmean(one.changed for one in moved))


def is_poor(blended: Sequence[Moved], reordered: Sequence[Moved]) -> bool:
    """Whether blending is clearly further from full prefill than another order of the chunks, prompt by prompt.

    The 95% interval of the difference lies above 0, and more tokens change. Or most tokens change, as an interval over
    the prompts has it: then nothing else matters.
    """
    differences = [one.divergence for one in blended], [one.divergence for one in reordered]
    further = paired(*differences).low > 0 and mean_of(blended).changed > mean_of(reordered).changed
    return further or _changes_most(blended)


def is_near(blended: Sequence[Moved], reordered: Sequence[Moved]) -> bool:
    """Whether blending that was found poor is now no further than another order of the chunks, in the mean."""
    ours, noise = mean_of(blended), mean_of(reordered)
    near = ours.divergence <= noise.divergence or ours.changed <= noise.changed
    return near and not _changes_most(blended)


def _changes_most(moved: Sequence[Moved]) -> bool:
    return interval([one.changed for one in moved]).low > 0.5


@dataclass(frozen=True)
class TrialResult:
    """The result of trying blending on a model. It holds no text.

    Parameters
    ----------
    prompts : int
        Prompts that were made of stored chunks.
    ratio : float
        Recompute ratio that was tried first.
    least_ratio : float
        The ratio below which no prompt goes from now on, 1 for full prefill; 0 if blending was not poor.
    divergence, changed : float
        How far blending at ``ratio`` moved answers, in the mean; see `Moved`.
    order_divergence, order_changed : float
        How far another order of the same chunks moved them.
    seconds : float
        Time it took, waiting for requests included.
    """

    prompts: int
    ratio: float
    least_ratio: float
    divergence: float
    changed: float
    order_divergence: float
    order_changed: float
    seconds: float = 0.0

    @property
    def words(self) -> str:
        """The result in a sentence."""
        said = (
            f"on {self.prompts} prompts made of stored chunks, blending moved this model's answers by "
            f"{self.divergence:.2g} nats a token and changed {self.changed:.0%} of their first tokens; another order "
            f"of the same chunks moved them by {self.order_divergence:.2g} and changed {self.order_changed:.0%}"
        )
        if not self.least_ratio:
            return said
        done = f"the recompute ratio is raised from {self.ratio:.3g} to {self.least_ratio:.3g}"
        if self.least_ratio >= 1:
            done = "every prompt is prefilled in full from now on"
        return f"blending is poor here: {said}. So {done}; run `cacheblend-rag calibrate` on your documents"


def keep_result(folder: Path, name: str, result: TrialResult) -> None:
    """Keep a result in the folder of a store.

    Raises
    ------
    StoreError
        If it cannot be written.
    """
    path = _path(folder, name)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, [json.dumps(asdict(result), indent=1).encode()])
    except OSError as error:
        raise StoreError(f"cannot write {str(path)!r}: {error}") from error


def kept_result(folder: Path | None, name: str) -> TrialResult | None:
    """The result that is kept under a name; None if there is none, or it cannot be read."""
    if folder is None:
        return None
    try:
        found = json.loads(_path(folder, name).read_text(encoding="utf-8"))
        values = {one.name: float(found[one.name]) for one in fields(TrialResult)}
        return TrialResult(int(values.pop("prompts")), **values)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path(folder: Path, name: str) -> Path:
    return folder / "trials" / f"{name}.json"
