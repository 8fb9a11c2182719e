"""First token, whole answer and memory of this package and of other engines on a CPU, from one GGUF file.

``python -m docs.benchmarks.scripts.whole_answer --model smollm2 --out docs/benchmarks/whole-answer-smollm2.json``

Each way of answering is a process of its own that holds its model. All answer in turn, round after round. The prompt is
a chat about the bundled articles in chunks of 512 tokens. This package has their KV on disk; the others prefill the
whole prompt. Each answer has 256 tokens and may not end before. It is noted when the first, the 16th and the 64th were
there. As such an answer repeats itself, no tokens are tried from what was written before (``prompt_lookup``).

ik_llama.cpp, OpenVINO GenAI and mistral.rs need the packages ik-llama-cpp-python, openvino-genai and mistralrs.
OpenVINO by default takes activations to 8 bits where the processor multiplies them faster, and keeps KV in 8 bits; the
exact row computes in float32 with KV in 16 bits. mistral.rs is given the chat as a message, as it takes no token ids.
Memory is that of the whole process: each has torch in it, some 0.4 GB that the other engines would not take.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.models.gguf import settings_folder
from cacheblend_rag.models.starters import STARTERS, starter_gguf
from cacheblend_rag.prompt.chat import question_turns, render_turns
from docs.benchmarks.scripts.common import TokenClock, machine, write_json
from docs.benchmarks.scripts.llama_cpp import Alone

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
        A starter's name.
    dtype : str
        Element type of plain transformers and of this package in PyTorch.
    chunks : int
        How many the prompt has.
    folder : str
        Where stores and files are.
    """

    model: str
    dtype: str
    chunks: int
    folder: str

    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return AutoTokenizer.from_pretrained(settings_folder(starter_gguf(self.model)))

    def prompt(self, tokenizer: Any) -> Prompt:
        """A chat about articles cut into so many chunks, the one with the answer in the middle."""
        before, after = render_turns(tokenizer, question_turns("<chunks>", QUESTION)).split("<chunks>")
        return Prompt(before, self.texts(tokenizer), after, ["\n\n"] * (self.chunks - 1))

    def texts(self, tokenizer: Any) -> list[str]:
        """Texts of the chunks."""
        files = sorted(ARTICLES_PATH.glob("*.md"), key=lambda file: (file.stem != "surtsey", file.stem))
        ids = tokenizer.encode("\n\n".join(file.read_text("utf-8") for file in files), add_special_tokens=False)
        parts = [ids[at * CHUNK_TOKENS : (at + 1) * CHUNK_TOKENS] for at in range(self.chunks)]
        chunks = [tokenizer.decode(part).strip() for part in parts]
        chunks.insert(self.chunks // 2, chunks.pop(0))
        return chunks

    def ids(self) -> list[int]:
        """The prompt's token ids."""
        tokenizer = self.tokenizer()
        return [
            int(token) for token in tokenizer.encode(self.prompt(tokenizer).written("").text, add_special_tokens=False)
        ]


# Ways of answering, each in a process of its own -----------------------------------------------


def _blended(case: Case, backend: str) -> _Answer:
    config, store = BlendConfig(prompt_cache=0), Path(case.folder, f"{backend} {case.chunks} chunks")
    given = {"dtype": case.dtype} if backend == "torch" else {}
    engine = BlendEngine.from_pretrained(case.model, backend=backend, config=config, store=store, **given)
    prompt = case.prompt(engine.tokenizer)
    engine.warm(prompt.chunks, progress=False)

    def answer(tokens: int) -> list[float]:
        clock = TokenClock()
        # A token that no model chooses ends the answer.
        unused = engine.model.config.vocab_size - 1
        endless = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=unused, pad_token_id=0)
        engine.generate(prompt, stop_repetition=False, generation_config=endless, logits_processor=[clock])
        engine.flush()
        return clock.times

    return answer


