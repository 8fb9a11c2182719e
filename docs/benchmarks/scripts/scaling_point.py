"""One length and one method of the script ``scaling``, in a process of its own.

``python -m docs.benchmarks.scripts.scaling_point '{"method": "full", "chunks": 4, …}'``

A process of its own, because the most memory a process ever took is all a system says of it. The last
line is JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from cacheblend_rag.calibration.timing import timed
from cacheblend_rag.config import BlendConfig, check_choice, check_share
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.fusor.work import RowsDone, prefill_work, work_share
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.memory import token_bytes
from cacheblend_rag.models.shape import ModelShape
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.report import FusedKV
from docs.benchmarks.scripts.measuring import bench_model, bench_prompt, warmed
from docs.benchmarks.scripts.shapes import BenchOptions

__all__ = ["CHECK_LAYER", "POINT_METHODS", "PointOptions", "main", "measure", "work_from"]

POINT_METHODS = ("full", "blended")
CHECK_LAYER = 1


@dataclass(frozen=True)
class PointOptions(BenchOptions):
    """Options of the measurement.

    Parameters
    ----------
    method : str
        ``"full"``, transformers' own forward pass, or ``"blended"``, the paper's rule over a warm store
        on disk.
    ratio : float
        Recompute ratio.
    """

    rounds: int = 1
    method: str = "blended"
    ratio: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("method", self.method, POINT_METHODS)
        check_share("ratio", self.ratio)


def measure(options: PointOptions) -> dict[str, Any]:
    """Measure one point; a dictionary fit for JSON.

    Sizes are in bytes: ``before`` is what the process had ever taken when the model and the store were
    ready, ``peak`` what it had taken after the prompts.
    """
    model, tokenizer = bench_model(options)
    measured = {"full": _full, "blended": _blend}[options.method]
    found = measured(model, tokenizer, bench_prompt(tokenizer, options), options)
    return {"method": options.method, "chunks": options.chunks, **found}


def _full(model: Any, tokenizer: Any, prompt: Prompt, options: PointOptions) -> dict[str, Any]:
    with BlendEngine(model, tokenizer, config=BlendConfig(write_back="off")) as engine:
        adapter, ids = engine.adapter, engine.tokenize(prompt).input_ids
        adapter.prefill(ids[:64])  # warms up
        before = _new_peak(adapter.device)
        seconds = [timed(lambda: int(adapter.prefill(ids).logits.argmax())) for _ in range(options.rounds)]
        return {
            "tokens": len(ids),
            "seconds": seconds,
            "work": 1.0,
            "multiply_adds": prefill_work(adapter.shape, len(ids)),
            "kv_bytes": len(ids) * token_bytes(adapter),
            "before": before,
            "peak": max(before, _peak(adapter.device)),  # the kernel counts some pages late
        }


def _blend(model: Any, tokenizer: Any, prompt: Prompt, options: PointOptions) -> dict[str, Any]:
    rule: dict[str, Any] = {
        "selection": "hkvd",
        "selection_options": {"check_layers": (CHECK_LAYER,)},
        "recompute_ratio": options.ratio,
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        warmed(model, tokenizer, prompt, folder, **rule) as (engine, _),
    ):
        adapter = engine.adapter
        before, seconds, behind = _new_peak(adapter.device), [], []
        told: dict[str, Any] = {}
        for _ in range(options.rounds):
            with _entering(adapter, CHECK_LAYER) as entered:
                started = time.perf_counter()
                fused = engine.fuse(prompt)
                int(fused.logits.argmax())
                ended = time.perf_counter()
            seconds.append(ended - started)
            behind.append(ended - entered[0])
            told = _mask_here(adapter, fused)
            del fused  # two prompts' KV at a time would count as one's
        return told | {
            "seconds": seconds,
            "seconds_after_check": behind,
            "before": before,
            "peak": max(before, _peak(adapter.device)),  # the kernel counts some pages late
        }


def _mask_here(adapter: ModelAdapter, fused: FusedKV) -> dict[str, Any]:
    report, shape = fused.report, adapter.shape
    return {
        "tokens": report.prompt_tokens,
        "hits": report.hits,
        "kept_rows": report.computed_tokens[CHECK_LAYER],
        "work": report.work,
        "multiply_adds": report.work * prefill_work(shape, report.prompt_tokens),
        "multiply_adds_after_check": work_from(shape, report.prompt_tokens, fused.done, CHECK_LAYER),
        "kv_bytes": report.prompt_tokens * token_bytes(adapter),
    }


def work_from(shape: ModelShape, tokens: int, done: RowsDone, layer: int) -> float:
    """Multiply-adds of a pass from a layer on, the output head included, checks not."""
    rest = ModelShape(shape.layers[layer:], shape.head)
    return work_share(rest, tokens, RowsDone(done.computed[layer:], ended=done.ended)) * prefill_work(rest, tokens)


@contextmanager
def _entering(adapter: ModelAdapter, layer: int) -> Iterator[list[float]]:
    """Within this, the moment is noted at which a layer's rows, those a check has kept, begin."""
    times: list[float] = []

    def note(module: torch.nn.Module, given: Any) -> None:
        if adapter.device.type == "cuda":
            torch.cuda.synchronize(adapter.device)
        times.append(time.perf_counter())

    hook = adapter.layers[layer].register_forward_pre_hook(note)
    try:
        yield times
    finally:
        hook.remove()


def _new_peak(device: torch.device) -> int:
    """Begin to count anew what memory is taken at most, where that can be done; what was taken so far."""
    before = _peak(device)
    if device.type == "cuda":
        before = int(torch.cuda.memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        return before
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return min(before, _peak(device))


def _peak(device: torch.device) -> int:
    """Most bytes the process has taken: of a GPU, or of the host's memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            # Of this program only; ru_maxrss may be that of the process which started it.
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the point that the one argument describes."""
    given = sys.argv[1:] if arguments is None else arguments
    print(json.dumps(measure(PointOptions(**json.loads(given[0])))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
