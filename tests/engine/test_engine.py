"""The engine as a whole: the user's model, reports, warming, and ends of life."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation import LogitsProcessor

from cacheblend_rag import BlendEngine
from cacheblend_rag.errors import CacheBlendError, ConfigError, ModelLoadError
from cacheblend_rag.models.modules import cache_argument
from tests import tiny
from tests.probes import CHUNKS, PROMPT, Broken, Hooked, engine_of, record_files
from tests.waiting import until

# The user's model ---------------------------------------------------------------------------


def picture(model: Any) -> dict[str, Any]:
    """Everything of a model that a careless guest could leave changed."""
    seen: dict[str, Any] = {"config": model.config.to_dict(), "attention": model.config._attn_implementation}
    seen["generation"] = model.generation_config.to_dict()
    for name, module in model.named_modules():
        seen[name, "training"] = module.training
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules"):
                value = {key: id(item) for key, item in value.items()}
            elif attribute.endswith("hooks") or attribute.endswith("kwargs"):
                value = dict(value) if hasattr(value, "items") else value
            elif attribute in ("config", "generation_config"):
                value = id(value)
            seen[name, attribute] = repr(value)
        seen[name, "class"] = (type(module), type(module).forward)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        seen[name, "tensor"] = (tensor._version, tensor.requires_grad, tensor.grad is None)
        seen[name, "sum"] = tensor.double().sum().item()
    return seen


@pytest.mark.parametrize(
    ("family", "attention", "training"),
    [("llama", "sdpa", True), ("gpt_oss", "eager", True), ("qwen3_vl", "sdpa", False)],
)
def test_nothing_is_left_behind_on_the_model(family: str, attention: str, training: bool) -> None:
    model = tiny.model(family)
    model.set_attn_implementation(attention)
    model.train(training)
    before = picture(model)
    grad = torch.is_grad_enabled()
    store = Hooked()
    with engine_of(model, store=store, recompute_ratio=0.2) as engine:
        assert picture(model) == before
        engine.warm(CHUNKS)
        engine.fuse(PROMPT)
        engine.generate(PROMPT, max_new_tokens=3)
        engine.generate("plain", max_new_tokens=3, temperature=1.0, seed=1)
        list(engine.stream(PROMPT, max_new_tokens=3))
        assert picture(model) == before
        for prompt in (PROMPT, "plain"):
            with pytest.raises(ZeroDivisionError):
                engine.generate(prompt, max_new_tokens=3, logits_processor=[Broken()])
            assert picture(model) == before

        def fail(key: str, layer: int) -> None:
            if layer == 2:
                raise ZeroDivisionError("a store of the user's failed")

        store.reading = fail
        with pytest.raises(ZeroDivisionError):
            engine.fuse(PROMPT)
    assert picture(model) == before
    assert torch.is_grad_enabled() == grad


# Made from what -----------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["no such/model", "empty"])
def test_unloadable_model_is_an_error_of_ours(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match="could not be loaded"):
        BlendEngine.from_pretrained(tmp_path / what)


# Reports ------------------------------------------------------------------------------------


def test_the_report_counts_what_happened() -> None:
    with engine_of(recompute_ratio=0.25, write_back="off") as engine:
        engine.warm([CHUNKS[0], CHUNKS[2]])
        answer = engine.generate(PROMPT, max_new_tokens=5)
        fused = engine.fuse(PROMPT)
        split = engine.tokenize(PROMPT)
    report = answer.report
    lengths = list(map(len, split.chunks))
    assert list(report.input_ids) == fused.input_ids
    assert report.prompt_tokens == len(fused.input_ids)
    assert report.prefix_tokens == len(split.prefix)
    assert report.chunk_tokens == sum(lengths)
    assert report.suffix_tokens == len(split.suffix)
    assert (report.hits, report.misses, report.lost, report.plain) == (2, 1, 0, False)
    assert report.reused_tokens == lengths[0] + lengths[2]
    allowed = int(0.25 * report.reused_tokens)
    assert report.recomputed_tokens == (report.reused_tokens, allowed, allowed, allowed)
    always = report.prompt_tokens - lengths[0] - lengths[2]
    assert report.computed_tokens == tuple(always + count for count in report.recomputed_tokens)
    assert fused.report.computed_tokens == tuple(map(len, fused.recomputed))
    seconds = report.seconds
    parts = (seconds.split, seconds.look_up, seconds.load, seconds.fuse, seconds.first_token)
    assert all(part > 0 for part in parts)
    assert report.ttft == pytest.approx(sum(parts))
    assert (report.generated_tokens, report.finish_reason) == (5, "length")


def test_decoding_from_a_fused_cache_by_hand_goes_on_where_the_prompt_ends() -> None:
    model = tiny.model()
    with engine_of(model, recompute_ratio=0.2) as engine:
        engine.warm(CHUNKS)
        engine.fuse(PROMPT)
        expected = engine.generate(PROMPT, max_new_tokens=6).token_ids
        fused = engine.fuse(PROMPT)
    assert fused.cache.get_seq_length() == len(fused.input_ids)
    token, made = int(fused.logits.argmax()), []
    with torch.no_grad():
        for _ in range(6):
            made.append(token)
            token = int(model(torch.tensor([[token]]), **{cache_argument(model): fused.cache}).logits[0, -1].argmax())
    assert made == expected


# Warming and forgetting ---------------------------------------------------------------------


def test_forget_erases_what_is_named_and_nothing_else(tmp_path: Path) -> None:
    with engine_of(store=tmp_path) as engine:
        engine.warm(CHUNKS)
        assert engine.forget([CHUNKS[1], "never stored", CHUNKS[1]]) == 1
        assert len(record_files(tmp_path)) == 2
        report = engine.with_config(write_back="off").fuse(PROMPT).report
        assert (report.hits, report.misses) == (2, 1)


def test_forget_lets_nothing_be_stored_that_was_about_to_be() -> None:
    with engine_of(write_back="background") as engine:
        engine.generate(PROMPT, max_new_tokens=2)
        assert engine.forget(CHUNKS) <= 3
        engine.flush()
        assert engine.forget(CHUNKS) == 0
        assert engine.with_config(write_back="off").fuse(PROMPT).report.hits == 0


# Ends ---------------------------------------------------------------------------------------


def test_close_stores_what_waits_and_twice_is_harmless(tmp_path: Path) -> None:
    engine = engine_of(store=tmp_path, write_back="background")
    engine.generate(PROMPT, max_new_tokens=2)
    engine.close()
    assert len(record_files(tmp_path)) == 4
    engine.close()
    engine.flush()


def test_closed_engine_refuses_and_leaves_the_store_alone(tmp_path: Path) -> None:
    engine = engine_of(store=tmp_path)
    engine.warm(CHUNKS)
    engine.close()
    calls = [
        lambda: engine.generate(PROMPT), lambda: engine.fuse(PROMPT), lambda: list(engine.stream(PROMPT)),
        lambda: engine.generate_batch([PROMPT]), lambda: engine.warm(CHUNKS), lambda: engine.warm(["new"]),
        lambda: engine.forget(CHUNKS),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(CacheBlendError, match="closed"):
            call()
    assert len(record_files(tmp_path)) == 3


def test_closing_waits_for_an_answer_under_way(tmp_path: Path) -> None:
    events, closing = list[str](), threading.Event()

    class Note(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if len(events) == 5:
                assert closing.wait(60)
            events.append("token")
            return scores

    engine = engine_of(store=tmp_path)
    close = engine.store.close
    engine.store.close = lambda: (events.append("closed"), close())[1]  # type: ignore[method-assign]
    stream = engine.stream(PROMPT, max_new_tokens=10, logits_processor=[Note()])
    next(stream)
    closing.set()
    engine.close()
    assert len(list(stream)) >= 1
    assert stream.result is not None
    assert stream.result.report.generated_tokens == 10
    assert len(record_files(tmp_path)) == 4, "inline storing happened before the store was closed"
    assert events == ["token"] * 10 + ["closed"]


def test_views_share_model_and_store_and_end_with_their_engine() -> None:
    engine = engine_of(recompute_ratio=0.2)
    view = engine.with_config(recompute_ratio=1.0)
    view.warm(CHUNKS)
    assert engine.fuse(PROMPT).report.recomputed_tokens[2] < view.fuse(PROMPT).report.recomputed_tokens[2]
    view.close()
    assert engine.fuse(PROMPT).report.hits == 3
    with pytest.raises(ConfigError, match="recompute_ratio"):
        engine.with_config(recompute_ratio=3)
    with pytest.raises(ConfigError, match="recompute_ratio"):
        engine.with_config(recompute_share=0.1)
    engine.close()
    with pytest.raises(ConfigError, match="closed"):
        view.fuse(PROMPT)


def test_dropped_engine_frees_its_model_and_ends_its_thread() -> None:
    gc.collect()
    before = set(threading.enumerate())
    engine = engine_of(write_back="background")
    store, model = engine.store, weakref.ref(engine.model)
    engine.generate(PROMPT, max_new_tokens=2)
    engine.flush()
    del engine
    until(lambda: (gc.collect(), model() is None and set(threading.enumerate()) <= before)[1])
    assert store.volume() > 0
