"""Variants of chunks: what verified prompts leave behind, which of them a later prompt takes, and how they go."""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.app.server.services.metrics import Metrics
from cacheblend_rag.engine import variants
from cacheblend_rag.engine.turns import Turns
from cacheblend_rag.engine.variants import KEY_PREFIX, Place, Variants
from cacheblend_rag.errors import StoreError
from cacheblend_rag.models.kv import LayerKV, SegmentKV
from cacheblend_rag.prompt.chat import STUFF
from cacheblend_rag.report import FusedKV, Tally
from cacheblend_rag.store import DiskStore, KVStore, MemoryStore
from cacheblend_rag.store.base import RecordInfo
from tests import tiny
from tests.engine.plain_variants import Variants as Plain
from tests.engine.plain_variants import fit as plain_fit
from tests.probes import CountingStore, answers_of, engine_of, naive_rows, record_files
from tests.tolerance import assert_close, assert_logits_close
from tests.toy import DOCUMENTS_PATH, MODEL_PATH, QUESTIONS_PATH
from tests.waiting import until

TEXTS = [tiny.text(20 + 3 * number, number) for number in range(6)]


def prompt(*numbers: int, prefix: str = "Read this:", question: str = "What fell in the end?") -> Prompt:
    return Prompt(prefix, [TEXTS[number] for number in numbers], question)


def engine_with(*asked: Sequence[int], model: Any = None, store: Any = None, **options: Any) -> BlendEngine:
    """An engine whose chunks are stored, and that has verified some prompts, by the numbers of their chunks."""
    engine = engine_of(model, store=store, **{"selection": "none", "verify": "always", **options})
    engine.warm(TEXTS)
    engine.generate(prompt(0), max_new_tokens=1, verify="off")  # from now on the prefix is known
    for numbers in asked:
        engine.generate(prompt(*numbers), max_new_tokens=2)
    engine.flush()
    return engine


def kept(store: KVStore) -> dict[str, RecordInfo]:
    return dict(store.infos(KEY_PREFIX))


def usually(engine: BlendEngine, asked: Prompt) -> FusedKV:
    """The prompt as it is fused where there are no variants."""
    with mock.patch.object(Variants, "instead_of", lambda self, usual, *given: tuple(usual)):
        return engine.fuse(asked)


def used(engine: BlendEngine, *numbers: int, **more: Any) -> tuple[int, ...]:
    """The chunks of a prompt that are read from variants."""
    return engine.fuse(prompt(*numbers, **more)).report.variants


def assert_exact(engine: BlendEngine, found: torch.Tensor, asked: Prompt) -> None:
    """Logits are those of full prefill."""
    assert_logits_close(found, exact(engine, asked), engine.model, len(engine.tokenize(asked).input_ids))


def exact(engine: BlendEngine, asked: Prompt) -> torch.Tensor:
    return engine.adapter.prefill(engine.tokenize(asked).input_ids).logits


# What is kept, and what is taken ------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["always", "idle"])
@pytest.mark.parametrize("write_back", ["inline", "background"])
def test_verified_prompt_leaves_its_chunks_behind_what_stood_before_them(mode: str, write_back: str) -> None:
    with engine_with(write_back=write_back, verify=mode) as engine:
        engine.flush()
        assert kept(engine.store) == {}
        asked = prompt(2, 0, 1)
        ids = engine.tokenize(asked).input_ids
        report = engine.generate(asked, max_new_tokens=5).report
        assert report.variants == ()
        engine.flush()
        infos = list(kept(engine.store).values())
        assert len(infos) == 3
        for info in infos:
            before = len(info.context_ids)
            assert info.context_ids + info.token_ids == ids[: before + info.tokens]
            assert (info.kind, info.rotated, info.contexts) == ("variant", False, 0)
            key = next(key for key, one in kept(engine.store).items() if one == info)
            record = engine.store.open(key)
            assert record is not None
            twin = engine.adapter.segment_kv(info.context_ids, info.token_ids)
            for layer, pair in enumerate(zip(twin.keys, twin.values, strict=True)):
                for ours, theirs in zip(record.read_layer(layer), pair, strict=True):
                    assert_close(ours, theirs, 1000)
        assert used(engine, 2, 0, 1) == (0, 1, 2)


