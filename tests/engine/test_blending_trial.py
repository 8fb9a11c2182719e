"""Blending is tried on a model that nothing is known of: what is found, said and kept, and whom it must not disturb."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.engine import blending_trial
from cacheblend_rag.engine.blending_trial import another_order, made_prompts
from cacheblend_rag.engine.judgement import Moved, TrialResult, is_near, is_poor, kept_result
from cacheblend_rag.engine.pipeline import Pauses
from cacheblend_rag.engine.ratio_policy import next_ratio
from cacheblend_rag.engine.scheduler import Scheduler, idle_seconds
from cacheblend_rag.engine.turns import Turns
from cacheblend_rag.langchain import CacheBlendLLM
from cacheblend_rag.store import DiskStore
from tests import tiny
from tests.programs import run_program
from tests.toy import MODEL_PATH
from tests.waiting import Clock, until

CHUNKS = [tiny.text(14, seed) for seed in range(12)]
PROMPTS = [
    Prompt("Read this:", CHUNKS[at : at + 4], f"Question: what fell {tiny.text(3, 90 + at)}?") for at in (0, 4, 8)
]


def sharp_model() -> Any:
    """A model whose tokens attend sharply to few others: KV of a chunk alone is far from what it is in a prompt."""
    model = tiny.model()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name or "v_proj" in name:
                weight.mul_(3)
    return model


def shallow_model() -> Any:
    """A model of one layer: KV depends on the token alone, so stored KV is what full prefill makes."""
    return tiny.model(num_hidden_layers=1)


def engine_of(model: Any = None, store: Any = None, **options: Any) -> BlendEngine:
    """An engine with the default rule and ratio over stored chunks."""
    options = {"min_tokens": 0, "write_back": "inline", "codec": "raw", **options}
    engine = BlendEngine(
        tiny.model() if model is None else model, tiny.tokenizer(), config=BlendConfig(**options), store=store
    )
    engine.warm(CHUNKS, progress=False)
    return engine


def ask(engine: BlendEngine) -> None:
    for prompt in PROMPTS:
        engine.generate(prompt, max_new_tokens=2)


def tried(engine: BlendEngine) -> TrialResult | None:
    """The result, once all prompts were asked and nothing is to be tried any more."""
    ask(engine)
    engine.verifications.trial.wait()
    return engine.verifications.trial.result


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No quiet time is waited for."""
    monkeypatch.setattr(blending_trial, "QUIET_SECONDS", 0.0)


