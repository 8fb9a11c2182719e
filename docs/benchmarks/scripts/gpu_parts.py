"""The parts of `gpu`, each run by a process: rates, times to first token, decoding, warming, memory and profiles.

``python -m docs.benchmarks.scripts.gpu_parts PART FILE`` waits for a line with the seconds it may take.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.calibration.profiler import timed
from cacheblend_rag.calibration.quality import Methods, PrefillResult, time_once
from cacheblend_rag.models.loading import load_model
from cacheblend_rag.store import KVStore, MemoryStore
from docs.benchmarks.scripts.common import (
    BenchOptions,
    TokenClock,
    bench_device,
    bench_model,
    bench_prompt,
    greedy,
    machine,
    read_plainly,
    shown_seconds,
    warmed,
)
from docs.benchmarks.scripts.concurrent import in_other_order
from docs.benchmarks.scripts.ttft import FULL, PREFIX, Cost, cost_of, kv_rate
from tests import tiny

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {},
    "gemma3_text": {},
    "phi3": {},
    "glm4": {},
    "granite": {},
    "olmo2": {},
    "deepseek_v3": {},
    "gpt_oss": {},
}
_NEAR = 1e-3  # of the largest logit, in float32
_ROUNDED = 0.05  # where weights or activations are rounded to eight bits or fewer
_WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
_WIDE |= {"head_dim": 32}


def exact(findings: Findings, sizes: Sizes) -> None:
    """Run all tests of exactness; each case says by how much results differ, as a share of the largest."""
    findings.begin("exact", "right", "difference")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-o", "addopts="]
    command += ["-o", "filterwarnings=", *sizes.tests]
    printed = findings.path.with_suffix(".tests")
    with ExitStack() as stack:
        output = stack.enter_context(printed.open("w", encoding="utf-8"))
        # They run beside the rest.
        tests = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        stack.callback(tests.kill)
        for name, work in cases_of(sizes).items():
            findings.case(name, work)
        findings.case("tests of kernels", partial(_tested, tests, printed, findings), seconds=300)


def cases_of(sizes: Sizes) -> dict[str, Callable[[], Mapping[str, Any]]]:
    """All cases by name, but for the tests of kernels."""
    device, families = bench_device(sizes.device), sizes.families or tuple(FAMILIES)
    cases: dict[str, Callable[[], Mapping[str, Any]]] = {}
    for family in families:
        cases[f"full recompute, {family}"] = partial(_full, family, device, sizes)
        cases[f"kernels, {family}"] = partial(_beside_layers, family, device, sizes)
    cases["places and codecs"] = partial(_exact_places, device, sizes)
    cases["decoded together"] = partial(_decoded, device)
    cases["recorded passes"] = partial(_again, device, sizes)
    cases |= {f"weights, {name}": partial(_quantised, name, device) for name in METHODS}
    cases |= {f"bfloat16, {family}": partial(_narrow, family, device, sizes) for family in families}
    return cases


def _row(name: str, difference: float, most: float = _NEAR, **more: Any) -> dict[str, Any]:
    right = difference <= most  # not so if it is not a number
    told = "".join(f", {key.replace('_', ' ')} {value}" for key, value in more.items())
    cells = [name, "yes" if right else "WRONG", f"{difference:.1e} of at most {most:.0e}{told}"]
    return {"right": right, "difference": difference, "most": most, **more, "rows": [cells]}


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference as a share of the largest element."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).abs().max() / wanted.abs().max())


@contextmanager
def without_kernels() -> Iterator[None]:
    """Within this, passes take transformers' layers and PyTorch's operations."""
    users = [module for name, module in list(sys.modules.items()) if name.startswith("cacheblend_rag.")]
    with ExitStack() as stack:
        for user in users:
            if "has_kernels" in vars(user):
                stack.enter_context(patch.object(user, "has_kernels", lambda device: False))
        yield


def _prompt(sizes: Sizes) -> Prompt:
    chunks = [tiny.text(words, seed) for seed, words in enumerate(sizes.words, 1)]
    return Prompt("Read this:", chunks, "What fell?")


def _model(family: str, device: torch.device, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return tiny.model(family, **FAMILIES[family] | changes).to(device, dtype)


@contextmanager
def _opened(model: Any, prompt: Prompt, store: KVStore | str | None = None, **options: Any) -> Iterator[BlendEngine]:
    """An engine that has stored a prompt's chunks and prefix."""
    config = BlendConfig(**{"min_tokens": 0, "write_back": "inline", "prompt_cache": 0, **options})
    store = MemoryStore(device=model.device) if store is None else store
    with BlendEngine(model, tiny.tokenizer(), config=config, store=store) as engine:
        engine.warm(prompt.chunks, progress=False)
        engine.fuse(prompt)
        yield engine


def _fused(engine: BlendEngine, prompt: Prompt) -> Any:
    fused = engine.fuse(prompt)
    if fused.report.hits != len(prompt.chunks):
        why = fused.report.plain_reason or "the store lacks the others"
        raise RuntimeError(f"{fused.report.hits} of {len(prompt.chunks)} chunks were found: {why}")
    return fused