def test_nothing_is_kept_of_an_answer_that_was_not_verified() -> None:
    with engine_with() as engine:
        for mode in ("off", "held"):
            engine.generate(prompt(0, 1), max_new_tokens=2, verify=mode)
        for options in ({"write_back": "off"}, {"selection": "all"}, {"min_tokens": 10**4}):
            engine.with_config(**options).generate(prompt(0, 1), max_new_tokens=2)
        assert kept(engine.store) == {}


def test_nothing_is_kept_or_used_behind_a_prefix_of_one_conversation() -> None:
    """What was said in it must not come into another answer, nor be stored because it was said once."""
    with engine_with() as engine:
        engine.generate(prompt(0, 1, prefix="Anna asked for her PIN."), max_new_tokens=2)
        assert kept(engine.store) == {}, "its prefix was never there before"
        engine.generate(prompt(0, 1), max_new_tokens=2)
        assert used(engine, 0, 1) == (0, 1)
        assert used(engine, 0, 1, prefix="Anna asked for her PIN.") == ()


def test_prompts_that_go_on_from_one_in_memory_leave_variants_and_take_them() -> None:
    with engine_with(prompt_cache="100MB") as engine:
        engine.generate(prompt(0, 1, prefix="Anna asked for her PIN."), max_new_tokens=2)
        assert kept(engine.store) == {}, "one prompt alone had this prefix"
        engine.generate(prompt(1, 2, 3), max_new_tokens=2)
        assert len(kept(engine.store)) == 3
        engine.generate(prompt(4), max_new_tokens=1, verify="off")
        other = engine.with_config(prompt_cache=0)
        assert used(other, 1, 2, 3) == (0, 1, 2)
        assert used(engine, 4, 1, 2, 3) == (2, 3)


def test_nothing_is_kept_behind_a_message_between_two_chunks() -> None:
    texts = TEXTS[:3]
    turn = "\n\nAnna said that her secret number is one two three four five six seven.\n\n"
    asked = Prompt("Read this:\n\n", texts, "\n\nWhat fell?", between=("\n\n", turn))
    with engine_with() as engine:
        engine.generate(asked, max_new_tokens=2, verify="off")  # its prefix is known from now on
        engine.generate(asked, max_new_tokens=2)
        assert [len(info.before) - 1 for info in kept(engine.store).values()] in ([0, 1], [1, 0])


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        ((1, 2, 3), (0, 1, 2)),  # as it was
        ((2, 1, 3), (2,)),  # the same before the last one, in another order
        ((2, 3), (1,)),  # half of what stood before it
        ((5, 4, 3), ()),
        ((4, 5, 2, 3), (3,) if plain_fit("452", "12") >= 0.5 else ()),
        ((3, 2, 1), ()),
    ],
)
def test_variant_must_fit(asked: tuple[int, ...], taken: tuple[int, ...]) -> None:
    with engine_with((1, 2, 3)) as engine:
        assert used(engine, *asked) == taken


def test_fit_is_that_of_the_plain_computation() -> None:
    sets = [numbers for count in range(4) for numbers in itertools.permutations("abcd", count)]
    for one, other in itertools.product(sets, sets):
        assert Place("p", one).fit(Place("p", other)) == plain_fit(one, other)
        assert Place("p", one).fit(Place("q", other)) == 0


def test_choice_and_kv_are_those_of_the_plain_computation(tmp_path: Path) -> None:
    chance = random.Random(4)
    orders = [chance.sample(range(6), 3) for _ in range(12)]
    earlier = [prompt(*numbers, question=f"Question {at}?") for at, numbers in enumerate(orders)]
    with engine_with(*orders, store=tmp_path) as engine:
        pipeline = engine._parts.pipeline
        plain, found, same = Plain(engine.adapter, pipeline.segments.tokenizer, earlier), 0, 0
        for numbers in itertools.permutations(range(6), 3):
            asked = prompt(*numbers)
            computed = plain.compute(asked, _never, least=0.5)
            with pipeline.look_up(engine.fitted(asked)) as lookup:
                for place, segment in enumerate(lookup.chunks):
                    best = plain.best(asked, place)
                    assert (segment.usual is not None) == (best is not None and best[0] >= 0.5)
                    if segment.usual is None or best is None:
                        continue
                    record, (fit, number, at) = lookup.records[segment.key], best
                    before = _texts_before(engine, record.info)
                    assert plain_fit([text.strip() for text in asked.chunks[:place]], before) == fit
                    found += 1
                    if before != [text.strip() for text in earlier[-number].chunks[:at]]:
                        continue  # another one that fits as well
                    same += 1
                    twin = computed(asked.chunks[place], (), record.info.token_ids, 0)
                    for layer, pair in enumerate(zip(twin.keys, twin.values, strict=True)):
                        # Eight bits.
                        torch.testing.assert_close(record.read_layer(layer), pair, rtol=0.06, atol=0.06)
        assert found > 100
        assert same > 0.8 * found


