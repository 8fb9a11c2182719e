"""First token, whole answer and memory, beside plain transformers, llama.cpp, ik_llama.cpp and OpenVINO GenAI.

``python -m docs.benchmarks.scripts.whole_answer --model smollm2 --out docs/benchmarks/whole-answer.json``

Each way of answering is a process of its own that holds its model. All answer in turn, round after round. The prompt
has chunks of 512 tokens, whose KV is stored on disk. A starter model reads a chat about the bundled articles, a known
shape has random weights and reads made-up text. Each answer has 256 tokens. It is noted when the first, the 16th and
the 64th were there. An answer that may not end repeats itself, so no tokens are tried from what was written before
(``prompt_lookup``): there would be more of them than in real answers.

llama.cpp, ik_llama.cpp and OpenVINO GenAI need the packages llama-cpp-python, ik-llama-cpp-python and openvino-genai,
and read a starter's own GGUF file of 4 bits. llama.cpp's 8 bits are made by its quantiser. OpenVINO by default takes
activations to 8 bits where the processor multiplies them faster, and keeps KV in 8 bits. Memory is that of the whole
process: each has torch in it, some 0.4 GB that llama.cpp by itself would not take.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import itertools
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.models.gguf import settings_folder
from cacheblend_rag.models.loading import load_model
from cacheblend_rag.models.starters import STARTERS, starter_gguf
from cacheblend_rag.prompt.chat import question_turns, render_turns
from docs.benchmarks.scripts.common import (
    SHAPES,
    BenchOptions,
    TokenClock,
    bench_prompt,
    bench_tokenizer,
    greedy,
    machine,
    random_model,
    write_json,
)


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


_UNREAD = ("Q5_0", "Q5_1", "Q5_K")
"""Kinds of weights that it cannot read."""


class OpenVino:
    """A model in OpenVINO.

    Parameters
    ----------
    path : Path
        A GGUF file.
    threads : int
    """

    def __init__(self, path: Path, threads: int) -> None:
        import openvino_genai

        self._library = openvino_genai
        self._model = openvino_genai.LLMPipeline(str(path), "CPU", INFERENCE_NUM_THREADS=threads)

    def answer(self, ids: Sequence[int], tokens: int) -> list[float]:
        """Answer by so many tokens; seconds from the start until each was there."""
        metrics = self._generate(ids, tokens).perf_metrics.raw_metrics
        first = metrics.m_times_to_first_token[0] / 1e6
        later = list(itertools.accumulate(each / 1e6 for each in metrics.m_durations))
        self._generate([1, 2], 1)  # or it goes on from the KV of these ids when they come again
        return [first, *(first + each for each in later)][:tokens]

    def _generate(self, ids: Sequence[int], tokens: int) -> Any:
        import openvino

        config = self._library.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        given = np.array([ids], dtype=np.int64)
        inputs = self._library.TokenizedInputs(openvino.Tensor(given), openvino.Tensor(np.ones_like(given)))
        return self._model.generate(inputs, config)


def write_readable(source: Path, target: Path) -> str:
    """Write a file with the kinds of weights that cannot be read taken to 8 bits; how the weights are called then."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(source)
    changed = sum(tensor.tensor_type.name in _UNREAD for tensor in reader.tensors)
    if not changed:
        target.symlink_to(source)
        return "of the file"
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        of_array = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=of_array)
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if kind.name in _UNREAD:
            data, kind = quantize(dequantize(data, kind), GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return f"{changed} of {len(reader.tensors)} in 8 bits, else of the file"


_log = logging.getLogger(__name__)
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


CHUNK_TOKENS, THREADS = 512, 2
NOTED = (1, 16, 64, 256)  # tokens of an answer
QUESTION = "When was Surtsey first seen?"
_Answer = Callable[[int], list[float]]
"""Answers by so many tokens, and says when each was there, in seconds."""


@dataclass(frozen=True)
class Case:
    """Options of the measurement.

    Parameters
    ----------
    model : str
        A starter's name; or a shape, as `BenchOptions` takes it.
    dtype : str
        Element type of plain transformers and of this package.
    chunks : int
        How many the prompt has.
    folder : str
        Where the store and llama.cpp's files are.
    """

    model: str
    dtype: str
    chunks: int
    folder: str

    @property
    def starter(self) -> bool:
        """Whether the model is a starter, and no shape with random weights."""
        return self.model in STARTERS

    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return (
            AutoTokenizer.from_pretrained(settings_folder(starter_gguf(self.model)))
            if self.starter
            else bench_tokenizer()
        )

    def plain_model(self) -> Any:
        """Its transformers model."""
        if self.starter:
            return load_model(self.model, device="cpu", dtype=self.dtype).model
        return random_model(self.model, dtype=self.dtype)

    def prompt(self, tokenizer: Any) -> Prompt:
        """Its prompt."""
        if self.starter:
            return _about_articles(tokenizer, self.chunks)
        return bench_prompt(tokenizer, BenchOptions(self.model, self.dtype, self.chunks, CHUNK_TOKENS, threads=THREADS))

    def ids(self) -> list[int]:
        """The prompt's token ids."""
        tokenizer = self.tokenizer()
        text = self.prompt(tokenizer).written("").text
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=not self.starter)]


