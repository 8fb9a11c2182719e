"""llama.cpp in turn with the methods of ``ttft``, on the very same weights.

``python -m docs.benchmarks.scripts.llama_cpp --shape smollm2-135m --methods prefix default``

It prefills the whole prompt, and the same with a prefix kept. Everything runs on the CPU. It needs the package
llama-cpp-python, which is built from source, with a compiler::

    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python "llama-cpp-python>=0.3.36"
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.calibration.comparison import PrefillResult, kept_ids
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import CacheBlendError, ConfigError
from cacheblend_rag.prompt import Prompt
from docs.benchmarks.scripts.common import options_from, reported, script_parser
from docs.benchmarks.scripts.gguf_file import KINDS, write_gguf
from docs.benchmarks.scripts.measuring import show_result
from docs.benchmarks.scripts.plots import draw_ttft
from docs.benchmarks.scripts.shapes import bench_device
from docs.benchmarks.scripts.ttft import TTFTOptions, add_ttft_arguments, ttft_table
from docs.benchmarks.scripts.ttft import measure as measure_ttft

__all__ = [
    "NAMES",
    "LlamaContext",
    "LlamaCpp",
    "LlamaSettings",
    "file_dtype",
    "main",
    "measure",
]

NAMES = ("llama.cpp", "llama.cpp, prefix kept")

_log = logging.getLogger(__name__)
# 512 rows at once are llama.cpp's default. Which is quickest depends on the prompt's length and the processor.
_TRIED = tuple(itertools.product((True, False), (512, 256)))
_ERROR = 4  # GGML_LOG_LEVEL_ERROR


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


def measure(options: TTFTOptions) -> dict[str, Any]:
    """Measure llama.cpp in turn with the methods of the options; a dictionary fit for JSON.

    Raises
    ------
    ConfigError
        If llama-cpp-python is not installed, or the device is no CPU.
    """
    try:
        import llama_cpp  # noqa: F401
    except ImportError as error:
        remedy = f"install it with: pip install llama-cpp-python ({error})"
        raise ConfigError("package", "llama_cpp", remedy) from error
    if bench_device(options.device).type != "cpu":
        raise ConfigError("device", options.device, 'use "cpu": llama.cpp is measured there only')
    about: dict[str, Any] = {}

    @contextmanager
    def theirs(engine: BlendEngine, prompt: Prompt) -> Iterator[dict[str, Callable[[], PrefillResult]]]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(engine.model, path, file_dtype(engine.model.dtype))
            with LlamaCpp(path, threads=options.threads) as llama:
                ids = engine.tokenize(prompt).input_ids
                settings = llama.quickest(ids)
                runs = _methods(llama, engine, prompt, settings)
                full, logits = engine.adapter.prefill(ids).logits, {name: run().logits for name, run in runs.items()}
                about.update(_agreement(settings, full, logits))
                yield runs

    found = measure_ttft(options, theirs)
    return found | {"llama_cpp": about}


def _methods(
    llama: LlamaCpp, engine: BlendEngine, prompt: Prompt, settings: LlamaSettings
) -> dict[str, Callable[[], PrefillResult]]:
    """Its prefill of the whole prompt, and the same with prefix and first chunk kept in its KV cache from before.

    Each goes from text to the logits of the first token; token ids are made by the engine's tokenizer.
    """
    known, room = kept_ids(engine, prompt), len(engine.tokenize(prompt).input_ids)
    behind = llama.context(room, settings)
    behind.prefill(known)
    runs = (_prefill(llama.context(room, settings), engine, prompt, 0), _prefill(behind, engine, prompt, len(known)))
    return dict(zip(NAMES, runs, strict=True))


def _prefill(context: LlamaContext, engine: BlendEngine, prompt: Prompt, kept: int) -> Callable[[], PrefillResult]:
    def run() -> PrefillResult:
        ids = engine.tokenize(prompt).input_ids
        return PrefillResult(None, context.prefill(ids, kept), (len(ids) - kept,) * engine.adapter.num_layers)

    return run


def _agreement(settings: LlamaSettings, full: torch.Tensor, others: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Which llama.cpp it was, and how near its logits of the first token are to transformers', ``[vocab]`` each.

    Fit for JSON; differences are the largest of any logit, as a share of the largest logit.
    """
    import llama_cpp

    wanted = full.float()
    differences = {name: (made - wanted).abs().max() / wanted.abs().max() for name, made in others.items()}
    return {
        "version": llama_cpp.__version__,
        "built_for": llama_cpp.llama_print_system_info().decode().strip(" |"),
        "weights": KINDS[file_dtype(full.dtype)],
        **asdict(settings),
        "logit_difference": {name: float(difference) for name, difference in differences.items()},
        "same_first_token": {name: bool(made.argmax() == wanted.argmax()) for name, made in others.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table and JSON."""
    parser = script_parser("llama_cpp", __doc__)
    add_ttft_arguments(parser)
    parsed = parser.parse_args(arguments)

    def show() -> None:
        options = options_from(TTFTOptions, parsed)
        show_result(parsed.plot, lambda: measure(options), ttft_table, draw_ttft)

    return reported(parser, show)


if __name__ == "__main__":
    sys.exit(main())
