"""llama.cpp beside our methods, on the very model that a benchmark made: full prefill, and with a prefix kept.

Needs the packages ``llama-cpp-python`` and ``gguf``. Everything runs on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import CacheBlendError, ConfigError
from cacheblend_rag.evaluation.baselines import Prefilled, kept_ids
from cacheblend_rag.evaluation.gguf_file import KINDS
from cacheblend_rag.prompt import Prompt

__all__ = [
    "NAMES",
    "LlamaContext",
    "LlamaCpp",
    "LlamaMethods",
    "LlamaSettings",
    "agreement",
    "check_installed",
    "file_dtype",
    "llama_cpp_methods",
]

# Methods as they are asked for, and as tables name them.
NAMES = {"llama.cpp": "llama.cpp", "llama.cpp-prefix": "llama.cpp, prefix kept"}

_log = logging.getLogger(__name__)
# 512 rows at once are llama.cpp's default. Which is quickest depends on the prompt's length and the processor.
_TRIED = tuple(itertools.product((True, False), (512, 256)))
_ERROR = 4  # GGML_LOG_LEVEL_ERROR


def check_installed(method: str) -> None:
    """Refuse a method of llama.cpp where a package is missing.

    Raises
    ------
    ConfigError
        If ``llama_cpp`` or ``gguf`` cannot be imported.
    """
    try:
        import gguf  # noqa: F401
        import llama_cpp  # noqa: F401
    except ImportError as error:
        remedy = "install what it needs with: pip install llama-cpp-python gguf"
        raise ConfigError("methods", method, f"{remedy} ({error})") from error


@dataclass(frozen=True)
class LlamaSettings:
    """How llama.cpp computes.

    Parameters
    ----------
    flash_attention : bool
    ubatch : int
        Rows computed at once.
    kv : {"F16", "F32"}
        Element type of its KV. Float16 is llama.cpp's default, and the quicker one.
    """

    flash_attention: bool = True
    ubatch: int = 512
    kv: str = "F16"


class LlamaCpp:
    """A model in llama.cpp; its contexts are freed with it.

    Parameters
    ----------
    path : Path
        A GGUF file, such as `write_gguf` makes.
    threads : int
        Threads llama.cpp computes with.
    """

    def __init__(self, path: Path, *, threads: int) -> None:
        import llama_cpp

        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_log_callback(), None)
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise CacheBlendError(f"llama.cpp could not load {path}")
        self._open = ExitStack()
        self._open.callback(llama_cpp.llama_model_free, self._model)
        self.threads = threads

    def context(self, tokens: int, settings: LlamaSettings) -> LlamaContext:
        """A context with a KV cache of its own.

        Parameters
        ----------
        tokens : int
            Positions it has room for.
        settings : LlamaSettings
        """
        made = LlamaContext(self._model, tokens, self.threads, settings)
        self._open.callback(made.close)
        return made

    def quickest(self, ids: Sequence[int]) -> LlamaSettings:
        """The settings that were quickest for these token ids: flash attention or not, 512 or 256 rows at once."""
        seconds = {}
        for settings in (LlamaSettings(*tried) for tried in _TRIED):
            with closing(LlamaContext(self._model, len(ids), self.threads, settings)) as context:
                context.prefill(ids)  # warms up
                started = time.perf_counter()
                context.prefill(ids)
                seconds[settings] = time.perf_counter() - started
        return min(seconds, key=lambda settings: seconds[settings])

    def close(self) -> None:
        """Free the model and its contexts."""
        self._open.close()

    def __enter__(self) -> LlamaCpp:
        """See `close`."""
        return self

    def __exit__(self, *exception: object) -> None:
        """See `close`."""
        self.close()


@functools.cache  # llama.cpp calls it for as long as the process lives
def _log_callback() -> Any:
    import llama_cpp

    def note(level: int, text: bytes, _: Any) -> None:
        _log.log(logging.ERROR if level == _ERROR else logging.DEBUG, "%s", text.decode(errors="replace").rstrip())

    return llama_cpp.llama_log_callback(note)


class LlamaContext:
    """A KV cache of llama.cpp and what it takes to fill it; made by `LlamaCpp.context`."""

    def __init__(self, model: Any, tokens: int, threads: int, settings: LlamaSettings) -> None:
        import llama_cpp

        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = tokens
        params.n_ubatch = settings.ubatch
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = getattr(llama_cpp, f"GGML_TYPE_{settings.kv}")
        params.flash_attn_type = int(settings.flash_attention)
        params.offload_kqv = params.op_offload = False
        self._lib, self._tokens = llama_cpp, tokens
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise CacheBlendError(f"llama.cpp could not make a context of {tokens} tokens")
        self._kv = llama_cpp.llama_get_memory(self._context)

    def prefill(self, ids: Sequence[int], kept: int = 0) -> torch.Tensor:
        """Logits of the last token.

        Parameters
        ----------
        ids : sequence of int
            The whole prompt.
        kept : int
            How many of its first tokens the KV cache holds already, from the call before; what lies behind them
            is removed.

        Returns
        -------
        Tensor, [vocab], float32

        Raises
        ------
        CacheBlendError
            If they do not fit, or llama.cpp says that it could not evaluate them.
        """
        if len(ids) > self._tokens:  # which ends the process otherwise
            raise CacheBlendError(f"{len(ids)} tokens do not fit a context made for {self._tokens}")
        if not self._lib.llama_memory_seq_rm(self._kv, 0, kept, -1):
            raise CacheBlendError(f"llama.cpp could not keep {kept} tokens")
        rest = (ctypes.c_int32 * (len(ids) - kept))(*ids[kept:])
        # Positions go on from those that are kept, and logits are computed of the last token alone.
        status = self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(rest, len(rest)))
        if status:
            raise CacheBlendError(f"llama.cpp could not evaluate {len(rest)} tokens behind {kept}: status {status}")
        logits = self._lib.llama_get_logits_ith(self._context, -1)
        view = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self._vocab)).contents
        return torch.frombuffer(view, dtype=torch.float32).clone()

    def close(self) -> None:
        """Free it."""
        self._lib.llama_free(self._context)


def file_dtype(dtype: torch.dtype) -> torch.dtype:
    """The element type that weights of another are given to llama.cpp in.

    Bfloat16 becomes float16 where llama.cpp has no instructions for it: its float16 is quicker there, by a
    quarter with AVX2, and exact for weights of usual size.
    """
    import llama_cpp

    slow = dtype == torch.bfloat16 and b"BF16 = 1" not in llama_cpp.llama_print_system_info()
    return torch.float16 if slow else dtype


@dataclass(frozen=True)
class LlamaMethods:
    """Prefills of llama.cpp by the names of `NAMES`, and how it computes them."""

    runs: dict[str, Callable[[], Prefilled]]
    settings: LlamaSettings


def llama_cpp_methods(llama: LlamaCpp, engine: BlendEngine, prompt: Prompt) -> LlamaMethods:
    """Its prefill of the whole prompt, and the same with prefix and first chunk kept in its KV cache from before.

    Each goes from text to the logits of the first token; token ids are made by the engine's tokenizer.
    Settings are those that are quickest for the whole prompt.
    """
    ids, known = engine.tokenize(prompt).input_ids, kept_ids(engine, prompt)
    settings = llama.quickest(ids)
    runs = {}
    for name, kept in zip(NAMES, (0, len(known)), strict=True):
        context = llama.context(len(ids), settings)
        if kept:
            context.prefill(known)
        runs[name] = _prefill(context, engine, prompt, kept)
    return LlamaMethods(runs, settings)


def _prefill(context: LlamaContext, engine: BlendEngine, prompt: Prompt, kept: int) -> Callable[[], Prefilled]:
    def run() -> Prefilled:
        ids = engine.tokenize(prompt).input_ids
        return Prefilled(None, context.prefill(ids, kept), (len(ids) - kept,) * engine.adapter.num_layers)

    return run


def agreement(settings: LlamaSettings, full: Prefilled, others: Mapping[str, Prefilled]) -> dict[str, Any]:
    """How near llama.cpp's logits of the first token are to transformers', and which llama.cpp it was.

    Parameters
    ----------
    settings : LlamaSettings
    full : Prefilled
        The whole prompt by transformers.
    others : mapping of str to Prefilled
        By llama.cpp.

    Returns
    -------
    dict
        Fit for JSON; differences are the largest of any logit, as a share of the largest logit.
    """
    import llama_cpp

    wanted = full.logits.float()
    differences = {name: (made.logits - wanted).abs().max() / wanted.abs().max() for name, made in others.items()}
    return {
        "version": llama_cpp.__version__,
        "built_for": llama_cpp.llama_print_system_info().decode().strip(" |"),
        "weights": KINDS[file_dtype(full.logits.dtype)],
        **asdict(settings),
        "logit_difference": {name: float(difference) for name, difference in differences.items()},
        "same_first_token": {name: bool(made.logits.argmax() == wanted.argmax()) for name, made in others.items()},
    }
