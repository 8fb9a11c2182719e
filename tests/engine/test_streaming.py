"""Streams: the same answer piece by piece, ended early without a trace, errors where they are read."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.generation import LogitsProcessor

from cacheblend_rag import BlendEngine, Prompt
from cacheblend_rag.errors import GenerationTimeoutError
from cacheblend_rag.models.row_layers import RowLayers
from tests import tiny
from tests.probes import Broken, Slow, answers_of, engine_of
from tests.waiting import until

PROMPT = Prompt("Read this:", [tiny.text(23, 1), tiny.text(31, 2), tiny.text(17, 3)], "What fell in the end?")
OTHER = Prompt("Read this:", [tiny.text(31, 2)], "And then?")


def stream_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "blend-stream"]


class Paced(LogitsProcessor):
    """Generates a token at a time, when it is let; counts them."""

    def __init__(self, free: int = 0) -> None:
        self.allowed = threading.Semaphore(free)
        self.begun = self.made = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.begun += 1
        assert self.allowed.acquire(timeout=60)
        self.made += 1
        return scores


@pytest.fixture
def engine() -> Iterator[BlendEngine]:
    with engine_of(recompute_ratio=0.2) as made:
        made.warm(PROMPT.chunks)
        made.fuse(PROMPT)
        yield made
    assert stream_threads() == []


# The same answer ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options"),
    [(PROMPT, {"max_new_tokens": 12}), ("What fell?", {"max_new_tokens": 1})],
    ids=["chunks", "plain"],
)
def test_every_form_gives_the_same_answer(engine: BlendEngine, prompt: Any, options: dict[str, Any]) -> None:
    engine.generate(prompt, **options)  # whatever was not stored is now
    expected = engine.generate(prompt, **options)
    stream = engine.stream(prompt, **options)
    assert stream.result is None
    pieces = list(stream)

    async def gather() -> tuple[Any, str, list[Any]]:
        made = [piece async for piece in engine.stream(prompt, **options)]
        return (
            await engine.agenerate(prompt, **options),
            "".join(made),
            await answers_of(engine, [OTHER, prompt], **options),
        )

    alone, streamed, batch = asyncio.run(gather())
    assert stream.result is not None
    for answer in (stream.result, alone, batch[1], engine.generate_batch([prompt], **options)[0]):
        assert answer.text == expected.text
        assert answer.token_ids == expected.token_ids
        assert answer.report.finish_reason == expected.report.finish_reason
        assert answer.report.hits == expected.report.hits
    assert "".join(pieces) == streamed == expected.text
    assert all(pieces)


def test_pieces_come_while_the_answer_is_made(engine: BlendEngine) -> None:
    pace = Paced()
    stream = engine.stream(PROMPT, max_new_tokens=30, logits_processor=[pace])
    pace.allowed.release(3)
    assert next(stream)
    assert pace.made <= 3
    assert stream.result is None
    pace.allowed.release(40)
    rest = list(stream)
    assert rest
    assert stream.result is not None
    assert list(stream) == []


# Ended early --------------------------------------------------------------------------------


def test_closing_early_frees_the_engine(engine: BlendEngine) -> None:
    slow = Slow(0.01)
    stream = engine.stream(PROMPT, max_new_tokens=1000, logits_processor=[slow])
    next(stream)
    stream.close()
    assert stream_threads() == []
    assert slow.made < 1000
    assert list(stream) == []
    stream.close()
    assert engine.generate(PROMPT, max_new_tokens=3).report.hits == 3


def test_abandoned_prompt_is_fused_no_further(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    layers: list[int] = []
    run_layer = RowLayers.run_layer

    def watched(self: RowLayers, layer: int, *arguments: Any) -> torch.Tensor:
        layers.append(layer)
        stream.cancel()
        return run_layer(self, layer, *arguments)

    monkeypatch.setattr(RowLayers, "run_layer", watched)
    stream = engine.stream(PROMPT, max_new_tokens=5)
    assert list(stream) == []
    until(lambda: not stream_threads())
    monkeypatch.undo()
    assert layers == [0]
    assert engine.generate(PROMPT, max_new_tokens=2).report.hits == 3


def test_late_answer_is_an_error_where_it_is_read(engine: BlendEngine) -> None:
    slow = Slow(0.02)
    stream = engine.stream(PROMPT, max_new_tokens=1000, logits_processor=[slow], timeout=0.2)
    with pytest.raises(GenerationTimeoutError, match=r"0\.2 s"):
        stream.complete()
    with pytest.raises(TimeoutError):
        asyncio.run(engine.stream(PROMPT, logits_processor=[Slow(0.02)], timeout=0.1).acomplete())
    until(lambda: not stream_threads())
    assert slow.made < 1000


# Errors -------------------------------------------------------------------------------------


def test_error_reaches_the_reader_and_frees_the_engine(engine: BlendEngine) -> None:
    stream = engine.stream(PROMPT, max_new_tokens=12, logits_processor=[Broken(5)])
    pieces: list[str] = []
    with pytest.raises(ZeroDivisionError, match="user's failed"):
        pieces.extend(stream)
    assert 0 < len(pieces) <= 5
    assert stream.result is None
    assert list(stream) == []
    assert engine.generate(PROMPT, max_new_tokens=2).report.generated_tokens == 2


# Asynchronous -------------------------------------------------------------------------------


def test_async_forms_do_not_block_the_loop(engine: BlendEngine) -> None:
    """Each token waits until the loop has turned."""

    async def read(pace: Paced) -> None:
        async for _ in engine.stream(PROMPT, max_new_tokens=8, logits_processor=[pace]):
            pass

    async def main() -> None:
        pace = Paced()
        arguments: dict[str, Any] = {"max_new_tokens": 8, "logits_processor": [pace]}
        works = (engine.agenerate(PROMPT, **arguments), answers_of(engine, [PROMPT], **arguments), read(pace))
        for number, work in enumerate(works):
            running = asyncio.ensure_future(work)
            for made in range(8 * number, 8 * number + 8):
                assert pace.made == made
                pace.allowed.release()
                while pace.made == made:
                    await asyncio.sleep(0.005)
            await running

    asyncio.run(main())


def test_cancelled_async_stream_frees_the_engine(engine: BlendEngine) -> None:
    slow = Slow(0.02)

    async def main() -> None:
        async def read() -> None:
            async for _ in engine.stream(PROMPT, max_new_tokens=1000, logits_processor=[slow]):
                pass

        task = asyncio.ensure_future(read())
        while not slow.made:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await engine.agenerate(PROMPT, max_new_tokens=3)).report.generated_tokens == 3

    asyncio.run(main())
    assert slow.made < 1000
