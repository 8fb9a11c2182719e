"""Kept prompts: the next turn continues from the last, and nothing takes them for what they are not."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import Prompt
from cacheblend_rag.engine.session_cache import KEY_PREFIX
from cacheblend_rag.errors import RecordError
from cacheblend_rag.store import DiskStore, KVRecord, MemoryStore, TieredStore
from tests import tiny
from tests.probes import CHUNKS, PROMPT, Hooked, assert_same, engine_of, segments_of
from tests.tolerance import assert_layers_close, assert_logits_close


def finals(store: Any) -> list[tuple[str, Any]]:
    return list(store.infos(KEY_PREFIX))


def turn(engine: Any, first: str, again: str) -> Prompt:
    """The next turn: the first question, its answer, and another question."""
    return Prompt(PROMPT.prefix, CHUNKS, PROMPT.suffix + first + again)


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3", "qwen3_vl"])
@pytest.mark.parametrize("on_disk", [True, False])
def test_the_next_turn_continues_from_the_last(family: str, on_disk: bool, tmp_path: Path) -> None:
    model = tiny.model(family)
    with engine_of(model, store=tmp_path if on_disk else None, session_cache=True, recompute_ratio=1.0) as engine:
        first = engine.generate(PROMPT, max_new_tokens=6)
        assert first.report.resumed_tokens == 0
        ((key, info),) = finals(engine.store)
        assert info.kind == "session"
        assert info.rotated
        asked = first.report.prompt_tokens
        assert info.token_ids[:asked] == first.report.input_ids
        assert info.token_ids[asked:] == tuple(first.token_ids[:-1])
        following = engine.fuse(turn(engine, first.text, " And before that?"))
        report = following.report
        assert asked - 2 <= report.resumed_tokens < report.prompt_tokens
        assert (report.hits, report.misses, report.lost) == (3, 0, 0)
        assert report.chunk_tokens == first.report.chunk_tokens
        computed = set(range(report.resumed_tokens, report.prompt_tokens))
        assert all(set(rows.tolist()) == computed for rows in following.recomputed)
        plain = tiny.full_prefill(model, following.input_ids)
        assert_logits_close(following.logits, plain.logits[0, -1], model, len(following.input_ids))
        assert_layers_close(following.cache.layers, tiny.cache_of(plain).layers, model)
        assert key.startswith(KEY_PREFIX)


def test_the_same_prompt_again_computes_one_row() -> None:
    with engine_of(session_cache=True, recompute_ratio=0.2) as engine:
        first = engine.generate(PROMPT, max_new_tokens=6)
        again = engine.generate(PROMPT, max_new_tokens=6)
        assert again.report.computed_tokens == (1,) * 4
        assert again.report.resumed_tokens == again.report.prompt_tokens - 1
        assert again.token_ids == first.token_ids
        assert len(finals(engine.store)) == 1


def test_other_chunks_behind_the_same_beginning_are_reused_as_ever() -> None:
    """The history stands between old chunks and new ones."""
    with engine_of(session_cache=True, recompute_ratio=0.2) as engine:
        engine.warm(CHUNKS)
        engine.generate(Prompt("Read this:", CHUNKS[:2], "What fell?"), max_new_tokens=4)
        longer = engine.fuse(Prompt("Read this:", CHUNKS, "What fell?"))
        report = longer.report
        assert (report.hits, report.misses) == (3, 0)
        tokens = engine.tokenize(Prompt("Read this:", CHUNKS, "What fell?"))
        separator = segments_of(engine).context_ids(CHUNKS[0])[1:]
        assert report.resumed_tokens == tokens.chunks[1].stop + len(separator), "up to where the prompts part"
        third = tokens.chunks[2]
        rows = set(longer.recomputed[-1].tolist())
        kept = rows & set(range(third.start, third.stop))
        assert len(kept) == report.recomputed_tokens[-1] == int(0.2 * len(third))
        assert not rows & set(range(report.resumed_tokens))


@pytest.mark.parametrize(
    "other",
    [
        Prompt("Read that:", CHUNKS, PROMPT.suffix),
        Prompt("Read this:", [CHUNKS[1], CHUNKS[0], CHUNKS[2]], PROMPT.suffix),
        Prompt("Read this:", CHUNKS[1:], PROMPT.suffix),
    ],
    ids=["prefix", "order", "fewer"],
)
def test_another_beginning_is_another_prompt(other: Prompt) -> None:
    with engine_of(session_cache=True, recompute_ratio=0.2) as engine:
        engine.warm(CHUNKS)
        plain = engine.with_config(session_cache=False)
        plain.fuse(other)  # stores the prefix
        expected = plain.fuse(other)
        engine.generate(PROMPT, max_new_tokens=4)
        fused = engine.with_config(write_back="off").fuse(other)
        assert fused.report.resumed_tokens == 0
        assert_same(fused, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute_ratio": 1.0},
        {"selection": "none"},
        {"selection_options": {"check_layers": (2,)}},
        {"salt": "tenant"},
        {"session_cache": False},
        {"selection": "all"},
    ],
    ids=str,
)
def test_prompt_kept_under_one_rule_is_not_resumed_under_another(changes: dict[str, Any]) -> None:
    with engine_of(session_cache=True, recompute_ratio=0.2, write_back="inline") as engine:
        engine.generate(PROMPT, max_new_tokens=4)
        other = engine.with_config(write_back="off", **changes)
        assert other.fuse(PROMPT).report.resumed_tokens == 0
        assert engine.fuse(PROMPT).report.resumed_tokens > 0


def test_kept_prompts_are_no_chunks_and_no_prefixes() -> None:
    store = Hooked()
    with engine_of(store=store, session_cache=True, recompute_ratio=0.2) as engine:
        engine.generate(PROMPT, max_new_tokens=4)
        kinds = sorted(record.info.kind for record in store.kept.values())
        assert kinds == ["chunk", "chunk", "chunk", "prefix", "session"]
        other = engine.with_config(session_cache=False)
        assert other.fuse(PROMPT).report.prefix_hit
        (key,) = [key for key, record in store.kept.items() if record.info.kind == "prefix"]
        known = store.kept[key]
        store.put(key, KVRecord(replace(known.info, kind="session"), known.kv))
        assert not other.fuse(PROMPT).report.prefix_hit, "what is approximate is never taken for it"


@pytest.mark.parametrize("write_back", ["background", "inline", "off"])
def test_they_are_kept_as_everything_is_written_back(write_back: str) -> None:
    with engine_of(session_cache=True, write_back=write_back) as engine:
        engine.generate(PROMPT, max_new_tokens=4)
        engine.flush()
        assert len(finals(engine.store)) == (0 if write_back == "off" else 1)


def test_without_the_option_nothing_of_the_question_is_kept() -> None:
    with engine_of() as engine:
        engine.generate(PROMPT, max_new_tokens=4)
        assert finals(engine.store) == []


def test_plain_prompts_leave_no_trace() -> None:
    with engine_of(session_cache=True) as engine:
        engine.generate("What fell?", max_new_tokens=4)
        assert finals(engine.store) == []


def test_forgetting_window_is_not_kept() -> None:
    with engine_of(tiny.model("mistral", sliding_window=16), session_cache=True) as engine:
        first = engine.generate(PROMPT, max_new_tokens=4)
        assert finals(engine.store) == []
        assert engine.generate(PROMPT, max_new_tokens=4).token_ids == first.token_ids


def test_forgetting_a_chunk_erases_the_prompts_that_hold_it(tmp_path: Path) -> None:
    store = TieredStore([MemoryStore(), DiskStore(tmp_path)])
    with engine_of(store=store, session_cache=True) as engine:
        engine.generate(PROMPT, max_new_tokens=4)
        engine.generate(Prompt("Read this:", CHUNKS[1:], "What fell?"), max_new_tokens=4)
        assert len(finals(store)) == 2
        assert engine.forget(CHUNKS[:1]) == 2
        assert len(finals(store)) == 1
        assert engine.forget(["something that was never there"]) == 0
        assert engine.forget(CHUNKS[2:]) == 2
        assert finals(store) == []
        other = engine.with_config(salt="another tenant")
        for one in (engine, other):
            one.generate(PROMPT, max_new_tokens=4)
        engine.forget(CHUNKS)
        assert other.fuse(PROMPT).report.resumed_tokens, "another tenant sees nothing of it"
    store.close()


@pytest.mark.parametrize("layer", [0, 2])
def test_kept_prompt_that_cannot_be_read_counts_as_never_kept(layer: int, caplog: pytest.LogCaptureFixture) -> None:
    store = Hooked()
    with engine_of(store=store, session_cache=True, recompute_ratio=0.2) as engine:
        engine.warm(CHUNKS)
        engine.generate(PROMPT, max_new_tokens=4)
        never = engine.with_config(session_cache=False, write_back="off").fuse(PROMPT)

        def fail(key: str, at: int) -> None:
            if key.startswith(KEY_PREFIX) and at == layer:
                raise RecordError("gone")

        store.reading = fail
        with caplog.at_level(logging.WARNING):
            fused = engine.with_config(write_back="off").fuse(PROMPT)
        assert (fused.report.lost, fused.report.resumed_tokens, fused.report.hits) == (1, 0, 3)
        assert_same(fused, never)
        assert store.still_open == []
        assert finals(store) == []
