"""Checkpoints of models answered plainly, in the store: a second process goes on from them exactly."""

from __future__ import annotations

import base64
import html
import json
import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendEngine, Prompt
from cacheblend_rag.models.cache_state import pack_cache, unpack_cache
from cacheblend_rag.models.plain import PlainAdapter
from cacheblend_rag.store.base import RecordInfo
from cacheblend_rag.store.disk import DiskStore
from tests import probes, tiny
from tests.integrations.langchain.models import tiny_parts
from tests.probes import files_with
from tests.thinking import Writer

BEGINS = tiny.text(40, 7)
CHUNKS = [tiny.text(23, 1), tiny.text(31, 2)]
PROMPT = Prompt(BEGINS, CHUNKS, "What fell in the end?")
OTHER = Prompt(BEGINS, [tiny.text(19, 5)], "Who watched from the tree?")
IN_SLICES = sorted(name for name, (goes_on, _) in tiny.PLAIN.items() if goes_on == "slices")
RECURRENT = ("lfm2", "mamba2", "qwen3_next")
MODELS: dict[str, Any] = {}


def model_of(family: str) -> Any:
    return MODELS.setdefault(family, tiny.plain_model(family))


def engine_of(folder: Path, family: str = "lfm2", **options: Any) -> BlendEngine:
    """An engine as a new process has it: it remembers nothing, and has the store of the ones before."""
    fields = {"prompt_cache": "auto", "min_tokens": 0, "write_back": "inline", "session_cache": True, **options}
    return probes.engine_of(model_of(family), store=DiskStore(folder), **fields)


def apart(engine: BlendEngine, fused: Any) -> float:
    """How far the logits behind a prompt are from those of a plain prefill."""
    plain = tiny.full_prefill(engine.model, fused.input_ids).logits[0, -1]
    return float((fused.logits - plain).norm() / plain.norm())


def infos_in(folder: Path) -> list[RecordInfo]:
    """Records that are stored."""
    with closing(DiskStore(folder)) as store:
        return [info for _, info in store.infos("")]


@pytest.mark.parametrize("family", IN_SLICES)
def test_state_is_the_same_once_it_was_bytes(family: str) -> None:
    adapter = PlainAdapter(model_of(family), "it is asked for")
    ids = list(range(3, 33))
    first = adapter.go_on(adapter.empty_cache(), ids[:20])
    packed = pack_cache(first.cache)
    assert packed is not None
    again = adapter.empty_cache()
    unpack_cache(torch.cat((packed, torch.zeros(9, dtype=torch.uint8))), again, adapter.device, 20)
    for step in (ids[20:29], ids[29:]):
        expected, found = adapter.extend(first.cache, step), adapter.extend(again, step)
        assert torch.equal(expected, found)
    assert pack_cache(again).equal(pack_cache(first.cache))  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("damage", ["cut", "layers", "name", "kind", "size", "type", "rows", "heads"])
def test_bytes_of_another_cache_are_refused(damage: str) -> None:
    adapter = PlainAdapter(model_of("lfm2"), "it is asked for")
    packed = pack_cache(adapter.go_on(adapter.empty_cache(), list(range(3, 20))).cache)
    assert packed is not None
    data = packed.numpy().tobytes()
    changed = {
        "cut": data[:-5],
        "layers": data.replace(b"PreallocatedLayer", b"PreallocatedLayex"),
        "name": data.replace(b'"keys"', b'"kezs"'),
        "size": data.replace(b"[1, 2, 17, 8]", b"[9, 9999, 9]"),
        "type": data.replace(b'"dtype", "float32"', b'"dtype", "loadsss"'),
        "rows": data.replace(b"[1, 2, 17, 8]", b"[1, 2, 9, 8]"),
        "heads": data.replace(b"[1, 2, 17, 8]", b"[1, 17, 2, 8]"),
        "kind": data.replace(b'"tensor"', b'"tensox"'),
    }[damage]
    assert changed != data
    with pytest.raises(ValueError, match=r"layer|ends|understood|holds"):
        unpack_cache(torch.frombuffer(bytearray(changed), dtype=torch.uint8), adapter.empty_cache(), adapter.device, 17)