def _texts_before(engine: BlendEngine, info: RecordInfo) -> list[str]:
    """The chunks before a variant, found in the ids before it."""
    tokenizer = engine._parts.pipeline.segments.tokenizer
    ids = " ".join(map(str, info.context_ids))
    places = {text: ids.find(" ".join(map(str, tokenizer.chunk(text).ids))) for text in TEXTS}
    return [text.strip() for text in sorted(places, key=lambda text: places[text]) if places[text] >= 0]


def _never(*given: Any) -> SegmentKV:
    raise AssertionError("there is a variant")


def test_variant_in_the_same_order_wins_and_is_exact() -> None:
    with engine_with((1, 0, 2, 3), (0, 1, 2, 3)) as engine:
        fused = engine.fuse(prompt(0, 1, 2, 3))
        assert fused.report.variants == (0, 1, 2, 3)
        assert_exact(engine, fused.logits, prompt(0, 1, 2, 3))
        assert fused.report.recomputed_tokens == (0,) * engine.adapter.num_layers


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("selection", ["query", "hkvd"])
def test_ratio_one_is_full_prefill(family: str, selection: str) -> None:
    with engine_with((0, 1, 2), (2, 1, 3), model=tiny.model(family)) as engine:
        whole = engine.with_config(selection=selection, recompute_ratio=1.0, verify="off")
        for numbers in ((0, 1, 2), (1, 2, 3), (2, 1, 0, 3), (4, 2, 1, 3)):
            fused = whole.fuse(prompt(*numbers))
            assert_exact(engine, fused.logits, prompt(*numbers))
        if not any(window for window in engine.adapter.windows):
            assert used(engine, 0, 1, 2) == (0, 1, 2)


def test_blended_pass_over_variants_is_that_of_its_plain_twin() -> None:
    model = tiny.model()
    with engine_with((0, 1, 2), (4, 1, 3), model=model) as engine:
        asked = prompt(1, 0, 2, 5)
        fit = engine.fitted(asked)
        split, layers = fit.split, []
        with engine._parts.pipeline.look_up(fit) as lookup:
            assert [one.usual is not None for one in lookup.chunks] == [False, False, True, False]
            config = model.config
            for layer in range(config.num_hidden_layers):
                shape = (1, config.num_key_value_heads, len(split.input_ids), config.head_dim)
                kv = LayerKV(torch.zeros(shape), torch.zeros(shape))
                for chunk, segment in zip(split.located, lookup.chunks, strict=True):
                    keys, values = lookup.records[segment.key].read_layer(layer)
                    at = slice(chunk.span.start, chunk.span.stop)
                    kv.keys[0, :, at], kv.values[0, :, at] = keys, values
                layers.append(kv)
        fused = engine.fuse(asked)
        rows = [
            sorted({*range(len(split.prefix)), *one.tolist()}) for one in fused.recomputed
        ]  # the prefix is exact, so it may be computed again
        _, logits = naive_rows(model, split.input_ids, layers, rows)
    assert_logits_close(fused.logits, logits, model, len(split.input_ids))


