"""A model as the engine runs it, on one of two backends: transformers in PyTorch, and GGUF files in llama.cpp."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch

from cacheblend_rag.config import BlendConfig, check_choice
from cacheblend_rag.engine.other_arguments import OTHERS
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.fusor import Fusion, fuse
from cacheblend_rag.fusor.selection import SelectionRule
from cacheblend_rag.fusor.self_check import check_adapter
from cacheblend_rag.llama_cpp.adapter import LlamaAdapter, LlamaDecode
from cacheblend_rag.llama_cpp.blend import fuse as fuse_in_llama_cpp
from cacheblend_rag.llama_cpp.library import is_installed
from cacheblend_rag.llama_cpp.runtime import is_in_llama_cpp
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.batched_decode import BatchedDecode
from cacheblend_rag.models.cpu.products import Products, products_of
from cacheblend_rag.models.families import check_runs, registered_as
from cacheblend_rag.models.identity import FileIdentity
from cacheblend_rag.models.loading import LoadedModel, load_model, loading_arguments
from cacheblend_rag.models.ollama import local_path
from cacheblend_rag.models.plain import BEGINNINGS, PlainAdapter, check_blends
from cacheblend_rag.models.starters import starter_gguf, starter_named

_log = logging.getLogger(__name__)
_BACKENDS = ("auto", "torch", "llama.cpp")


def load(model: str | os.PathLike[str], backend: str = "auto", **arguments: Any) -> LoadedModel:
    """Load a model and its tokenizer.

    Parameters
    ----------
    model : str or path
        As for `load_model`.
    backend : str
        ``"torch"``, ``"llama.cpp"``, or ``"auto"``: llama.cpp for GGUF files on a CPU, where it is installed, and
        PyTorch for all else. Starters are GGUF files.
    **arguments
        ``device``, ``dtype`` and others, as for `load_model`; in llama.cpp ``lora``, a GGUF file with an adapter.

    Raises
    ------
    ConfigError
        If llama.cpp is chosen for a model that is not a GGUF file, or with arguments of PyTorch.
    """
    check_choice("backend", backend, _BACKENDS)
    starter = starter_named(model, "language model")
    if starter is None and not os.path.isfile(local_path(model)):
        if backend == "llama.cpp":
            raise ConfigError("backend", backend, f"name a GGUF file, not {os.fspath(model)!r}")
        return load_model(model, **arguments)
    device, dtype, others = loading_arguments(arguments.pop("device", None), arguments.pop("dtype", None), arguments)
    for name in sorted(others.keys() & {"n_ctx", "n_gpu_layers", "n_batch", "flash_attn", "lora_path"}):
        raise ConfigError(name, others[name], OTHERS[name][1])
    lora = others.pop("lora", None)
    if backend == "auto":
        backend = backend_for(model, device, dtype, others) if lora is None else "llama.cpp"
    if backend == "torch":
        if lora is not None:
            raise ConfigError("lora", lora, "leave backend out: llama.cpp computes with adapters in GGUF files")
        return load_model(model, device=device, dtype=dtype, **others)
    given = ({} if device == "cpu" else {"device": device}) | {"dtype": dtype} | others
    for name, value in given.items():
        if value != "auto":
            remedy = 'leave it out: llama.cpp computes with the file as it is; or use backend="torch"'
            raise ConfigError(name, value, remedy)
    from cacheblend_rag.llama_cpp.model import load_gguf  # transformers' generation takes a second to import

    return LoadedModel(*load_gguf(starter_gguf(starter) if starter else model, lora), os.fspath(model), None)


def backend_for(model: str | os.PathLike[str], device: str, dtype: str, others: Mapping[str, Any]) -> str:
    """The backend where none is named: PyTorch if it is no GGUF file, an argument needs it, or a GPU is there."""
    is_file = starter_named(model, "language model") is not None or os.path.isfile(local_path(model))
    if not is_file or others or dtype != "auto" or device not in ("auto", "cpu") or torch.cuda.is_available():
        return "torch"
    if is_installed():
        return "llama.cpp"
    _log.warning(
        "llama.cpp is not installed, so PyTorch computes %s, which takes several times its size in memory: "
        'pip install "cacheblend-rag[llama-cpp]"',
        os.fspath(model),
    )
    return "torch"


def adapter_of(model: Any) -> PlainAdapter:
    """The model taken apart for the blended pass; if it is not blended, what its plain answers need.

    Parameters
    ----------
    model : transformers PreTrainedModel or LlamaModel

    Raises
    ------
    UnsupportedModelError
        If transformers cannot go on from a prompt with it, or it is not shaped like the family it was registered as.
    """
    if is_in_llama_cpp(model):
        return cast(PlainAdapter, LlamaAdapter(model))
    try:
        adapter = ModelAdapter(model)
        check_adapter(adapter)
    except UnsupportedModelError as error:
        if registered_as(model.config) is not None:
            raise
        check_runs(model.config)
        plain = PlainAdapter(model, error.reason)
        name = getattr(model.config, "_name_or_path", "") or model.config.model_type
        _log.warning("model %s is answered plainly, %s: %s", name, BEGINNINGS[plain.goes_on], plain.plain_reason)
        return plain
    return adapter


class ModelInUse:
    """A model whose adapters may be switched, and whose weights may be prepacked.

    Parameters
    ----------
    adapter : PlainAdapter
        A `ModelAdapter`, if the model is blended.
    config : BlendConfig
        How it multiplies: ``prepack_weights``.
    identity : FileIdentity
    anew : bool
        Whether copies of weights that others have made are made again.

    Raises
    ------
    ConfigError
        If weights cannot be prepacked though they should be.
    """

    def __init__(self, adapter: PlainAdapter, config: BlendConfig, identity: FileIdentity, *, anew: bool) -> None:
        self.adapter, self.identity = adapter, identity
        self._option = config.prepack_weights
        self._products = self._find_products(anew)
        self.fuse: Callable[..., Fusion] = fuse_in_llama_cpp if isinstance(adapter, LlamaAdapter) else fuse
        """The blended pass where the model is; see `cacheblend_rag.fusor.fuse`."""

    def with_config(self, config: BlendConfig) -> ModelInUse:
        """The same model with other options for its matrix products; the weights are not read again."""
        if config.prepack_weights == self._option:
            return self
        return ModelInUse(self.adapter, config, self.identity, anew=False)

    @property
    def blended(self) -> ModelAdapter:
        """The model, taken apart for the blended pass.

        Raises
        ------
        UnsupportedModelError
            If it is answered plainly.
        """
        if self.adapter.plain_reason:
            check_blends(self.adapter)
        return cast(ModelAdapter, self.adapter)

    @property
    def fingerprint(self) -> str:
        """Identity when the model was last looked at; see `look`."""
        return self.identity.value

    def look(self) -> str:
        """Notice that adapters were switched, merged or trained since; the identity of the model now."""
        if self.identity.refresh():  # copies of its weights are of what they were
            self._find_products(anew=True)
        return self.fingerprint

    def watch(self) -> Callable[[], bool]:
        """Function that says whether the model is as it is now, and was all the time that it was glanced at."""
        before, changes = self.fingerprint, self.identity.changes
        return lambda: self.look() == before and self.identity.changes == changes

    def products(self) -> AbstractContextManager[None]:
        """Context within which the model multiplies as ``prepack_weights`` says."""
        return nullcontext() if self._products is None else self._products.in_use()

    def release(self) -> None:
        """Use prepacked weights no more; they go with the last engine over the model."""
        self._products = None

    def _find_products(self, anew: bool) -> Products | None:
        if not isinstance(self.adapter, ModelAdapter):  # how other layers multiply was never tried
            if self._option is True:
                reason = self.adapter.plain_reason
                why = f"the model is not blended: {reason}" if reason else "llama.cpp packs the weights itself"
                raise ConfigError("prepack_weights", True, f'use "auto"; {why}')
            return None
        model, parts = self.adapter.model, (*self.adapter.layers, self.adapter.model.lm_head)
        return products_of(model, parts, self._option, anew=anew)


def decode_of(adapter: PlainAdapter) -> BatchedDecode | LlamaDecode:
    """The function that takes the steps of a model's answers."""
    return LlamaDecode(adapter) if isinstance(adapter, LlamaAdapter) else BatchedDecode(adapter)


def check_rule(adapter: PlainAdapter, name: Any, rule: SelectionRule) -> None:
    """Refuse a rule that a backend cannot follow.

    Raises
    ------
    ConfigError
        If it drops rows between layers, and the model is in llama.cpp.
    """
    layers = range(1, adapter.num_layers)
    if isinstance(adapter, LlamaAdapter) and any(rule.fit(adapter.num_layers).checks(layer) for layer in layers):
        remedy = "use 'query', 'boundary', 'none' or 'all': llama.cpp computes a token on all layers at once"
        raise ConfigError("selection", name, remedy)
