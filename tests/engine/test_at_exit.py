"""Programs that end while something of theirs is under way: how they end, after how long, and what they say."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pairwise import others_slow
from tests.programs import run_program
from tests.toy import MODEL_PATH
from tests.waiting import until

# Each token takes PyTorch some milliseconds, and no answer ends before its many tokens are there.
START = f"""
import asyncio, contextlib, itertools, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
import torch
from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.langchain import CacheBlendLLM

class Long:
    def __call__(self, input_ids, scores):
        product = torch.ones(600, 600)
        for _ in range(3):
            product = (product @ product).clamp(0, 1)
        return scores.index_fill(1, torch.tensor([0, 1, 2]), -1e9)

MODEL, QUESTION = {str(MODEL_PATH)!r}, "What fell in the end? " * 9
MANY = {{"max_new_tokens": 400, "logits_processor": [Long()]}}
"""
ENGINE = "stream = BlendEngine.from_pretrained(MODEL).stream(QUESTION, **MANY)\n"
ENDS = {
    "left": (ENGINE + "for piece in stream:\n    break", 0),
    "failed": (ENGINE + "for piece in stream:\n    raise ValueError", 1),
    "cancelled": (
        "llm = CacheBlendLLM.from_model_id(MODEL, **MANY)\n"
        "with contextlib.suppress(TimeoutError):\n"
        "    asyncio.run(asyncio.wait_for(llm.ainvoke(QUESTION), 0.3))",
        0,
    ),
    "left in LangChain": ("for piece in CacheBlendLLM.from_model_id(MODEL, **MANY).stream(QUESTION):\n    break", 0),
    "on a daemon thread": (
        "engine = BlendEngine.from_pretrained(MODEL)\n"
        "threading.Thread(target=engine.generate, args=(QUESTION,), kwargs=MANY, daemon=True).start()\n"
        "time.sleep(0.3)",  # so that it is at work, most probably
        0,
    ),
}


@pytest.mark.parametrize("end", others_slow([*ENDS], ("failed", "on a daemon thread")))
def test_program_that_leaves_an_answer_early_ends_as_any_other(end: str, tmp_path: Path) -> None:
    program, status = ENDS[end]
    done = run_program(["-c", START + program], tmp_path, whole_end=True)
    assert done.returncode == status, done.stderr


# Each of these takes a tenth of a second to be stored.
STORING = """
from cacheblend_rag.engine import write_back

write_back._PASS_TOKENS = 1  # each in a pass of its own
engine = BlendEngine.from_pretrained(MODEL, config=BlendConfig(min_tokens=0, condition="sink"))
put = engine.store.put

def slow(key, record):
    time.sleep(0.1)  # the pace of a slow disk
    put(key, record)
    print("stored", flush=True)

engine.store.put = slow
chunks = [f"The {number}th mill burned down in 1931, and nobody saw it." for number in range(24)]
engine.generate(Prompt("", chunks, "Which?"), max_new_tokens=1)
"""
ALL = 24


def test_program_stores_its_queue_at_exit_and_says_so_if_that_takes_long(tmp_path: Path) -> None:
    done = run_program(["-c", START + STORING], tmp_path, whole_end=True)
    assert done.returncode == 0
    assert done.stdout.count("stored") == ALL
    assert done.stderr.count("is being stored before the end, for 30 s at most") == 1
    assert "not stored" not in done.stderr


def test_the_time_that_a_program_stores_for_is_bounded(tmp_path: Path) -> None:
    done = run_program(["-c", START + STORING + "engine.close(seconds=1.2)"], tmp_path, whole_end=True)
    assert done.returncode == 0
    stored = done.stdout.count("stored")
    assert stored < ALL
    assert f"KV of {ALL - stored} segments was not stored" in done.stderr


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_interrupt_ends_storing_at_exit(times: int, tmp_path: Path) -> None:
    output, errors = tmp_path / "output", tmp_path / "errors"
    program = START + "import atexit\natexit.register(print, 'closed')\n" + STORING
    if times == 2:
        program += "engine.store.put = lambda *given: threading.Event().wait()  # for ever"
    # No fork: how an interpreter ends after an interrupt is seen only of one that Python itself began.
    with (
        output.open("wb") as out,
        errors.open("wb") as err,
        subprocess.Popen([sys.executable, "-c", program], stdout=out, stderr=err) as process,
    ):
        try:
            for said in ("is being stored", "was not stored")[:times]:
                until(lambda said=said: said in errors.read_text(), 60)
                process.send_signal(signal.SIGINT)
            assert process.wait(20) == -signal.SIGINT, "as any program that is interrupted"
        finally:
            process.kill()
    assert output.read_text().count("stored") < ALL
    assert ("closed" in output.read_text()) == (times == 1), "the first interrupt lets all be closed"


BEHIND = f"""
import time
from dataclasses import replace

MODEL = {str(MODEL_PATH)!r}
from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.store import MemoryStore, TieredStore

class Slow(MemoryStore):
    def __init__(self):
        super().__init__("1GB")
        self.traits = replace(self.traits, tier="far", remote=True)

    def put(self, key, record):
        time.sleep(0.1)  # the pace of a slow network
        print("written", flush=True)

store = TieredStore([MemoryStore("1GB"), Slow()])
engine = BlendEngine.from_pretrained(MODEL, config=BlendConfig(min_tokens=0, condition="sink"), store=store)
chunks = [f"The {{number}}th mill burned down in 1931, and nobody saw it." for number in range(5)]
engine.generate(Prompt("", chunks, "Which?"), max_new_tokens=1)
"""


def test_queue_of_a_slow_tier_is_written_before_a_program_ends(tmp_path: Path) -> None:
    done = run_program(["-c", BEHIND], tmp_path, whole_end=True)
    assert (done.returncode, done.stdout.count("written")) == (0, 5), done.stderr
