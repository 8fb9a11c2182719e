"""How prompts of a model will be answered, as its config alone says: before its weights are fetched."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import AutoConfig

from cacheblend_rag.errors import ModelLoadError, UnsupportedModelError
from cacheblend_rag.models.families import why_plain
from cacheblend_rag.models.gguf import gguf_config, is_gguf
from cacheblend_rag.models.loading import auto_class, found_model, one_line
from cacheblend_rag.models.model_names import name_remedy
from cacheblend_rag.models.shape import context_window

# Those of which tiny models did not go on from a cache in slices; see `PlainAdapter.goes_on`. Loading tries it anew.
_IN_FULL = ("bamba", "falcon_mamba", "jamba", "mamba", "minimax", "recurrent_gemma", "rwkv", "xlstm", "zamba")


@dataclass(frozen=True)
class Treatment:
    """How prompts of a model are answered.

    Parameters
    ----------
    how : str
        ``"blended"``; ``"plain, beginnings reused"``: by its own prefill, which goes on from a kept beginning;
        ``"plain"``: by its own prefill of each whole prompt; ``"refused"``.
    reason : str
        Why it is not blended; empty if it is.
    window : int, optional
        Tokens that its context window holds, if it is known.
    """

    how: Literal["blended", "plain, beginnings reused", "plain", "refused"]
    reason: str = ""
    window: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.how + (self.reason and f": {self.reason}")


def treatment_of(config: Any) -> Treatment:
    """How prompts of a model with this config are answered.

    Parameters
    ----------
    config : transformers PretrainedConfig
    """
    try:
        reason = why_plain(config)
    except UnsupportedModelError as error:
        return Treatment("refused", error.reason)
    if type(config) not in auto_class(config)._model_mapping:
        return Treatment("refused", f"transformers has no causal language model for {config.model_type!r}")
    if reason is None:
        return Treatment("blended", window=context_window(config))
    ahead = getattr(config.get_text_config(), "use_bidirectional_attention", None) in (True, "all")
    in_full = ahead or config.get_text_config().model_type in _IN_FULL
    return Treatment("plain" if in_full else "plain, beginnings reused", reason)


def expected_treatment(model: str | os.PathLike[str]) -> Treatment:
    """How prompts of a model are answered, by its id, folder or GGUF file; only the config is read or downloaded.

    Raises
    ------
    ModelLoadError
        If its config cannot be read.
    """
    name = os.fspath(model)
    try:
        with found_model(model, {}, weights=False):
            own = gguf_config(model) if is_gguf(model) else AutoConfig.from_pretrained(os.path.expanduser(name))
        return treatment_of(own)
    except UnsupportedModelError as error:
        return Treatment("refused", error.reason or str(error))
    except (OSError, ValueError, ImportError, KeyError) as error:
        fault = f"the config of model {name!r} cannot be read: {one_line(error)}"
        raise ModelLoadError(f"{fault}; {name_remedy(said=name)}") from error
