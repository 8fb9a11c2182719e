"""A model as an engine runs it: its identity now, and the products by prepacked weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.cpu.weight_prepacking import Prepacking, prepacked_products
from cacheblend_rag.models.identity import ModelIdentity


class ModelInUse:
    """A model whose adapters may be switched, and whose weights may be prepacked.

    Parameters
    ----------
    adapter : ModelAdapter
    option : bool or "auto"
        `BlendConfig.prepack_weights`.
    identity : ModelIdentity
    anew : bool
        Whether copies of weights that others have made are made again.

    Raises
    ------
    ConfigError
        If weights cannot be prepacked though they should be.
    """

    def __init__(self, adapter: ModelAdapter, option: bool | str, identity: ModelIdentity, *, anew: bool) -> None:
        self.adapter, self._option, self._identity = adapter, option, identity
        self._prepacked = self._prepack(anew)

    def with_prepacking(self, option: bool | str) -> ModelInUse:
        """The same model, multiplying as another option says; its weights are not read again."""
        if option == self._option:
            return self
        return ModelInUse(self.adapter, option, self._identity, anew=False)

    @property
    def fingerprint(self) -> str:
        """Identity when the model was last looked at; see `look`."""
        return self._identity.value

    def look(self) -> str:
        """Notice that adapters were switched, merged or trained since; the identity of the model now."""
        if self._identity.refresh():  # copies of its weights are of what they were
            self._prepack(anew=True)
        return self._identity.value

    def products(self) -> AbstractContextManager[None]:
        """Context within which the model multiplies as ``prepack_weights`` says."""
        return self._prepacked()

    def release(self) -> None:
        """Use prepacked weights no more; they go with the last engine over the model."""
        self._prepacked = nullcontext

    def _prepack(self, anew: bool) -> Prepacking:
        model, parts = self.adapter.model, (*self.adapter.layers, self.adapter.model.lm_head)
        return prepacked_products(model, parts, self._option, anew=anew)
