"""A model as an engine runs it: its identity now, and the products by prepacked weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor import Fusion, FusionPlan, fuse
from cacheblend_rag.fusor.selection import SelectionRule
from cacheblend_rag.llama_cpp.adapter import LlamaAdapter
from cacheblend_rag.llama_cpp.blend import fuse as fuse_in_llama_cpp
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.cpu.products import Products, products_of
from cacheblend_rag.models.identity import FileIdentity
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.models.plain import PlainAdapter, check_blends


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

    def fuse(
        self,
        plan: FusionPlan,
        layers: Iterable[LayerKV],
        rule: SelectionRule,
        each_layer: Callable[[], object] | None = None,
    ) -> tuple[Fusion, Any]:
        """Run the blended pass; see `cacheblend_rag.fusor.fuse`. It comes with a cache of the whole prompt."""
        adapter: Any = self.blended
        if isinstance(adapter, LlamaAdapter):
            return fuse_in_llama_cpp(adapter, plan, layers, rule)
        fusion = fuse(adapter, plan, layers, rule, each_layer)
        return fusion, adapter.new_cache(fusion.layers)

    @property
    def fingerprint(self) -> str:
        """Identity when the model was last looked at; see `look`."""
        return self.identity.value

    def look(self) -> str:
        """Notice that adapters were switched, merged or trained since; the identity of the model now."""
        if self.identity.refresh():  # copies of its weights are of what they were
            self._find_products(anew=True)
        return self.fingerprint

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
