"""The part of `gpu` that says whether results are right: beside the model's own, with kernels and without."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.models.loading import load_model
from cacheblend_rag.store import KVStore, MemoryStore
from docs.benchmarks.scripts.common import greedy
from docs.benchmarks.scripts.gpu import ROOT
from docs.benchmarks.scripts.measuring import read_plainly
from docs.benchmarks.scripts.shapes import bench_device
from tests import tiny

if TYPE_CHECKING:
    from docs.benchmarks.scripts.gpu_parts import Findings, Sizes

__all__ = ["FAMILIES", "METHODS", "cases_of", "difference", "exact", "without_kernels"]

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
    cases["places and codecs"] = partial(_places, device, sizes)
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
    config = BlendConfig(**{"min_tokens": 0, "write_back": "inline", "prompt_lookup": 0, "prompt_cache": 0, **options})
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


def _places(device: torch.device, sizes: Sizes) -> dict[str, Any]:
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
