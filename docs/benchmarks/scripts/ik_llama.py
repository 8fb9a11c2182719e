"""ik_llama.cpp, as the package ik-llama-cpp-python brings it.

It needs that package, built for the processor, with a compiler::

    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary ik-llama-cpp-python ik-llama-cpp-python
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

__all__ = ["IkLlama"]


class IkLlama:
    """A model in ik_llama.cpp with one KV cache: weights repacked for the processor, flash attention, KV in float16.

    Parameters
    ----------
    path : Path
        A GGUF file.
    tokens : int
        Positions that the KV cache has room for.
    threads : int
    """

    def __init__(self, path: Path, tokens: int, threads: int) -> None:
        from ik_llama_cpp import _ctypes_api as library
        from ik_llama_cpp import _internals as batches

        self._library, self._batches = library, batches
        library.llama_backend_init()
        of_model = library.llama_model_default_params()
        of_model.n_gpu_layers, of_model.repack_tensors, of_model.use_mmap = 0, True, False
        model = library.llama_model_load_from_file(str(path).encode(), of_model)
        if not model:
            raise SystemExit(f"ik_llama.cpp could not load {path}")
        params = library.llama_context_default_params()
        params.n_ctx = params.n_batch = tokens
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn = True
        self._context = library.llama_init_from_model(model, params)
        self._vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))

    def prefill(self, ids: Sequence[int], kept: int = 0) -> torch.Tensor:
        """Logits of the last token, ``[vocab]``; see `LlamaContext.prefill`. What is kept must be all that is there."""
        if not kept:
            self._library.llama_kv_cache_clear(self._context)
        batch = self._batches.make_batch_range(list(ids[kept:]), pos_start=kept, logits_last=True)
        status = self._library.llama_decode(self._context, batch)
        self._library.llama_batch_free(batch)
        if status:
            raise SystemExit(f"ik_llama.cpp could not evaluate {len(ids) - kept} tokens behind {kept}: status {status}")
        logits = self._library.llama_get_logits_ith(self._context, -1)
        view = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self._vocabulary)).contents
        return torch.frombuffer(view, dtype=torch.float32).clone()