def _plain(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits of the last position, by the model alone."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(ids)], device=model.device)).logits[0, -1]
    return logits


def _full(family: str, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    model, prompt = _model(family, device), _prompt(sizes)
    with _opened(model, prompt, recompute_ratio=1.0) as engine:
        fused = _fused(engine, prompt)
    return _row(f"full recompute, {family}", difference(fused.logits, _plain(model, fused.input_ids)))


def _beside_layers(family: str, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Passes by kernels beside those by transformers' layers, with the default rule and the paper's."""
    model, prompt, worst, same = _model(family, device), _prompt(sizes), 0.0, True
    for rule in ("query", "hkvd"):
        options: dict[str, Any] = {"selection": rule, "recompute_ratio": 0.3}
        with _opened(model, prompt, **options) as engine:
            ours = _fused(engine, prompt)
        with without_kernels(), _opened(model, prompt, **options) as engine:
            theirs = _fused(engine, prompt)
        worst = max(worst, difference(ours.logits, theirs.logits))
        same &= all(map(_equal, ours.recomputed, theirs.recomputed))
    return _row(f"kernels, {family}", worst, same_rows=same)


def _equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours.cpu(), theirs.cpu())


def _exact_places(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Raw records from wherever they lie are equal bit by bit; of eight bits they are so with prefetch and without."""
    model, prompt = _model("qwen3", device), _prompt(sizes)
    rows, found = list[list[str]](), dict[str, Any]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        places: dict[str, tuple[KVStore | str, dict[str, Any]]] = {
            "raw, pinned": (MemoryStore(), {"codec": "raw"}),
            "raw, gpu": (MemoryStore(device=device), {"codec": "raw"}),
            "raw, files": (str(folder / "raw"), {"codec": "raw", "memory_limit": 0}),
            "raw, files, memory above": (str(folder / "above"), {"codec": "raw", "memory_limit": "1GB"}),
            "int8, files": (str(folder / "int8"), {"memory_limit": 0}),
            "int8, files, memory above": (str(folder / "both"), {"memory_limit": "1GB"}),
        }
        logits: dict[str, torch.Tensor] = {}
        for place, (store, options) in places.items():
            kind = place[:4]
            engine = stack.enter_context(_opened(model, prompt, store, recompute_ratio=0.3, **options))
            for way, reading in (("", nullcontext()), (", read plainly", read_plainly())):
                with reading:
                    now = logits.setdefault(kind, _fused(engine, prompt).logits)
                    row = _row(place + way, difference(_fused(engine, prompt).logits, now), most=1e-6)
                rows, found = rows + row.pop("rows"), {**found, place + way: row}
        with without_kernels():
            store = str(folder / "int8")
            engine = stack.enter_context(_opened(model, prompt, store, recompute_ratio=0.3, memory_limit=0))
            row = _row("int8, files, without kernels", difference(logits["int8"], _fused(engine, prompt).logits))
        rows, found = rows + row.pop("rows"), {**found, "without kernels": row}
    found["int8 to raw"] = difference(logits["int8"], logits["raw,"])
    return {**found, "rows": rows}


def _decoded(device: torch.device, tokens: int = 12) -> dict[str, Any]:
    """Tokens of answers decoded together, one by one, and by transformers alone."""
    rows, found = list[list[str]](), dict[str, Any]()
    for family in ("llama", "qwen3", "gemma3_text"):
        model = _model(family, device)
        prompts = [
            Prompt("Read this:", [tiny.text(23 + 9 * number, number), tiny.text(31, 9)], "What fell? " * (number + 1))
            for number in range(4)
        ]
        with _opened(model, prompts[0], recompute_ratio=1.0, max_concurrent=4) as engine:
            config = greedy(engine.tokenizer, tokens)
            alone = [list(engine.generate(one, generation_config=config).token_ids) for one in prompts]
            together = [list(one.token_ids) for one in engine.generate_batch(prompts, generation_config=config)]
            plain = []
            for one in prompts:
                ids = torch.tensor([engine.tokenize(one).input_ids], device=model.device)
                answer = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
                plain.append(answer[0, ids.shape[1] :].tolist())
        pairs = {"together": together, "alone": alone}
        other = {name: sum(a != b for a, b in zip(ours, plain, strict=True)) for name, ours in pairs.items()}
        right = not any(other.values())
        told = ", ".join(f"{count} of {len(prompts)} differ {name}" for name, count in other.items())
        rows.append([f"decoded, {family}", "yes" if right else "WRONG", told])
        found[family] = {"right": right, "differ": other}
    return {**found, "rows": rows}


def _again(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """The same prompt again and again: a pass runs, is recorded as a CUDA graph, and is replayed."""
    rows, found = list[list[str]](), dict[str, Any]()
    model, prompt = _model("llama", device, num_hidden_layers=sizes.layers), _prompt(sizes)
    turned = Prompt(prompt.prefix, prompt.chunks[::-1], prompt.suffix)
    for place in ("gpu", "pinned"):
        for rule in ("query", "hkvd"):
            store = MemoryStore(device=device if place == "gpu" else "cpu")
            with _opened(model, prompt, store, recompute_ratio=0.2, selection=rule) as engine:
                passes = [_fused(engine, prompt).logits.clone() for _ in range(4)]
                _fused(engine, turned)
                passes.append(_fused(engine, prompt).logits.clone())
            with without_kernels(), _opened(model, prompt, store, recompute_ratio=0.2, selection=rule) as engine:
                wanted = _fused(engine, prompt).logits
            worst = max(difference(one, wanted) for one in passes)
            row = _row(f"recorded, {rule}, {place}", worst)
            rows, found = rows + row.pop("rows"), {**found, f"{rule}, {place}": row}
    return {**found, "rows": rows}


def _narrow(family: str, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    """Full recompute in bfloat16 is not much further from float32's logits than the model's own pass is."""
    wide, prompt = _model(family, device), _prompt(sizes)
    model = _model(family, device, torch.bfloat16)
    with _opened(model, prompt, recompute_ratio=1.0) as engine:
        fused = _fused(engine, prompt)
    wanted = _plain(wide, fused.input_ids)
    own = difference(_plain(model, fused.input_ids), wanted)
    return _row(f"bfloat16, {family}", difference(fused.logits, wanted), most=3 * own + 1e-2)


# Quantised weights --------------------------------------------------------------------------


def _written(folder: Path, family: str) -> Path:
    """A tiny model in a folder, wide enough for blocks of 128."""
    tiny.model(family, **_WIDE).to(torch.bfloat16).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def _saved(maker: str, folder: Path, device: torch.device) -> Any:
    """A model as others save it, its weights quantised."""
    from tests.parity import test_quantised as makers

    path = getattr(makers, maker)(folder)
    return load_model(path, device=str(device), dtype="bfloat16").model


def _made(config: str, family: str, options: Mapping[str, Any], folder: Path, device: torch.device) -> Any:
    """A model whose weights are quantised while it is loaded."""
    import transformers

    path, chosen = _written(folder, family), getattr(transformers, config)(**options)
    return load_model(path, device=str(device), dtype="bfloat16", quantization_config=chosen).model


METHODS: dict[str, tuple[str, Callable[[Path, torch.device], Any]]] = {
    "fp8, saved": ("langchain_core", partial(_saved, "of_float8")),
    "mxfp4, saved": ("langchain_core", partial(_saved, "of_mxfp4")),
    "fp8": ("torch", partial(_made, "FineGrainedFP8Config", "qwen3", {})),
    "mxfp4": ("kernels", partial(_made, "Mxfp4Config", "gpt_oss", {})),
    "bitsandbytes, 4 bits": ("bitsandbytes", partial(_made, "BitsAndBytesConfig", "llama", {"load_in_4bit": True})),
    "bitsandbytes, 8 bits": ("bitsandbytes", partial(_made, "BitsAndBytesConfig", "llama", {"load_in_8bit": True})),
}
"""By name: the package without which it is left out, and what makes a model."""


def _quantised(name: str, device: torch.device) -> dict[str, Any]:
    needed, make = METHODS[name]
    if find_spec(needed) is None:
        return {"rows": [[f"weights, {name}", "left out", f"{needed} is not installed"]]}
    prompt = Prompt("Read this:", [tiny.text(words, words) for words in (37, 20, 51)], "What fell?")
    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder), device)
        with _opened(model, prompt, recompute_ratio=1.0) as engine:
            fused = _fused(engine, prompt)
        kinds = sorted({type(module).__name__ for module in model.modules() if "inear" in type(module).__name__})
        found = difference(fused.logits, _plain(model, fused.input_ids))
    return _row(f"weights, {name}", found, most=_ROUNDED, layers="+".join(kinds))


def _tested(tests: subprocess.Popen[bytes], printed: Path, findings: Findings) -> dict[str, Any]:
    """The tests of kernels, which ran meanwhile; those that ended in time count where there was too little."""
    code: int | None
    try:
        code = tests.wait(max(1.0, findings.left - 2))
    except subprocess.TimeoutExpired:
        tests.kill()
        tests.wait()
        code = None
    lines = printed.read_text(encoding="utf-8").strip().splitlines() or ["pytest printed nothing"]
    failed = sorted({line.split("::")[-1] for line in lines if re.search(r"\b(FAILED|ERROR)\b.*::", line)})
    passed = sum(" PASSED" in line for line in lines)
    last = "then the time ran out" if code is None else lines[-1].strip("= ")[:90]
    right = not failed if code is None else code == 0
    rows = [["tests of kernels", "yes" if right else "WRONG", f"{passed} passed; {last}"]]
    rows += [["", "WRONG", test[:110]] for test in failed[:5]]
    return {"right": right, "status": code, "failed": failed, "rows": rows}


_LOST = 3  # exit status of a process whose GPU does nothing any more
_PAPER = {"selection": "hkvd", "selection_options": {"check_layers": (1,)}}
_FALLING = {"selection": "gradual", "selection_options": {"check_layers": (1,), "recompute_ratios": (0.3, 0.03)}}
_LIMIT = "60GB"  # of stores in memory
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] "
    "{% endif %}"
)
_LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


ROOT = Path(__file__).parents[3]
BATCH = "plain prefill, one batch"


@dataclass(frozen=True)
class Sizes:
    """How much the parts take on.

    Parameters
    ----------
    device, dtype
        As in `BenchOptions`.
    shape : str
        In place of every part's own shape, if given.
    most : tuple of int
        Most chunks of a prompt, and most tokens of each.
    copied : int
        Bytes of a copy.
    product : int
        Rows and columns of a matrix product.
    words : tuple of int
        Words of the chunks of tests of exactness.
    layers : int
        Of models whose passes are recorded as CUDA graphs.
    families : tuple of str
        For tests of exactness; all if empty.
    at_once : tuple of int
        Answers decoded together.
    new_tokens : int
        Of each.
    rounds, warming_up : int
        Of ways to a first token. A pass is recorded as a CUDA graph the second time its size comes.
    threads : int
    tests : tuple of str
        Arguments of pytest.
    """

    device: str = "auto"
    dtype: str = "bfloat16"
    shape: str = ""
    most: tuple[int, int] = (10**6, 10**6)
    copied: int = 2**30
    product: int = 8192
    words: tuple[int, ...] = (60, 41, 70)
    layers: int = 11
    families: tuple[str, ...] = ()
    at_once: tuple[int, ...] = (1, 8, 32)
    new_tokens: int = 25
    rounds: int = 4
    warming_up: int = 2
    threads: int = 8
    tests: tuple[str, ...] = ("-n", "4", "tests/parity/test_gpu_kernels.py")

    def options(self, shape: str, chunks: int, chunk_tokens: int) -> BenchOptions:
        """Options of a benchmark over one prompt."""
        return BenchOptions(
            shape=self.shape or shape,
            dtype=self.dtype,
            chunks=min(chunks, self.most[0]),
            chunk_tokens=min(chunk_tokens, self.most[1]),
            threads=self.threads,
            device=self.device,
        )


def tiny_sizes(folder: Path, **changes: Any) -> Sizes:
    """Sizes that take any device seconds; the model's config is written into a folder."""
    shape = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "max_position_embeddings": 8192,
    }
    path = folder / "tiny.json"
    path.write_text(json.dumps(shape), encoding="utf-8")
    tiny = Sizes(
        dtype="float32",
        shape=str(path),
        most=(2, 24),
        copied=2**20,
        product=64,
        words=(13, 8, 17),
        layers=3,
        at_once=(1, 2),
        new_tokens=5,
        rounds=1,
        warming_up=1,
        threads=1,
        tests=("-n", "0", "tests/parity/test_gpu_kernels.py", "-k", "norms_and_gates"),
    )
    return replace(tiny, **changes)


