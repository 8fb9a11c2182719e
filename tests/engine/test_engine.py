"""The engine as a whole: the user's model, reports, warming, and ends of life."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation import LogitsProcessor

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.engine.decode import DecodeOptions, decode
from cacheblend_rag.errors import CacheBlendError, ConfigError, ModelLoadError, PromptError, UnsupportedModelError
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.modules import cache_argument
from cacheblend_rag.store import DiskStore, MemoryStore
from docs.benchmarks.scripts.common import read_plainly
from tests import tiny
from tests.probes import Hooked, engine_of, key_of
from tests.tolerance import assert_logits_close
from tests.waiting import until

CHUNKS = [tiny.text(23, 1), tiny.text(31, 2), tiny.text(17, 3)]
PROMPT = Prompt("Read this:", CHUNKS, "What fell in the end?")


def record_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and "cache.db" not in path.name)


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


class Broken(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("a processor of the user's failed")


def test_modules_that_train_beside_frozen_ones_stay_so_through_decoding() -> None:
    model = tiny.model()
    with engine_of(model) as engine:
        fused = engine.fuse(PROMPT)
        for module in (model, model.model.layers[1].mlp):
            module.training = True
        before = picture(model)
        options = DecodeOptions(max_new_tokens=2)
        decode(
            model, engine.tokenizer, input_ids=fused.input_ids, cache=fused.cache, logits=fused.logits, options=options
        )  # fmt: skip
        assert picture(model) == before


@pytest.mark.pairwise
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", [*tiny.FAMILIES, "gemma3", "qwen3_vl"])
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


def test_results_carry_no_gradient() -> None:
    with engine_of() as engine:
        engine.warm(CHUNKS)
        fused = engine.fuse(PROMPT)
        assert not fused.logits.requires_grad
        assert not any(layer.keys.requires_grad for layer in fused.cache.layers)
        assert not engine.fuse("plain").logits.requires_grad


def test_training_mode_changes_no_result() -> None:
    model = tiny.model(attention_dropout=0.5)
    with engine_of(model, recompute_ratio=0.3) as engine:
        engine.warm(CHUNKS)
        calm = engine.generate(PROMPT, max_new_tokens=12).token_ids
        plain = engine.generate("What fell?", max_new_tokens=12).token_ids
        model.train()
        assert engine.generate(PROMPT, max_new_tokens=12).token_ids == calm
        assert engine.generate("What fell?", max_new_tokens=12).token_ids == plain


def test_engine_still_works_after_an_error_of_a_processor() -> None:
    with engine_of() as engine:
        with pytest.raises(ZeroDivisionError):
            engine.generate(PROMPT, logits_processor=[Broken()])
        engine.generate(PROMPT, max_new_tokens=2)
        assert engine.generate(PROMPT, max_new_tokens=2).report.hits == 3


# Made from what -----------------------------------------------------------------------------


def test_unknown_family_is_named_with_the_known_ones() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    other = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(UnsupportedModelError, match=r"gpt2.*llama.*mistral.*qwen2.*qwen3"):
        ModelAdapter(other)


@pytest.mark.parametrize("what", ["no such/model", "empty"])
def test_unloadable_model_is_an_error_of_ours(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match="could not be loaded"):
        BlendEngine.from_pretrained(tmp_path / what)


@pytest.mark.parametrize(("name", "value"), [("dtype", "int3"), ("device", "abacus")])
def test_bad_load_options_are_named(name: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=name):
        BlendEngine.from_pretrained(tmp_path, **{name: value})  # type: ignore[arg-type]


def test_from_pretrained_takes_a_dtype(tmp_path: Path) -> None:
    tiny.model().save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    config = BlendConfig(min_tokens=0, write_back="inline")
    with BlendEngine.from_pretrained(str(tmp_path), config=config, dtype="bfloat16", device="cpu") as engine:
        engine.warm(CHUNKS)
        fused = engine.fuse(PROMPT)
        assert fused.report.hits == 3
        assert fused.cache.layers[0].keys.dtype == torch.bfloat16
        assert engine.generate(PROMPT, max_new_tokens=2).token_ids


@pytest.mark.parametrize("prompt", [None, 5, ["a", "b"], b"bytes"])
def test_object_that_is_no_prompt_is_refused(prompt: Any) -> None:
    with engine_of() as engine:
        for call in (engine.fuse, engine.generate):
            with pytest.raises(PromptError, match="give a Prompt or a text"):
                call(prompt)
        for call in (engine.warm, engine.forget, engine.chunks.estimate_bytes):
            with pytest.raises(PromptError, match="list of texts"):
                call("one text")


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


def test_reported_seconds_are_those_that_passed() -> None:
    store = Hooked()
    with engine_of(store=store) as engine, read_plainly():
        engine.warm(CHUNKS)
        store.reading = lambda key, layer: time.sleep(0.01)  # time that is to be found in the report
        store.opened = lambda key: time.sleep(0.02)
        started = time.perf_counter()
        answer = engine.generate(PROMPT, max_new_tokens=1)
        passed = time.perf_counter() - started
    assert answer.report.seconds.load >= 3 * 4 * 0.01
    assert answer.report.seconds.look_up >= 3 * 0.02
    assert 0.18 <= answer.report.ttft <= passed


def test_time_spent_on_a_lost_record_is_part_of_ttft() -> None:
    store = Hooked()
    with engine_of(store=store, write_back="off") as engine, read_plainly():
        engine.warm(CHUNKS)

        def fail(key: str, layer: int) -> None:
            if layer == 3:
                store.reading = lambda key, layer: None
                time.sleep(0.05)  # time that is to be found in the report
                raise OSError("gone")

        store.reading = fail
        report = engine.generate(PROMPT, max_new_tokens=1).report
    assert report.lost == 1
    assert report.ttft >= 0.05


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


@pytest.mark.parametrize("on_disk", [True, False])
def test_warm_report(on_disk: bool, tmp_path: Path) -> None:
    with engine_of(store=tmp_path if on_disk else None) as engine:
        first = engine.warm([CHUNKS[0], CHUNKS[1], CHUNKS[0]], progress=False)
        assert (first.computed, first.present, first.skipped) == (2, 1, 0)
        assert first.tokens == sum(map(len, engine.tokenize(PROMPT).chunks[:2]))
        assert first.bytes == engine.chunks.estimate_bytes(CHUNKS[:2])
        assert first.seconds > 0
        second = engine.warm(CHUNKS, progress=False)
        assert (second.computed, second.present, second.skipped) == (1, 2, 0)
        none = engine.warm(iter([]), progress=False)
        assert (none.computed, none.present, none.tokens, none.bytes) == (0, 0, 0, 0)


@pytest.mark.parametrize("tokens", [1, 60, 900])
def test_estimated_bytes_are_those_of_the_files(tokens: int, tmp_path: Path) -> None:
    texts = [tiny.text(tokens, seed) for seed in range(3)]
    with engine_of(store=tmp_path) as engine:
        estimate = engine.chunks.estimate_bytes([*texts, texts[0]])
        assert record_files(tmp_path) == []
        engine.warm(texts, progress=False)
    assert sum(path.stat().st_size for path in record_files(tmp_path)) == estimate


@pytest.mark.parametrize("on_disk", [True, False])
def test_warming_stops_before_it_would_evict_its_own_work(on_disk: bool, tmp_path: Path) -> None:
    texts = [tiny.text(300, seed) for seed in range(12)]
    with engine_of() as sizer:
        size = sizer.chunks.estimate_bytes(texts[:1])
    limit = 6 * size
    with engine_of(store=tmp_path if on_disk else None, size_limit=limit, codec="raw") as engine:
        report = engine.warm(texts, progress=False)
        assert 3 <= report.computed <= 6
        assert report.skipped == 12 - report.computed
        present = [engine.store.contains(key_of(engine, text)) for text in texts]
        assert present == [True] * report.computed + [False] * report.skipped
        assert engine.store.volume() <= limit
        again = engine.warm(texts, progress=False)
        assert (again.computed, again.present, again.skipped) == (0, report.computed, report.skipped)


def test_warming_shows_progress_only_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with engine_of() as engine:
        engine.warm(CHUNKS, progress=False)
        assert capsys.readouterr().err == ""
        engine.warm(["another"], progress=True)
        assert "1/1" in capsys.readouterr().err
        engine.warm(["a third"])
        assert capsys.readouterr().err == "", "standard error is no terminal here"


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


def test_forget_and_warm_behind_a_prefix() -> None:
    with engine_of(condition="prefix", write_back="off") as engine:
        engine.warm(CHUNKS, prefix="Read this:")
        assert engine.fuse(PROMPT).report.hits == 3
        assert engine.forget(CHUNKS) == 0
        assert engine.forget(CHUNKS, prefix="Another:") == 0
        assert engine.forget(CHUNKS, prefix="Read this:") == 3


# Ends ---------------------------------------------------------------------------------------


def test_engine_reports_storing_time_apart() -> None:
    with engine_of(write_back="background") as engine:
        report = engine.generate(PROMPT, max_new_tokens=2).report
        engine.flush()
        stored = engine.turns.write_back.seconds
        assert stored > 0
        assert report.misses == len(PROMPT.chunks)
        engine.generate(PROMPT, max_new_tokens=2)
        engine.flush()
        assert engine.turns.write_back.seconds == stored, "nothing was missing"


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


def test_store_the_user_made_stays_open() -> None:
    closed: list[bool] = []

    class Store(MemoryStore):
        def close(self) -> None:
            closed.append(True)

    store = Store()
    with engine_of(store=store) as engine:
        engine.warm(CHUNKS)
    assert closed == []
    with engine_of(store=store) as engine:
        assert engine.fuse(PROMPT).report.hits == 3


def test_closing_waits_for_an_answer_under_way(tmp_path: Path) -> None:
    events, closing = list[str](), threading.Event()

    class Note(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if len(events) == 5:
                assert closing.wait(20)
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


def test_view_outlives_the_name_of_its_engine() -> None:
    view = engine_of(write_back="background").with_config(recompute_ratio=0.5)
    gc.collect()
    view.generate(PROMPT, max_new_tokens=2)
    view.flush()
    assert view.fuse(PROMPT).report.hits == 3


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


def test_threads_asking_at_once_get_the_answers_they_would_get_alone() -> None:
    prompts = [Prompt("Read this:", [CHUNKS[n % 3], CHUNKS[(n + 1) % 3]], f"What fell {n}?") for n in range(4)]
    answers: dict[int, list[int]] = {}
    with engine_of(recompute_ratio=0.2) as engine:
        for prompt in prompts:
            engine.fuse(prompt)
        expected = [answer.token_ids for answer in engine.generate_batch(prompts, max_new_tokens=8)]

        def ask(number: int) -> None:
            answers[number] = engine.generate(prompts[number], max_new_tokens=8).token_ids

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert [answers[number] for number in range(4)] == expected


def test_two_engines_share_a_folder(tmp_path: Path) -> None:
    with engine_of(store=tmp_path) as one, engine_of(store=tmp_path) as two:
        one.warm(CHUNKS[:2])
        two.warm(CHUNKS[1:])
        assert one.fuse(PROMPT).report.hits == two.fuse(PROMPT).report.hits == 3


def test_evicting_store_only_costs_hits(tmp_path: Path) -> None:
    """Far more chunks than fit: every answer is that of an engine whose store is large."""
    prompts = [Prompt("Read:", [tiny.text(60, 3 * n), tiny.text(60, 3 * n + 1)], "Why?") for n in range(5)]
    with engine_of() as sizer:
        size = sizer.chunks.estimate_bytes(prompts[0].chunks)
    store, hits = DiskStore(tmp_path, 2 * size + 70_000), []
    with engine_of(store=store, recompute_ratio=0.2) as small, engine_of(recompute_ratio=0.2) as large:
        for prompt in prompts:
            large.warm(prompt.chunks)
        for prompt in [*prompts, *reversed(prompts)]:
            fused = small.fuse(prompt)
            assert store.volume() <= store.traits.size_limit
            hits.append(fused.report.hits)
            if fused.report.hits == 2:
                expected = large.fuse(prompt)  # misses its prefix the first time, hits it the second
                assert_logits_close(fused.logits, expected.logits, small.model, len(fused.input_ids))
    assert hits[:5] == [0] * 5, "none was asked before"
    assert hits[5] == 2, "what was stored last is still there"
    assert hits[-1] == 0, "what was stored first is not"
    store.close()
