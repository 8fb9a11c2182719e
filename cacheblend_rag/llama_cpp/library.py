"""llama.cpp's C functions, as far as the backend calls them.

The names and the layouts below are those of llama.h of build 11548 (October 2026). Structures change between versions,
so another version is refused when it is loaded.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int8, c_int32, c_size_t, c_uint8, c_uint32, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import ModelLoadError

VERSION = "0.26"
"""Version of ggml, llama.cpp's own library, in whose builds structures are those below."""
PATH = "CACHEBLEND_RAG_LLAMA_CPP"
"""Environment variable that names a library of one's own, such as one built for a GPU."""
F16 = 1
"""Element type of KV: `GGML_TYPE_F16`."""

Observer = ctypes.CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)
"""Asked for each tensor of a graph whether its values are wanted, and called again once they are there."""
_Log = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)


class ModelOptions(ctypes.Structure):
    """``struct llama_model_params``."""

    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int),
        ("load_mode", c_int),
        ("lazy_mode", c_int),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class ContextOptions(ctypes.Structure):
    """``struct llama_context_params``."""

    _fields_ = (
        *((f"n_{name}", c_uint32) for name in ("ctx", "batch", "ubatch", "seq_max", "rs_seq")),
        *((f"n_outputs_max{name}", c_uint32) for name in ("", "_per_seq")),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int),
        ("rope_scaling_type", c_int),
        ("pooling_type", c_int),
        ("attention_type", c_int),
        ("flash_attn_type", c_int),
        *((f"rope_freq_{name}", c_float) for name in ("base", "scale")),
        *((f"yarn_{name}", c_float) for name in ("ext_factor", "attn_factor", "beta_fast", "beta_slow")),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", Observer),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int),
        ("type_v", c_int),
        ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        *((name, c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified")),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class Batch(ctypes.Structure):
    """``struct llama_batch``."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_log_set": (None, (_Log, c_void_p)),
    "llama_backend_init": (None, ()),
    "llama_model_default_params": (ModelOptions, ()),
    "llama_context_default_params": (ContextOptions, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, ModelOptions)),
    "llama_model_free": (None, (c_void_p,)),
    "llama_init_from_model": (c_void_p, (c_void_p, ContextOptions)),
    "llama_free": (None, (c_void_p,)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    **{f"llama_model_n_{count}": (c_int32, (c_void_p,)) for count in ("ctx_train", "layer", "head", "head_kv", "swa")},
    "llama_model_is_recurrent": (c_bool, (c_void_p,)),
    "llama_model_is_hybrid": (c_bool, (c_void_p,)),
    "llama_adapter_lora_init": (c_void_p, (c_void_p, c_char_p)),
    "llama_set_adapters_lora": (c_int32, (c_void_p, POINTER(c_void_p), c_size_t, POINTER(c_float))),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_can_shift": (c_bool, (c_void_p,)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_memory_seq_cp": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "llama_memory_seq_add": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "llama_memory_seq_pos_max": (c_int32, (c_void_p, c_int32)),
    "llama_state_seq_get_size": (c_size_t, (c_void_p, c_int32)),
    "llama_state_seq_get_data": (c_size_t, (c_void_p, POINTER(c_uint8), c_size_t, c_int32)),
    "llama_state_seq_set_data": (c_size_t, (c_void_p, POINTER(c_uint8), c_size_t, c_int32)),
    "llama_batch_init": (Batch, (c_int32, c_int32, c_int32)),
    "llama_batch_free": (None, (Batch,)),
    "llama_decode": (c_int32, (c_void_p, Batch)),
    "llama_get_logits_ith": (POINTER(c_float), (c_void_p, c_int32)),
    "ggml_version": (c_char_p, ()),
    "ggml_get_name": (c_char_p, (c_void_p,)),
    "ggml_nbytes": (c_size_t, (c_void_p,)),
    "ggml_backend_tensor_get": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
}


@_Log  # type: ignore[untyped-decorator]
def _silent(level: int, text: bytes, data: object) -> None:
    """llama.cpp describes each model on standard error; what goes wrong comes back as a code."""


class Library:
    """The functions, by name.

    Parameters
    ----------
    path : Path
        The shared library.

    Raises
    ------
    ModelLoadError
        If the library cannot be loaded, lacks a function, or is of another build.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            loaded = ctypes.CDLL(str(path))
            for name, (result, arguments) in _FUNCTIONS.items():
                function = getattr(loaded, name)
                function.restype, function.argtypes = result, arguments
                setattr(self, name, function)
        except (OSError, ValueError, AttributeError) as error:
            raise ModelLoadError(f"llama.cpp's library {str(path)!r} cannot be used: {error}; {_REMEDY}") from error
        self.version: str = self.ggml_version().decode()
        if not self.version.startswith(f"{VERSION}."):
            raise ModelLoadError(
                f"llama.cpp's library {str(path)!r} has ggml {self.version}, but only {VERSION} is supported; {_REMEDY}"
            )
        self.llama_log_set(_silent, None)
        self.llama_backend_init()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


_REMEDY = f'unset {PATH} and run pip install "cacheblend-rag[llama-cpp]", or let it name a build with ggml {VERSION}'


def _candidates() -> Iterator[Path]:
    """Shared libraries of the installed package; the one for Windows exports none of the functions."""
    found = importlib.util.find_spec("xllamacpp")
    if found is not None and found.origin is not None:
        yield from sorted(Path(found.origin).parent.glob("xllamacpp*.so"))


def is_installed() -> bool:
    """Whether a library is available: the user's own build, or that of the installed package."""
    return bool(os.environ.get(PATH)) or next(_candidates(), None) is not None


@cache
def library() -> Library:
    """llama.cpp: the library that ``CACHEBLEND_RAG_LLAMA_CPP`` names, else that of an installed package.

    Raises
    ------
    ModelLoadError
        If no usable library is found.
    """
    own = os.environ.get(PATH)
    if own:
        return Library(Path(own).expanduser())
    path = next(_candidates(), None)
    if path is None:
        raise ModelLoadError(f"GGUF files are answered by llama.cpp, which is not installed; {_REMEDY}")
    return Library(path)