@dataclass
class Findings:
    """A part's results, case by case, rewritten to a file whenever one is there.

    Parameters
    ----------
    path : Path
        Cases that it has already are not run again.
    seconds : float
        That the part may take.
    alone : bool
        Whether the process is the part's own: it then ends with a case that takes too long.
    """

    path: Path
    seconds: float
    alone: bool = False
    found: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ends = time.monotonic() + self.seconds
        if self.path.exists():
            self.found = json.loads(self.path.read_text(encoding="utf-8"))
        self.found.setdefault("cases", {})

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._ends - time.monotonic()

    def begin(self, *head: str, **about: Any) -> None:
        """Note titles of the table's columns, and whatever holds for all cases."""
        self.found = {"head": head, **about, **self.found}
        self.save()

    def save(self) -> None:
        """Write all there is."""
        aside = self.path.with_suffix(".part")
        aside.write_text(json.dumps(self.found, indent=1), encoding="utf-8")
        aside.replace(self.path)

    def case(
        self, name: str, work: Callable[[], Mapping[str, Any]], seconds: float = 60.0, *, again: bool = False
    ) -> None:
        """Run a case, unless it ran or there is no time, and note what it found or how it failed.

        Parameters
        ----------
        name : str
        work : callable
            Gives the findings; under ``rows``, lines of the table.
        seconds : float
            That it may take where the process is its own.
        again : bool
            Run it also if a process before this one did, and lived.
        """
        before = self.found["cases"].get(name)
        if before is not None and not (again and before["state"] == "done"):
            return
        case: dict[str, Any] = {"state": "running"}
        self.found["cases"][name] = case
        if self.left <= 0:
            case["state"] = "no time was left"
        else:
            began = time.monotonic()
            self.save()
            with self._watched(seconds):
                case |= self._tried(work)
            case["took"] = round(time.monotonic() - began, 2)
        self.save()
        if case["state"] == "failed" and self.alone and _gpu_is_lost():
            os._exit(_LOST)

    @contextmanager
    def _watched(self, seconds: float) -> Iterator[None]:
        if self.alone:
            faulthandler.dump_traceback_later(max(1.0, min(seconds, self.left + 3)), exit=True)
        try:
            yield
        finally:
            if self.alone:
                faulthandler.cancel_dump_traceback_later()

    @staticmethod
    def _tried(work: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        try:
            return {**work(), "state": "done"}
        except Exception as error:
            return {"state": "failed", "error": _end_of(error)}
        finally:
            gc.collect()
            if not _gpu_is_lost():
                torch.cuda.empty_cache()  # nothing where no GPU is in use


def _end_of(error: Exception) -> str:
    """The end of an error's traceback."""
    return "".join(traceback.format_exception(error))[-1500:]


def _gpu_is_lost() -> bool:
    """Whether a fault has left this process nothing of its GPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Versions and rates -------------------------------------------------------------------------


def versions(findings: Findings, sizes: Sizes) -> None:
    """Versions, and the rates of copies and of a matrix product."""
    device = bench_device(sizes.device)
    findings.begin("of the machine", "figure", machine=machine(sizes.device))

    def told() -> dict[str, Any]:
        found: dict[str, str] = {
            name: str(findings.found["machine"][name]) for name in ("device", "torch", "transformers", "python")
        }
        if device.type == "cuda":
            at = torch.cuda.get_device_properties(device)
            found |= {"memory": f"{at.total_memory / 1e9:.1f} GB", "cuda": str(torch.version.cuda)}
            found["driver"] = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
        return {"rows": [["machine", ", ".join(f"{name} {value}" for name, value in found.items())]], **found}

    def kernels() -> dict[str, Any]:
        from cacheblend_rag.models.gpu import has_kernels

        run = has_kernels(device)
        return {"run": run, "rows": [["kernels of this package", "run" if run else "DO NOT RUN"]]}

    def copies(source: torch.device, pinned: bool) -> dict[str, Any]:
        given = torch.ones(sizes.copied // 4, device=source, pin_memory=pinned and device.type == "cuda")
        taken = torch.empty_like(given, device=device, pin_memory=False)
        rate = given.nbytes / _quickest(lambda: taken.copy_(given, non_blocking=True), device)
        name = f"{'pinned host' if pinned else source.type} to {device.type}"
        return {"bytes_a_second": rate, "rows": [[f"copy, {name}", f"{rate / 1e9:.1f} GB/s"]]}

    def product() -> dict[str, Any]:
        kind = getattr(torch, sizes.dtype)
        first, second = (torch.randn(sizes.product, sizes.product, device=device).to(kind) for _ in range(2))
        rate = 2 * sizes.product**3 / _quickest(lambda: first @ second, device)
        row = [f"product of {sizes.product} x {sizes.product}, {sizes.dtype}", f"{rate / 1e12:.1f} TFLOP/s"]
        return {"operations_a_second": rate, "rows": [row]}

    findings.case("machine", told)
    findings.case("kernels", kernels)
    findings.case("device to device", lambda: copies(device, pinned=False))
    findings.case("pinned to device", lambda: copies(torch.device("cpu"), pinned=True))
    findings.case("pageable to device", lambda: copies(torch.device("cpu"), pinned=False))
    findings.case("product", product)


def _quickest(work: Callable[[], object], device: torch.device, repeats: int = 8) -> float:
    """The least seconds of several runs."""

    def settled() -> None:
        work()
        _settled(device)

    return min(timed(settled) for _ in range(repeats))


# Time to first token ------------------------------------------------------------------------


Way = Callable[[], PrefillResult | None]
"""Runs until the first token is known to the host, or gives what it is made from."""


def ttft(findings: Findings, sizes: Sizes, shape: str, chunks: int, chunk_tokens: int) -> None:
    """Times to first token of ways in groups, each with full recompute, round after round.

    A group has one recompute ratio: recordings of CUDA graphs are kept for a few numbers of rows at a time.
    """
    options = sizes.options(shape, chunks, chunk_tokens)
    findings.begin("way", "first token", "faster", "work", "bound", "of bound", "rounds", options=asdict(options))
    with ExitStack() as stack:
        made: list[_Prompted] = []

        def warm_stores() -> dict[str, Any]:
            made.append(stack.enter_context(_prompted(options)))
            tokens = len(made[0].engine.tokenize(made[0].prompt).input_ids)
            shown = [f"{place} {rate / 1e9:.1f} GB/s" for place, rate in made[0].rates.items()]
            row = [f"{tokens} tokens; KV is read at {', '.join(shown)}"]
            found = {
                "tokens": tokens,
                "warming": made[0].warming,
                "read_rates": made[0].rates,
                "failed": made[0].failed,
            }
            return {**found, "rows": [row, *_failed_rows(made[0].failed)]}

        findings.case("warm stores", warm_stores, again=True)
        if not made:
            return
        full = _full_ways(made[0])
        for name, ways in _groups(made[0]).items():
            extra = full if name == next(iter(_RATIOS)) else {FULL: full[FULL]}
            findings.case(name, partial(_in_rounds, findings, sizes, made[0], {**extra, **ways}))


@dataclass(frozen=True)
class _Prompted:
    """A prompt, and engines whose stores hold its chunks, by where these are; there as far as that succeeded."""

    prompt: Prompt
    engines: Mapping[str, BlendEngine]
    rates: Mapping[str, float]
    warming: Mapping[str, float]
    failed: Mapping[str, str]
    long: bool

    @property
    def engine(self) -> BlendEngine:
        return next(iter(self.engines.values()))


_RATIOS = {"15%": 0.15, "30, 3%": None, "5%": 0.05, "3%": 0.03, "30%": 0.3}


@contextmanager
def _prompted(options: BenchOptions) -> Iterator[_Prompted]:
    model, tokenizer = bench_model(options)
    tokenizer.chat_template = TEMPLATE
    prompt = bench_prompt(tokenizer, options)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        places: dict[str, tuple[KVStore | str, dict[str, Any]]] = {
            "gpu": (MemoryStore(_LIMIT, device=model.device), {}),
            "pinned": (MemoryStore(_LIMIT), {}),
            "files": (str(folder / "int8"), {"memory_limit": 0}),
        }
        if not _is_long(options):
            places["raw files"] = (str(folder / "raw"), {"memory_limit": 0, "codec": "raw"})
            places["files, memory above"] = (str(folder / "both"), {})
        engines, warming, known = dict[str, BlendEngine](), dict[str, float](), None
        rates, failed = dict[str, float](), dict[str, str]()
        for place, (store, config) in places.items():
            try:
                opened = warmed(model, tokenizer, prompt, store, fingerprint=known, **config)
                engine, report = stack.enter_context(opened)
                rates[place], warming[place], known = kv_rate(engine), report.seconds, engine.fingerprint
            except Exception as error:
                if place == "gpu" or _gpu_is_lost():
                    raise
                failed[place] = _end_of(error)
            else:
                engines[place] = engine
        yield _Prompted(prompt, engines, rates, warming, failed, _is_long(options))


def _is_long(options: BenchOptions) -> bool:
    """Whether a prompt is measured with few ways: all of them would take minutes."""
    return options.chunks * options.chunk_tokens > 4096


def _groups(made: _Prompted) -> dict[str, dict[str, Way]]:
    """Ways by group and name."""
    groups: dict[str, dict[str, Way]] = {}
    for name, ratio in _RATIOS.items():
        rules: dict[str, dict[str, Any]] = {f"gradual {name}": _FALLING}
        if ratio is not None:
            flat = {"recompute_ratio": ratio}
            rules = {f"query {name}": flat, f"hkvd {name}": {**_PAPER, **flat}}
        ways = groups[name] = {}
        for rule, options in rules.items():
            first = name == next(iter(_RATIOS))
            for place in _places(made)[: 1 if made.long and not (first and rule.startswith("query")) else None]:
                ways[f"{rule}, {place}"] = Methods(made.engines[place].with_config(**options), made.prompt).blended
    main = groups[next(iter(groups))]
    for place in ("raw files", "files, memory above"):
        if place in made.engines:
            main[f"default, {place}"] = Methods(made.engines[place], made.prompt).blended
    nothing = made.engine.with_config(salt="nothing is stored under it", write_back="off")
    main[PREFIX] = _made_first(lambda: Methods(made.engine, made.prompt).prefix_caching())
    main["cold"] = Methods(nothing, made.prompt).blended
    if not made.long:
        main |= _ways_of_users(made)
    groups["full reuse"] = {
        f"full reuse, {place}": Methods(made.engines[place].with_config(selection="none"), made.prompt).blended
        for place in _places(made)[: 1 if made.long else None]
    }
    return groups


def _places(made: _Prompted) -> list[str]:
    return [place for place in ("pinned", "gpu", "files") if place in made.engines]


def _made_first(make: Callable[[], Way]) -> Way:
    """A way that is made when it first runs."""
    ways: list[Way] = []

    def run() -> PrefillResult | None:
        if not ways:
            ways.append(make())
        return ways[0]()

    return run


def _full_ways(made: _Prompted) -> dict[str, Way]:
    """Plain transformers' prefill with each attention that is there."""
    engine, prompt = made.engine, made.prompt
    plain = Methods(engine, prompt).full_recompute

    def within(scope: Callable[[], AbstractContextManager[Any]]) -> PrefillResult:
        with scope():
            return plain()

    ways: dict[str, Way] = {FULL: plain}
    if engine.adapter.device.type == "cuda":
        order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        first = partial(sdpa_kernel, [*order, SDPBackend.MATH], set_priority=True)
        ways[f"{FULL}, cuDNN"] = partial(within, first)
    if find_spec("flash_attn"):
        ways[f"{FULL}, flash_attention_2"] = partial(within, partial(_attending_by, engine.model, "flash_attention_2"))
    return ways


@contextmanager
def _attending_by(model: Any, implementation: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _ways_of_users(made: _Prompted) -> dict[str, Way]:
    """The first token as users get it, KV in pinned memory."""
    engine = made.engines[_places(made)[0]].with_config(write_back="background")
    prompt = made.prompt

    def generate() -> None:
        engine.generate(prompt, max_new_tokens=1)

    ways: dict[str, Way] = {"generate": generate}
    try:
        from langchain_core.messages import HumanMessage, SystemMessage

        from cacheblend_rag.langchain import ChatCacheBlend
    except ImportError:
        return ways
    from cacheblend_rag.engine.llm_base import known_chunks

    known_chunks.add(prompt.chunks)
    chat = ChatCacheBlend(engine=engine, max_new_tokens=1)
    asked = "\n\n".join([*prompt.chunks, prompt.suffix])
    messages = [SystemMessage(prompt.prefix), HumanMessage(asked)]

    def invoke() -> None:
        found = chat.invoke(messages).response_metadata
        if found["hits"] != len(prompt.chunks):
            raise RuntimeError(f"{found['hits']} of {len(prompt.chunks)} chunks were found")

    return {**ways, "ChatCacheBlend.invoke": invoke}


def _in_rounds(findings: Findings, sizes: Sizes, made: _Prompted, ways: Mapping[str, Way]) -> dict[str, Any]:
    """Time ways in turn, after rounds that warm up, without those that fail and the slower forms of full recompute."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    warming: dict[str, list[float]] = {name: [] for name in ways}
    last, failed, slower = dict[str, PrefillResult](), dict[str, str](), set[str]()
    for number in range(sizes.warming_up + (min(2, sizes.rounds) if made.long else sizes.rounds)):
        if number == sizes.warming_up:
            full = {name: times[-1] for name, times in warming.items() if name.startswith(FULL) and times}
            slower = {name for name in full if name != FULL and full[name] > 1.1 * min(full.values())}
        for name, way in ways.items():
            if name in failed or name in slower or findings.left <= 0:
                continue
            try:
                took, result = _first_token(way)
            except Exception as error:
                if _gpu_is_lost():
                    raise
                failed[name] = _end_of(error)
                continue
            (warming if number < sizes.warming_up else seconds)[name].append(took)
            if result is not None:
                last[name] = result
    if not any(seconds.values()):
        seconds = {name: times[-1:] for name, times in warming.items()}  # better than nothing
    timed_ways = {name: times for name, times in seconds.items() if times}
    left_out = {name: warming[name] for name in slower}
    return {**_times(made, timed_ways, warming, last, failed), "left_out": left_out}


def _first_token(way: Way) -> tuple[float, PrefillResult | None]:
    result: list[PrefillResult] = []

    def run() -> Any:
        found = way()
        if found is None:
            return _Known
        result.append(replace(found, cache=None))
        return found

    took, _ = time_once(run)
    return took, result[0] if result else None


class _Known:
    """Stands for a result whose first token the host knows."""

    logits = torch.zeros(1)


def _times(
    made: _Prompted,
    seconds: Mapping[str, Sequence[float]],
    warming: Mapping[str, Sequence[float]],
    last: Mapping[str, PrefillResult],
    failed: Mapping[str, str],
) -> dict[str, Any]:
    """A group's result: medians, and how many times sooner than the fastest full recompute of the same rounds."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    fastest = min((name for name in medians if name.startswith(FULL)), key=medians.__getitem__)
    tokens, full = len(made.engine.tokenize(made.prompt).input_ids), medians[fastest]
    rows, ways = list[list[str]](), dict[str, dict[str, Any]]()
    for name, times in seconds.items():
        paired = [one / other for one, other in zip(seconds[fastest], times, strict=False)]
        found: dict[str, Any] = {"seconds": medians[name], "range": [min(times), max(times)], "rounds": len(times)}
        found |= {"faster": statistics.median(paired), "warming_up": list(warming[name])}
        cells = ["", "", ""]
        if name in last:
            cost: Cost = cost_of(made.engine.adapter, tokens, last[name])
            bound = cost.bound(full, _rate(made, name))
            found |= asdict(cost) | {"bound": bound, "of_bound": bound / medians[name]}
            cells = [f"{cost.work:.1%}", shown_seconds(bound), f"{bound / medians[name]:.0%}"]
            if (report := last[name].report) is not None:
                found |= {"parts": asdict(report.seconds), "hits": report.hits}
        ways[name] = found
        rows.append([name, shown_seconds(medians[name]), f"{found['faster']:.2f}x", *cells, str(len(times))])
    rows += _failed_rows(failed)
    return {"full": fastest, "full_seconds": full, "ways": ways, "failed": failed, "rows": rows}


def _failed_rows(failed: Mapping[str, str]) -> list[list[str]]:
    return [[f"{name} FAILED: {error.strip().splitlines()[-1]}"[:140]] for name, error in failed.items()]


def _rate(made: _Prompted, name: str) -> float:
    """Bytes a second at which the KV of a way can be read."""
    place = name.partition(", ")[2].rpartition("%, ")[2]
    return made.rates.get(place, max(made.rates.values()))


# Decoding -----------------------------------------------------------------------------------


def decode(findings: Findings, sizes: Sizes, shape: str) -> None:
    """Time a step of several answers, by an engine and by transformers.

    Of transformers it is the time from the first token to the last. An engine lets answers in one after another, so its
    time is the difference between whole answers and first tokens alone.
    """
    options = sizes.options(shape, 6, 490)
    findings.begin("decoding", "a step", "transformers", "ratio", "whole answers", options=asdict(options))
    model, tokenizer = bench_model(options)
    prompt, most = bench_prompt(tokenizer, options), max(sizes.at_once)
    steps, config = sizes.new_tokens - 1, greedy(tokenizer, sizes.new_tokens)
    with warmed(model, tokenizer, prompt, MemoryStore(_LIMIT), max_concurrent=most) as (engine, _):
        for number in sizes.at_once:
            prompts = [in_other_order(prompt, one) for one in range(number)]
            split = [engine.tokenize(one).input_ids for one in prompts]
            shortest = min(map(len, split))  # without padding, and so without a mask
            ids = torch.tensor([one[-shortest:] for one in split], device=model.device)
            rounds = 2 if number == 1 else 1

            def ours(tokens: int, prompts: list[Prompt] = prompts) -> float:
                answers = greedy(tokenizer, tokens)
                return timed(lambda: engine.generate_batch(prompts, generation_config=answers))

            def plain(ids: torch.Tensor = ids) -> float:
                clock = TokenClock()
                mask = torch.ones_like(ids)
                model.generate(ids, attention_mask=mask, generation_config=config, logits_processor=[clock])
                return (clock.times[-1] - clock.times[0]) / steps

            def measured(
                number: int = number, rounds: int = rounds, ours: Any = ours, plain: Any = plain
            ) -> dict[str, Any]:
                found: dict[str, list[float]] = {"ours": [], "transformers": [], "whole": [], "first": []}
                for turn in range(rounds + 1):
                    if turn > 1 and findings.left <= 0:
                        break
                    whole, first = ours(sizes.new_tokens), ours(1)
                    took = [(whole - first) / steps, plain() if turn or number == 1 else 0.0, whole, first]
                    for name, one in zip(found, took, strict=True):
                        found[name] += [one] if turn else []
                step, theirs, whole = (statistics.median(found[name]) for name in ("ours", "transformers", "whole"))
                row = [f"{shape}, {number} at once", shown_seconds(step), shown_seconds(theirs)]
                return {"times": found, "rows": [[*row, f"{step / theirs:.2f}x", shown_seconds(whole)]]}

            findings.case(f"{number} at once", measured)


# Warming ------------------------------------------------------------------------------------


def warm(findings: Findings, sizes: Sizes, shape: str = "mistral-7b") -> None:
    """Time the warming of 32 chunks with default options, beside one plain batch of the same tokens."""
    options = sizes.options(shape, 32, 512)
    findings.begin("warming", "a chunk", "to one batch", options=asdict(options))
    model, tokenizer = bench_model(options)
    prompt = bench_prompt(tokenizer, options)
    first: list[float] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stores: dict[str, KVStore | str] = {
            "pinned": MemoryStore(_LIMIT),
            "gpu": MemoryStore(_LIMIT, device=model.device),
            "files": folder,
        }
        engines, known = dict[str, BlendEngine](), None
        for place, store in stores.items():
            opened = warmed(model, tokenizer, prompt, store, fingerprint=known, memory_limit=0)
            engines[place], _ = stack.enter_context(opened)
            known = engines[place].fingerprint
        split = engines["pinned"].tokenize(prompt)
        ids = [split.ids(span) for span in split.chunks]

        def batch() -> float:
            return timed(lambda: prefill_batch(engines["pinned"], ids))

        def warmed_again(engine: BlendEngine) -> float:
            engine.forget(prompt.chunks)
            return timed(lambda: engine.warm(prompt.chunks, progress=False))

        def measured(name: str, way: Callable[[], float]) -> dict[str, Any]:
            times = [way() for _ in range(3) if findings.left > 0]
            each = statistics.median(times[1:] or times) / len(ids)
            first.append(each)
            return {"a_chunk": each, "times": times, "rows": [[name, shown_seconds(each), f"{each / first[0]:.2f}x"]]}

        findings.case(BATCH, lambda: measured(BATCH, batch))
        for place, engine in engines.items():
            name = f"warm, {place}"
            findings.case(name, partial(measured, name, partial(warmed_again, engine)))


# Memory -------------------------------------------------------------------------------------


def memory(findings: Findings, sizes: Sizes, shape: str = "mistral-7b") -> None:
    """The most memory of the GPU above the weights, and pinned memory of the host."""
    options = sizes.options(shape, 12, 1024)
    findings.begin("memory", "peak above weights", "pinned", options=asdict(options))
    model, tokenizer = bench_model(options)
    prompt, device = bench_prompt(tokenizer, options), model.device
    weights = sum(weight.nbytes for weight in model.parameters())
    with warmed(model, tokenizer, prompt, MemoryStore(_LIMIT)) as (engine, _):
        ways: dict[str, Callable[[], object]] = {
            FULL: Methods(engine, prompt).full_recompute,
            "blended, default": Methods(engine, prompt).blended,
            "blended and 8 tokens": lambda: engine.generate(prompt, max_new_tokens=8),
        }
        for name, way in ways.items():
            findings.case(name, partial(_peak, name, way, weights, device))


def _peak(name: str, way: Callable[[], object], weights: int, device: torch.device) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    way()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    way()
    peak = torch.cuda.max_memory_allocated(device) - weights if on_gpu else 0
    stats: Callable[[], dict[str, int]] = getattr(torch.cuda, "host_memory_stats", dict)  # not in every PyTorch
    pinned = stats().get("allocated_bytes.current", 0) if on_gpu else 0
    shown = [f"{one / 1e9:.2f} GB" for one in (peak, pinned)]
    return {"peak": peak, "pinned": pinned, "weights": weights, "rows": [[name, *shown]]}


# Profiles -----------------------------------------------------------------------------------


def profiles(findings: Findings, sizes: Sizes, shape: str = "mistral-7b") -> None:
    """Kernels, launches and the GPU's busy time: the default over pinned memory and files, and a decoded token."""
    options = sizes.options(shape, 6, 512)
    findings.begin("profile", "time", "count", options=asdict(options))
    model, tokenizer = bench_model(options)
    prompt, steps = bench_prompt(tokenizer, options), sizes.new_tokens - 1
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        pinned, _ = stack.enter_context(warmed(model, tokenizer, prompt, MemoryStore(_LIMIT)))
        known = pinned.fingerprint
        opened = warmed(model, tokenizer, prompt, folder, fingerprint=known, memory_limit=0)
        files, _ = stack.enter_context(opened)

        def answered(tokens: int) -> Callable[[], object]:
            return lambda: pinned.generate(prompt, generation_config=greedy(tokenizer, tokens))

        def a_token() -> dict[str, Any]:
            whole, first = _profiled(answered(steps + 1), model.device), _profiled(answered(1), model.device)
            return _rows("a token", _difference(whole, first, steps))

        def a_pass(name: str, engine: BlendEngine) -> dict[str, Any]:
            return _rows(name, _profiled(lambda: int(engine.fuse(prompt).logits.argmax()), model.device))

        for name, engine in (("default, pinned", pinned), ("default, files", files)):
            findings.case(name, partial(a_pass, name, engine))
        findings.case("a token", a_token)


def _profiled(run: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Times and counts of kernels of one run, in seconds, after three that warm up."""
    for _ in range(3):
        run()
    _settled(device)
    wall = min(timed(run) for _ in range(3))
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as recorded:
        run()
        _settled(device)
    events = recorded.events() or []
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    there = [event for event in events if event.device_type == kind and not getattr(event, "is_user_annotation", False)]
    kernels: dict[str, list[float]] = {}
    for event in there:
        total = kernels.setdefault(event.name, [0.0, 0])
        total[0] += event.time_range.elapsed_us() / 1e6
        total[1] += 1
    launches = sum(event.device_type == DeviceType.CPU and event.name.startswith(_LAUNCHES) for event in events)
    busy = _covered([(event.time_range.start, event.time_range.end) for event in there]) / 1e6
    return {"wall": wall, "busy": busy, "launches": launches, "kernels": kernels}


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """How much is within any of these spans."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _difference(whole: Mapping[str, Any], first: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """What one of the steps took by which two runs differ."""
    found: dict[str, Any] = {name: (whole[name] - first[name]) / steps for name in ("wall", "busy", "launches")}
    none = [0.0, 0.0]
    pairs = {name: (one, first["kernels"].get(name, none)) for name, one in whole["kernels"].items()}
    found["kernels"] = {name: [(a - b) / steps for a, b in zip(*pair, strict=True)] for name, pair in pairs.items()}
    return found


def _rows(name: str, found: dict[str, Any]) -> dict[str, Any]:
    top = dict(sorted(found["kernels"].items(), key=lambda one: -one[1][0])[:15])
    told = f"{name}: wall {shown_seconds(found['wall'])}, busy {shown_seconds(found['busy'])}"
    rows = [[told, "", f"{found['launches']:.0f} launches"]]
    rows += [["  " + kernel[:90], shown_seconds(took), f"{count:.0f}"] for kernel, (took, count) in top.items()]
    return {**found, "kernels": top, "rows": rows, "short": rows[:4]}


# The process of a part ----------------------------------------------------------------------


def run_part(name: str, findings: Findings, sizes: Sizes) -> None:
    """Run the part of a name, such as ``"ttft:mistral-7b:6x512"``."""
    kind, *given = name.split(":")
    if kind == "ttft":
        chunks, tokens = map(int, given[1].split("x"))
        return ttft(findings, sizes, given[0], chunks, tokens)
    parts: dict[str, Callable[..., None]] = {
        "versions": versions,
        "exact": exact,
        "decode": decode,
        "warm": warm,
        "memory": memory,
        "profile": profiles,
    }
    return parts[kind](findings, sizes, *given)


def main(arguments: Sequence[str] | None = None) -> int:
    """Wait for a line with seconds on standard input, and run a part; the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m docs.benchmarks.scripts.gpu_parts", description=__doc__)
    parser.add_argument("part")
    parser.add_argument("file", type=Path, help="for its results")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes")
    parsed = parser.parse_args(arguments)
    print("ready", flush=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads more than that
    seconds = sys.stdin.readline()
    if not seconds:
        return 0  # it is not wanted any more
    with tempfile.TemporaryDirectory() if parsed.rehearse else nullcontext("") as folder:
        sizes = tiny_sizes(Path(folder)) if parsed.rehearse else Sizes()
        run_part(parsed.part, Findings(parsed.file, float(seconds), alone=True), sizes)
    return 0


def prefill_batch(engine: BlendEngine, ids: Sequence[Sequence[int]]) -> torch.Tensor:
    """The model's own forward pass over several sequences, padded at their ends.

    Returns
    -------
    Tensor, [sequences], long
        Likeliest token behind each sequence as it was padded, which says that the pass has ended.
    """
    longest, device = max(map(len, ids)), engine.adapter.device
    inputs = torch.zeros(len(ids), longest, dtype=torch.long)
    mask = torch.zeros_like(inputs)
    for row, chunk in enumerate(ids):
        inputs[row, : len(chunk)] = torch.tensor(chunk)
        mask[row, : len(chunk)] = 1
    with torch.no_grad():
        out = engine.model(inputs.to(device), attention_mask=mask.to(device), use_cache=True, logits_to_keep=1)
    tokens: torch.Tensor = out.logits[:, -1].argmax(dim=-1).cpu()
    return tokens


if __name__ == "__main__":
    sys.exit(main())