@pytest.fixture
def begun(at_once: None, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set within the first layer of a trial, which then waits until a request wants the model, or nobody the result."""
    event, pauses = threading.Event(), Turns.pauses_in_background

    def pausing(self: Turns, cancelled: Callable[[], bool]) -> Pauses:
        usual = pauses(self, cancelled)

        def each_layer() -> None:
            if not event.is_set():
                event.set()
                until(lambda: self.scheduler.waiting > 0 or cancelled())
            usual.each_layer()

        return Pauses(usual.between, each_layer)

    monkeypatch.setattr(Turns, "pauses_in_background", pausing)
    return event


# Found, said, answered ---------------------------------------------------------------------------


@pytest.mark.usefixtures("at_once")
def test_model_on_which_blending_is_poor_gets_more_recompute(caplog: pytest.LogCaptureFixture) -> None:
    with engine_of() as engine, caplog.at_level(logging.WARNING):
        assert engine.fuse(PROMPTS[0]).report.recompute_ratio == 0.15
        found = tried(engine)
        assert found is not None
        assert (found.prompts, found.ratio) == (12, 0.15)
        assert 0.15 < found.least_ratio < 1
        assert engine.fuse(PROMPTS[0]).report.recompute_ratio == found.least_ratio
        assert engine.with_config(selection="hkvd").fuse(PROMPTS[0]).report.recompute_ratio == found.least_ratio
        assert CacheBlendLLM(engine=engine).stats().least_ratio == found.least_ratio
    (record,) = [one for one in caplog.records if "blending is poor" in one.message]
    assert f"raised from 0.15 to {found.least_ratio:.3g}" in record.message
    assert f"{found.divergence:.2g} nats" in record.message


@pytest.mark.usefixtures("at_once")
def test_model_that_does_not_tolerate_blending_answers_by_full_prefill(caplog: pytest.LogCaptureFixture) -> None:
    with engine_of(sharp_model()) as engine, caplog.at_level(logging.WARNING):
        found = tried(engine)
        assert found is not None
        assert found.least_ratio == 1
        answer = engine.generate(PROMPTS[0], max_new_tokens=6)
        expected = engine.with_config(selection="all").generate(PROMPTS[0], max_new_tokens=6)
        assert answer.token_ids == expected.token_ids
        assert (answer.report.plain, answer.report.plain_reason) == (True, "blending was found poor on this model")
        full_reuse = engine.with_config(selection="none", prompt_cache=0).fuse(PROMPTS[0]).report
        assert not full_reuse.plain, "a rule without a share stays as it was chosen"
    assert "every prompt is prefilled in full from now on" in caplog.text


@pytest.mark.usefixtures("at_once")
def test_model_on_which_blending_is_exact_keeps_its_ratio(caplog: pytest.LogCaptureFixture) -> None:
    with engine_of(shallow_model()) as engine, caplog.at_level(logging.WARNING):
        found = tried(engine)
        assert found is not None
        assert (found.least_ratio, found.changed) == (0, 0)
        assert found.divergence < 1e-6 < found.order_divergence
        assert engine.fuse(PROMPTS[0]).report.recompute_ratio == 0.15
    assert not [one for one in caplog.records if one.name.endswith("blending_trial")]


def moved(*values: tuple[float, float]) -> list[Moved]:
    return [Moved(*one) for one in values] * 6


def test_poor_is_what_moves_answers_clearly_further_than_another_order() -> None:
    order = moved((0.05, 0.0), (0.02, 0.1))
    assert is_poor(moved((0.3, 0.2), (0.2, 0.1)), order)
    assert not is_poor(moved((0.06, 0.0), (0.015, 0.2)), order), "not clearly"
    assert not is_poor(moved((2e-4, 0.0), (3e-4, 0.0)), moved((1e-5, 0.0), (1e-5, 0.0))), "no token changes"
    assert not is_poor(moved((0.9, 0.4), (0.1, 0.3)), moved((1.0, 0.5), (1.2, 0.6))), "another order does worse"
    assert is_poor(moved((0.9, 0.8), (0.7, 0.6)), moved((2.0, 0.9), (1.5, 0.8))), "most tokens are other ones"
    assert not is_poor([Moved(0.0, 0.0)] * 11 + [Moved(4.0, 1.0)], moved((0.1, 0.0), (0.0, 0.1))), "one prompt"
    assert is_near(moved((0.03, 0.3), (0.02, 0.1)), order)
    assert not is_near(moved((0.3, 0.2), (0.02, 0.1)), order)
    assert not is_near(moved((0.9, 0.8), (0.7, 0.6)), moved((2.0, 0.9), (1.5, 0.8)))


def test_divergence_and_changed_tokens_are_those_of_the_first_tokens() -> None:
    full = torch.tensor([[0.7, 0.3], [0.6, 0.4]]).log()
    other = torch.tensor([[0.7, 0.3], [0.4, 0.6]]).log()
    found = Moved.between(full, other)
    assert found.changed == 0.5
    assert found.divergence == pytest.approx((0.6 * torch.tensor(1.5).log() + 0.4 * torch.tensor(2 / 3).log()) / 2)


# Kept --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("at_once")
def test_result_is_kept_with_the_store_and_holds_before_the_next_first_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(store=tmp_path) as engine:
        found = tried(engine)
    assert found is not None
    (path,) = (tmp_path / "trials").iterdir()
    assert all(isinstance(value, (int, float)) for value in json.loads(path.read_text()).values()), "no text"
    monkeypatch.setattr(blending_trial, "try_blending", lambda *given: pytest.fail("it is done once"))
    with caplog.at_level(logging.WARNING), engine_of(store=tmp_path) as engine:
        assert "blending is poor" in caplog.text
        assert engine.fuse(PROMPTS[0]).report.recompute_ratio == found.least_ratio
        assert tried(engine) == found
    with engine_of(store=tmp_path, try_blending=False) as engine:
        assert engine.fuse(PROMPTS[0]).report.recompute_ratio == 0.15
    with engine_of(tiny.model(seed=1), store=tmp_path) as engine:
        assert engine.verifications.trial.result is None, "another model"
    path.write_text("{}")
    assert kept_result(tmp_path, path.stem) is None, "damaged"


@pytest.mark.usefixtures("at_once")
def test_nothing_is_written_into_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    with contextlib.closing(DiskStore(tmp_path)) as store, engine_of(store=store) as engine:
        store.traits = replace(store.traits, read_only=True)
        assert tried(engine) is not None
    assert not (tmp_path / "trials").exists()


# When it is tried --------------------------------------------------------------------------------


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    "options",
    [{"try_blending": False}, {"recompute_ratio": 0.15}, {"selection": "none"}, {"selection": "all"}],
    ids=str,
)
def test_nothing_is_tried_where_it_is_off_or_the_user_has_chosen(options: dict[str, Any]) -> None:
    with engine_of(**options) as engine:
        assert tried(engine) is None
        assert not engine.verifications.trial._asked, "nothing is remembered for it"


@pytest.mark.usefixtures("at_once")
def test_few_chunks_and_chunks_that_are_not_stored_say_nothing() -> None:
    with engine_of() as engine:
        for _ in range(9):
            engine.generate(PROMPTS[0], max_new_tokens=2)
        engine.verifications.trial.wait()
        assert engine.verifications.trial.result is None
    with engine_of() as engine:
        for key, _ in list(engine.store.infos("")):
            engine.store.delete(key)
        unstored = engine.with_config(write_back="off", prompt_cache=0)  # so each is blended again
        assert tried(unstored) is None
        engine.warm(CHUNKS, progress=False)
        assert tried(unstored) is not None, "it is tried once they are"


def test_nothing_is_tried_before_the_model_has_been_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(blending_trial, "_wait_for_quiet", lambda *given: None)
    monkeypatch.setattr(blending_trial, "QUIET_SECONDS", 10.0)
    with engine_of() as engine:
        clock = Clock()
        monkeypatch.setattr(engine.turns.scheduler, "_clock", clock)
        ask(engine)
        trial = engine.verifications.trial
        for seconds in (0.0, 4.0, 5.0):
            clock.advance(seconds)
            waits.append(trial.step() or 0.0)
        assert waits == [10.0, 6.0, 1.0]
        assert trial.result is None
        clock.advance(1.0)
        assert trial.step() == 0.0
        assert trial.result is not None
        assert trial.step() is None


def test_idle_seconds_are_those_since_the_model_was_left() -> None:
    scheduler = Scheduler(clock := Clock())
    clock.advance(3.0)
    with scheduler:
        clock.advance(2.0)
        assert idle_seconds(scheduler) == 0.0
    clock.advance(4.0)
    assert idle_seconds(scheduler) == 4.0


# Whom it must not disturb ------------------------------------------------------------------------


def test_requests_go_before_the_rest_of_a_trial_and_are_answered_alike(begun: threading.Event) -> None:
    with engine_of(shallow_model()) as engine:
        expected = [engine.generate(prompt, max_new_tokens=2).token_ids for prompt in PROMPTS]
        assert begun.wait(20)
        again = [engine.generate(prompt, max_new_tokens=2).token_ids for prompt in PROMPTS]
        assert again == expected
        engine.verifications.trial.wait()
        found = engine.verifications.trial.result
        assert found is not None
        assert found.divergence < 1e-6, "requests in between change nothing"


def test_closing_gives_up_a_trial(begun: threading.Event, tmp_path: Path) -> None:
    with engine_of(store=tmp_path) as engine:
        ask(engine)
        assert begun.wait(20)
        trial = engine.verifications.trial
    assert trial.result is None
    assert not trial._asked
    assert not (tmp_path / "trials").exists()


def test_forgetting_a_chunk_gives_up_a_trial_over_it(begun: threading.Event) -> None:
    with engine_of() as engine:
        ask(engine)
        assert begun.wait(20)
        engine.forget(CHUNKS[1:2])
        engine.verifications.trial.wait()
        trial = engine.verifications.trial
        assert trial.result is None
        assert not [one for one in trial._asked if CHUNKS[1] in one.prompt.chunks], "no text of it is remembered"


@pytest.mark.usefixtures("at_once")
def test_chunks_of_tenants_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[str]] = []
    monkeypatch.setattr(blending_trial, "try_blending", lambda of, ends: asked.append({one.whose[1] for one in of}))
    with engine_of() as engine:
        other = engine.with_config(salt="another tenant")
        other.warm(CHUNKS, progress=False)
        for one, prompts in ((engine, PROMPTS[:1]), (other, PROMPTS)):
            for prompt in prompts:
                one.generate(prompt, max_new_tokens=2)
        engine.verifications.trial.wait()
    assert asked == [{"another tenant"}]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError(), RuntimeError("bad luck")], ids=repr)
def test_trial_that_fails_is_not_tried_again_and_answers_go_on(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*given: Any) -> Any:
        raise error

    with engine_of() as engine:
        monkeypatch.setattr(blending_trial, "try_blending", fails)
        assert tried(engine) is None
        assert tried(engine) is None
        assert engine.generate(PROMPTS[0], max_new_tokens=2).token_ids
    assert ("trying blending failed" in caplog.text) == (str(error) == "bad luck")
    assert caplog.text.count("Traceback") <= 1


def test_engine_that_is_dropped_is_not_kept_by_what_waits_for_quiet() -> None:
    engine = engine_of()
    ask(engine)
    trial, thread = weakref.ref(engine.verifications.trial), engine.verifications.trial._thread
    assert thread is not None
    assert thread.is_alive()
    del engine
    gc.collect()
    assert trial() is None
    thread.join(20)
    assert not thread.is_alive()


PROGRAM = f"""
from transformers.utils.logging import disable_progress_bar
from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.engine import blending_trial
disable_progress_bar()
blending_trial.QUIET_SECONDS = {{quiet}}
engine = BlendEngine.from_pretrained({str(MODEL_PATH)!r}, config=BlendConfig(min_tokens=0, write_back="inline"))
words = "one two three four five six seven eight nine ten".split()
chunks = [f"The {{{{word}}}} of the keepers has its own lamp and its own oak." for word in words]
for _ in range(2):
    for at in (0, 3, 6):
        engine.generate(Prompt("Read:", chunks[at : at + 4], "Who?"), max_new_tokens=2)
trial = engine.verifications.trial
assert trial._thread is not None
print("ends", flush=True)
"""


@pytest.mark.parametrize("quiet", [0.0, 3600.0], ids=["under way", "waiting"])
def test_program_that_ends_does_not_wait_for_a_trial(quiet: float, tmp_path: Path) -> None:
    ended = run_program(["-c", PROGRAM.format(quiet=quiet)], tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "ends\n"), ended.stderr
    assert ended.stderr == ""


# The prompts -------------------------------------------------------------------------------------


def test_prompts_that_are_made_ask_what_was_asked_over_chunks_in_another_order() -> None:
    between = ("\n", "\nuser: go on\n", "\n")
    chat = Prompt("Read this:", CHUNKS[:4], "What is said?", between)
    made = list(made_prompts([*PROMPTS, chat], 12))
    assert len(made) == 12
    for prompt in made:
        (asked,) = [one for one in (*PROMPTS, chat) if one.suffix == prompt.suffix]
        assert set(asked.chunks) & set(prompt.chunks), "one of its own is among them"
        assert len(set(prompt.chunks)) == 4
        other = another_order(prompt)
        assert other.chunks != prompt.chunks
        assert sorted(other.chunks) == sorted(prompt.chunks)
        assert prompt.between == (None if asked.between is None else ("\n", "\n", "\n"))
    assert len({prompt.chunks for prompt in made}) == 12
    long = Prompt("", [*CHUNKS, *CHUNKS], "All?")
    assert {len(prompt.chunks) for prompt in made_prompts([long], 3)} == {6}
    one = [Prompt("", [chunk], "One?") for chunk in CHUNKS]
    assert {len(prompt.chunks) for prompt in made_prompts(one, 3)} == {2}


def test_ratio_rises_to_full_prefill_at_last() -> None:
    steps = [0.15]
    while steps[-1] < 1:
        steps.append(next_ratio(steps[-1]))
    assert steps == [0.15, 0.225, 0.3375, 0.5063, 0.7594, 1.0]
