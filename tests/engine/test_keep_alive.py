"""Memory of a model that nobody uses is given back, and nothing else of it changes."""

from __future__ import annotations

import errno
import gc
import logging
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import cacheblend_rag.engine.keep_alive as keep_alive
from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.config import read_keep_alive
from cacheblend_rag.engine.scheduler import Scheduler, held_if_idle, is_wanted
from cacheblend_rag.errors import ConfigError, GenerationError
from cacheblend_rag.models.cpu import weight_prepacking
from cacheblend_rag.models.weight_file import WeightFile, why_kept
from tests import gguf_files, tiny
from tests.probes import CHUNKS, PROMPT, record_files
from tests.waiting import until

CONFIG = BlendConfig(min_tokens=0, write_back="inline", prepack_weights=False)
FOR_EVER = 10_000.0
OTHER = Prompt("Read this:", [CHUNKS[1], CHUNKS[0]], "Who saw it?")


def saved(folder: Path, model: Any = None) -> Path:
    """A tiny model in a folder."""
    (tiny.model() if model is None else model).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(keep_alive, "default_data_path", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def engine(folder: Path) -> Iterator[BlendEngine]:
    with BlendEngine.from_pretrained(folder, config=CONFIG, keep_alive=FOR_EVER) as made:
        yield made


def put_away(engine: BlendEngine) -> None:
    """As the watcher does once it is time."""
    engine.keep_alive.seconds = 0.0
    assert engine.keep_alive.look() >= 0.0
    engine.keep_alive.seconds = FOR_EVER
    assert engine.keep_alive.away


def storages(model: Any) -> list[StorageWeakRef]:
    """The memory that weights lie in, without keeping it alive."""
    return [StorageWeakRef(weight.untyped_storage()) for weight in model.parameters()]


def answers(engine: BlendEngine) -> list[Any]:
    """What an engine says, and how it was made."""
    found = [engine.generate(prompt, max_new_tokens=6) for prompt in (PROMPT, OTHER, "What fell?")]
    return [(one.text, one.report.hits, one.report.misses, one.report.resumed_tokens) for one in found]


KINDS: dict[str, Any] = {
    "float32": lambda: tiny.model(),
    "bfloat16": lambda: tiny.model().to(torch.bfloat16),
    "tied": lambda: tiny.model(tie_word_embeddings=True),
    "plain": lambda: tiny.plain_model("mamba"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_answers_and_records_are_those_of_a_model_that_stayed(kind: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "model", KINDS[kind]())
    config = BlendConfig(min_tokens=0, write_back="inline")
    twin = BlendEngine.from_pretrained(model, config=config, store=tmp_path / "one")
    engine = BlendEngine.from_pretrained(model, config=config, store=tmp_path / "two", keep_alive=FOR_EVER)
    with twin, engine:
        objects, values = list(engine.model.parameters()), [one.clone() for one in engine.model.parameters()]
        for _ in range(3):
            assert answers(engine) == answers(twin)
            assert engine.fuse(PROMPT).logits.equal(twin.fuse(PROMPT).logits)
            before = storages(engine.model)
            put_away(engine)
            gc.collect()
            assert all(one.expired() for one in before), "memory is free"
            assert engine.fingerprint == twin.fingerprint
        assert answers(engine) == answers(twin)
        assert not engine.keep_alive.away
        assert all(one is other for one, other in zip(engine.model.parameters(), objects, strict=True))
        assert all(one.equal(value) for one, value in zip(objects, values, strict=True))
        files = [sorted(path.read_bytes() for path in record_files(tmp_path / name)) for name in ("one", "two")]
        assert files[0] == files[1]
        assert bool(files[0]) == (kind != "plain")


def test_gguf_file_is_put_away_too(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "tiny.gguf", tiny.model())
    with BlendEngine.from_pretrained(path, config=CONFIG, keep_converted=False, keep_alive=FOR_EVER) as engine:
        expected = answers(engine)
        path.unlink()  # its file is not asked again
        put_away(engine)
        assert engine.chunks
        assert [one[0] for one in answers(engine)] == [one[0] for one in expected]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters_are_put_away_with_their_model(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    made = peft.get_peft_model(tiny.model(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    made.base_model.model.config._name_or_path = made.peft_config["default"].base_model_name_or_path = str(folder)
    for name, weight in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    made.save_pretrained(tmp_path / "adapter")
    with BlendEngine.from_pretrained(tmp_path / "adapter", config=CONFIG, keep_alive=FOR_EVER) as engine:
        identity = engine.fingerprint
        answers(engine)
        expected, logits = answers(engine), engine.fuse(PROMPT).logits
        put_away(engine)
        assert engine.fingerprint == identity
        assert answers(engine) == expected
        assert engine.fuse(PROMPT).logits.equal(logits)


def test_model_itself_can_be_called_while_it_is_away(engine: BlendEngine) -> None:
    inputs = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = engine.model(inputs).logits
        seen = list[Any]()
        handle = engine.model.lm_head.register_forward_hook(lambda *given: seen.append(given[0]))
        put_away(engine)
        assert engine.model(inputs).logits.equal(expected)
        assert seen == [engine.model.lm_head]
        handle.remove()


def test_weights_that_changed_are_kept_as_they_are(engine: BlendEngine) -> None:
    put_away(engine)
    weight = engine.model.lm_head.weight
    with torch.no_grad():
        weight.mul_(2.0)
    doubled = weight.clone()
    engine.generate("What fell?", max_new_tokens=1)
    put_away(engine)
    assert weight.equal(doubled)
    before = weight.data
    weight.data = doubled + 1.0
    engine.generate("What fell?", max_new_tokens=1)
    put_away(engine)
    assert weight.equal(doubled + 1.0)
    assert before.equal(doubled), "a file that others still read is not written again"


def file_of(model: torch.nn.Module, folder: Path) -> WeightFile:
    """A file that the weights lie in."""
    file = WeightFile(model, torch.device("cpu"), folder)
    assert file.put_away()
    return file


@pytest.mark.parametrize("asked", range(1, 8))
def test_weights_that_are_changed_and_changed_back_are_those_of_now(asked: int, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    file, value = file_of(model, tmp_path), model.weight.detach().clone()
    model.weight.data = value + 1  # as merging an adapter does
    times = iter(range(1, 100))
    file.put_away(lambda: next(times) >= asked)  # somebody wants the model, earlier or later
    model.weight.data = value.clone()
    assert file.put_away()
    assert model.weight.equal(value)


@pytest.mark.parametrize("asked", range(1, 6))
def test_training_meanwhile_is_not_lost(asked: int, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    value, times = model.weight.detach().clone(), list[int]()
    file = WeightFile(model, torch.device("cpu"), tmp_path)

    @torch.no_grad()
    def train() -> bool:
        times.append(1)
        if len(times) == asked:
            model.weight.add_(1.0)
        return False

    file.put_away(train)
    with torch.no_grad():
        model.weight.add_(0.0 if len(times) >= asked else 1.0)
    assert model.weight.equal(value + 1)


def test_file_is_not_written_again_and_again_while_weights_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, written = torch.nn.Linear(4, 4), list[Any]()
    file, inner = WeightFile(model, torch.device("cpu"), tmp_path), tempfile.TemporaryFile
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **given: written.append(1) or inner(**given))

    @torch.no_grad()
    def train() -> bool:
        model.weight.add_(1.0)
        return False

    for _ in range(5):
        assert not file.put_away(train)
        train()
    assert len(written) == 1
    assert not file.put_away()
    assert file.put_away(), "they rest"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_changes_weights_of_its_own(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    file, value = file_of(model, tmp_path), model.weight.detach().clone()
    if (child := os.fork()) == 0:
        with torch.no_grad():
            model.weight.zero_()
        os._exit(int(bool(model.weight.any())))
    assert os.waitpid(child, 0)[1] == 0
    assert model.weight.equal(value)
    assert file.put_away()
    assert model.weight.equal(value)


def test_model_that_the_disk_does_not_take_in_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    model = torch.nn.Linear(4, 4)
    file, place = WeightFile(model, torch.device("cpu"), tmp_path), model.weight.data_ptr()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space left"):
            file.put_away()
    assert model.weight.data_ptr() == place
    assert file.put_away()


def test_weights_of_other_kinds_stay_where_they_are(engine: BlendEngine) -> None:
    engine.model.sparse = torch.nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False)
    engine.model.nowhere = torch.nn.Parameter(torch.empty(3, device="meta"))
    engine.model.empty = torch.nn.Parameter(torch.empty(0, 3))
    engine.model.expanded = torch.nn.Parameter(torch.ones(2, 1).expand(2, 5))
    put_away(engine)
    assert engine.model.sparse.detach().to_dense().equal(torch.eye(3))
    assert engine.model.expanded.stride() == (1, 0)


def test_views_share_what_is_given_back(engine: BlendEngine) -> None:
    view = engine.with_config(recompute_ratio=0.5).named("other")
    put_away(engine)
    assert view.keep_alive.away
    view.generate(PROMPT, max_new_tokens=1)
    assert not engine.keep_alive.away


@pytest.mark.parametrize("use", ["request", "background", "in turn", "fuse", "warm", "stream"])
def test_each_use_of_the_model_has_it_back(use: str, engine: BlendEngine) -> None:
    put_away(engine)
    seen = list[bool]()

    def look(*_: Any) -> None:
        seen.append(engine.keep_alive.away)

    handle = engine.model.get_decoder().layers[0].register_forward_pre_hook(look)
    if use == "background":
        with engine.turns.in_background():
            look()
    elif use == "in turn":
        with engine.turns.in_turn():
            look()
    elif use == "fuse":
        engine.fuse(PROMPT)
    elif use == "warm":
        engine.warm(CHUNKS)
    elif use == "stream":
        assert "".join(engine.stream("What fell?", max_new_tokens=2))
    else:
        engine.generate(PROMPT, max_new_tokens=1)
    handle.remove()
    assert seen
    assert not any(seen)


def test_store_in_the_background_has_the_model_back(folder: Path) -> None:
    config = BlendConfig(min_tokens=0, write_back="background")
    with BlendEngine.from_pretrained(folder, config=config, keep_alive=FOR_EVER) as engine:
        engine.generate(PROMPT, max_new_tokens=1)
        engine.flush()
        put_away(engine)
        assert engine.generate(PROMPT, max_new_tokens=1).report.hits == len(CHUNKS)


# The moment ----------------------------------------------------------------------------------


def test_scheduler_is_held_only_if_nobody_has_wanted_the_model_for_so_long() -> None:
    now = [0.0]
    scheduler = Scheduler(lambda: now[0])
    with scheduler:
        now[0] = 10.0
    for now[0], expected in ((10.0, False), (14.0, False), (15.0, True), (16.0, True)):
        with held_if_idle(scheduler, 5.0) as held:
            assert held is expected, now
    with scheduler, held_if_idle(scheduler, 0.0) as held:
        assert not held
    with scheduler.background(), held_if_idle(scheduler, 0.0) as held:
        assert not held


def test_request_that_comes_while_weights_are_written_does_not_wait_for_all_of_them(engine: BlendEngine) -> None:
    written, expected = list[int](), engine.generate(PROMPT, max_new_tokens=4).text
    scheduler, results = engine.turns.scheduler, list[str]()
    asking = threading.Thread(target=lambda: results.append(engine.generate(PROMPT, max_new_tokens=4).text))

    def wanted() -> bool:
        written.append(1)
        if len(written) == 3:
            asking.start()
            until(lambda: scheduler.waiting == 1)
        return is_wanted(scheduler)

    weights = engine.keep_alive._weights
    with held_if_idle(scheduler, 0.0) as held:
        assert held
        assert not weights.put_away(wanted)
        assert len(written) <= 4
        assert not results
    asking.join()
    assert results == [expected]
    put_away(engine)
    assert engine.generate(PROMPT, max_new_tokens=4).text == expected


def test_several_requests_that_come_meanwhile_are_all_answered(engine: BlendEngine) -> None:
    expected = engine.generate(PROMPT, max_new_tokens=4).text
    scheduler, results = engine.turns.scheduler, list[str]()
    threads = [
        threading.Thread(target=lambda: results.append(engine.generate(PROMPT, max_new_tokens=4).text))
        for _ in range(4)
    ]
    with held_if_idle(scheduler, 0.0) as held:
        assert held
        assert engine.keep_alive._weights.put_away()
        for thread in threads:
            thread.start()
        until(lambda: scheduler.waiting == 4)
        assert engine.keep_alive.away
        assert not results
    for thread in threads:
        thread.join()
    assert results == [expected] * 4
    assert not engine.keep_alive.away


def test_watcher_puts_away_and_ends_with_the_engine(folder: Path) -> None:
    before = set(threading.enumerate())
    with BlendEngine.from_pretrained(folder, config=CONFIG) as engine:
        assert "keep-alive" not in {thread.name for thread in set(threading.enumerate()) - before}
        assert engine.keep_alive.seconds is None
        assert not engine.keep_alive.away
    engine = BlendEngine.from_pretrained(folder, config=CONFIG, keep_alive="0s")
    until(lambda: engine.keep_alive.away)
    expected = engine.generate("What fell?", max_new_tokens=3).text
    until(lambda: engine.keep_alive.away)
    assert engine.generate("What fell?", max_new_tokens=3).text == expected
    thread = engine.keep_alive._thread
    engine.close()
    assert thread is not None
    assert not thread.is_alive()


def test_engine_that_is_dropped_takes_its_thread_and_its_model_along(folder: Path) -> None:
    engine = BlendEngine.from_pretrained(folder, config=CONFIG, keep_alive=FOR_EVER)
    put_away(engine)
    thread, model = engine.keep_alive._thread, weakref.ref(engine.model)
    assert thread is not None
    del engine
    gc.collect()
    until(lambda: not thread.is_alive())
    gc.collect()
    assert model() is None


def test_another_engine_over_the_model_outlives_the_first(folder: Path) -> None:
    first = BlendEngine.from_pretrained(folder, config=CONFIG, keep_alive=FOR_EVER)
    expected = first.generate("What fell?", max_new_tokens=3).text
    with BlendEngine(first.model, first.tokenizer, config=CONFIG) as second:
        put_away(first)
        first.close()
        assert second.generate("What fell?", max_new_tokens=3).text == expected


def test_file_that_cannot_be_written_leaves_the_model_in_memory(
    engine: BlendEngine, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = engine.generate("What fell?", max_new_tokens=3).text
    cache.parent.mkdir(exist_ok=True)
    cache.write_text("no folder")
    engine.keep_alive.seconds = 0.0
    with caplog.at_level(logging.WARNING):
        engine.keep_alive._watch()  # ends by itself
    assert "keep_alive does nothing any more" in caplog.text
    assert not engine.keep_alive.away
    assert engine.generate("What fell?", max_new_tokens=3).text == expected


def test_watcher_says_why_torch_refuses(engine: BlendEngine, caplog: pytest.LogCaptureFixture) -> None:
    def refused(*_: Any) -> bool:
        raise NotImplementedError("no such storage")

    engine.keep_alive.seconds, engine.keep_alive._weights.put_away = 0.0, refused  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        engine.keep_alive._watch()
    assert "the model stays in memory: no such storage" in caplog.text


def test_nothing_is_left_in_the_cache(engine: BlendEngine, cache: Path) -> None:
    put_away(engine)
    assert list(cache.iterdir()) == []


def test_program_ends_at_once_while_its_model_is_kept_or_away(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from cacheblend_rag import BlendEngine, BlendConfig\n"
        "made = [BlendEngine.from_pretrained(sys.argv[1], config=BlendConfig(), keep_alive=s) "
        "for s in (0, 10000)]\n"
        "made[0].keep_alive.look(); print(made[0].keep_alive.away)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.split() == ["True"]


# Beside a device ------------------------------------------------------------------------------


def test_weights_are_copied_back_to_a_device(tmp_path: Path) -> None:
    model = tiny.model(tie_word_embeddings=True)
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    second.weight.data = first.weight.data.t()  # one memory for two objects
    model.pair = torch.nn.ModuleList([first, second])
    values = {name: one.clone() for name, one in model.named_parameters()}
    file = WeightFile(model, torch.device("cpu"), tmp_path, copied=True)
    for _ in range(2):
        before = storages(model)
        assert file.put_away()
        assert file.away
        assert all(one.expired() for one in before)
        mapped = storages(model)
        file.bring_back()
        assert not file.away
        assert {one.cdata for one in storages(model)}.isdisjoint(one.cdata for one in mapped)
        for name, one in model.named_parameters():
            assert one.equal(values[name]), name
        with torch.no_grad():
            first.weight[0, 1] = 7.0
        assert float(second.weight.detach()[1, 0]) == 7.0
        values = {name: one.clone() for name, one in model.named_parameters()}


def test_device_without_room_leaves_the_weights_away(engine: BlendEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, expected = engine.keep_alive._weights, engine.generate("What fell?", max_new_tokens=3).text
    weights._copied = True
    put_away(engine)
    with monkeypatch.context() as patched:

        def full(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("no room")

        patched.setattr(torch.Tensor, "to", full)
        with suppress(GenerationError), pytest.raises(torch.OutOfMemoryError):
            engine.generate("What fell?", max_new_tokens=3)
        assert engine.keep_alive.away
    assert engine.generate("What fell?", max_new_tokens=3).text == expected
    assert not engine.keep_alive.away


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_a_gpu_is_given_back(folder: Path) -> None:
    with BlendEngine.from_pretrained(folder, config=CONFIG, device="cuda", keep_alive=FOR_EVER) as engine:
        expected, before = answers(engine), torch.cuda.memory_allocated()
        size = sum(one.nbytes for one in engine.model.parameters())
        put_away(engine)
        assert torch.cuda.memory_allocated() <= before - size
        assert [one[0] for one in answers(engine)] == [one[0] for one in expected]


def test_prepacked_copies_go_and_come_with_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_prepacking, "_LEAST", 2**6)
    model = saved(tmp_path / "model", tiny.model().to(torch.bfloat16))
    config = BlendConfig(min_tokens=0, write_back="inline", prepack_weights=True)
    try:
        engine = BlendEngine.from_pretrained(model, config=config, keep_alive=FOR_EVER)
    except ConfigError as error:
        pytest.skip(str(error))
    with engine:
        expected = answers(engine)
        copies = weight_prepacking._by_model[engine.model]()
        assert copies is not None
        assert any(one.copy for one in copies._forwards)
        put_away(engine)
        assert not any(one.copy for one in copies._forwards)
        found = engine.generate(PROMPT, max_new_tokens=6)
        assert found.text == expected[0][0]
        assert any(one.copy for one in copies._forwards)


# The option -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        *[(None, None), (-1, None), ("-1", None), ("-1m", None), (float("inf"), None)],
        *[(10**400, None), (-(10**400), None), ("9" * 400 + "h", None)],
        *[(0, 0.0), (2.5, 2.5), ("300", 300.0), ("5m", 300.0), ("1h30m", 5400.0), ("1.5h", 5400.0)],
        *[("500ms", 0.5), ("2h45m", 9900.0), (".5m", 30.0), ("1.m", 60.0), ("+90s", 90.0), ("30m1h", 5400.0)],
        *[("1h15m30.918s", 4530.918), ("5us", 5e-6), ("5µs", 5e-6), ("5μs", 5e-6), ("7ns", 7e-9), ("-0", 0.0)],
    ],
)
def test_time_is_read_as_ollama_has_it(given: Any, seconds: float | None) -> None:
    assert read_keep_alive("keep_alive", given) == (seconds if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    "given",
    [
        *["", "soon", "m5", ".", "-", "s", ".s", "1h30", "1h 30m", "5 s", " 5m", "5m ", "5M", "10S", "1d", "5 minutes"],
        *["1e3", "nan", "inf", "--5m", "٣m", True, False, float("nan"), [5], b"5m"],
    ],
)
def test_other_times_are_refused_before_anything_is_loaded(given: Any, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^keep_alive=.*\"5m\""):
        BlendEngine.from_pretrained(folder / "not there", keep_alive=given)


def test_models_that_cannot_be_put_away_say_why() -> None:
    model = tiny.model()
    assert why_kept(model) is None
    model.lm_head.to("meta")
    assert "spread over" in str(why_kept(model))
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    assert "quantised" in str(why_kept(model))
    with pytest.raises(ConfigError, match=r"^keep_alive=5.0 .*leave it out; .* quantised"):
        keep_alive.check_keep_alive(5.0, model)