def test_answers_come_nearer_on_repeated_traffic() -> None:
    """Of the trained toy: six passages of which four stand in a prompt, in any order."""
    passages = [path.read_text(encoding="utf-8").strip() for path in sorted(DOCUMENTS_PATH.glob("*.md"))[:6]]
    questions = [json.loads(line)["question"] for line in QUESTIONS_PATH.read_text(encoding="utf-8").splitlines()]
    chance = random.Random(1)

    def ask(at: int) -> Prompt:
        return Prompt(STUFF.prefix, chance.sample(passages, 4), STUFF.suffix.format(q=questions[at]))

    config = BlendConfig(min_tokens=0, recompute_ratio=0.15, write_back="inline")
    with BlendEngine.from_pretrained(MODEL_PATH, dtype="float32", config=config) as engine:
        engine.warm(passages)
        seen, asked = [ask(at) for at in range(40)], [ask(at) for at in range(40, 60)]
        targets = [exact(engine, one).log_softmax(-1) for one in asked]

        def divergence() -> float:
            found = [engine.fuse(one).logits.log_softmax(-1) for one in asked]
            pairs = zip(targets, found, strict=True)
            return sum(float((one.exp() * (one - other)).sum()) for one, other in pairs) / len(asked)

        means = [divergence()]
        for part in (seen[:10], seen[10:]):
            for one in part:
                engine.generate(one, max_new_tokens=1, verify="always")
            means.append(divergence())
    assert means[0] > means[1] > means[2]
    assert means[2] < 0.5 * means[0]


async def test_answers_under_way_together_leave_exact_variants() -> None:
    with engine_with(max_concurrent=3, write_back="background") as engine:
        orders = [(0, 1, 2), (2, 1, 3), (4, 0)]
        await answers_of(engine, [prompt(*numbers) for numbers in orders], max_new_tokens=6)
        engine.flush()
        for numbers in orders:
            fused = engine.fuse(prompt(*numbers))
            assert fused.report.variants == tuple(range(len(numbers)))
            assert_exact(engine, fused.logits, prompt(*numbers))


# What it costs ------------------------------------------------------------------------------------


def test_store_is_asked_no_more_than_without() -> None:
    counted = []
    for look in (Variants.instead_of, lambda self, usual, *given: tuple(usual)):
        store = CountingStore(MemoryStore())
        with mock.patch.object(Variants, "instead_of", look), engine_with(store=store, verify="off") as engine:
            store.forget()
            infos = store.inner.infos
            store.infos = lambda beginning, infos=infos, store=store: store.calls.append(("infos",)) or infos(beginning)
            engine.fuse(prompt(0, 1, 2))
            engine.with_config(recompute_ratio=0.3).fuse(prompt(3, 1))
            counted.append(store.counts)
    assert counted[0] == counted[1]


def test_prompt_with_variants_opens_all_at_once() -> None:
    store = CountingStore(MemoryStore())
    with engine_with((0, 1, 2), store=store) as engine:
        store.forget()
        assert used(engine, 0, 1, 2) == (0, 1, 2)
        assert sum(call[0] == "open_all" for call in store.calls) == 1


def test_same_prompt_again_stores_nothing() -> None:
    store = CountingStore(MemoryStore())
    with engine_with((0, 1, 2), store=store) as engine:
        store.forget()
        engine.generate(prompt(0, 1, 2, question="And what else?"), max_new_tokens=2)
        assert [call for call in store.calls if call[0] == "put"] == []


def test_variants_are_found_again_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_with((0, 1, 2), (3, 2), store=tmp_path):
        pass
    store, asked = DiskStore(tmp_path), list[str]()
    infos = store.infos
    monkeypatch.setattr(store, "infos", lambda beginning: asked.append(beginning) or infos(beginning))
    with closing(store), engine_of(store=store, selection="none") as engine:
        assert used(engine, 0, 1, 2) == (0, 1, 2)
        assert len(asked) == 4, "whether there are any, and those of each chunk"
        assert used(engine, 3, 2) == (0, 1)
        assert used(engine, 0, 1, 2) == (0, 1, 2)
        assert len(asked) == 5


def test_counts_say_how_many_were_used() -> None:
    with engine_with((0, 1, 2)) as engine:
        tally = Tally()
        for numbers in ((0, 1), (1, 0)):
            tally.note(engine.generate(prompt(*numbers), max_new_tokens=1, verify="off"))
        assert tally.stats().variants == 2
        metrics = Metrics(lambda: 0, lambda: 0, lambda: None)
        metrics.answered(engine.generate(prompt(0, 1, 2), max_new_tokens=1, verify="off").report)
        assert b"cacheblend_rag_variants_total 3.0" in metrics.text()


# Variants that are not there any more --------------------------------------------------------------


