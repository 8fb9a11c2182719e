"""LoRA adapters on a model: what of it is the model's own, and what the adapters make of it now.

``peft`` puts its layers in the place of a model's own, whether `PeftModel` or transformers' ``load_adapter`` asks for
them. It is imported only where a model has such layers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.models.quantised import weights_of

_OWN = ("base_layer.", "original_module.")  # where peft keeps what it put its layer in place of


@dataclass(frozen=True)
class AdaptedLayer:
    """A layer of peft's, as its next pass computes.

    Parameters
    ----------
    path : str
        Where it stands in the model.
    facts : tuple
        Values beside tensors on which its pass depends: scaling and the like, for each active adapter.
    tensors : tuple of (str, Tensor)
        Those of the active adapters, and of the merged ones.
    merged : tuple of str
        Adapters that are merged into its own weights.
    active : tuple of str
        Adapters that its pass adds to them.
    module : BaseTunerLayer or AuxiliaryTrainingWrapper
        The layer itself.
    """

    path: str
    facts: tuple[object, ...]
    tensors: tuple[tuple[str, torch.Tensor], ...]
    merged: tuple[str, ...]
    active: tuple[str, ...]
    module: Any

    @property
    def switched(self) -> bool:
        """Whether it has other adapters now."""
        return (self.merged, self.active) != _adapters_of(self.module)


def unwrap(model: Any) -> Any:
    """The transformers model within a `PeftModel`; another model is itself.

    Raises
    ------
    UnsupportedModelError
        If the model has adapters that are not LoRA.
    """
    if hasattr(model, "peft_config") and callable(getattr(model, "get_base_model", None)):
        _check_kinds(model)
        return model.get_base_model()
    return model


def adapted_layers(model: Any) -> list[AdaptedLayer]:
    """All layers of peft's in a model; empty for a model without adapters.

    Raises
    ------
    UnsupportedModelError
        If the model has adapters that are not LoRA.
    """
    layers = _layers(model)
    if layers:
        _check_kinds(model)
    return [_read(path, layer) for path, layer in layers]


def own_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's weights by the names they have without adapters; merged adapters are in them."""
    paths = {path for path, _ in _layers(model)}
    for name, weight in weights_of(model):
        own = _own_name(name, paths)
        if own is not None:
            yield own, weight


def _layers(model: Any) -> list[tuple[str, Any]]:
    """Layers of peft's and where they stand; they may be there still when their adapters are deleted."""
    if "peft" not in sys.modules:  # then nobody has made any
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return [(path, module) for path, module in model.named_modules() if isinstance(module, kinds)]


def _own_name(name: str, paths: set[str]) -> str | None:
    """The name of a weight without peft's layers in its path; None if it is an adapter's."""
    parts = name.split(".")
    for at in range(1, len(parts)):
        if ".".join(parts[:at]) not in paths:
            continue
        rest = ".".join(parts[at:])
        inner = next((part for part in _OWN if rest.startswith(part)), None)
        if inner is None:
            return None
        return _own_name(".".join([*parts[:at], rest.removeprefix(inner)]), paths - {".".join(parts[:at])})
    return name


def _check_kinds(model: Any) -> None:
    for name, config in getattr(model, "peft_config", {}).items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA" or getattr(config, "alora_invocation_tokens", None):
            said = "an activated LoRA" if kind == "LORA" else f"of type {kind}"
            raise UnsupportedModelError(
                f"the adapter {name!r} is {said}, and only LoRA is supported on a model: merge it into the weights "
                "with merge_and_unload() if it can be, or take it off"
            )


def _read(path: str, layer: Any) -> AdaptedLayer:
    if layer.disable_adapters and layer.merged_adapters:
        layer.unmerge()  # its next pass would, and compute with other weights than those that were looked at
    merged, active = _adapters_of(layer)
    facts, tensors = list[object](), list[tuple[str, torch.Tensor]]()
    for number, adapter in enumerate(merged or active):
        held = [(name, getattr(layer, name)) for name in layer.adapter_layer_names]
        found = [(f"{path}.{number}.{name}", some[adapter]) for name, some in held if adapter in some]
        if not found:
            continue
        tensors += (pair for name, part in found for pair in _tensors(name, part))
        given = [(name, getattr(layer, name, None)) for name in layer.other_param_names]
        # Of a dict of modules nothing is taken: dropout, which is one, has no part in answering.
        own = [(name, value.get(adapter) if isinstance(value, dict) else None) for name, value in given]
        variant = type(getattr(layer, "lora_variant", {}).get(adapter)).__name__
        facts.append((path, number, variant, *((name, repr(value)) for name, value in own)))
    return AdaptedLayer(path, tuple(facts), tuple(tensors), merged, active, layer)


def _adapters_of(layer: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The adapters that are merged into a layer's own weights, and those that its pass adds to them."""
    merged = tuple(layer.merged_adapters)
    return merged, () if layer.disable_adapters or merged else tuple(layer.active_adapters)


def _tensors(name: str, part: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(part, torch.Tensor):
        yield name, part
        return
    for own, tensor in part.state_dict(keep_vars=True).items():
        yield f"{name}.{own}", tensor
