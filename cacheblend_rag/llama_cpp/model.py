"""A model in llama.cpp as transformers' generation asks it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, GenerationMixin, PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from cacheblend_rag.errors import ModelLoadError
from cacheblend_rag.llama_cpp.runtime import CELLS, Runtime
from cacheblend_rag.models.gguf import check_start, content_sha256, settings_folder
from cacheblend_rag.models.memory import total_memory
from cacheblend_rag.models.modules import CACHE_FIELD
from cacheblend_rag.models.ollama import local_path
from cacheblend_rag.models.shape import head_width
from cacheblend_rag.models.starter_table import BESIDE_WEIGHTS


class LlamaModel(nn.Module, GenerationMixin):  # type: ignore[misc]
    """A model in llama.cpp. Tokens are chosen by transformers, and computed by llama.cpp.

    Parameters
    ----------
    file : Path
        The GGUF file.
    runtime : Runtime
    config : PreTrainedConfig
        Of the file's settings.
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
        """The inputs of a step: the newest token, and the KV of all before it."""
        return {"input_ids": input_ids[:, -1:], "past_key_values": past_key_values}

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: Any = None,
        past_key_values: Any = None,
        return_dict: bool = True,
    ) -> CausalLMOutputWithPast:
        """Compute the next tokens of one sequence, whose `SequenceCache` grows by them."""
        ids, cache = input_ids[0].tolist(), past_key_values
        logits = cache.runtime.compute(ids, cache.length, cache.sequence, len(ids))
        cache.length += len(ids)
        return CausalLMOutputWithPast(logits=logits[None], **{CACHE_FIELD: cache})


def load_gguf(file: str | os.PathLike[str], lora: str | os.PathLike[str] | None = None) -> tuple[LlamaModel, Any]:
    """The model in a GGUF file, and its tokenizer.

    Config and tokenizer are read from the file once and kept in the user's cache.

    Parameters
    ----------
    file : str or path
    lora : str or path, optional
        A GGUF file with a LoRA adapter for the model.

    Raises
    ------
    ModelLoadError
        If a file is missing or damaged, memory is too small for it, or llama.cpp is not installed or cannot load it.
    UnsupportedModelError
        If its architecture is not supported.
    """
    path = local_path(file)
    lora = None if lora is None else Path(lora).expanduser()
    files = [path] if lora is None else [path, lora]
    for one in files:
        check_start(one)
    folder = settings_folder(path)  # hashes the file on first use
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    generation = GenerationConfig.from_pretrained(folder)
    kv = 4 * config.num_hidden_layers * config.num_key_value_heads * head_width(config)  # bytes of a token
    needed, there = path.stat().st_size + BESIDE_WEIGHTS + CELLS * kv, total_memory()
    if there is not None and needed > there:
        raise ModelLoadError(
            f"{str(path)!r} takes some {needed:,} bytes of memory, and there are {there:,}; take a smaller model, or a "
            "file with fewer bits"
        )
    runtime = Runtime(path, torch.get_num_threads(), lora, config.has_q4_0)
    config._name_or_path = str(path)
    identity = "+".join(map(content_sha256, files))
    return LlamaModel(path, runtime, config, generation, identity), tokenizer
