"""Programs that end while something of theirs is under way: how they end, and what is stored by then."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from tests.programs import run_program
from tests.toy import MODEL_PATH
from tests.waiting import until

# Each token takes PyTorch some milliseconds, and no answer ends before its many tokens are there.
LEAVES = f"""
import asyncio, contextlib, threading, time
import torch
from cacheblend_rag import BlendEngine
from cacheblend_rag.langchain import CacheBlendLLM

class Long:
    def __call__(self, input_ids, scores):
        product = torch.ones(600, 600)
        for _ in range(3):
            product = (product @ product).clamp(0, 1)
        return scores.index_fill(1, torch.tensor([0, 1, 2]), -1e9)

MODEL, QUESTION = {str(MODEL_PATH)!r}, "What fell in the end? " * 9
MANY = {{"max_new_tokens": 400, "logits_processor": [Long()]}}
llm = CacheBlendLLM.from_model_id(MODEL, **MANY)
left = llm.stream(QUESTION)
next(left)
with contextlib.suppress(TimeoutError):
    asyncio.run(asyncio.wait_for(llm.ainvoke(QUESTION), 0.3))
engine = BlendEngine.from_pretrained(MODEL)
threading.Thread(target=engine.generate, args=(QUESTION,), kwargs=MANY, daemon=True).start()
time.sleep(0.3)  # so that it is at work, most probably
for piece in BlendEngine.from_pretrained(MODEL).stream(QUESTION, **MANY):
    raise SystemExit(3)
"""


def test_program_that_leaves_answers_early_ends_as_any_other(tmp_path: Path) -> None:
    done = run_program(["-c", LEAVES], tmp_path, whole_end=True)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr


# Each of these takes a tenth of a second to be stored.
CHUNKS = [f"The {number}th mill burned down in 1931, and nobody saw it." for number in range(24)]
PROMPT = Prompt("Read this:", CHUNKS, "Which?")
ALL = len(CHUNKS) + 1
OPTIONS: dict[str, Any] = {"min_tokens": 0, "condition": "sink", "recompute_ratio": 0.2, "codec": "raw"}
STORES = f"""
import atexit, signal, sys, time
from dataclasses import replace
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
atexit.register(print, "closed")
from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.engine import write_back
from cacheblend_rag.store import MemoryStore, TieredStore

write_back._PASS_TOKENS = 1  # each in a pass of its own
config, prompt = BlendConfig(**{OPTIONS!r}), Prompt("Read this:", {CHUNKS!r}, "Which?")
engine = BlendEngine.from_pretrained({str(MODEL_PATH)!r}, config=config, store=sys.argv[1])

def slowly(put, said):
    def slow(key, record):
        time.sleep(0.1)  # the pace of a slow disk or network
        put(key, record)
        print(said, flush=True)
    return slow

engine.store.put = slowly(engine.store.put, "stored")
engine.generate(prompt, max_new_tokens=1)
"""
BEHIND = """
far = MemoryStore("1GB")
far.traits, far.put = replace(far.traits, tier="far", remote=True), slowly(far.put, "written")
store = TieredStore([MemoryStore("1GB"), far])
few = Prompt("", prompt.chunks[:5], "Which?")
BlendEngine(engine.model, engine.tokenizer, config=config, store=store).generate(few, max_new_tokens=1)
"""


def test_queues_are_stored_before_a_program_ends_and_another_process_gets_hits(tmp_path: Path) -> None:
    """The program neither flushes nor closes. One of its engines is alive until the end, another was dropped."""
    done = run_program(["-c", STORES + BEHIND, str(tmp_path)], tmp_path, whole_end=True)
    assert done.returncode == 0, done.stderr
    assert (done.stdout.count("stored"), done.stdout.count("written")) == (ALL, 5)
    assert re.search(r"being stored before the end, for (29|30) s at most", done.stderr)
    assert "not stored" not in done.stderr
    assert "Exception" not in done.stderr
    with BlendEngine.from_pretrained(MODEL_PATH, config=BlendConfig(**OPTIONS), store=tmp_path) as engine:
        report = engine.fuse(PROMPT).report
        assert (report.hits, report.prefix_hit) == (len(CHUNKS), True)


@pytest.mark.slow
def test_interrupt_ends_storing_at_exit(tmp_path: Path) -> None:
    output, errors = tmp_path / "output", tmp_path / "errors"
    # No fork: how an interpreter ends after an interrupt is seen only of one that Python itself began.
    with (
        output.open("wb") as out,
        errors.open("wb") as err,
        subprocess.Popen([sys.executable, "-c", STORES, str(tmp_path)], stdout=out, stderr=err) as process,
    ):
        try:
            until(lambda: "is being stored" in errors.read_text())
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == -signal.SIGINT, "as any program that is interrupted"
        finally:
            process.kill()
    stored = output.read_text().count("stored")
    assert stored < ALL
    assert f"KV of {ALL - stored} segments was not stored" in errors.read_text()
    assert "closed" in output.read_text(), "the first interrupt lets all be closed"
