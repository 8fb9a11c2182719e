"""What is found again, by whom, and what happens when it cannot be read after all."""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import Prompt, pipeline
from cacheblend_rag.errors import RecordError
from cacheblend_rag.report import FusedKV
from cacheblend_rag.store import DiskStore
from tests import tiny
from tests.probes import Hooked, engine_of

CHUNKS = [tiny.text(23, 1), tiny.text(31, 2), tiny.text(17, 3)]
PROMPT = Prompt("Read this:", CHUNKS, "What fell in the end?")


@pytest.fixture(autouse=True)
def even_small_records_are_prefetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_WORTH_A_THREAD", 0)


def assert_same(ours: FusedKV, theirs: FusedKV) -> None:
    assert ours.input_ids == theirs.input_ids
    assert torch.equal(ours.logits, theirs.logits)
    for mine, other in zip(ours.cache.layers, theirs.cache.layers, strict=True):
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)
    for mine, other in zip(ours.recomputed, theirs.recomputed, strict=True):
        assert torch.equal(mine, other)


def record_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and "cache.db" not in path.name)


# Hits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_warmed_in_any_order_all_hit_with_one_result(order: tuple[int, ...]) -> None:
    with engine_of(recompute_ratio=0.2) as first, engine_of(recompute_ratio=0.2) as second:
        first.warm(CHUNKS)
        second.warm([CHUNKS[n] for n in order])
        for arrangement in (order, (0, 1, 2), (2, 2, 0)):
            prompt = Prompt("Read this:", [CHUNKS[n] for n in arrangement], "What fell?")
            one, two = first.fuse(prompt), second.fuse(prompt)
            assert one.report.hits == two.report.hits == len(prompt.chunks)
            assert one.report.misses == 0
            assert_same(one, two)


def test_a_permuted_prompt_hits_what_an_earlier_answer_stored() -> None:
    with engine_of(recompute_ratio=0.2) as asked, engine_of(recompute_ratio=0.2) as warmed:
        assert asked.generate(PROMPT, max_new_tokens=4).report.misses == 3
        warmed.warm(reversed(CHUNKS))
        prompt = Prompt("Read this:", [CHUNKS[2], CHUNKS[0], CHUNKS[1]], "What fell?")
        warmed.fuse(prompt)  # stores the prefix, as the answer above did
        one, two = asked.generate(prompt, max_new_tokens=16), warmed.generate(prompt, max_new_tokens=16)
        assert one.report.hits == two.report.hits == 3
        assert one.token_ids == two.token_ids
        assert one.text == two.text


@pytest.mark.parametrize("warm", [True, False])
def test_the_same_input_gives_the_same_output(warm: bool) -> None:
    with engine_of(recompute_ratio=0.2, write_back="off") as engine:
        if warm:
            engine.warm(CHUNKS)
        first = engine.fuse(PROMPT)
        for _ in range(2):
            engine.fuse(Prompt("Other:", CHUNKS[:2], "Else?"))
            assert_same(engine.fuse(PROMPT), first)