@pytest.mark.parametrize("family", RECURRENT)
def test_new_process_goes_on_from_the_instructions_and_from_the_turn_before(family: str, tmp_path: Path) -> None:
    with engine_of(tmp_path, family) as engine:
        writer = Writer(engine.tokenizer, " the old river fell")
        first = engine.generate(PROMPT, max_new_tokens=20, logits_processor=[writer])
        begun = engine.fuse(OTHER)
    turn = Prompt(BEGINS, CHUNKS, f"{PROMPT.suffix}{first.text} And then?")
    with engine_of(tmp_path, family) as engine:
        again = engine.fuse(OTHER)
        assert again.report.resumed_tokens == first.report.prefix_tokens == begun.report.resumed_tokens > 0
        assert apart(engine, again) < 1e-3
        assert torch.equal(again.logits, begun.logits), "that of memory is the same"
    ids = (*first.report.input_ids, *first.token_ids)
    with engine_of(tmp_path, family) as engine:
        later = engine.fuse(turn)
        assert tuple(later.input_ids[: len(ids) - 1]) == ids[:-1]
        assert later.report.resumed_tokens == len(ids) - 1 > len(first.report.input_ids)
        assert apart(engine, later) < 1e-3
        free = engine.generate(PROMPT, max_new_tokens=8)
    with engine_of(tmp_path / "another", family) as engine:
        assert engine.generate(PROMPT, max_new_tokens=8).token_ids == free.token_ids


def test_finished_turns_are_stored_only_where_prompts_are(tmp_path: Path) -> None:
    for session_cache, records in ((False, 1), (True, 2)):
        folder = tmp_path / str(session_cache)
        with engine_of(folder, session_cache=session_cache) as engine:
            answer = engine.generate(PROMPT, max_new_tokens=8)
        infos = infos_in(folder)
        assert min(info.tokens for info in infos) == answer.report.prefix_tokens
        assert len(infos) == records
        assert {info.kind for info in infos} == {"checkpoint"}


def test_conversation_without_documents_is_stored_only_where_prompts_are(tmp_path: Path) -> None:
    for session_cache in (False, True):
        folder = tmp_path / str(session_cache)
        with engine_of(folder, session_cache=session_cache) as engine:
            engine.generate(Prompt(BEGINS, suffix="What fell in the end?"), max_new_tokens=8)
        assert bool(infos_in(folder)) is session_cache


@pytest.mark.parametrize("options", [{"write_back": "off"}, {"prompt_cache": 0}], ids=str)
def test_nothing_is_stored_where_nothing_shall_be(tmp_path: Path, options: dict[str, Any]) -> None:
    with engine_of(tmp_path, **options) as engine:
        engine.generate(PROMPT, max_new_tokens=4)
    assert infos_in(tmp_path) == []


def test_other_tenants_and_models_find_nothing(tmp_path: Path) -> None:
    with engine_of(tmp_path, salt="ada") as engine:
        engine.generate(PROMPT, max_new_tokens=4)
    for family, salt in (("lfm2", "ben"), ("mamba2", "ada")):
        with engine_of(tmp_path, family, salt=salt) as engine:
            assert engine.fuse(PROMPT).report.resumed_tokens == 0
    with engine_of(tmp_path, salt="ada") as engine:
        assert engine.fuse(PROMPT).report.resumed_tokens > 0


