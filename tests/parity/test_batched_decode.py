"""Several answers under way: steps taken together are those that each takes alone, and nobody is in another's way."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers.generation import LogitsProcessor

from cacheblend_rag import BlendEngine, Prompt
from cacheblend_rag.engine.scheduler import scheduler_of
from cacheblend_rag.errors import GenerationError
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.batched_decode import BatchedDecode
from cacheblend_rag.models.modules import cache_argument
from cacheblend_rag.report import Generation
from tests import tiny
from tests.pairwise import others_slow
from tests.parity.test_families import EAGER_ONLY, OF_LATENTS, WINDOWS
from tests.probes import engine_of
from tests.tolerance import assert_layers_close, assert_logits_close
from tests.waiting import until

PROMPTS = [
    Prompt("Read this:", [tiny.text(23 + 9 * number, number), tiny.text(31, 9)], "What fell? " * (number + 1))
    for number in range(4)
]


def all_at_once(engine: BlendEngine, prompts: list[Prompt], **options: Any) -> list[Generation]:
    """Their answers, all begun before the first of them is let in."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        with scheduler_of(engine.model).entered():
            asked = [pool.submit(engine.generate, prompt, **options) for prompt in prompts]
            until(lambda: scheduler_of(engine.model).waiting == len(prompts))
        return [one.result(120) for one in asked]


@pytest.fixture
def engine() -> Iterator[BlendEngine]:
    with engine_of(recompute_ratio=0.4, max_concurrent=4) as made:
        made.warm([chunk for prompt in PROMPTS for chunk in prompt.chunks])
        made.fuse(PROMPTS[0])  # stores the prefix
        yield made