def _about_articles(tokenizer: Any, count: int) -> Prompt:
    """A chat about articles cut into so many chunks, the one with the answer in the middle."""
    files = sorted(ARTICLES_PATH.glob("*.md"), key=lambda file: (file.stem != "surtsey", file.stem))
    texts = [file.read_text(encoding="utf-8") for file in files]
    ids = tokenizer.encode("\n\n".join(texts), add_special_tokens=False)
    chunks = [tokenizer.decode(ids[n * CHUNK_TOKENS : (n + 1) * CHUNK_TOKENS]).strip() for n in range(count)]
    chunks.insert(count // 2, chunks.pop(0))
    before, after = render_turns(tokenizer, question_turns("<chunks>", QUESTION)).split("<chunks>")
    return Prompt(before, chunks, after, ["\n\n"] * (count - 1))


# Ways of answering, each in a process of its own -----------------------------------------------


def _transformers(case: Case) -> _Answer:
    model, tokenizer, ids = case.plain_model(), case.tokenizer(), torch.tensor([case.ids()])

    def answer(tokens: int) -> list[float]:
        clock, config = TokenClock(), greedy(tokenizer, tokens)
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, generation_config=config, logits_processor=[clock])
        return clock.times

    return answer


def _engine(case: Case, **options: Any) -> _Answer:
    model, tokenizer = case.plain_model(), case.tokenizer()
    store = Path(case.folder, f"{case.chunks} chunks")
    engine = BlendEngine(model, tokenizer, config=BlendConfig(prompt_cache=0, **options), store=store)
    prompt = case.prompt(tokenizer)
    engine.warm(prompt.chunks, progress=False)

    def answer(tokens: int) -> list[float]:
        clock = TokenClock()
        engine.generate(prompt, generation_config=greedy(tokenizer, tokens), logits_processor=[clock])
        engine.flush()
        return clock.times

    return answer


def _llama(case: Case, bits: int) -> _Answer:
    ids = case.ids()
    llama = LlamaCpp(Path(case.folder, f"{bits}.gguf"), threads=THREADS)
    return _token_by_token(llama.context(len(ids) + NOTED[-1], LlamaSettings()), ids)


def _ik_llama(case: Case) -> _Answer:
    ids = case.ids()
    return _token_by_token(IkLlama(_starter_file(case), len(ids) + NOTED[-1], THREADS), ids)


def _token_by_token(context: LlamaContext | IkLlama, ids: Sequence[int]) -> _Answer:
    def answer(tokens: int) -> list[float]:
        given, times = list(ids), []
        for count in range(tokens):  # the KV of all but the newest token is there, and of none at first
            given.append(int(context.prefill(given, kept=len(given) - 1 if count else 0).argmax()))
            times.append(time.perf_counter())
        return times

    return answer


def _openvino(case: Case) -> _Answer:
    ids, model = case.ids(), OpenVino(_openvino_file(case), THREADS)

    def answer(tokens: int) -> list[float]:
        began = time.perf_counter()
        return [began + seconds for seconds in model.answer(ids, tokens)]

    return answer


def _openvino_file(case: Case) -> Path:
    return Path(case.folder, "openvino.gguf")


def _starter_file(case: Case) -> Path:
    if not case.starter:
        raise SystemExit(
            f"--model {case.model}: llama.cpp, ik_llama.cpp and OpenVINO GenAI read the files of starters alone"
        )
    return starter_gguf(case.model)


@dataclass(frozen=True)
class Way:
    """A way of answering: how tables call it, what answers, llama.cpp's bits, and a package that must be there."""

    title: str
    answer: Callable[[Case], _Answer]
    bits: int | None = None
    package: str | None = None


WAYS = {
    "transformers": Way("plain transformers", _transformers),
    "full": Way("this package, full recompute", lambda case: _engine(case, selection="all")),
    "reuse": Way("this package, full KV reuse", lambda case: _engine(case, selection="none")),
    "default": Way("this package, blended (default)", _engine),
    "llama-4": Way("llama.cpp, 4 bits, full prefill", lambda case: _llama(case, 4), 4, "llama_cpp"),
    "llama-8": Way("llama.cpp, 8 bits, full prefill", lambda case: _llama(case, 8), 8, "llama_cpp"),
    "ik": Way("ik_llama.cpp, 4 bits, full prefill", _ik_llama, package="ik_llama_cpp"),
    "openvino": Way("OpenVINO GenAI, 4 bits, full prefill", _openvino, package="openvino_genai"),
}