def _transformers(case: Case) -> _Answer:
    path, ids = starter_gguf(case.model), torch.tensor([case.ids()])
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=case.dtype).eval()

    def answer(tokens: int) -> list[float]:
        clock = TokenClock()
        endless = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, generation_config=endless, logits_processor=[clock])
        return clock.times

    return answer


def _token_by_token(next_token: Callable[[Sequence[int], int], int], ids: Sequence[int], tokens: int) -> list[float]:
    """When each token of a greedy answer was there; the function takes ids and the position that they stand at."""
    given, at, times = ids, 0, []
    for _ in range(tokens):
        token = next_token(given, at)
        times.append(time.perf_counter())
        given, at = [token], at + len(given)
    return times


def _llama(case: Case) -> _Answer:
    ids, runtime = case.ids(), Alone(starter_gguf(case.model), THREADS)

    def answer(tokens: int) -> list[float]:
        with runtime.sequence() as sequence:
            return _token_by_token(lambda *at: int(runtime.compute(*at, sequence, 1)[-1].argmax()), ids, tokens)

    return answer


class _IkLlama:
    """A model in ik_llama.cpp: weights repacked for the processor, flash attention, KV in float16."""

    def __init__(self, path: Path, tokens: int) -> None:
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
        params.n_threads = params.n_threads_batch = THREADS
        params.flash_attn = True
        self._context = library.llama_init_from_model(model, params)
        self._vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))

    def next_token(self, ids: Sequence[int], at: int) -> int:
        """The token after some, which stand at a position behind those before."""
        if not at:
            self._library.llama_kv_cache_clear(self._context)
        batch = self._batches.make_batch_range(list(ids), pos_start=at, logits_last=True)
        status = self._library.llama_decode(self._context, batch)
        self._library.llama_batch_free(batch)
        if status:
            raise SystemExit(f"ik_llama.cpp could not evaluate {len(ids)} tokens behind {at}: status {status}")
        logits = self._library.llama_get_logits_ith(self._context, -1)
        view = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self._vocabulary)).contents
        return int(torch.frombuffer(view, dtype=torch.float32).argmax())


def _ik_llama(case: Case) -> _Answer:
    ids = case.ids()
    model = _IkLlama(starter_gguf(case.model), len(ids) + NOTED[-1])

    return lambda tokens: _token_by_token(model.next_token, ids, tokens)


_EXACT = {"KV_CACHE_PRECISION": "f16", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "INFERENCE_PRECISION_HINT": "f32"}


def _openvino(case: Case, **options: str) -> _Answer:
    import openvino
    import openvino_genai

    given = np.array([case.ids()], dtype=np.int64)
    model = openvino_genai.LLMPipeline(str(openvino_file(case)), "CPU", INFERENCE_NUM_THREADS=THREADS, **options)

    def generate(ids: Any, tokens: int) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        mask = openvino.Tensor(np.ones_like(ids))
        return model.generate(openvino_genai.TokenizedInputs(openvino.Tensor(ids), mask), config)

    def answer(tokens: int) -> list[float]:
        began = time.perf_counter()
        metrics = generate(given, tokens).perf_metrics.raw_metrics
        first = began + metrics.m_times_to_first_token[0] / 1e6
        later = itertools.accumulate(each / 1e6 for each in metrics.m_durations)
        generate(given[:, :2], 1)  # or it goes on from the KV of these ids when they come again
        return [first, *(first + each for each in later)][:tokens]

    return answer