def test_a_changed_prefix_keeps_the_hits_and_a_known_one_is_reused_exactly() -> None:
    model = tiny.model()
    with engine_of(model, recompute_ratio=0.2) as engine:
        first = engine.fuse(PROMPT)
        assert (first.report.hits, first.report.prefix_hit) == (0, False)
        for prefix in ("Today is Monday. Read this:", ""):
            other = engine.fuse(Prompt(prefix, CHUNKS, PROMPT.suffix))
            assert (other.report.hits, other.report.prefix_hit) == (3, False)
        again = engine.fuse(PROMPT)
        assert (again.report.hits, again.report.prefix_hit) == (3, True)
        tokens = again.report.prefix_tokens
        assert again.report.reused_tokens == again.report.chunk_tokens + tokens
        plain = tiny.full_prefill(model, again.input_ids[:tokens]).past_key_values
        for ours, theirs in zip(again.cache.layers, plain.layers, strict=True):
            torch.testing.assert_close(ours.keys[:, :, :tokens], theirs.keys, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(ours.values[:, :, :tokens], theirs.values, atol=1e-5, rtol=1e-5)
        for ours, theirs in zip(again.cache.layers, first.cache.layers, strict=True):
            assert torch.equal(ours.keys[:, :, :tokens], theirs.keys[:, :, :tokens])
        for rows in again.recomputed:
            assert not set(rows.tolist()) & set(range(tokens))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_chunk_right_behind_its_prefix_is_exact_without_recompute(family: str) -> None:
    model = tiny.model(family)
    one = Prompt("Read this with care:", CHUNKS[:1], "What fell?")
    with engine_of(model, condition="prefix", recompute_ratio=0.0) as engine:
        engine.warm(CHUNKS, prefix=one.prefix)
        fused = engine.fuse(one)
        assert fused.report.hits == 1
        assert fused.report.recomputed_tokens == (0,) * 4
        plain = tiny.full_prefill(model, fused.input_ids)
        torch.testing.assert_close(fused.logits, plain.logits[0, -1], atol=1e-4, rtol=1e-4)
        for ours, theirs in zip(fused.cache.layers, plain.past_key_values.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=1e-4)
        assert engine.fuse(Prompt("Another prefix:", CHUNKS[:1], "What fell?")).report.hits == 0
        assert engine.fuse(Prompt("", CHUNKS[:1], "What fell?")).report.hits == 0
        second = engine.fuse(Prompt(one.prefix, CHUNKS[1:], "What fell?"))
        assert second.report.hits == 2
    with engine_of(model, recompute_ratio=0.0) as sink:
        sink.warm(CHUNKS)
        inexact = sink.fuse(one)
        plain = tiny.full_prefill(model, inexact.input_ids)
        assert not torch.allclose(inexact.logits, plain.logits[0, -1], atol=1e-2), "nothing would show the difference"


def test_an_exact_chunk_is_never_recomputed() -> None:
    with engine_of(condition="prefix", recompute_ratio=0.5) as engine:
        engine.warm(CHUNKS, prefix=PROMPT.prefix)
        fused = engine.fuse(PROMPT)
        split = fused.report.prefix_tokens
        exact = range(split, split + len(engine._pipeline.tokenizer.chunk_ids(CHUNKS[0])))
        rows = {row for layer in fused.recomputed for row in layer.tolist()}
        assert not rows & set(exact)
        assert rows & set(range(exact.stop, split + fused.report.chunk_tokens))


def test_a_chunk_right_behind_the_sink_is_exact_too() -> None:
    model = tiny.model()
    with engine_of(model, recompute_ratio=0.0) as engine:
        engine.warm(CHUNKS)
        fused = engine.fuse(Prompt("", CHUNKS[:1], "What fell?"))
        assert fused.report.hits == 1
        plain = tiny.full_prefill(model, fused.input_ids)
        torch.testing.assert_close(fused.logits, plain.logits[0, -1], atol=1e-4, rtol=1e-4)


# What is computed, what is stored -----------------------------------------------------------


def test_missing_chunks_and_the_suffix_are_always_computed() -> None:
    with engine_of(selection="none", write_back="off") as engine:
        engine.warm([CHUNKS[0], CHUNKS[2]])
        fused = engine.fuse(PROMPT)
        split = engine._pipeline.tokenizer.tokenize(PROMPT)
    assert (fused.report.hits, fused.report.misses) == (2, 1)
    computed = [*range(split.prefix.stop), *range(split.chunks[1].start, split.chunks[1].stop)]
    computed += range(split.suffix.start, split.suffix.stop)
    assert [rows.tolist() for rows in fused.recomputed] == [computed] * 4


def test_glue_is_always_computed_and_never_stored() -> None:
    store = Hooked()
    prompt = Prompt("Read this:", CHUNKS, "What fell?", glue=["\nContext: ", "\nMore: "])
    with engine_of(store=store, selection="none") as engine:
        engine.fuse(prompt)
        fused = engine.fuse(prompt)
        tokenizer = engine._pipeline.tokenizer
        split = tokenizer.tokenize(prompt)
    assert (fused.report.hits, fused.report.misses) == (3, 0)
    glue = [*range(split.chunks[0].stop, split.chunks[1].start), *range(split.chunks[1].stop, split.chunks[2].start)]
    assert split.input_ids[glue[0] : glue[0] + 2] == tokenizer.inner_ids("\nContext: ")[:2]
    assert fused.recomputed[-1].tolist() == [*glue, *range(split.suffix.start, split.suffix.stop)]
    assert sorted(store.stored_ids()) == sorted([split.ids(split.prefix), *map(tokenizer.chunk_ids, CHUNKS)])


@pytest.mark.parametrize("suffix", ["What fell?", "What # # fell # # ?", " # # ", ""])
def test_nothing_of_the_question_is_stored(suffix: str) -> None:
    store = Hooked()
    with engine_of(store=store) as engine:
        engine.generate(Prompt("Read # # this:", ["a # # b", "c"], suffix), max_new_tokens=3)
        tokenizer = engine._pipeline.tokenizer
        expected = [tokenizer.opening_ids("Read # # this:"), tokenizer.chunk_ids("a # # b"), tokenizer.chunk_ids("c")]
    assert sorted(store.stored_ids()) == sorted(expected)


@pytest.mark.parametrize(
    "prompt",
    ["What fell?", Prompt("", [], "What fell?"), Prompt("Read this:", [], "What fell?"), "Read this: # # What fell?"],
    ids=str,
)
def test_a_text_without_chunks_is_plain_and_leaves_no_trace(prompt: Any) -> None:
    store = Hooked()
    with engine_of(store=store) as engine:
        answer = engine.generate(prompt, max_new_tokens=5)
        fused = engine.fuse(prompt)
        expected = tiny.full_prefill(engine.model, fused.input_ids).logits[0, -1]
    assert answer.report.plain
    assert fused.deviation is None
    assert (answer.report.hits, answer.report.misses) == (0, 0)
    torch.testing.assert_close(fused.logits, expected, atol=1e-5, rtol=1e-5)
    assert store.kept == {}


def test_few_chunk_tokens_are_answered_plainly_and_stored_nowhere() -> None:
    store = Hooked()
    tokens = sum(len(engine_of()._pipeline.tokenizer.chunk_ids(chunk)) for chunk in CHUNKS)
    with engine_of(store=store, min_tokens=tokens + 1) as engine:
        fused = engine.fuse(PROMPT)
        assert fused.report.plain
        assert fused.report.chunk_tokens == tokens
        assert store.kept == {}
        assert not engine.with_config(min_tokens=tokens).fuse(PROMPT).report.plain
        assert len(store.kept) == 4


def test_a_text_is_split_like_the_prompt_it_spells() -> None:
    with engine_of(recompute_ratio=0.2) as engine:
        text = " # # ".join(["Read this:", *CHUNKS, "What fell in the end?"])
        cold, warm = engine.fuse(text), engine.fuse(PROMPT)
        assert cold.input_ids == warm.input_ids
        assert warm.report.hits == 3


# Identity -----------------------------------------------------------------------------------


def hits_over(folder: Path, model: Any, **options: Any) -> tuple[int, bool]:
    with engine_of(model, store=folder, write_back="off", **options) as engine:
        report = engine.fuse(PROMPT).report
        return report.hits, report.prefix_hit


def test_only_the_very_same_model_and_salt_hit(tmp_path: Path) -> None:
    with engine_of(tiny.model(), store=tmp_path) as engine:
        engine.fuse(PROMPT)
    assert hits_over(tmp_path, tiny.model()) == (3, True)
    assert hits_over(tmp_path, tiny.model(seed=1)) == (0, False)
    assert hits_over(tmp_path, tiny.model("mistral")) == (0, False)
    assert hits_over(tmp_path, tiny.model(rope="linear")) == (0, False)
    assert hits_over(tmp_path, tiny.model().to(torch.bfloat16)) == (0, False)
    assert hits_over(tmp_path, tiny.model(), salt="tenant") == (0, False)
    assert hits_over(tmp_path, tiny.model(), separator="\n\n") == (0, True)
    assert hits_over(tmp_path, tiny.model(), condition="prefix") == (0, True)
    assert hits_over(tmp_path, tiny.model()) == (3, True)


@pytest.mark.parametrize("step", [1e-3, 1e-7])
@pytest.mark.parametrize(
    "weight", ["model.embed_tokens.weight", "model.layers.3.mlp.down_proj.weight", "model.norm.weight"]
)
def test_a_fine_tune_of_a_single_weight_gets_no_hits(weight: str, step: float, tmp_path: Path) -> None:
    with engine_of(tiny.model(vocab_size=4000), store=tmp_path) as engine:
        engine.fuse(PROMPT)
    tuned = tiny.model(vocab_size=4000)
    flat = dict(tuned.named_parameters())[weight].data.view(-1)
    before = flat[len(flat) // 2].item()
    flat[len(flat) // 2] += step
    assert flat[len(flat) // 2].item() != before
    assert hits_over(tmp_path, tuned) == (0, False)


def test_two_tenants_share_nothing_and_keep_their_own(tmp_path: Path) -> None:
    store = DiskStore(tmp_path)
    with engine_of(store=store, salt="one") as one, engine_of(store=store, salt="two") as two:
        one.warm(CHUNKS)
        assert two.fuse(PROMPT).report.hits == 0  # and stores its own
        assert two.fuse(PROMPT).report.hits == 3
        assert one.forget(CHUNKS) == 3
        assert two.fuse(PROMPT).report.hits == 3
    store.close()


def test_a_record_put_under_a_foreign_key_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """A hash that happens to match is not enough: ids and model are compared."""
    store = Hooked()
    with engine_of(store=store, write_back="off") as engine:
        never = engine.fuse(PROMPT)
        engine.warm([CHUNKS[0], "something else"])
        keys = {record.info.token_ids: key for key, record in store.kept.items()}
        tokenizer = engine._pipeline.tokenizer
        foreign = store.kept[keys[tokenizer.chunk_ids("something else")]]
        store.put(keys[tokenizer.chunk_ids(CHUNKS[0])], foreign)
        with caplog.at_level(logging.WARNING):
            fused = engine.fuse(PROMPT)
    assert fused.report.hits == 0
    assert "another segment or model" in caplog.text
    assert_same(fused, never)


WRITER = """
import sys
from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from tests.test_reuse import PROMPT
config = BlendConfig(min_tokens=0, recompute_ratio=0.2, write_back="background")
kept = BlendEngine.from_pretrained(sys.argv[1], config=config, store=sys.argv[2])
out = kept.generate(PROMPT, max_new_tokens=8)
print(out.report.hits, out.report.misses)
BlendEngine(kept.model, kept.tokenizer, config=config, store=sys.argv[3]).generate(PROMPT, max_new_tokens=2)
"""


def test_another_process_over_the_folder_gets_hits_even_if_the_first_just_ended(tmp_path: Path) -> None:
    """The first neither flushes nor closes: what it computed is stored when the interpreter ends.

    One of its engines is alive until then, another was dropped at once.
    """
    from cacheblend_rag import BlendConfig, BlendEngine

    saved, folder, other = tmp_path / "model", tmp_path / "kv", tmp_path / "other"
    tiny.model().save_pretrained(saved)
    tiny.tokenizer().save_pretrained(saved)
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", WRITER, str(saved), str(folder), str(other)],
        capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent.parent, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["0", "3"]
    assert "Exception" not in done.stderr
    assert len(record_files(folder)) == len(record_files(other)) == 4
    config = BlendConfig(min_tokens=0, recompute_ratio=0.2, write_back="inline")
    with BlendEngine.from_pretrained(saved, config=config, store=folder) as engine:
        shared = engine.fuse(PROMPT)
        assert (shared.report.hits, shared.report.prefix_hit) == (3, True)
        with BlendEngine(engine.model, engine.tokenizer, config=config) as own:
            own.fuse(PROMPT)
            assert_same(own.fuse(PROMPT), shared)


def test_saving_a_model_does_not_cost_its_hits(tmp_path: Path) -> None:
    model = tiny.model()
    with engine_of(model, store=tmp_path / "kv") as engine:
        engine.fuse(PROMPT)
    model.save_pretrained(tmp_path / "model")
    model.generation_config.max_new_tokens = 7
    assert hits_over(tmp_path / "kv", model) == (3, True)
    loaded = type(model).from_pretrained(tmp_path / "model").eval()
    assert hits_over(tmp_path / "kv", loaded) == (3, True)


# Damage -------------------------------------------------------------------------------------


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def _cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "deleted": Path.unlink,
    "emptied": lambda path: _cut(path, 0),
    "cut in the header": lambda path: _cut(path, 100),
    "cut in layer 2": lambda path: _cut(path, path.stat().st_size // 2),
    "cut by a byte": lambda path: _cut(path, path.stat().st_size - 1),
    "flipped in the header": lambda path: _flip(path, 40),
    "flipped in layer 0": lambda path: _flip(path, 4096 + 10),
    "flipped in the last layer": lambda path: _flip(path, path.stat().st_size - 4096 - 10),
}


def never_stored(missing: int, **options: Any) -> FusedKV:
    """The result of a run in which one chunk was never stored."""
    with engine_of(recompute_ratio=0.2, **options) as engine:
        engine.warm([chunk for number, chunk in enumerate(CHUNKS) if number != missing])
        return engine.with_config(write_back="off").fuse(PROMPT)


def file_of(folder: Path, chunk: str) -> Path:
    ids = json.dumps(list(engine_of()._pipeline.tokenizer.chunk_ids(chunk)), separators=(",", ":")).encode()
    (found,) = [path for path in record_files(folder) if b'"token_ids":' + ids in path.read_bytes()]
    return found


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_record_damaged_before_look_up_is_a_logged_miss(
    damage: str, prefetch: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(store=tmp_path, recompute_ratio=0.2, prefetch=prefetch, write_back="off") as engine:
        engine.warm(CHUNKS)
        DAMAGE[damage](file_of(tmp_path, CHUNKS[1]))
        with caplog.at_level(logging.WARNING):
            fused = engine.fuse(PROMPT)
        assert len(caplog.records) == 1
        assert "miss" in caplog.text or "lost while loading" in caplog.text
        assert (fused.report.hits, fused.report.misses) == (2, 1)
        assert fused.report.lost == (1 if "layer" in damage and "cut" not in damage else 0)
        assert_same(fused, never_stored(1))
        caplog.clear()
        again = engine.with_config(write_back="inline").fuse(PROMPT)  # stores it anew
        assert again.report.misses == 1
        assert engine.fuse(PROMPT).report.hits == 3
        assert caplog.records == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("layer", [None, 0, 1, 3])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_record_damaged_while_it_is_loaded_is_dropped(
    victim: int, layer: int | None, prefetch: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Cut between look-up and load (no layer), or just before a layer is read, after others were fused."""
    store = Hooked(DiskStore(tmp_path))
    with engine_of(store=store, recompute_ratio=0.2, prefetch=prefetch, write_back="off") as engine:
        engine.warm(CHUNKS)
        path = file_of(tmp_path, CHUNKS[victim])
        ids = engine._pipeline.tokenizer.chunk_ids(CHUNKS[victim])
        (key,) = [key for key, record in store.kept.items() if record.info.token_ids == ids]
        if layer is None:
            store.opened = lambda opened: _cut(path, 4096 + 5) if opened == key and path.exists() else None
        else:
            store.reading = lambda read, at: _cut(path, 4096) if (read, at) == (key, layer) else None
        with caplog.at_level(logging.WARNING):
            fused = engine.fuse(PROMPT)
        assert (fused.report.hits, fused.report.misses, fused.report.lost) == (2, 1, 1)
        assert key in caplog.text
        assert "lost while loading" in caplog.text
        assert store.still_open == []
        assert not store.contains(key)
    assert_same(fused, never_stored(victim))
    store.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-loader")]


@pytest.mark.parametrize("prefetch", [True, False])
def test_every_record_lost_one_after_another_gives_a_cold_run(prefetch: bool, caplog: pytest.LogCaptureFixture) -> None:
    store = Hooked()
    with engine_of(store=store, recompute_ratio=0.2, prefetch=prefetch, write_back="off") as engine:
        cold = engine.fuse(PROMPT)
        engine.with_config(write_back="inline").fuse(PROMPT)

        def fail(key: str, layer: int) -> None:
            if layer == 2:
                raise RecordError("gone")

        store.reading = fail
        with caplog.at_level(logging.WARNING):
            fused = engine.fuse(PROMPT)
    assert (fused.report.hits, fused.report.misses, fused.report.lost) == (0, 3, 4)
    assert not fused.report.prefix_hit
    assert store.still_open == []
    assert_same(fused, cold)


def test_a_lost_prefix_is_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    store = Hooked()
    with engine_of(store=store, recompute_ratio=0.2) as engine:
        engine.warm(CHUNKS)
        never = engine.with_config(write_back="off").fuse(PROMPT)
        engine.fuse(PROMPT)
        (key,) = [key for key, record in store.kept.items() if record.info.rotated]

        def fail(read: str, layer: int) -> None:
            if (read, layer) == (key, 1):
                store.reading = lambda key, layer: None
                raise RecordError("gone")

        store.reading = fail
        with caplog.at_level(logging.WARNING):
            fused = engine.fuse(PROMPT)
        assert (fused.report.hits, fused.report.lost, fused.report.prefix_hit) == (3, 1, False)
        assert_same(fused, never)
        assert engine.fuse(PROMPT).report.prefix_hit


def test_an_eviction_during_the_pass_changes_nothing(tmp_path: Path) -> None:
    store = Hooked(DiskStore(tmp_path))
    with engine_of(store=store, recompute_ratio=0.2, write_back="off") as engine:
        engine.warm(CHUNKS)
        warm = engine.fuse(PROMPT)

        def evict(key: str, layer: int) -> None:
            if layer == 2:
                store.inner.delete(key)

        store.reading = evict
        fused = engine.fuse(PROMPT)
        assert fused.report.hits == 3
        assert_same(fused, warm)
        store.reading = lambda key, layer: None
        assert engine.fuse(PROMPT).report.hits == 0
    store.close()


def test_no_file_stays_open_after_a_loss(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = Hooked(DiskStore(tmp_path))
        with engine_of(store=store, write_back="off") as engine:
            engine.warm(CHUNKS)

            def fail(key: str, layer: int) -> None:
                raise OSError("disk gone")

            store.reading = fail
            assert engine.fuse(PROMPT).report.lost == 3
        assert store.still_open == []
        store.close()