def _work(way: str, case: Case) -> None:
    """Answer whenever a line comes in, and say how long it took."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries write there what they like
    torch.set_num_threads(THREADS)
    answer = WAYS[way].answer(case)
    answer(2)  # warms up
    print("ready", file=said, flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        times = answer(NOTED[-1])
        seconds = [times[count - 1] - began for count in NOTED]
        print(json.dumps({"seconds": seconds, "peak": _peak_memory()}), file=said, flush=True)


def _peak_memory() -> int:
    """Most bytes of memory that this program has taken; what ``getrusage`` says may be of the one that started it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status)[1])  # type: ignore[index]


# The whole -------------------------------------------------------------------------------------


class _Worker:
    """A process that answers in one way."""

    def __init__(self, way: str, case: Case) -> None:
        command = [
            sys.executable,
            "-m",
            "docs.benchmarks.scripts.whole_answer",
            "--work",
            way,
            json.dumps(asdict(case)),
        ]
        here = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=here)
        if self._read() != "ready":
            raise SystemExit(f"{way} did not start")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return dict(json.loads(self._read()))

    def end(self) -> None:
        self._process.communicate()


def write_for_llama(case: Case, ways: Sequence[str]) -> dict[str, str]:
    """Write the files that llama.cpp reads; by its way, the kind of weights in it."""
    wanted = {way: bits for way in ways if (bits := WAYS[way].bits) is not None}
    if not wanted:
        return {}
    source = _starter_file(case)
    return {way: _write_quantised(case, source, bits) for way, bits in wanted.items()}


def _write_quantised(case: Case, source: Path, bits: int) -> str:
    """Write a file of so many bits; the kind of weights in it. The starter's own has 4."""
    import llama_cpp

    file = Path(case.folder, f"{bits}.gguf")
    if bits == 4:
        file.symlink_to(source)
        return source.name.split(".")[-2]
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), params):
        raise SystemExit(f"llama.cpp could not write {file}")
    return "Q8_0"


def measure(
    model: str, dtype: str, counts: Sequence[int], rounds: int, ways: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Time ways in turn; the result so far after each number of chunks, fit for JSON."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        cases = [Case(model, dtype, count, folder) for count in counts]
        weights = write_for_llama(cases[0], ways)
        if "openvino" in ways:
            weights["openvino"] = write_readable(_starter_file(cases[0]), _openvino_file(cases[0]))
        for case in cases:
            tokens = len(case.ids())
            rows += [
                {
                    "way": way,
                    "weights": weights.get(way, _weights_of(way, dtype)),
                    "prompt_tokens": tokens,
                    "seconds": [statistics.median(at) for at in zip(*(one["seconds"] for one in times), strict=True)],
                    "peak_bytes": max(one["peak"] for one in times),
                    "rounds": [one["seconds"] for one in times],
                }
                for way, times in _in_turn(case, rounds, ways).items()
            ]
            yield {"model": model, "noted": NOTED, "machine": machine("cpu") | {"threads": THREADS}, "rows": rows}


def _weights_of(way: str, dtype: str) -> str:
    return "of the file" if way == "ik" else dtype


def _in_turn(case: Case, rounds: int, ways: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The report of each way on its answers, a round each."""
    workers = {way: _Worker(way, case) for way in ways}
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, worker in workers.items():
            found[way].append(worker.answer())
    for worker in workers.values():
        worker.end()
    return found


def markdown(result: dict[str, Any]) -> str:
    """The result as tables, one for each prompt."""
    parts = []
    for tokens in dict.fromkeys(row["prompt_tokens"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["prompt_tokens"] == tokens]
        head = " | ".join(f"{count} tokens" for count in NOTED[1:])
        parts += [
            f"{result['model']}, {tokens:,} prompt tokens\n",
            f"| | weights | first token | sooner | {head} | a token | peak memory |",
            "|---" * (6 + len(NOTED[1:])) + "|",
        ]
        for row in rows:
            seconds = row["seconds"]
            later = " | ".join(f"{at:.2f} s" for at in seconds[1:])
            a_token = 1e3 * (seconds[-1] - seconds[0]) / (NOTED[-1] - 1)
            parts.append(
                f"| {WAYS[row['way']].title} | {row['weights']} | {seconds[0]:.2f} s "
                f"| {rows[0]['seconds'][0] / seconds[0]:.1f}× | {later} "
                f"| {a_token:.0f} ms | {row['peak_bytes'] / 1e9:.2f} GB |"
            )
        parts.append("")
    return "\n".join(parts)


def main() -> None:
    """Read the arguments and measure, or be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a starter model, or one of " + ", ".join(SHAPES))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--counts", nargs="+", type=int, default=[6, 12], help="chunks of the prompts")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="by default all that can be")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        way, case = given.work
        _work(way, Case(**json.loads(case)))
        return
    ways = given.ways or [
        name for name, way in WAYS.items() if way.package is None or importlib.util.find_spec(way.package) is not None
    ]
    for result in measure(given.model, given.dtype, given.counts, given.rounds, ways):
        print(markdown(result), flush=True)
        if given.out:
            write_json(given.out, result)


if __name__ == "__main__":
    main()