def openvino_file(case: Case) -> Path:
    """The starter's file, with the kinds of weights that OpenVINO cannot read taken to 8 bits."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    source, target = starter_gguf(case.model), Path(case.folder, f"openvino-{os.getpid()}.gguf")
    unread, reader = ("Q5_0", "Q5_1", "Q5_K"), GGUFReader(source)
    if not any(tensor.tensor_type.name in unread for tensor in reader.tensors):
        return source
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        of_array = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=of_array)
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if kind.name in unread:
            data, kind = quantize(dequantize(data, kind), GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _mistral(case: Case) -> _Answer:
    os.environ["RAYON_NUM_THREADS"] = str(THREADS)
    import mistralrs

    path, tokenizer = starter_gguf(case.model), case.tokenizer()
    content = "\n\n".join((*case.texts(tokenizer), QUESTION))
    which = mistralrs.Which.GGUF(quantized_model_id=str(path.parent), quantized_filename=path.name)
    runner = mistralrs.Runner(which=which, prefix_cache_n=0)

    def answer(tokens: int) -> list[float]:
        messages = [{"role": "user", "content": content}]
        request = mistralrs.ChatCompletionRequest(
            messages=messages, model="default", max_tokens=tokens, temperature=0.0, stream=True, ignore_eos=True
        )
        times = [time.perf_counter() for _ in runner.send_chat_completion_request(request)]
        return (times + times[-1:] * tokens)[:tokens]

    return answer


@dataclass(frozen=True)
class Way:
    """A way of answering: how tables call it, what answers, and a package that must be there."""

    title: str
    answer: Callable[[Case], _Answer]
    package: str | None = None


WAYS = {
    "blended": Way("this package, in llama.cpp (default)", lambda case: _blended(case, "llama.cpp")),
    "torch": Way("this package, in PyTorch", lambda case: _blended(case, "torch")),
    "transformers": Way("plain transformers", _transformers),
    "llama": Way("llama.cpp", _llama),
    "ik": Way("ik_llama.cpp", _ik_llama, "ik_llama_cpp"),
    "openvino": Way("OpenVINO GenAI, as it comes", _openvino, "openvino_genai"),
    "openvino-exact": Way("OpenVINO GenAI, exact", lambda case: _openvino(case, **_EXACT), "openvino_genai"),
    "mistral": Way("mistral.rs", _mistral, "mistralrs"),
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
        module, arguments = "docs.benchmarks.scripts.whole_answer", ["--work", way, json.dumps(asdict(case))]
        here = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))}
        command = [sys.executable, "-m", module, *arguments]
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


def measure(
    model: str, dtype: str, counts: Sequence[int], rounds: int, ways: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Time ways in turn; the result so far after each number of chunks, fit for JSON."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in (Case(model, dtype, count, folder) for count in counts):
            tokens = len(case.ids())
            rows += [
                {
                    "way": way,
                    "prompt_tokens": tokens,
                    "seconds": [statistics.median(at) for at in zip(*(one["seconds"] for one in times), strict=True)],
                    "peak_bytes": max(one["peak"] for one in times),
                    "rounds": [one["seconds"] for one in times],
                }
                for way, times in _in_turn(case, rounds, ways).items()
            ]
            about = machine("cpu") | {"threads": THREADS, "dtype": dtype}
            yield {"model": model, "noted": NOTED, "machine": about, "rows": rows}


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
    """The result as tables, one for each prompt; ratios are to the first way."""
    parts = []
    for tokens in dict.fromkeys(row["prompt_tokens"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["prompt_tokens"] == tokens]
        head = " | ".join(f"{count} tokens" for count in NOTED[1:])
        parts += [
            f"{result['model']}, {tokens:,} prompt tokens\n",
            f"| | first token | {head} | a token | peak memory |",
            "|---" * (4 + len(NOTED[1:])) + "|",
        ]
        for row in rows:
            seconds, base = row["seconds"], rows[0]["seconds"]
            at = [f"{one:.2f} s ({one / first:.1f}×)" for one, first in zip(seconds, base, strict=True)]
            a_token = 1e3 * (seconds[-1] - seconds[0]) / (NOTED[-1] - 1)
            cells = [WAYS[row["way"]].title, *at, f"{a_token:.0f} ms", f"{row['peak_bytes'] / 1e9:.2f} GB"]
            parts.append(f"| {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts)


def main() -> None:
    """Read the arguments and measure, or be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", choices=STARTERS)
    parser.add_argument("--dtype", default="float32", help="of PyTorch's ways")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--counts", nargs="+", type=int, default=[6], help="chunks of the prompts")
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
