"""A model as transformers runs it: the prefill and the steps of answers that are not blended."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from transformers import DynamicCache

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.models.cache import called_at_each_layer, preallocate
from cacheblend_rag.models.identity import ModelIdentity
from cacheblend_rag.models.kv import Prefilled
from cacheblend_rag.models.modules import cache_argument, evaluating, keeping_nothing, takes
from cacheblend_rag.models.quantised import is_quantised, mixes_rows
from cacheblend_rag.models.shape import context_window

# Tokens of one slice of a prefill that others may interrupt, and those that are tried at load.
_SLICE, _TRIED = 1024, 12
# Largest relative error between two ways to the same logits. Wrong ones differ by about 1.
_COARSE = 0.2
_TOLERANCE = {torch.float32: 5e-3, torch.float16: 5e-2, torch.bfloat16: _COARSE}

Going = Literal["slices", "steps", "whole"]
"""How a model goes on from a cache; see `PlainAdapter.goes_on`."""

BEGINNINGS: dict[Going, str] = {
    "slices": "its prompts' beginnings reused exactly",
    "steps": "each prompt computed in full",
    "whole": "each answer by transformers' own generate()",
}
"""Of each way of going on, whether beginnings of prompts are reused, as a user is told it."""


class PlainAdapter:
    """A causal language model that answers by its own prefill, whatever its layers are.

    Parameters
    ----------
    model : transformers PreTrainedModel
    reason : str
        Why it is not blended.

    Raises
    ------
    UnsupportedModelError
        If its own forward pass fails.

    Attributes
    ----------
    plain_reason : str
        Why it is not blended; empty for a model that is.
    repeats_exactly : bool
        Whether an answer is checked token by token, so that it has the very bits of one that was never blended.
    goes_on : {"slices", "steps", "whole"}
        ``"slices"``: a prompt may be read in pieces, so what is behind its first piece can be kept for others.
        ``"steps"``: a pass over several tokens begins anew, so a prompt is read at once, and only its answer goes on
        token by token. ``"whole"``: what it has read is in no cache that could be handed on, and transformers' own
        ``generate`` answers.
    """

    plain_reason: str = ""
    repeats_exactly = False
    goes_on: Going = "slices"

    def __init__(self, model: Any, reason: str) -> None:
        self.model, self.plain_reason = model, reason
        self.config = model.config.get_text_config()
        first = next(model.parameters())  # of a model on several devices, where its input goes
        self.device: torch.device = first.device
        self.dtype: torch.dtype = first.dtype
        self.mixes_rows = mixes_rows(model)
        self.goes_on = self._try_going_on()

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return int(self.config.num_hidden_layers)

    @property
    def context_window(self) -> int | None:
        """Most tokens of a prompt with its answer; None if the model's config does not say it."""
        return context_window(self.config)

    def identity(self, own: str | None = None) -> ModelIdentity:
        """Identity of the model, with its adapters; ``own`` is that of its own weights, where it is known."""
        return ModelIdentity(self.model, own)

    def regime(self, tokens: int) -> int | None:
        """Frequency regime of stored KV for a prompt of this many tokens; None, as no chunk's KV is of use."""
        return None

    @property
    def regimes(self) -> tuple[int, ...]:
        """All frequency regimes in which KV of chunks may be stored."""
        return ()

    def reusable(self, tokens: int) -> bool:
        """Whether stored KV of chunks can be used in a prompt of this length. If not, the prompt is prefilled."""
        return self.regime(tokens) is not None

    steps_as_prefill = True
    """Whether tokens of an answer, computed one by one, have the KV that a prefill gives them."""

    def aligned(self, tokens: int) -> int:
        """How many of a kept prompt's exact first tokens a check may go on from."""
        return tokens

    @property
    def steps_alone(self) -> bool:
        """Whether answers must decode alone: frequencies change with length, or the model keeps a state."""
        return self.goes_on == "whole" or self._frequencies_change

    @property
    def _frequencies_change(self) -> bool:
        """Whether they depend on a prompt's length: pieces of it would have those of shorter ones."""
        parameters = getattr(self.config, "rope_parameters", None) or {}
        kinds = {one.get("rope_type") for one in (parameters, *parameters.values()) if isinstance(one, dict)}
        return bool(kinds & {"dynamic", "longrope"})

    def prefill(
        self,
        ids: Sequence[int],
        between: Callable[[float, int], object] | None = None,
        each_layer: Callable[[], object] | None = None,
    ) -> Prefilled:
        """The model's own forward pass over all ids: plain prefill.

        Parameters
        ----------
        ids : sequence of int
        between : callable, optional
            Ids are passed in slices, where the model takes them so. Between two of them this is called with the seconds
            that the last one took and the ids passed; others may use the model then.
        each_layer : callable, optional
            Called within each layer that attends.
        """
        return self.go_on(self.empty_cache(), ids, between, each_layer)

    def empty_cache(self) -> Any:
        """A cache that holds nothing yet."""
        return preallocate(DynamicCache(config=self.config))

    def go_on(
        self,
        cache: Any,
        ids: Sequence[int],
        between: Callable[[float, int], object] | None = None,
        each_layer: Callable[[], object] | None = None,
    ) -> Prefilled:
        """Prefill ids after those that a cache holds. The cache grows by them."""
        size = _SLICE if between is not None and self.goes_on == "slices" and not self.mixes_rows else len(ids)
        for start in range(0, len(ids), size):
            began = time.perf_counter()
            with called_at_each_layer(cache, each_layer):
                logits = self.extend(cache, ids[start : start + size], logits_to_keep=1)[-1]
            if between is not None and start + size < len(ids):
                between(time.perf_counter() - began, start + size)
        return Prefilled(cache, logits)

    def extend(self, cache: Any, ids: Sequence[int], logits_to_keep: int = 0) -> torch.Tensor:
        """The model's own forward pass over ids behind a cache, which grows by them.

        Parameters
        ----------
        cache : transformers Cache
        ids : sequence of int
        logits_to_keep : int
            How many of the last positions give logits; 0 for all.

        Returns
        -------
        Tensor, [positions, vocab]
        """
        inputs = torch.tensor([list(ids)], device=self.device)
        kept = {} if cache is None else {cache_argument(self.model): cache, "use_cache": True}
        if takes(self.model, "logits_to_keep"):
            kept["logits_to_keep"] = logits_to_keep
        with evaluating(self.model), torch.no_grad():
            logits: torch.Tensor = keeping_nothing(self.model)(inputs, **kept).logits[0]
        return logits[-logits_to_keep:]

    def _try_going_on(self) -> Going:
        """Read a dozen tokens at once and in pieces, from a copied cache too; where both agree, pieces are exact."""
        try:
            ways: tuple[Going, ...] = ("steps",) if self._frequencies_change else ("slices", "steps")
            return next((way for way in ways if self._goes_on_by(way)), "whole")
        except (AttributeError, TypeError, RuntimeError, ValueError, IndexError, KeyError, ImportError) as error:
            said = f"its own forward pass fails with {type(error).__name__} ({error})"
            kind = getattr(self.model.config, "model_type", type(self.model).__name__)
            raise UnsupportedModelError(f"a {kind!r} model cannot be run by this transformers: {said}") from error

    def _goes_on_by(self, way: str) -> bool:
        """Whether it goes on in this way from what a cache holds."""
        limit = _COARSE if is_quantised(self.model) else _TOLERANCE.get(self.dtype, _COARSE)
        # Where two experts are nearly equal, rounding alone chooses another one; over other tokens they are not.
        for first in (11, 12):
            ids = [(first + 37 * number) % int(self.config.vocab_size) for number in range(_TRIED)]
            expected = self.extend(None, ids, logits_to_keep=1)[-1].float()
            pieces = self._in_pieces(ids, _TRIED // 2 - 1 if way == "slices" else _TRIED - 1)
            # Written so that NaN counts as wrong.
            if all(float((one - expected).norm() / expected.norm().clamp_min(1e-30)) <= limit for one in pieces):
                return True
        return False

    def _in_pieces(self, ids: Sequence[int], first: int) -> list[torch.Tensor]:
        """Logits behind ids that were read in two pieces, and the same from a copy of what the first one left."""
        try:
            cache = self.empty_cache()
            self.extend(cache, ids[:first], logits_to_keep=1)
            copied = copy.deepcopy(cache)
            return [self.extend(one, ids[first:], logits_to_keep=1)[-1].float() for one in (cache, copied)]
        except (AttributeError, TypeError, RuntimeError, ValueError, IndexError, KeyError, NotImplementedError):
            return [torch.tensor(float("nan"))]  # it takes no such cache


def check_blends(adapter: PlainAdapter) -> None:
    """Refuse what can only be done with a model that is blended.

    Raises
    ------
    UnsupportedModelError
        If this one is answered plainly.
    """
    if adapter.plain_reason:
        kind = getattr(adapter.config, "model_type", type(adapter.model).__name__)
        raise UnsupportedModelError(
            f"a {kind!r} model is answered plainly, so there is no blended pass to try: {adapter.plain_reason}",
            adapter.plain_reason,
        )