@pytest.fixture
def passes(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many took each step."""
    counts: list[int] = []
    take = BatchedDecode.__call__

    def counted(self: BatchedDecode, asked: Sequence[Any]) -> list[torch.Tensor]:
        counts.append(len(asked))
        return take(self, asked)

    monkeypatch.setattr(BatchedDecode, "__call__", counted)
    return counts


class Held(LogitsProcessor):
    """Holds an answer where its first token is known, until it may go on."""

    def __init__(self) -> None:
        self.there, self.go, self.tokens = threading.Event(), threading.Event(), 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.tokens += 1
        self.there.set()
        assert self.go.wait(120)
        return scores


# The pass -----------------------------------------------------------------------------------


def steps_of(model: Any, texts: list[list[int]], count: int) -> tuple[list[torch.Tensor], Any]:
    """Logits of some steps behind texts of several lengths, each by the model alone; and its caches."""
    logits, caches = [], []
    for ids in texts:
        out = tiny.full_prefill(model, ids)
        caches.append(tiny.cache_of(out))
        rows = []
        for step in range(count):
            with torch.no_grad():
                out = model(torch.tensor([[step + 5]]), use_cache=True, **{cache_argument(model): caches[-1]})
            rows.append(out.logits[0, -1])
        logits.append(torch.stack(rows))
    return logits, caches


def check_together(model: Any, together: bool) -> None:
    texts = [list(range(3, 3 + length)) for length in (5, 90, 12)]
    expected, caches = steps_of(model, texts, 4)
    adapter = ModelAdapter(model)
    steps = BatchedDecode(adapter)
    assert steps.possible
    own = [adapter.prefill(ids).cache for ids in texts]
    rows: list[int] = []
    hook = model.get_decoder().layers[0].register_forward_hook(lambda module, args, output: rows.append(len(args[0])))
    found = [[] for _ in texts]
    attention = model.config._attn_implementation
    for step in range(4):
        asked = [
            {"input_ids": torch.tensor([[step + 5]]), cache_argument(model): cache, "use_cache": True} for cache in own
        ]
        with torch.no_grad():
            for logits, of in zip(steps(asked), found, strict=True):
                assert logits.shape == (1, 1, 400)
                of.append(logits[0, 0])
    hook.remove()
    assert rows == ([3] * 4 if together else [1] * 12)
    assert model.config._attn_implementation == attention
    for of, alone in zip(found, expected, strict=True):
        assert_logits_close(torch.stack(of), alone, model, 90 + 4)
    for cache, alone in zip(own, caches, strict=True):
        assert cache.get_seq_length() == alone.get_seq_length()
        assert_layers_close(cache.layers, alone.layers, model)


@pytest.mark.parametrize("family", others_slow(tiny.DIFFERENT, ("llama", "gpt_oss", "deepseek_v3")))
def test_steps_together_are_those_of_each_alone(family: str) -> None:
    check_together(tiny.model(family, tiny.rope_types(family)[0]), family not in (*EAGER_ONLY, *OF_LATENTS))


@pytest.mark.parametrize("family", others_slow(sorted(WINDOWS), ("ministral3",)))
def test_steps_together_beyond_windows(family: str) -> None:
    check_together(tiny.model(family, **WINDOWS[family]), True)


def test_model_run_beside_a_batch_gives_its_own_result(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model()
    steps, found = BatchedDecode(ModelAdapter(model)), []
    expected = tiny.full_prefill(model, list(range(3, 40))).logits
    taken = BatchedDecode.one_pass

    def beside_another(self: BatchedDecode, asked: Any) -> Any:
        assert model.config._attn_implementation == "sdpa"
        found.append(tiny.full_prefill(model, list(range(3, 40))).logits)
        return taken(self, asked)

    monkeypatch.setattr(BatchedDecode, "one_pass", beside_another)
    caches = [ModelAdapter(model).prefill([3, 4, 5]).cache for _ in range(2)]
    steps([{"input_ids": torch.tensor([[5]]), cache_argument(model): cache} for cache in caches])
    assert_logits_close(found[0], expected, model, 37)


def test_length_dependent_frequencies_answer_one_after_another() -> None:
    with engine_of(tiny.model("llama", "longrope"), max_concurrent=4) as engine:
        held = Held()
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(engine.generate, PROMPTS[0], max_new_tokens=3, logits_processor=[held])
            assert held.there.wait(120)
            second = pool.submit(engine.generate, PROMPTS[1], max_new_tokens=1)
            until(lambda: scheduler_of(engine.model).waiting)
            held.go.set()
            assert (len(first.result(120).token_ids), len(second.result(120).token_ids)) == (3, 1)
        assert held.tokens == 3


# Answers ------------------------------------------------------------------------------------


@pytest.fixture
def nobody_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is taken early for tokens that come late, which they do on a machine that stands still for a while."""
    monkeypatch.setattr("cacheblend_rag.engine.scheduler._GAP", 1e6)


@pytest.mark.usefixtures("nobody_is_late")
def test_answers_under_way_at_once_are_those_given_alone(engine: BlendEngine, passes: list[int]) -> None:
    alone = [engine.generate(prompt, max_new_tokens=8).token_ids for prompt in PROMPTS]
    assert set(passes) == {1}
    passes.clear()
    assert [one.token_ids for one in all_at_once(engine, PROMPTS, max_new_tokens=8)] == alone
    assert passes == [4] * 7  # each step was one pass for all
    passes.clear()
    found = engine.generate_batch([*PROMPTS, *PROMPTS], max_new_tokens=8)
    assert [one.token_ids for one in found] == [*alone, *alone]
    assert (max(passes), sum(passes)) == (4, 8 * 7)


def test_request_is_let_in_between_two_tokens_of_another(engine: BlendEngine) -> None:
    first, second = Held(), Held()
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(engine.generate, PROMPTS[0], max_new_tokens=16, logits_processor=[first])
        assert first.there.wait(120)
        short = pool.submit(engine.generate, PROMPTS[1], max_new_tokens=2, logits_processor=[second])
        until(lambda: scheduler_of(engine.model).waiting)
        first.go.set()
        assert second.there.wait(120)
        assert first.tokens == 1  # it waits for the other's first token, and not the other for its last
        second.go.set()
        assert len(short.result(120).token_ids) == 2
        assert len(long.result(120).token_ids) == 16


class Counted(LogitsProcessor):
    """Counts the tokens of an answer, and calls something at the first of them."""

    def __init__(self, at_first: Any = None) -> None:
        self.tokens, self.at_first, self.begun = 0, at_first, threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.tokens += 1
        if self.tokens == 1:
            self.begun.set()
            if self.at_first is not None:
                self.at_first()
        return scores


def test_answer_goes_on_between_two_layers_of_another_prompt(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = PROMPTS[1]
    alone = [engine.generate(prompt, max_new_tokens=n).token_ids for prompt, n in ((PROMPTS[0], 100), (later, 4))]
    monkeypatch.setattr("cacheblend_rag.engine.scheduler._GAP", 0.0)
    passes, first = list[int](), Counted()
    second = Counted(lambda: passes.append(first.tokens))

    def embeds(_: Any, given: Any) -> None:
        if given[0].numel() > 1 and not passes:  # the prompt that came later
            passes.append(first.tokens)

    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(engine.generate, PROMPTS[0], max_new_tokens=100, logits_processor=[first])
        assert first.begun.wait(120)
        with engine.model.get_input_embeddings().register_forward_pre_hook(embeds):
            short = pool.submit(engine.generate, later, max_new_tokens=4, logits_processor=[second])
            found = [long.result(120).token_ids, short.result(120).token_ids]
    began, ended = passes
    assert ended - began >= engine.adapter.num_layers - 1, "a step at each layer but the first"
    assert found == alone


@pytest.mark.parametrize(("family", "changes"), [("gpt_oss", {}), ("deepseek_v3", {}), ("mistral", WINDOWS["mistral"])])
def test_prefill_in_slices_is_the_whole_one(family: str, changes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_rag.models.adapter._SLICE", 20)
    model, ids, between = tiny.model(family, **changes), list(range(3, 93)), list[float]()
    sliced = ModelAdapter(model).prefill(ids, lambda seconds, done: between.append(seconds))
    whole = tiny.full_prefill(model, ids)
    assert len(between) >= 4
    assert_logits_close(sliced.logits, whole.logits[0, -1], model, len(ids))
    assert_layers_close(sliced.cache.layers, tiny.cache_of(whole).layers, model)


def test_request_is_let_in_between_two_slices_of_a_prefill(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheblend_rag.models.adapter._SLICE", 10)
    extend, passed, begun, waits = ModelAdapter.extend, list[int](), threading.Event(), threading.Event()

    def noted(self: ModelAdapter, cache: Any, ids: Any, *others: Any, **more: Any) -> torch.Tensor:
        passed.append(len(ids))
        begun.set()
        assert waits.wait(120)
        return extend(self, cache, ids, *others, **more)

    monkeypatch.setattr(ModelAdapter, "extend", noted)
    long, short = Prompt(suffix=" ".join(["ash"] * 60)), Prompt(suffix="ash")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(engine.generate, long, max_new_tokens=2)
        assert begun.wait(120)
        second = pool.submit(engine.generate, short, max_new_tokens=2)
        until(lambda: scheduler_of(engine.model).waiting)
        waits.set()
        report = first.result(120).report
        second.result(120)
    assert len(passed) > 4
    assert passed[1] < 10, "the second begins behind the first slice"
    assert report.prompt_tokens == sum(passed) - passed[1]


def test_no_more_are_under_way_than_allowed_or_have_room(
    engine: BlendEngine, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = all_at_once(engine.with_config(max_concurrent=2), PROMPTS, max_new_tokens=5)
    assert [len(one.token_ids) for one in found] == [5] * 4
    assert max(passes) == 2
    passes.clear()
    monkeypatch.setattr("cacheblend_rag.models.batched_decode.free_memory_on", lambda device: 10_000)
    found = all_at_once(engine, PROMPTS, max_new_tokens=5)
    assert [len(one.token_ids) for one in found] == [5] * 4
    assert set(passes) == {1}


def test_seeds_hold_whoever_else_draws(engine: BlendEngine, passes: list[int]) -> None:
    sampled: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.5, "seed": 7}
    alone = [engine.generate(prompt, **sampled).token_ids for prompt in PROMPTS]
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    passes.clear()
    assert [one.token_ids for one in all_at_once(engine, PROMPTS, **sampled)] == alone
    assert max(passes) == 4
    assert torch.equal(torch.random.get_rng_state(), state)


def test_cancelled_stream_leaves_the_others_alone(engine: BlendEngine) -> None:
    alone = engine.generate(PROMPTS[0], max_new_tokens=24).token_ids
    held = Held()
    with ThreadPoolExecutor(1) as pool:
        left = engine.stream(PROMPTS[1], max_new_tokens=400, logits_processor=[held])
        reading = threading.Thread(target=lambda: [None for _ in left])
        reading.start()
        assert held.there.wait(120)
        stays = pool.submit(engine.generate, PROMPTS[0], max_new_tokens=24)
        until(lambda: scheduler_of(engine.model).waiting)
        left.cancel()
        held.go.set()
        assert stays.result(120).token_ids == alone
        reading.join(120)
    assert held.tokens < 400


# Batches ------------------------------------------------------------------------------------


def test_failed_batch_ends_prompts_begun_ahead(engine: BlendEngine) -> None:
    class Failing(LogitsProcessor):
        tokens = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.tokens += 1
            if input_ids.shape[1] == shortest + 3:
                raise ZeroDivisionError
            scores[:, 2] = float("-inf")  # the others do not end by themselves
            return scores

    shortest, failing = len(engine.tokenize(PROMPTS[0]).input_ids), Failing()
    with pytest.raises(ZeroDivisionError):
        engine.generate_batch(PROMPTS, max_new_tokens=1_500, logits_processor=[failing])
    until(lambda: not scheduler_of(engine.model)._begun)
    assert failing.tokens < 1_000


# Trouble ------------------------------------------------------------------------------------


def test_failed_step_ends_its_own_answers_and_no_others(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = engine.generate(PROMPTS[0], max_new_tokens=6).token_ids
    with monkeypatch.context() as patch:
        patch.setattr(BatchedDecode, "one_pass", lambda self, asked: torch.empty(2**62))
        with ThreadPoolExecutor(3) as pool:
            with scheduler_of(engine.model).entered():
                asked = [pool.submit(engine.generate, prompt, max_new_tokens=6) for prompt in PROMPTS[:3]]
                until(lambda: scheduler_of(engine.model).waiting == 3)
            errors = [one.exception(120) for one in asked]
    assert sorted(type(error).__name__ for error in errors) == ["GenerationError", "GenerationError", "RuntimeError"]
    told = next(error for error in errors if isinstance(error, GenerationError))
    assert isinstance(told.__cause__, RuntimeError)
    assert engine.model.config._attn_implementation == "sdpa"
    assert engine.generate(PROMPTS[0], max_new_tokens=6).token_ids == alone


def test_closing_waits_for_all_who_are_under_way() -> None:
    engine = engine_of(max_concurrent=4)
    held = Held()
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(engine.generate, PROMPTS[0], max_new_tokens=12, logits_processor=[held])
        assert held.there.wait(120)
        closing = pool.submit(engine.close)
        until(lambda: scheduler_of(engine.model).waiting)
        held.go.set()
        assert len(asked.result(120).token_ids) == 12
        closing.result(120)
    assert held.tokens == 12
