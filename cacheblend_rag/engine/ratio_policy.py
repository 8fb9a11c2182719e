"""Decisions of the loading controller for a request: its rule, and which records are worth reading."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cacheblend_rag.config import CONDITIONS, RULE_OPTIONS, BlendConfig
from cacheblend_rag.errors import StoreError
from cacheblend_rag.fusor import FusionPlan
from cacheblend_rag.fusor.blend import SINK
from cacheblend_rag.fusor.selection import SelectionRule, keep_at_least, make_rule
from cacheblend_rag.fusor.work import expected_share
from cacheblend_rag.loading import BlendSettings, ChunkKV, LoadingController, LoadingPlan, MachineProfile, RatioBounds
from cacheblend_rag.models.shape import ModelShape
from cacheblend_rag.store.base import KVStore

_log = logging.getLogger(__name__)
WORTH = 0.75
"""Expected work, as a share of a full prefill's, up to which a prompt is blended.

A row takes longer than one of a prefill: rows are scattered, attention is a greater part of them, KV is read, and the
question's attention is looked at in its plain form.
"""


class RatioPolicy:
    """Chooses the rule of each request.

    Parameters
    ----------
    config : BlendConfig
    layers : int
        Of the model.
    model : str
        Fingerprint of the model.
    controller : LoadingController or None

    Notes
    -----
    With ``recompute_ratio="auto"`` and no rule options given, what was calibrated for the model holds.
    """

    def __init__(self, config: BlendConfig, layers: int, model: str, controller: LoadingController | None) -> None:
        self.controller = controller
        self.settings = _calibrated(config, model, controller)
        self.config = config
        """The options, with the calibrated rule where it holds."""
        if self.settings is not None:
            values: dict[str, Any] = {name: getattr(self.settings, name) for name in RULE_OPTIONS}
            if config.condition == "auto":
                values["condition"] = self.settings.condition
            self.config = dataclasses.replace(config, recompute_ratio=self.settings.recompute_ratio, **values)
        self._layers, self._model = layers, model
        self.rule = make_rule(self.config).fit(layers)
        self.ratio = self.config.ratio if self.settings is None else self.settings.least_ratio
        """The rule's recompute ratio where no plan says another."""
        self._rules = {self.ratio: self.rule}

    @property
    def free(self) -> bool:
        """Whether the ratio is the controller's to choose."""
        config = self.config
        named = isinstance(config.selection, str) and config.selection not in ("none", "all")
        if self.settings is not None:
            return named
        return config.recompute_ratio == "auto" and named and not config.selection_options.get("recompute_ratios")

    def choose(
        self, chunks: Sequence[ChunkKV], tokens: int, computed: int, tier: str, scored: int | None = None
    ) -> tuple[SelectionRule, float, LoadingPlan | None]:
        """Choose for a request: the rule, its recompute ratio, and the plan; no plan where nothing was measured.

        Parameters
        ----------
        chunks : sequence of ChunkKV
            Those that are stored.
        tokens : int
            Of the prompt.
        computed : int
            Tokens that are computed whatever is chosen.
        tier : str
            The device that the chunks are stored on.
        scored : int, optional
            Those of them that a scoring pass computes, too; by default all.
        """
        controller = self.controller
        if controller is None or not chunks or not controller.knows(self._model, tier):
            return self.rule, self.ratio, None
        bounds = RatioBounds()
        if self.settings is not None:
            bounds = RatioBounds(self.ratio, max(bounds.highest, self.ratio), bounds.step)
        # Of a prefill any ratio does what is not stored, its scoring, and the first layers' many rows.
        scored_share = _scored_share(self.rule, self._layers)  # of the layers, before the first of them is fused
        scored_work = (computed if scored is None else scored) * scored_share
        whole = min(1.0, (computed + scored_work) / tokens)
        plan = controller.plan(
            self._model,
            chunks,
            tokens,
            device=tier,
            ratio=None if self.free else self.ratio,
            bounds=bounds,
            fixed_share=whole + (1 - whole) * self.head_share(),
            reads=self._layers,
            read_before=scored_share,
        )
        if not self.free:  # what the user fixed is only foretold
            plan = dataclasses.replace(plan, recomputed_chunks=())
        ratio = plan.recompute_ratio
        if ratio not in self._rules:
            config = dataclasses.replace(self.config, recompute_ratio=ratio)
            rule = make_rule(config) if self.settings is None else keep_at_least(self.rule, ratio)
            self._rules[ratio] = rule.fit(self._layers)
        return self._rules[ratio], ratio, plan

    def expected_work(
        self, rule: SelectionRule, ratio: float, plan: FusionPlan, shape: ModelShape, begun: int
    ) -> float:
        """Work that a blended pass will do, as a share of the full prefill in whose place it stands.

        With few reused tokens it may be more than that: a scoring pass runs other rows through most layers once more.

        Parameters
        ----------
        rule : SelectionRule
        ratio : float
            Its recompute ratio.
        plan : FusionPlan
            The rows that are read.
        shape : ModelShape
        begun : int
            First tokens that a full prefill need not compute.
        """
        tokens = len(plan.input_ids)
        reused = [at for span in plan.reused for at in span]
        read = {*reused, *(at for span in plan.exact for at in span)}
        computed = [at for at in range(tokens) if at not in read or at == tokens - 1]
        fixed = keep_at_least(rule, 1.0) is rule  # a rule without a share recomputes nothing
        kept = 0.0 if fixed else ratio + self.head_share() * (1 - ratio)
        left_out = {at for span in plan.missing for at in span if at >= SINK}
        scored = [at for at in computed if at not in left_out] if reused else []
        share = _scored_share(rule, self._layers)
        return expected_share(shape, tokens, computed, reused, scored, share=share, kept=kept, begun=begun)

    def head_share(self) -> float:
        """Work of the layers up to the last check beyond the rule's last share."""
        checks: Any = getattr(self.rule, "check_layers", None)
        if not checks:
            return 0.0
        ratios: Any = getattr(self.rule, "recompute_ratios", ())
        if not ratios or ratios[-1] == 1:
            return float(min(checks)) / self._layers
        stops = (*checks[1:], self._layers)
        rows = checks[0] + sum(r * (stop - at) for r, at, stop in zip(ratios, checks, stops, strict=True))
        return float((rows / self._layers - ratios[-1]) / (1 - ratios[-1]))

    def note(self, plan: LoadingPlan | None, read: float) -> None:
        """Tell the controller how long reading really took."""
        if self.controller is not None and plan is not None:
            self.controller.note(plan.device, plan.load_seconds, read)