def test_forgotten_chunk_takes_its_checkpoints_along(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        prefix = engine.generate(PROMPT, max_new_tokens=4).report.prefix_tokens
        engine.forget([CHUNKS[0]])
        assert [info.tokens for _, info in engine.store.infos("")] == [prefix], "instructions hold no chunk"
        assert engine.fuse(PROMPT).report.resumed_tokens == prefix
    with engine_of(tmp_path) as engine:
        engine.fuse(PROMPT)
        engine.forget([BEGINS])
        assert engine.fuse(PROMPT).report.resumed_tokens in (0, prefix)  # by how its ids are cut
    with engine_of(tmp_path, write_back="background") as engine:
        engine.generate(PROMPT, max_new_tokens=4)
        engine.forget([CHUNKS[0]])
        engine.flush()
        assert all(info.tokens <= prefix for _, info in engine.store.infos(""))


SECRET = "\n".join(f'Er sagte "{tiny.text(5, 900 + at)}" / nämlich {tiny.text(4, 950 + at)}.' for at in range(6))
FORMS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "JSON": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "JSON in ASCII": lambda text: json.dumps(text)[1:-1],
    "HTML": html.escape,
    "other line ends": lambda text: text.replace("\n", "\r\n"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", RECURRENT)
def test_erased_text_leaves_no_checkpoint_of_a_prompt_that_holds_it_in_another_form(
    family: str, form: str, tmp_path: Path
) -> None:
    """Neither in memory, from where the next prompt would store it again, nor in any file."""
    written = FORMS[form](SECRET)
    prompts = [Prompt(f"{BEGINS} {written}", CHUNKS, "What fell?"), Prompt(suffix=f"{BEGINS} {written} What fell?")]
    model = tiny.plain_model(family, max_position_embeddings=4096)
    options: dict[str, Any] = {"prompt_cache": "auto", "min_tokens": 0, "session_cache": True}
    tokenizer = tiny_parts("byte-level BPE")[1]
    ids = tuple(tokenizer(written)["input_ids"])
    middle = ids[len(ids) // 3 : len(ids) // 3 + 12]
    with probes.engine_of(model, tokenizer, DiskStore(tmp_path), write_back="inline", **options) as engine:
        for prompt in prompts:
            engine.generate(prompt, max_new_tokens=2)
        assert files_with(middle, tmp_path)
        engine.forget([SECRET])
        assert not files_with(middle, tmp_path)
        held = [known for _, known in engine.chunks.pipeline.checkpoints._held]
        assert not [known for known in held if middle[0] in known and str(middle)[1:-1] in str(known)]
        engine.generate(prompts[0], max_new_tokens=2)
    with probes.engine_of(model, tokenizer, DiskStore(tmp_path), write_back="background", **options) as engine:
        engine.generate(prompts[1], max_new_tokens=2)
        engine.forget([SECRET])
        engine.flush()
        assert not files_with(middle, tmp_path), "neither what waited nor what an earlier process stored"
    with probes.engine_of(model, tokenizer, DiskStore(tmp_path), write_back="inline", salt="ada", **options) as engine:
        engine.generate(prompts[1], max_new_tokens=2)
        engine.with_config(salt="ben").forget([SECRET])
        assert files_with(middle, tmp_path), "it is another tenant's"
        engine.chunks.forget_for_all([SECRET])
        assert not files_with(middle, tmp_path)


def test_damaged_checkpoint_is_a_miss_and_leaves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine_of(tmp_path, session_cache=False) as engine:
        engine.generate(PROMPT, max_new_tokens=4)
    (record,) = [one for one in tmp_path.rglob("*") if one.is_file() and one.read_bytes()[:7] == b"CBRAGKV"]
    data = bytearray(record.read_bytes())
    data[5000] ^= 255
    record.write_bytes(data)
    with engine_of(tmp_path, write_back="off") as engine, caplog.at_level(logging.WARNING):
        fused = engine.fuse(PROMPT)
        assert (fused.report.resumed_tokens, apart(engine, fused) < 1e-3) == (0, True)
        assert list(engine.store.infos("")) == []
    assert "counts as a miss" in caplog.text


def test_checkpoints_are_bounded_as_all_records(tmp_path: Path) -> None:
    limit = 2_000_000
    for number in range(6):
        fields: dict[str, Any] = {"prompt_cache": "auto", "min_tokens": 0, "write_back": "inline"}
        store = DiskStore(tmp_path, size_limit=limit)
        with probes.engine_of(model_of("qwen3_next"), store=store, session_cache=True, **fields) as engine:
            engine.generate(Prompt(tiny.text(60, number), CHUNKS, "What fell?"), max_new_tokens=4)
            assert engine.store.volume() <= limit


def test_encrypted_store_has_them_encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_RAG_ENCRYPTION_KEY", base64.b64encode(bytes(range(32))).decode())
    with engine_of(tmp_path, session_cache=False) as engine:
        engine.generate(PROMPT, max_new_tokens=4)
    (record,) = [one for one in tmp_path.rglob("*") if one.is_file() and one.read_bytes()[:5] == b"CBRAG"]
    assert record.read_bytes()[:7] == b"CBRAGKS"
    assert b"LinearAttention" not in record.read_bytes()
    with engine_of(tmp_path) as engine:
        assert engine.fuse(PROMPT).report.resumed_tokens > 0
