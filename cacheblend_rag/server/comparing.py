"""One prompt answered by every method, row by row."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from cacheblend_rag.decode import DecodeOptions
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.evaluation.baselines import decode_from, prefill_methods
from cacheblend_rag.prompt import Prompt

__all__ = ["compare_all"]

_SHORT = {"full recompute": "full", "prefix caching": "prefix", "full reuse": "reuse", "blended": "blend"}


def compare_all(engine: BlendEngine, prompt: Prompt, max_new_tokens: int) -> Iterator[dict[str, Any]]:
    """A row a method, full recompute first; ``ttft_s`` is of one warm request.

    Parameters
    ----------
    engine : BlendEngine
    prompt : Prompt
    max_new_tokens : int
        Most tokens of each answer.
    """
    engine.warm(prompt.chunks, progress=False)
    engine.flush()  # storing must not run beside what is timed
    ids, options = engine.tokenize(prompt).input_ids, DecodeOptions(max_new_tokens=max_new_tokens, temperature=0.0)
    full = ""
    for name, method in prefill_methods(engine, prompt).items():
        started = time.perf_counter()
        prefilled = method()
        int(prefilled.logits.argmax())  # the first token, known to the host
        seconds = time.perf_counter() - started
        text = decode_from(engine, ids, prefilled, options).text.strip()
        full = text if name == "full recompute" else full
        yield {"method": _SHORT[name], "answer": text, "ttft_s": seconds, "same_as_full": text == full}
