"""GGUF files as models: their settings through transformers, their weights in llama.cpp."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from cacheblend_rag.errors import ModelLoadError
from cacheblend_rag.llama_cpp.model import LlamaModel
from cacheblend_rag.llama_cpp.runtime import Runtime
from cacheblend_rag.models.gguf import check_start, content_sha256, settings_folder
from cacheblend_rag.models.memory import total_memory
from cacheblend_rag.models.ollama import local_path
from cacheblend_rag.models.starter_table import BESIDE_WEIGHTS


def load_gguf(file: str | os.PathLike[str]) -> tuple[LlamaModel, Any]:
    """The model in a GGUF file, and its tokenizer.

    Config and tokenizer are read from the file once and kept in the user's cache.

    Parameters
    ----------
    file : str or path

    Raises
    ------
    ModelLoadError
        If the file is missing or damaged, memory is too small for it, or llama.cpp is not installed or cannot load it.
    UnsupportedModelError
        If its architecture is not supported.
    """
    path = local_path(file)
    check_start(path)
    needed, there = path.stat().st_size + BESIDE_WEIGHTS, total_memory()
    if there is not None and needed > there:
        raise ModelLoadError(
            f"{str(path)!r} takes some {needed:,} bytes of memory, and there are {there:,}; take a smaller model, or a "
            "file with fewer bits"
        )
    folder = settings_folder(path)  # hashes the file on first use
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    generation = GenerationConfig.from_pretrained(folder)
    runtime = Runtime(path, torch.get_num_threads())
    config._name_or_path = str(path)
    return LlamaModel(path, runtime, config, generation, content_sha256(path)), tokenizer
