"""Several engines over one model, on several threads, and whoever else runs the model meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers.generation import LogitsProcessor

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.engine.scheduler import scheduler_of
from cacheblend_rag.errors import ConfigError
from tests import tiny
from tests.engine.test_engine import picture
from tests.probes import CHUNKS, PROMPT, Hooked, engine_of
from tests.waiting import until

OTHER = Prompt("Look here:", CHUNKS[::-1], "Who watched the river?")
IDS = torch.arange(3, 60)[None]


class Failing(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] % 3 == 0:
            raise ZeroDivisionError("a processor of the user's failed")
        return scores


def plain_answer(model: Any) -> torch.Tensor:
    """The user's own call: logits of every token, and the tokens it decodes."""
    with torch.no_grad():
        logits = model(IDS).logits
        ids = model.generate(
            IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=5, do_sample=False, pad_token_id=0
        )
    return torch.cat((logits.flatten(), ids.flatten().float()))


def use(engine: BlendEngine, number: int) -> None:
    """One request of some kind: answered, cancelled half-way, or failing in the pass or in decoding."""
    prompt = PROMPT if number % 2 else OTHER
    match number % 5:
        case 0:
            engine.generate(prompt, max_new_tokens=4)
        case 1:
            with contextlib.closing(engine.stream(prompt, max_new_tokens=40)) as stream:
                next(stream)
        case 2:
            with pytest.raises(ZeroDivisionError):
                engine.generate(prompt, max_new_tokens=6, logits_processor=[Failing()])
        case 3:
            failing: Any = engine.store
            failing.broken = threading.get_ident()
            try:
                with pytest.raises(ZeroDivisionError):
                    engine.fuse(prompt)
            finally:
                failing.broken = None
        case 4:
            engine.warm([tiny.text(9, number)], progress=False)


class Breakable(Hooked):
    """Fails in the middle of a pass of one thread."""

    def __init__(self) -> None:
        super().__init__(reading=self.read)
        self.broken: int | None = None

    def read(self, key: str, layer: int) -> None:
        if layer == 2 and self.broken is not None:
            raise ZeroDivisionError("a store of the user's failed")


def test_nothing_is_left_behind_and_others_are_not_disturbed() -> None:
    model = tiny.model("gemma2")
    expected, before, done = plain_answer(model), picture(model), threading.Event()
    options: list[dict[str, Any]] = [
        {"recompute_ratio": 0.3},
        {"recompute_ratio": 0.3, "max_concurrent": 3},
        {"selection": "query", "recompute_ratio": 0.3},
    ]
    engines = [engine_of(model, store=Breakable(), **one) for one in options]
    for engine in engines:
        engine.warm(CHUNKS, progress=False)

    def plainly() -> int:
        for times in itertools.count(1):
            assert torch.equal(plain_answer(model), expected)
            if done.is_set():
                return times
        return 0

    with ThreadPoolExecutor(4) as pool:
        user = pool.submit(plainly)
        asked = [
            pool.submit(lambda engine=engine, at=at: [use(engine, number) for number in range(at, at + 5)])
            for at, engine in enumerate(engines)
        ]
        try:
            for one in asked:
                one.result(120)
        finally:
            done.set()
        assert user.result(60) > 1
    for engine in engines:
        engine.close()
    assert picture(model) == before
    assert torch.equal(plain_answer(model), expected)


def test_engines_over_one_model_take_turns() -> None:
    model = tiny.model()
    one, other, apart = (engine_of(of, write_back="off") for of in (model, model, tiny.model()))
    with one, other, apart:
        alone = other.generate(PROMPT, max_new_tokens=3).token_ids
        with ThreadPoolExecutor(1) as pool:
            with scheduler_of(model).entered():
                assert apart.generate(PROMPT, max_new_tokens=1).token_ids  # another model waits for nobody
                asked = pool.submit(other.generate, PROMPT, max_new_tokens=3)
                until(lambda: scheduler_of(one.model).waiting)
                assert not asked.done()
            assert asked.result(60).token_ids == alone


def test_requests_of_models_that_stand_beside_each_other_take_turns() -> None:
    config = BlendConfig(min_tokens=0, max_concurrent=2)
    with (
        BlendEngine(tiny.model(), tiny.tokenizer(), config=config) as first,
        BlendEngine(tiny.model(num_hidden_layers=3), tiny.tokenizer(), config=config, beside=first) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        for engine in (first, other):
            engine.warm(CHUNKS, progress=False)
        alone = [engine.generate(PROMPT, max_new_tokens=8).text for engine in (first, other)]
        with first.turns.in_background():
            waiting = pool.submit(other.generate, PROMPT, max_new_tokens=8)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.2)
        assert waiting.result(timeout=60).text == alone[1]
        begun = [engine.stream(PROMPT, max_new_tokens=8) for engine in (first, other)]
        together = ["".join(pieces) for pieces in zip(*itertools.zip_longest(*begun, fillvalue=""), strict=True)]
        assert together == alone
    model = tiny.model()
    with engine_of(model), engine_of() as other, pytest.raises(ConfigError, match="beside"):
        BlendEngine(model, tiny.tokenizer(), beside=other)
