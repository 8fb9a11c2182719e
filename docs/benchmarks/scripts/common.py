"""Shared by scripts of benchmarks: arguments, errors, ways that are timed in turn, and how these are shown."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from transformers.generation import LogitsProcessor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cacheblend_rag.app.cli.arguments import add_arguments
from cacheblend_rag.calibration.profiler import timed
from cacheblend_rag.calibration.quality import PrefillResult, time_once
from cacheblend_rag.config import BlendConfig, check_choice, check_whole
from cacheblend_rag.engine import pipeline, turns
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import CacheBlendError, ConfigError, MissingExtraError
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.report import BlendReport, WarmReport
from cacheblend_rag.store import KVStore

SYSTEM = "Answer the question at the end from the passages below. Say so if they do not hold the answer."
QUESTION = "What does the second passage say about the mill, and who rebuilt it after the fire in the valley?"
# How bars look by where the KV they read lies; those of methods that read none come first.
_PLACES: dict[str, dict[str, str]] = {
    "": {"facecolor": "white", "label": "no KV loaded"},
    "disk": {"facecolor": "0.5", "label": "KV on disk"},
    "memory": {"facecolor": "0.85", "hatch": "////", "label": "KV in memory"},
    "gpu": {"facecolor": "0.95", "hatch": "....", "label": "KV on the GPU"},
}
EDGE = {"edgecolor": "black", "linewidth": 0.6}
"""How bars are drawn round."""


def import_pyplot() -> Any:
    """Pyplot of matplotlib, drawing into files.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("matplotlib", "benchmarks") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def pyplot_for(path: str | Path | None) -> Any:
    """Pyplot for a file drawn after long work, which is checked now; None if none is named.

    Raises
    ------
    ConfigError
        If matplotlib draws no such kind of file, or its folder does not exist.
    MissingExtraError
        If matplotlib is not installed.
    """
    if not path:
        return None
    pyplot = import_pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    wanted = Path(path)
    if wanted.suffix.lower().removeprefix(".") not in FigureCanvasBase.get_supported_filetypes():
        raise ConfigError("plot", str(path), "use a file name that ends in .svg, .png or .pdf")
    if not wanted.parent.is_dir():
        raise ConfigError("plot", str(path), "use a folder that exists")
    return pyplot


def save_figure(pyplot: Any, figure: Any, path: str | Path) -> None:
    """Write a figure into a file and let go of it; the same figure gives the same file."""
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(Path(path).suffix.lower())
    with pyplot.rc_context({"svg.hashsalt": "cacheblend-rag"}):  # ids that do not change
        figure.savefig(path, dpi=150, metadata=undated)
    pyplot.close(figure)


