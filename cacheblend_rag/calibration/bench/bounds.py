"""The least time a method could take: its arithmetic at full prefill's rate, or reading its KV if that is longer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cacheblend_rag.calibration.comparison import Prefilled
from cacheblend_rag.calibration.profiler import measure_gpu_copy, measure_memory, read_files
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.fusor.work import RowsDone, work_share
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.memory import token_bytes


@dataclass(frozen=True)
class Cost:
    """What a method had to do for a prompt.

    Parameters
    ----------
    work : float
        Multiply-adds as a share of a full prefill's, attention counted by the keys each row sees: the
        layers before a check, the rows kept, the question, checks, scoring and the output head.
    loaded : int
        Bytes of KV read from a store.
    """

    work: float
    loaded: int = 0

    def bound(self, full: float, rate: float) -> float:
        """Seconds no method with this cost can beat on this machine.

        Reading hides behind computing at best, so it counts only as far as it takes longer.

        Parameters
        ----------
        full : float
            Seconds full prefill took in the same run.
        rate : float
            Bytes a second at which KV can be read.
        """
        return max(self.work * full, self.loaded / rate)


def cost_of(adapter: ModelAdapter, tokens: int, done: Prefilled) -> Cost:
    """What a method did for a prompt of so many tokens.

    Without a report, it computed the last rows of the prompt, on each layer to its end.
    """
    if done.report is not None:
        report = done.report
        return Cost(report.work, report.reused_tokens * token_bytes(adapter))
    computed = tuple(torch.arange(tokens - rows, tokens) for rows in done.computed)
    return Cost(work_share(adapter.shape, tokens, RowsDone(computed)))


def kv_rate(engine: BlendEngine) -> float:
    """Bytes a second at which KV could come from an engine's store to its model, nothing checked or put in place.

    Of a folder, as its files lie now, in the system's page cache or not.
    """
    folder, kept = engine.store.folder, engine.store.device
    if folder is not None:
        rate = read_files(folder.glob("??/??/*.val"))
    else:
        rate = measure_memory(device=kept).throughput
    device = engine.adapter.device
    if device.type == "cuda" and kept.type != "cuda":
        rate = min(rate, measure_gpu_copy(device).throughput)
    return rate