def test_variant_that_has_gone_is_a_miss_and_the_usual_record_is_read() -> None:
    store = CountingStore(MemoryStore())
    with engine_with((0, 1, 2), store=store) as engine:
        expected = usually(engine, prompt(0, 1, 2))
        for key in kept(store):
            store.delete(key)
        found = engine.fuse(prompt(0, 1, 2))
        assert (found.report.hits, found.report.variants, found.report.lost) == (3, (), 0)
        assert torch.equal(found.logits, expected.logits)
        store.forget()
        engine.fuse(prompt(0, 1, 2))
        assert sum(call[0] == "open_all" for call in store.calls) == 1, "it is not looked for again"


@pytest.mark.parametrize("damage", ["cut", "altered", "emptied"])
def test_damaged_variant_is_a_miss_and_the_usual_record_is_read(damage: str, tmp_path: Path) -> None:
    with engine_with(store=tmp_path) as engine:
        before = set(record_files(tmp_path))
        engine.generate(prompt(0, 1, 2), max_new_tokens=1)
        expected = usually(engine, prompt(0, 1, 2))
        for path in set(record_files(tmp_path)) - before:
            content = bytearray(path.read_bytes())
            content[-4096] ^= 1  # the first byte of the last layer
            path.write_bytes({"cut": content[:-4096], "altered": content, "emptied": b""}[damage])
        found = engine.fuse(prompt(0, 1, 2))
        assert (found.report.hits, found.report.variants) == (3, ())
        assert torch.equal(found.logits, expected.logits)
        assert kept(engine.store) == {}


def test_chunk_without_any_record_is_computed_and_its_usual_record_stored_again() -> None:
    with engine_with((0, 1, 2)) as engine:
        usual = next(
            key for key, info in engine.store.infos("") if info.kind == "chunk" and info.tokens == _tokens(engine, 2)
        )
        engine.store.delete(usual)
        for key, info in kept(engine.store).items():
            if info.tokens == _tokens(engine, 2):
                engine.store.delete(key)
        report = engine.generate(prompt(0, 1, 2), max_new_tokens=1, verify="off").report
        assert (report.hits, report.misses, report.variants) == (2, 1, (0, 1))
        assert engine.store.contains(usual)


def _tokens(engine: BlendEngine, number: int) -> int:
    return len(engine.tokenize(prompt(number)).chunks[0])


def test_record_of_another_kind_under_a_variants_key_is_refused() -> None:
    with engine_with((0, 1)) as engine:
        (key,) = [key for key, info in kept(engine.store).items() if len(info.before) == 2]
        usual, _ = next((key, info) for key, info in engine.store.infos("") if info.kind == "chunk")
        record = engine.store._records[usual]  # type: ignore[attr-defined]
        engine.store.put(key, record)
        assert used(engine, 0, 1) == (0,)
        assert not engine.store.contains(key)


# Erasing ------------------------------------------------------------------------------------------


def test_forgetting_a_chunk_erases_its_variants_and_those_behind_it() -> None:
    with engine_with((0, 1, 2), (3, 4), (4, 1)) as engine:
        assert len(kept(engine.store)) == 7
        engine.forget([TEXTS[1]])
        left = kept(engine.store).values()
        tokenizer = engine._parts.pipeline.segments.tokenizer
        gone = tokenizer.chunk(TEXTS[1]).ids
        assert len(left) == 4
        for info in left:
            ids = info.context_ids + info.token_ids
            assert not any(ids[at : at + len(gone)] == gone for at in range(len(ids)))
        assert used(engine, 3, 4) == (0, 1)


