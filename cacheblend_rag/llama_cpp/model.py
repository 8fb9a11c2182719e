"""What transformers' generation asks of a model, over llama.cpp."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig

from cacheblend_rag.llama_cpp.runtime import Runtime


class LlamaModel(nn.Module, GenerationMixin):  # type: ignore[misc]
    """A model in llama.cpp. It chooses tokens as transformers' models do; its passes are those of a `LlamaAdapter`.

    Parameters
    ----------
    file : Path
        The GGUF file.
    runtime : Runtime
    config : PreTrainedConfig
        What the file says of the model.
    generation_config : GenerationConfig
    identity : str
        Of the file's content.
    """

    main_input_name = "input_ids"
    base_model_prefix = ""
    device = torch.device("cpu")
    dtype = torch.float32
    _is_stateful = False

    def __init__(
        self,
        file: Path,
        runtime: Runtime,
        config: PreTrainedConfig,
        generation_config: GenerationConfig,
        identity: str,
    ) -> None:
        super().__init__()
        self.file, self.runtime, self.identity = file, runtime, identity
        self.config, self.generation_config = config, generation_config
        self.eval()

    @property
    def base_model(self) -> LlamaModel:
        """The model itself."""
        return self

    def _optimize_model_for_decode(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, attention_mask: Any = None, past_key_values: Any = None, **others: Any
    ) -> dict[str, Any]:
        """What a step is given: the newest token, and the KV of all before it."""
        return {"input_ids": input_ids[:, -1:], "past_key_values": past_key_values}

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        use_cache: Any = None,
        logits_to_keep: Any = None,
    ) -> Any:
        """Not called: the engine takes each step."""
        raise NotImplementedError("a model in llama.cpp is run by the engine alone")
