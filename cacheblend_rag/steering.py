"""What the loading controller decides for a request: its rule, and which records are worth reading."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.errors import StoreError
from cacheblend_rag.fusor.selection import SelectionRule, make_rule
from cacheblend_rag.loading import TASKS, ChunkKV, LoadingController, LoadingPlan, MachineProfile
from cacheblend_rag.report import Expected

__all__ = ["Choice", "Steering", "controller_beside", "profile_path"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """How one request is answered.

    Parameters
    ----------
    rule : SelectionRule
    ratio : float
        Its recompute ratio.
    plan : LoadingPlan or None
        What the controller made of it; None where nothing was measured.
    """

    rule: SelectionRule
    ratio: float
    plan: LoadingPlan | None = None

    @property
    def expected(self) -> Expected | None:
        """For the report."""
        if self.plan is None:
            return None
        return Expected(self.plan.load_seconds, self.plan.recompute_seconds, self.plan.prefill_seconds)


class Steering:
    """Chooses the rule of each request.

    Parameters
    ----------
    config : BlendConfig
    layers : int
        Of the model.
    model : str
        Fingerprint of the model.
    controller : LoadingController or None
    """

    def __init__(self, config: BlendConfig, layers: int, model: str, controller: LoadingController | None) -> None:
        self.controller = controller
        self._config, self._layers, self._model = config, layers, model
        self.rule = make_rule(config).fit(layers)
        self._rules = {config.ratio: self.rule}

    @property
    def free(self) -> bool:
        """Whether the ratio is the controller's to choose."""
        config = self._config
        named = isinstance(config.selection, str) and config.selection not in ("none", "all")
        return config.recompute_ratio == "auto" and named and not config.recompute_ratios

    def choose(self, chunks: Sequence[ChunkKV], tokens: int, computed: int, medium: str) -> Choice:
        """Choose for a request.

        Parameters
        ----------
        chunks : sequence of ChunkKV
            Those that are stored.
        tokens : int
            Of the prompt.
        computed : int
            Tokens that are computed whatever is chosen.
        medium : str
            What the chunks are stored on.
        """
        controller = self.controller
        if controller is None or not chunks or not controller.knows(self._model, medium):
            return Choice(self.rule, self._config.ratio)
        plan = controller.plan(
            self._model,
            chunks,
            tokens,
            device=medium,
            ratio=None if self.free else self._config.ratio,
            bounds=TASKS[self._config.task],
            fixed_share=self._fixed_share(tokens, computed),
            reads=self._layers,
        )
        if not self.free:  # what the user fixed is only foretold
            plan = dataclasses.replace(plan, recomputed_chunks=())
        return Choice(self._rule_of(plan.recompute_ratio), plan.recompute_ratio, plan)

    def _fixed_share(self, tokens: int, computed: int) -> float:
        """Share of a prefill that any ratio does: what is not stored, and the layers before the check."""
        checks: Any = getattr(self.rule, "check_layers", None)
        whole = computed / tokens
        return whole + (1 - whole) * (min(checks) / self._layers if checks else 0.0)

    def _rule_of(self, ratio: float) -> SelectionRule:
        if ratio not in self._rules:
            config = dataclasses.replace(self._config, recompute_ratio=ratio)
            self._rules[ratio] = make_rule(config).fit(self._layers)
        return self._rules[ratio]

    def note(self, choice: Choice, read: float) -> None:
        """Tell the controller how long reading really took."""
        if self.controller is not None and choice.plan is not None:
            self.controller.note(choice.plan.device, choice.plan.load_seconds, read)


def profile_path(store: Any) -> Path | None:
    """Where the profile of a store is kept; None for one without a folder."""
    folder = getattr(store, "folder", None)
    return Path(folder) / "profile.json" if folder is not None else None


def controller_beside(store: Any) -> LoadingController | None:
    """A controller over the profile kept beside a store, if there is one; a damaged one is logged."""
    path = profile_path(store)
    try:
        profile = MachineProfile.load(path) if path is not None else None
    except StoreError as error:
        _log.warning("%s", error)
        return None
    return LoadingController(profile) if profile is not None else None