def draw_ttft(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """Time to first token of every method, a bar each, with its bound and how many times faster it is."""
    seconds, bounds, faster = result["ttft_seconds"], result["bound_seconds"], result["times_faster"]
    split = {name: _method_and_place(name) for name in seconds}
    methods = list(dict.fromkeys(method for method, _ in split.values()))
    # Bars of one method stand together, methods half a bar apart.
    places = {name: number + 0.5 * methods.index(split[name][0]) for number, name in enumerate(seconds)}
    figure, axis = pyplot.subplots(figsize=(7.5, 1.5 + 0.24 * max(places.values())), layout="constrained")
    for place, look in _PLACES.items():
        at = [name for name in seconds if split[name][1] == place]
        if at:
            axis.barh([places[name] for name in at], [seconds[name] for name in at], height=0.9, **EDGE, **look)
    for colour, width, label in (("white", 4, None), ("black", 2, "bound")):  # stands out on any bar
        low, high = ([places[name] + half for name in seconds] for half in (-0.45, 0.45))
        axis.vlines([bounds[name] for name in seconds], low, high, colors=colour, linewidth=width, label=label)
    for name, value in seconds.items():
        end = (max(value, bounds[name]), places[name])
        text = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": "small"}
        axis.annotate(f"{faster[name]:.1f}×", end, **text)
    middle = {method: [places[name] for name in seconds if split[name][0] == method] for method in methods}
    bar_rows(axis, {method: sum(at) / len(at) for method, at in middle.items()})
    axis.set(xlabel="time to first token (s)", xlim=(0, 1.1 * max(*seconds.values(), *bounds.values())))
    prompt = f"{result['prompt_tokens']:,} tokens"
    titled(figure, "Time to first token, and how many times faster than full recompute", result, prompt)
    figure.legend(loc="outside lower center", ncols=5, fontsize="small", frameon=False)
    save_figure(pyplot, figure, path)


def _method_and_place(name: str) -> tuple[str, str]:
    method, _, place = name.rpartition(", ")
    return (method, place) if place in _PLACES and method else (name, "")


def bar_rows(axis: Any, places: Mapping[str, float]) -> None:
    """Names of rows of bars, the first on top."""
    axis.set_yticks(list(places.values()), list(places))
    axis.invert_yaxis()
    axis.margins(y=0.02)
    unboxed(axis)


def unboxed(axis: Any) -> None:
    """Leave out the frame's upper and right sides, and marks beside names."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def titled(figure: Any, title: str, result: Mapping[str, Any], detail: str) -> None:
    """Write above a figure what it shows, and under what it was measured: model, element type, processor.

    Parameters
    ----------
    figure : matplotlib Figure
    title : str
    result : mapping
        Of a benchmark.
    detail : str
        Further conditions of the measurement.
    """
    options, machine = result["options"], result["machine"]
    device = machine["processor"] if machine["device"] == "cpu" else machine["device"]
    conditions = f"{Path(options['shape']).name}, {options['dtype']}, {detail}, {device}"
    figure.suptitle(f"{title}\n{conditions}", fontsize="medium")


SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "qwen3-1.7b": {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    # As of version 0.2, which has no sliding window.
    "mistral-7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "qwen3-14b": {
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    # The text model of Gemma 3: five layers of six see a window.
    "gemma3-12b": {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "yi-34b": {
        "model_type": "llama",
        "hidden_size": 7168,
        "intermediate_size": 20480,
        "num_hidden_layers": 60,
        "num_attention_heads": 56,
        "num_key_value_heads": 8,
        "vocab_size": 64000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class BenchOptions:
    """Options of all benchmarks over one prompt.

    Parameters
    ----------
    shape : str
        Model shape, a key of `SHAPES` or the path of a ``config.json``.
    dtype : str
        Element type.
    chunks, chunk_tokens : int
        Chunks in the prompt, and tokens of each.
    rounds : int
        Timed rounds after one that warms up.
    threads : int
        Threads torch may use.
    device : str
        Where the model is: ``"auto"`` (a GPU if there is one), or a torch device.

    Raises
    ------
    ConfigError
        If a number is below 1.
    """

    shape: str = "qwen2.5-0.5b"
    dtype: str = "float32"
    chunks: int = 4
    chunk_tokens: int = 512
    rounds: int = 5
    threads: int = 2
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("chunks", "chunk_tokens", "rounds", "threads"):
            check_whole(name, getattr(self, name), 1)


def bench_device(name: str) -> torch.device:
    """The device of a name, ``"auto"`` being a GPU if there is one.

    Raises
    ------
    ConfigError
        If there is no device of that name.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError("device", name, 'use "auto", "cpu", "cuda" or "cuda:0"') from error


def shape_config(shape: str) -> Any:
    """The transformers config of a shape.

    Parameters
    ----------
    shape : str
        A key of `SHAPES`, or the path of a ``config.json``.

    Raises
    ------
    ConfigError
        If there is neither.
    """
    settings = dict(SHAPES[shape]) if shape in SHAPES else _settings_in(Path(shape))
    return CONFIG_MAPPING[settings.pop("model_type")](**settings)


def _settings_in(path: Path) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = settings["model_type"] in CONFIG_MAPPING
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    if not known:
        names = ", ".join(map(repr, SHAPES))
        raise ConfigError("shape", str(path), f"use one of {names}, or the path of a model's config.json")
    return settings


def random_model(shape: str, *, dtype: str = "float32", device: str = "cpu", seed: int = 0) -> Any:
    """A model of a known shape with random weights.

    Parameters
    ----------
    shape : str
        As for `shape_config`.
    dtype : str
        Element type, such as ``"bfloat16"``.
    device : str
        As for `bench_device`; the weights are drawn there.
    seed : int
        Of the weights.

    Raises
    ------
    ConfigError
        If the shape, the element type or the device is not known.
    """
    check_choice("dtype", dtype, ("float32", "bfloat16", "float16"))
    config = shape_config(shape)
    torch.manual_seed(seed)
    with bench_device(device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()


_ALLOCATOR = ("GLIBC_TUNABLES", "MALLOC_")


@contextmanager
def read_plainly() -> Iterator[None]:
    """Within this, layers are read one after another, none of them ahead of its use."""
    with mock.patch.object(pipeline, "_WORTH_A_THREAD", math.inf):
        yield


def bench_model(options: BenchOptions) -> tuple[Any, Any]:
    """A model of random weights and a tokenizer; from now on torch takes the threads of the options."""
    torch.set_num_threads(options.threads)
    model = random_model(options.shape, dtype=options.dtype, device=options.device)
    return model, bench_tokenizer()


def bench_tokenizer() -> Any:
    """A byte-level BPE tokenizer for the text of benchmarks, made on the spot."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([SYSTEM, QUESTION, f" {SYSTEM} {QUESTION}".lower()], trainer)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    # A message is written as it is, so that a chat has the tokens of the same text.
    made.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    return made


def bench_prompt(tokenizer: Any, options: BenchOptions) -> Prompt:
    """The prompt of a benchmark: a short prefix, chunks, and a question of about 30 tokens."""
    return Prompt(SYSTEM, chunk_texts(tokenizer, options.chunks, options.chunk_tokens), QUESTION)


def chunk_texts(tokenizer: Any, count: int, tokens: int) -> list[str]:
    """So many chunks of about the wanted number of tokens."""
    chooser = random.Random(0)
    words = (SYSTEM + " " + QUESTION).lower().split()
    texts = []
    for _ in range(count):
        text = [chooser.choice(words) for _ in range(tokens)]

        def size(length: int, text: list[str] = text) -> int:
            return len(tokenizer.encode(" ".join(text[:length]), add_special_tokens=False))

        texts.append(" ".join(text[: max(1, bisect_right(range(tokens + 1), tokens, key=size) - 1)]))
    return texts


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each way's times."""
    return {name: statistics.median(times) for name, times in seconds.items()}


@contextmanager
def warmed(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    store: KVStore | str | None,
    *,
    fingerprint: str | None = None,
    **config: Any,
) -> Iterator[tuple[BlendEngine, WarmReport]]:
    """An engine in whose store a prompt's prefix and chunks are, and what warming took.

    Parameters
    ----------
    model, tokenizer
    prompt : Prompt
    store : KVStore, str or None
        As for `BlendEngine`.
    fingerprint : str, optional
        Of the model, if another engine has found it.
    **config
        Options of `BlendConfig`.
    """
    options = BlendConfig(**{"min_tokens": 0, "write_back": "inline", "prompt_cache": 0, **config})
    engine = BlendEngine(model, tokenizer, config=options, store=store, fingerprint=fingerprint)
    # Random weights repeat themselves, so there would be more to look up than in any real answer.
    with mock.patch.object(turns, "TRIED_AT_ONCE", 0), engine:
        warming = engine.warm(prompt.chunks, progress=False)
        engine.fuse(prompt)  # stores the prefix
        yield engine, warming


def timed_result(options: BenchOptions, report: BlendReport, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The result of a benchmark of one prompt, whatever it times; fit for JSON.

    Parameters
    ----------
    options : BenchOptions
    report : BlendReport
        Of the prompt, blended.
    seconds : mapping of str to sequence of float
        Times of each way, a round each.
    """
    return {
        "options": asdict(options),
        "machine": machine(options.device),
        "prompt_tokens": report.prompt_tokens,
        "hits": report.hits,
        "spread": {name: [min(times), max(times)] for name, times in seconds.items()},
    }


def show_result(
    plot: str | None,
    measure: Callable[[], Mapping[str, Any]],
    tell: Callable[[Mapping[str, Any]], str],
    draw: Callable[[Any, Mapping[str, Any], Path], None],
) -> None:
    """Measure, and print what is to be told of it; the whole result is the last line, as JSON.

    Parameters
    ----------
    plot : str, optional
        File to draw the result into. If a package or the folder is missing, this shows before anything is measured.
    measure, tell : callable
    draw : callable
        Takes pyplot, the result and the file.
    """
    pyplot = pyplot_for(plot)
    result = measure()
    print(tell(result))
    print(json.dumps(result))
    if plot:
        draw(pyplot, result, Path(plot))


def shown_seconds(seconds: float) -> str:
    """A time as tables show it."""
    if seconds < 1e-3:
        return f"{1e6 * seconds:.1f} µs"
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


def machine(device: str = "auto") -> dict[str, Any]:
    """Where and with what something was measured; ``device`` as in `BenchOptions`."""
    found = bench_device(device)
    return {
        "processor": _processor(),
        "device": torch.cuda.get_device_name(found) if found.type == "cuda" else str(found),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
        # Settings of the C library's allocator, on which times over many megabytes depend.
        "allocator": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_ALLOCATOR)},
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns stand under one another."""
    lines = [head, *rows]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(head))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in padded)


_Options = TypeVar("_Options")


def script_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """A parser of the script of a name; ``about`` is its docstring."""
    return argparse.ArgumentParser(prog=f"python -m docs.benchmarks.scripts.{name}", description=about)


def prompt_parser(name: str, about: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with `add_prompt_arguments`, whose defaults are given."""
    parser = script_parser(name, about)
    add_prompt_arguments(parser, **defaults)
    return parser


def add_prompt_arguments(
    parser: argparse.ArgumentParser, *, shape: str, rounds: int, chunks: int = 4, chunk_tokens: int = 512
) -> None:
    """Arguments for `BenchOptions`, and a file for the plot."""
    add_machine_arguments(parser, shape=shape, rounds=rounds)
    parser.add_argument("--chunks", type=int, default=chunks)
    parser.add_argument("--chunk-tokens", type=int, default=chunk_tokens)


def add_machine_arguments(parser: argparse.ArgumentParser, *, shape: str, rounds: int) -> None:
    """The model, and how it is run and timed, whatever the prompt."""
    parser.add_argument("--shape", default=shape, help="model shape, random weights; or the path of a config.json")
    parser.add_argument("--dtype", default="float32", help='"float32", "bfloat16" or "float16"')
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--plot", metavar="FILE", help="draw the result into a file, such as result.svg")
    add_arguments(parser, "device")


def options_from(kind: type[_Options], parsed: argparse.Namespace) -> _Options:
    """Options of a benchmark, from arguments of the same names.

    Parameters
    ----------
    kind : type
        A dataclass. An option without an argument keeps its default; lists become tuples.
    parsed : Namespace
    """
    names = {option.name for option in fields(kind)}  # type: ignore[arg-type]
    given: dict[str, Any] = {name: value for name, value in vars(parsed).items() if name in names and value is not None}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def run_bench(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    kind: type[_Options],
    show: Callable[[_Options, str | None], None],
) -> int:
    """Measure what the arguments say, and show it; the process's exit status.

    Parameters
    ----------
    parser : ArgumentParser
        Its arguments have the names of the options.
    arguments : sequence of str, optional
        Those of the process by default.
    kind : type
        The options.
    show : callable
        Takes them and the file for the plot.
    """
    parsed = parser.parse_args(arguments)
    return reported(parser, lambda: show(options_from(kind, parsed), parsed.plot))


def reported(parser: argparse.ArgumentParser, work: Callable[[], object]) -> int:
    """Do a script's work; the process's exit status.

    It is 2, with the reason on standard error, if the work is refused, and 130 if it is interrupted.
    """
    try:
        work()
    except CacheBlendError as error:
        print(f"{parser.prog.rpartition('.')[2]}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog.rpartition('.')[2]}: interrupted", file=sys.stderr)
        return 130
    return 0


def write_json(path: str | Path, result: Mapping[str, Any]) -> None:
    """Write the JSON that stands beside a table."""
    Path(path).write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


class TokenClock(LogitsProcessor):  # type: ignore[misc]
    """Notes when each token's logits are there.

    Attributes
    ----------
    times : list of float
        As `time.perf_counter` counts.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See `LogitsProcessor`."""
        self.times.append(time.perf_counter())
        return scores


def greedy(tokenizer: Any, new_tokens: int) -> GenerationConfig:
    """Greedy decoding of exactly so many tokens, whatever they are."""
    return GenerationConfig(
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )


def in_turn(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run ways in turn, round after round; a first round warms up and does not count.

    Parameters
    ----------
    ways : mapping of str to callable
        Each says how many seconds it took, or what else is measured of it.
    rounds : int
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            took = way()
            if number:
                found[name].append(took)
    return found


def table_of_ways(head: Sequence[str], result: Mapping[str, Any], seconds: str, ratios: str) -> str:
    """A table of times.

    Parameters
    ----------
    head : sequence of str
        Titles of the columns: the way, its time, and its ratio to another's.
    result : mapping
    seconds, ratios : str
        Under what these stand in the result, by way.
    """
    rows = [(name, shown_seconds(value), f"{result[ratios][name]:.2f}×") for name, value in result[seconds].items()]
    return table(head, rows)


def draw_ways(pyplot: Any, result: Mapping[str, Any], ranges: Mapping[str, Sequence[float]], ratios: str) -> Any:
    """A figure of each way's milliseconds a token with their range, and its ratio to the first way's."""
    seconds = result["seconds_a_token"]
    first = next(iter(seconds))
    figure, axis = pyplot.subplots(figsize=(7.5, 1.6 + 0.32 * len(seconds)), layout="constrained")
    for plain, look in ((True, {"facecolor": "white", "hatch": "///"}), (False, {"facecolor": "0.65"})):
        at = [n for n, name in enumerate(seconds) if name.startswith(("plain", "transformers")) == plain]
        values = [1e3 * value for n, value in enumerate(seconds.values()) if n in at]
        label = "plain transformers" if plain else "this package"
        axis.barh(at, values, height=0.7, label=label, **EDGE, **look)
    for number, (name, value) in enumerate(seconds.items()):
        low, high = ranges[name]
        spread = {"xerr": [[1e3 * (value - low)], [1e3 * (high - value)]], "color": "black", "capsize": 3}
        axis.errorbar(1e3 * value, number, linestyle="", label="" if number else "range of the rounds", **spread)
        # In a column of their own, where no line crosses them.
        where = {"xycoords": axis.get_yaxis_transform(), "va": "center", "fontsize": "small"}
        axis.annotate(f"{1e3 * value:.2f} ms, {result[ratios][name]:.2f}×", (1.01, number), **where)
    axis.axvline(1e3 * seconds[first], color="black", linewidth=1, linestyle="--", label=first)
    bar_rows(axis, {name: float(number) for number, name in enumerate(seconds)})
    axis.set(xlabel="time a token (ms)", xlim=(0, None))
    figure.legend(loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    return figure


@dataclass(frozen=True)
class Timings:
    """Seconds of each method in every timed round, and what its last round gave."""

    seconds: dict[str, list[float]]
    last: dict[str, PrefillResult]


def time_rounds(methods: Mapping[str, Callable[[], PrefillResult]], rounds: int) -> Timings:
    """Time methods in turn, round after round, to the first token; a first round warms up and does not count.

    The last round's results come without their caches: those of many methods take much memory.
    """
    timed = Timings({name: [] for name in methods}, {})
    for number in range(rounds + 1):
        for name, method in methods.items():
            took, result = time_once(method)
            timed.last[name] = replace(result, cache=None)
            del result  # what it holds is released before the next method's time begins
            if number:
                timed.seconds[name].append(took)
    return timed


def read_files(paths: Iterable[Path], repeats: int = 3) -> float:
    """Bytes a second at which files are read and nothing is done with them, the best of some repeats.

    Raises
    ------
    ConfigError
        If there is nothing in them.
    """
    found = list(paths)
    size = sum(path.stat().st_size for path in found)
    if not size:
        raise ConfigError("paths", found, "use files with something in them")
    buffer = bytearray(max(path.stat().st_size for path in found))

    def read() -> None:
        for path in found:
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    return size / min(timed(read) for _ in range(repeats))
