"""Loading a model and its tokenizer by id or path."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cacheblend_rag.errors import ConfigError, ModelLoadError
from cacheblend_rag.models.element_type import type_to_load
from cacheblend_rag.models.fingerprint import fingerprint
from cacheblend_rag.models.identity import files_identity, known_fingerprint, remember_fingerprint
from cacheblend_rag.models.shape import head_width

__all__ = ["KVGeometry", "LoadedModel", "load_geometry", "load_model"]

_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer.

    Parameters
    ----------
    model, tokenizer
    name : str
        What it was loaded by.
    identity : str or None
        Of its files, if the model is nothing but what is in them; see `files_identity`.
    """

    model: Any
    tokenizer: Any
    name: str
    identity: str | None

    def fingerprint(self) -> str:
        """Identity of the model; its weights are read through only if its files are not known."""
        known = known_fingerprint(self.identity)
        if known is None:
            known = fingerprint(self.model)
            if self.identity is not None:
                remember_fingerprint(self.identity, known, self.name)
        return known


def load_model(
    model: str | os.PathLike[str], *, device: str = "auto", dtype: str = "auto", **model_kwargs: Any
) -> LoadedModel:
    """Load through transformers' auto classes.

    Parameters
    ----------
    model : str or path
        A folder, or an id that transformers can resolve.
    device : str
        ``"auto"`` (a GPU if there is one), or a torch device.
    dtype : str
        ``"auto"`` (see `type_to_load`), ``"float32"``, ``"bfloat16"`` or ``"float16"``.
    **model_kwargs
        Passed on to ``from_pretrained``; with any, ``"auto"`` is the checkpoint's element type.

    Raises
    ------
    ModelLoadError
        If the model or the tokenizer cannot be loaded.
    ConfigError
        If the device or the element type is not known.
    """
    if dtype not in _DTYPES:
        raise ConfigError("dtype", dtype, "use one of " + ", ".join(map(repr, _DTYPES)))
    target = _device(device)
    name = os.fspath(model)
    try:
        if dtype == "auto" and not model_kwargs:
            dtype = type_to_load(AutoConfig.from_pretrained(name), target)
        before = None if model_kwargs else files_identity(name, dtype)
        loaded = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **model_kwargs)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelLoadError(
            f"model {name!r} could not be loaded: {error}; name a folder written by save_pretrained, "
            "or an id that is in the local cache or can be downloaded"
        ) from error
    if "device_map" not in model_kwargs:
        loaded = loaded.to(target)
    # What was downloaded just now, or changed meanwhile, is known from the next load on.
    unchanged = before is not None and before == files_identity(name, dtype)
    return LoadedModel(loaded.eval(), tokenizer, name, before if unchanged else None)


@dataclass(frozen=True)
class KVGeometry:
    """Shape of a model's KV, as its config says.

    Parameters
    ----------
    layers, kv_heads, head_dim : int
    dtype : str
        Element type that it is loaded in.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str


def load_geometry(model: str | os.PathLike[str], dtype: str = "auto") -> tuple[KVGeometry, Any]:
    """Shape of a model's KV, and its tokenizer; weights are not read.

    Raises
    ------
    ModelLoadError
        If the config or the tokenizer cannot be loaded.
    ConfigError
        If the element type is not known.
    """
    if dtype not in _DTYPES:
        raise ConfigError("dtype", dtype, "use one of " + ", ".join(map(repr, _DTYPES)))
    name = os.fspath(model)
    try:
        config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
        heads = int(config.num_attention_heads)
        if dtype == "auto":
            dtype = type_to_load(config, _device("auto"))
        geometry = KVGeometry(
            layers=int(config.num_hidden_layers),
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=head_width(config),
            dtype=str(config.dtype or torch.float32).removeprefix("torch.") if dtype == "auto" else dtype,
        )
    except (OSError, ValueError, ImportError, KeyError, AttributeError) as error:
        raise ModelLoadError(f"config and tokenizer of model {name!r} could not be loaded: {error}") from error
    return geometry, tokenizer


def _device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ConfigError("device", device, 'use "auto", "cpu", "cuda" or "cuda:0"') from error