def test_forgetting_finds_chunks_that_stood_in_another_form() -> None:
    """A tokenizer that merges pieces across an edge that no usual prompt has."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<<" + TEXTS[0][:12]])
    merged = Prompt("<<", TEXTS[:2], " Why?", ["\n\n"])
    with engine_of(tiny.model(vocab_size=500), tokenizer, selection="none", verify="always") as engine:
        assert [one.usual for one in engine.tokenize(merged).located] == [False, True]
        engine.generate(merged, max_new_tokens=1)
        assert engine.fuse(merged).report.variants == (0, 1)
        engine.forget(TEXTS[:1])
        assert kept(engine.store) == {}, "that of the other one stood behind it"


def test_forgetting_leaves_another_tenants_variants_alone() -> None:
    with engine_with((0, 1, 2)) as engine:
        other = engine.with_config(salt="another tenant")
        assert used(other, 0, 1, 2) == (), "tenants share nothing"
        for _ in range(2):
            other.generate(prompt(0, 1, 2), max_new_tokens=1)
        assert len(kept(engine.store)) == 6
        engine.forget(TEXTS)
        assert len(kept(engine.store)) == 3
        assert used(other, 0, 1, 2) == (0, 1, 2)
        assert used(engine, 0, 1, 2) == ()


def test_tenants_that_were_not_seen_for_long_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "_TENANTS", 3)
    with engine_with((0, 1, 2)) as engine:
        for number in range(5):
            used(engine.with_config(salt=f"tenant {number}"), 0, 1, 2)
        assert len(engine.chunks.pipeline.variants._tenants) == 3
        assert used(engine, 0, 1, 2) == (0, 1, 2)
        engine.forget(TEXTS)
        assert used(engine, 0, 1, 2) == ()


def test_variants_that_wait_to_be_stored_are_not_stored_once_forgotten() -> None:
    with engine_with(write_back="background") as engine:
        with engine.turns.scheduler:  # so that nothing is stored yet
            engine_jobs = engine.turns.write_back
            answer = engine.generate(prompt(0, 1, 2), max_new_tokens=1)
            assert answer.verification.status != "off"
            waiting = [name for name in engine_jobs._names if name.startswith(KEY_PREFIX)]
            assert len(waiting) == 3
            engine.chunks.drop_waiting(TEXTS[1:2])
        engine.flush()
        assert [len(info.before) for info in kept(engine.store).values()] == [1], "the one that stood before it"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set when a check has begun, which then waits until nobody wants the result."""
    event, pauses = threading.Event(), Turns.pauses_in_background

    def paused(self: Turns, cancelled: Any) -> Any:
        event.set()
        until(cancelled)
        return pauses(self, cancelled)

    monkeypatch.setattr(Turns, "pauses_in_background", paused)
    yield event
    event.set()


def test_check_under_way_stores_nothing_of_what_is_forgotten(begun: threading.Event) -> None:
    with engine_with(verify="off") as engine:
        answer = engine.generate(prompt(0, 1, 2), max_new_tokens=1, verify="idle")
        assert begun.wait(20)
        engine.forget(TEXTS[:1])
        found = engine.verifications.result(answer.verification.id, wait=20)
        assert found is not None
        assert found.status == "given up"
        engine.flush()
        assert kept(engine.store) == {}