def _scored_share(rule: SelectionRule, layers: int) -> float:
    """Share of the layers that a rule's scoring pass goes through."""
    scored = rule.score_layers
    return (scored[-1] + 1) / layers if scored else 0.0


def _calibrated(config: BlendConfig, model: str, controller: LoadingController | None) -> BlendSettings | None:
    """The calibrated options of a model, if the choice is left to us."""
    settings = controller.blends.get(model) if controller is not None else None
    if settings is None or config.recompute_ratio != "auto":
        return None
    if any(getattr(config, name) != BlendConfig.default(name) for name in RULE_OPTIONS):
        return None  # the user names a rule
    if "auto" not in (config.condition, settings.condition) and config.condition != settings.condition:
        return None  # or what chunks are computed behind, for which another share may be needed
    if settings.condition not in CONDITIONS:
        _log.warning(
            "the model was calibrated with condition=%r, which has ended; run `cacheblend-rag calibrate` again",
            settings.condition,
        )
        return None
    if not settings.tolerates:
        _log.warning(
            "calibration found that this model does not tolerate blending within %g nats: every prompt is prefilled "
            "in full; set recompute_ratio to blend anyway",
            settings.tolerance,
        )
    return settings


def profile_path(store: KVStore) -> Path | None:
    """Path of a store's profile; None if the store has no folder."""
    return store.traits.folder / "profile.json" if store.traits.folder is not None else None


def controller_beside(store: KVStore) -> LoadingController | None:
    """A controller with a store's profile; None if it has none. A damaged profile is logged."""
    path = profile_path(store)
    try:
        profile = MachineProfile.load(path) if path is not None else None
    except StoreError as error:
        _log.warning("%s", error)
        return None
    return LoadingController(profile) if profile is not None else None