@pytest.mark.parametrize("write_back", ["inline", "background"])
@pytest.mark.parametrize("verify", ["off", "always"])
def test_answer_under_way_stores_nothing_of_what_is_forgotten(write_back: str, verify: str) -> None:
    def forget(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        engine.forget(TEXTS[:1])
        return scores

    with engine_with(verify="off", write_back=write_back) as engine:
        engine.forget(TEXTS[:2])
        before = {key for key, _ in engine.store.infos("")}
        engine.generate(prompt(2, 0, 1), max_new_tokens=2, verify=verify, logits_processor=[forget])
        engine.flush()
        gone = engine._parts.pipeline.segments.tokenizer.chunk(TEXTS[0]).ids
        stored = {key: info.context_ids + info.token_ids for key, info in engine.store.infos("")}
        for ids in stored.values():
            assert not any(ids[at : at + len(gone)] == gone for at in range(len(ids)))
        assert stored.keys() > before, "the other chunk that was missing is"


@pytest.mark.parametrize("when", ["stored", "under way"])
def test_prefix_that_holds_what_is_forgotten_goes_too(when: str) -> None:
    def forget(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        engine.forget(TEXTS[:1])
        return scores

    with engine_of(salt="a") as engine:
        asked, other = prompt(1, prefix=f"Earlier: {TEXTS[0]} And now:"), engine.with_config(salt="b")
        other.generate(asked, max_new_tokens=1)
        engine.generate(asked, max_new_tokens=1, logits_processor=[forget] if when == "under way" else [])
        if when == "stored":
            engine.forget(TEXTS[:1])
        assert (engine.fuse(asked).report.prefix_hit, other.fuse(asked).report.prefix_hit) == (False, True)


# Other ways of keeping KV --------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("memory", [0, "1GB"])
def test_variants_lie_in_any_codec_and_tier(codec: str, memory: Any, tmp_path: Path) -> None:
    with engine_with((0, 1, 2), store=tmp_path, codec=codec, memory_limit=memory) as engine:
        target, usual = exact(engine, prompt(0, 1, 2)), usually(engine, prompt(0, 1, 2))
        fused = engine.fuse(prompt(0, 1, 2))
        assert fused.report.variants == (0, 1, 2)
        assert (fused.logits - target).norm() < (usual.logits - target).norm()


@pytest.mark.parametrize("options", [{"condition": "context"}, {"condition": "prefix"}], ids=str)
def test_variants_are_used_under_every_condition(options: dict[str, Any]) -> None:
    with engine_with((0, 1, 2), **options) as engine:
        first = () if options["condition"] == "prefix" else (0,)
        assert used(engine, 0, 1, 2) == (*first, 1, 2)
        found = engine.fuse(prompt(0, 1, 2))
        assert_exact(engine, found.logits, prompt(0, 1, 2))


def test_layers_that_forget_their_first_rows_leave_no_variants() -> None:
    model = tiny.model("gemma3_text", layer_types=tiny.LAYER_TYPES, sliding_window=24)
    with engine_with((0, 1, 2), model=model) as engine:
        assert kept(engine.store) == {}


def test_frequency_regimes_have_variants_of_their_own() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0}
    half = tiny.model("phi3").config.head_dim // 2
    rope |= {"short_factor": [1.0] * half, "long_factor": [2.0] * half}
    model = tiny.model("phi3", rope_parameters=rope)
    with engine_with((0, 1, 2), (0, 1, 2, 3, 4, 5), model=model) as engine:
        lengths = [len(engine.tokenize(prompt(*numbers)).input_ids) for numbers in ((0, 1, 2), range(6))]
        for numbers in ((0, 1, 2), tuple(range(6))):
            fused = engine.fuse(prompt(*numbers))
            assert fused.report.variants == tuple(range(len(numbers))), lengths
            assert_exact(engine, fused.logits, prompt(*numbers))


def test_adapter_that_is_switched_has_other_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_with((0, 1, 2)) as engine:
        identity = engine.turns.segments.model._identity
        own = identity.value
        monkeypatch.setattr(identity, "refresh", lambda: setattr(identity, "value", "another adapter"))
        assert used(engine, 0, 1, 2) == ()
        monkeypatch.setattr(identity, "refresh", lambda: setattr(identity, "value", own))
        assert used(engine, 0, 1, 2) == (0, 1, 2)


def test_conversation_that_goes_on_takes_variants_for_its_new_chunks() -> None:
    with engine_with((0, 1, 2, 3), prompt_cache="auto") as engine:
        engine.chunks.drop_prompts()
        engine.generate(prompt(0, 1), max_new_tokens=1, verify="always")
        report = engine.generate(prompt(0, 1, 2), max_new_tokens=1, verify="off").report
        assert report.resumed_tokens > 0
        assert report.variants == (2,)


def test_remote_store_is_looked_through_beside_requests() -> None:
    store = MemoryStore()
    with engine_with((0, 1), store=store):
        pass
    asked, go_on = threading.Event(), threading.Event()

    class Remote(CountingStore):
        def infos(self, beginning: str) -> Iterator[tuple[str, RecordInfo]]:
            asked.set()
            go_on.wait(20)
            return super().infos(beginning)

    remote = Remote(store)
    remote.traits = type(store.traits)(tier="far", remote=True)
    with engine_of(store=remote, selection="none") as engine:
        assert used(engine, 0, 1) == ()
        assert asked.wait(20)
        go_on.set()
        until(lambda: used(engine, 0, 1) == (0, 1))


def test_store_that_cannot_be_looked_through_has_no_variants() -> None:
    class Broken(CountingStore):
        def infos(self, beginning: str) -> Iterator[tuple[str, RecordInfo]]:
            raise StoreError("away")

    with engine_of(store=Broken(MemoryStore()), selection="none") as engine:
        assert engine.fuse(prompt(0, 1)).report.variants == ()
