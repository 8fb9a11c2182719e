"""GGUF files in llama.cpp: what is computed, stored, blended, verified and refused."""

from __future__ import annotations

import copy
import gc
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from cacheblend_rag.calibration.quality import Methods
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.engine.scheduler import ModelTime, Scheduler, _Step
from cacheblend_rag.errors import ConfigError, GenerationError, ModelLoadError
from cacheblend_rag.llama_cpp.adapter import LlamaAdapter, LlamaDecode
from cacheblend_rag.llama_cpp.blend import _attention
from cacheblend_rag.llama_cpp.cache import SequenceCache
from cacheblend_rag.llama_cpp.library import library
from cacheblend_rag.llama_cpp.model import load_gguf
from cacheblend_rag.llama_cpp.runtime import Runtime
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.modules import cache_argument
from cacheblend_rag.prompt import Prompt
from tests import gguf_files, tiny
from tests.programs import start_program
from tests.waiting import until

CHUNKS = [
    "The harbour of Reval froze in January, and no ship came in before the end of March that year.",
    "Copper was paid for in salt: one pound for three, as the guild had written down in its book.",
    "A letter from Bruges took five weeks, and the answer as long again if the straits were open.",
]


@pytest.fixture(scope="module")
def torch_model():
    return tiny.model("qwen3").float().eval()


@pytest.fixture(scope="module")
def file(tmp_path_factory, torch_model) -> Path:
    return gguf_files.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", torch_model)


@pytest.fixture(scope="module")
def loaded(file):
    return load_gguf(file)


def engine_of(loaded, store=None, **options) -> BlendEngine:
    settings = {"prompt_cache": 0, "min_tokens": 1, "write_back": "inline"} | options
    return BlendEngine(*loaded, config=BlendConfig(**settings), store=store)


def prompt_of(chunks=CHUNKS, question="How long did a letter take?") -> Prompt:
    return Prompt(prefix="Answer from the notes.\n", chunks=list(chunks), suffix=f"\n{question}\n")


def ids_of(engine: BlendEngine, prompt: Prompt) -> list[int]:
    return list(engine.tokenize(prompt).input_ids)


@pytest.mark.parametrize(("kind", "repacked"), [("Q4_0", True), ("Q8_0", False)])
def test_weights_are_repacked_where_that_is_faster(tmp_path, torch_model, monkeypatch, kind, repacked):
    options, load = [], library().llama_model_load_from_file
    monkeypatch.setattr(
        library(), "llama_model_load_from_file", lambda *given: options.append(given[1]) or load(*given)
    )
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    load_gguf(gguf_files.write(tmp_path / "tiny.gguf", torch_model, kind))
    assert [one.use_extra_bufts for one in options] == [repacked]


def test_logits_are_those_of_the_same_weights_in_pytorch(loaded, torch_model):
    ids = list(range(5, 45))
    own = engine_of(loaded).adapter.prefill(ids).logits
    expected = ModelAdapter(torch_model).prefill(ids).logits
    assert float((own - expected).norm() / expected.norm()) < 5e-3


def test_state_is_read_and_written_as_llama_cpp_does(loaded):
    runtime = loaded[0].runtime
    with runtime.sequence() as one:
        runtime.compute(list(range(5, 25)), 0, one)
        state = runtime.state(one)
    again = runtime.layout.write(*runtime.layout.read(state, 0, 20), 0)
    assert np.array_equal(state[8:], again[8:])  # the sequence's number aside


def test_attention_of_the_question_is_pytorchs_on_every_layer(loaded, torch_model):
    runtime, ids = loaded[0].runtime, list(range(5, 45))
    with runtime.sequence() as one:
        runtime.compute(ids[:30], 0, one)
        queries = runtime.queries(ids[30:], 30, one, range(runtime.layers))
        keys = runtime.kv(one, 0, len(ids))[0]
    torch_model.set_attn_implementation("eager")
    expected = torch_model(torch.tensor([ids]), output_attentions=True).attentions
    for own, stored, theirs in zip(queries, keys, expected, strict=True):
        found = _attention(own, stored.float(), 30)
        assert torch.allclose(found, theirs[0, :, 30:].mean(dim=(0, 1)), atol=1e-3)


def test_moved_kv_is_that_of_its_new_place(loaded):
    """Keys of the first layer depend on a token and its position alone."""
    adapter, ids = engine_of(loaded).adapter, list(range(40, 60))
    (kv,) = adapter.segments_kv(list(range(5, 30)), [ids])
    (own,) = adapter.segments_kv((), [ids])
    assert torch.allclose(kv.keys[0].float(), own.keys[0].float(), atol=2e-2, rtol=1e-2)
    assert torch.allclose(kv.values[0].float(), own.values[0].float(), atol=2e-2, rtol=1e-2)
    assert not torch.allclose(kv.values[-1].float(), own.values[-1].float(), atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("stored", [CHUNKS, CHUNKS[:2], CHUNKS[::2]])
@pytest.mark.parametrize("rule", ["all", "query", "boundary"])
def test_recomputing_everything_is_full_prefill(loaded, rule, stored):
    engine = engine_of(loaded, selection=rule, recompute_ratio=1.0)
    engine.chunks.warm(stored)
    prompt = prompt_of()
    fused = engine.fuse(prompt)
    expected = engine.adapter.prefill(ids_of(engine, prompt)).logits
    assert fused.report.hits == (0 if rule == "all" else len(stored))
    assert float((fused.logits - expected).norm() / expected.norm()) < 2e-2


def test_chunks_are_reused_in_another_order_and_few_rows_computed(loaded):
    engine = engine_of(loaded)
    first = engine.generate(prompt_of(), max_new_tokens=4)
    again = engine.generate(prompt_of(CHUNKS[::-1], "Who paid in salt?"), max_new_tokens=4)
    assert (first.report.hits, first.report.misses) == (0, 3)
    assert (again.report.hits, again.report.misses, again.report.plain) == (3, 0, False)
    whole = len(ids_of(engine, prompt_of(CHUNKS[::-1], "Who paid in salt?")))
    assert again.report.computed_tokens[0] < 0.6 * whole


def test_records_outlive_the_engine_and_a_damaged_one_is_a_miss(loaded, tmp_path):
    with engine_of(loaded, tmp_path / "kv") as engine:
        engine.chunks.warm(CHUNKS)
    with engine_of(loaded, tmp_path / "kv") as engine:
        assert engine.generate(prompt_of(), max_new_tokens=2).report.hits == 3
    record = max((path for path in (tmp_path / "kv").rglob("*.val")), key=lambda path: path.stat().st_size)
    data = bytearray(record.read_bytes())
    for at in range(len(data) // 4, len(data), 64):
        data[at] ^= 0xFF
    record.write_bytes(data)
    with engine_of(loaded, tmp_path / "kv") as engine:
        answer = engine.generate(prompt_of(), max_new_tokens=2)
        assert answer.report.misses + answer.report.lost >= 1


def test_store_outlives_a_process_that_is_killed(file, loaded, tmp_path):
    program = """
import itertools, sys
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.engine import BlendEngine
from tests.llama_cpp.test_llama_cpp import CHUNKS
engine = BlendEngine.from_pretrained(sys.argv[1], store=sys.argv[2], config=BlendConfig(min_tokens=1))
for round in itertools.count():
    engine.chunks.warm(CHUNKS, progress=False)
    print(round, flush=True)
    engine.forget(CHUNKS)
"""
    output = tmp_path / "output"
    process = start_program(["-c", program, str(file), str(tmp_path / "kv")], Path.cwd(), output, tmp_path / "errors")
    until(lambda: output.exists() and output.read_text().count("\n") > 2)
    process.kill()
    process.join()
    with engine_of(loaded, tmp_path / "kv", codec="raw") as engine, engine_of(loaded, codec="raw") as fresh:
        for one in (engine, fresh):
            one.chunks.warm(CHUNKS, progress=False)
        assert engine.generate(prompt_of(), max_new_tokens=1).report.hits == 3
        answers = [one.generate(prompt_of(), max_new_tokens=6, verify="always").token_ids for one in (engine, fresh)]
        assert answers[0] == answers[1]


def test_records_of_another_library_are_misses(loaded, tmp_path, monkeypatch):
    with engine_of(loaded, tmp_path / "kv") as engine:
        engine.chunks.warm(CHUNKS)
    monkeypatch.setattr(loaded[0].runtime, "version", "0.27.0")
    with engine_of(loaded, tmp_path / "kv") as engine:
        assert engine.generate(prompt_of(), max_new_tokens=2).report.hits == 0


def test_verified_answer_is_llama_cpps_own(loaded):
    engine = engine_of(loaded, recompute_ratio=0.05)
    engine.chunks.warm(CHUNKS)
    for question in ("How long did a letter take?", "Who paid in salt?", "When did the harbour freeze?"):
        prompt = prompt_of(CHUNKS[::-1], question)
        answer = engine.generate(prompt, max_new_tokens=12, verify="always")
        own = engine.generate(prompt, max_new_tokens=12, verify="held")
        assert answer.verification.status in ("verified", "corrected")
        assert answer.token_ids == own.token_ids == greedy(engine, ids_of(engine, prompt), 12)


def greedy(engine: BlendEngine, ids: list[int], most: int) -> list[int]:
    """The answer of llama.cpp alone: full prefill, then token by token."""
    made = engine.adapter.prefill(ids)
    logits, answer = made.logits, list[int]()
    ends = np.atleast_1d(engine.model.generation_config.eos_token_id)
    while len(answer) < most and not set(answer[-1:]) & set(ends):
        answer.append(int(logits.argmax()))
        logits = engine.adapter.extend(made.cache, answer[-1:])[-1]
    return answer


def test_kept_prompt_is_gone_on_from(loaded):
    engine = engine_of(loaded, prompt_cache=10**8)
    first = engine.generate(prompt_of(), max_new_tokens=4)
    text = prompt_of().written(engine.config.separator).text + first.text + " And then what came by sea to the town?"
    answer = engine.generate(text, max_new_tokens=4)
    assert answer.report.resumed_tokens > 32
    assert answer.token_ids == engine_of(loaded).generate(text, max_new_tokens=4).token_ids


def test_check_goes_on_from_whole_batches_of_prompts_alone(loaded):
    """Words of an answer were computed one by one, and llama.cpp rounds a batch otherwise."""
    engine = engine_of(loaded, prompt_cache=10**8)
    text = "Notes. " + tiny.text(480, 1)
    prompt = len(ids_of(engine, Prompt(suffix=text)))
    assert 512 - 40 < prompt < 512
    first = engine.generate(text, max_new_tokens=60, stop_repetition=False)
    ids = [*ids_of(engine, Prompt(suffix=text)), *first.token_ids, 9, 9]
    with engine.chunks.pipeline.route(engine.chunks.pipeline.split(Prompt(suffix=text))) as route:
        assert route.ticket.exact_cache(ids) is None


def test_prompt_that_is_asked_again_is_exact_if_it_is_verified(loaded):
    engine = engine_of(loaded, prompt_cache=10**8)
    first = engine.generate("Who paid in salt?" * 8, max_new_tokens=4)
    checks = ("off", "always", "held")
    again = [engine.generate("Who paid in salt?" * 8, max_new_tokens=4, verify=how) for how in checks]
    assert [one.report.fidelity for one in (first, *again)] == ["exact", "approximate", "exact", "exact"]
    assert {one.text for one in again[1:]} == {first.text}


def test_answers_at_once_are_those_of_one_after_another(loaded):
    engine = engine_of(loaded, max_concurrent=3)
    engine.chunks.warm(CHUNKS)
    prompts = [prompt_of(CHUNKS, question) for question in ("Who?", "When was it?", "How long did it take?")]
    alone = [engine.generate(prompt, max_new_tokens=6).token_ids for prompt in prompts]
    together = [answer.token_ids for answer in engine.generate_batch(prompts, max_new_tokens=6)]
    assert together == alone


def test_context_grows_with_what_it_must_hold(loaded, monkeypatch, file):
    monkeypatch.setattr("cacheblend_rag.llama_cpp.runtime._CELLS_ALONE", 512)
    engine = engine_of(load_gguf(file))
    ids = [5 + number % 40 for number in range(700)]
    long, short = engine.adapter.prefill(ids), engine.adapter.prefill(ids[:300])
    assert long.cache.length == 700
    expected = engine_of(loaded).adapter
    assert torch.allclose(long.logits, expected.prefill(ids).logits, atol=1e-3)
    assert torch.allclose(short.logits, expected.prefill(ids[:300]).logits, atol=1e-3)
    kept, copied = engine.adapter.live(engine.adapter.at_rest(long.cache, 700)), copy.copy(long.cache)
    logits = [engine.adapter.extend(cache, [9]) for cache in (kept, copied, long.cache)]
    assert all(torch.equal(one, logits[-1]) for one in logits)


def test_context_that_grows_while_stored_kv_is_put_in_place_changes_nothing(loaded, file, monkeypatch, tmp_path):
    logits, chunks = [], [tiny.text(110, number) for number in range(6)]
    with engine_of(loaded, tmp_path / "kv") as engine:
        engine.chunks.warm(chunks, progress=False)
        engine.fuse(prompt_of(chunks))  # stores the prefix
    for cells in (8192, 512):
        monkeypatch.setattr("cacheblend_rag.llama_cpp.runtime.CELLS", cells)
        with engine_of(load_gguf(file), tmp_path / "kv", selection="none") as engine:
            logits.append(engine.fuse(prompt_of(chunks)).logits)
    assert torch.allclose(*logits, atol=1e-3)


def test_short_last_chunk_behind_a_missing_one_is_computed_with_the_question(loaded, monkeypatch):
    monkeypatch.setattr("cacheblend_rag.llama_cpp.blend._LONG", 100)
    chunks = [tiny.text(150, 1), tiny.text(20, 2), tiny.text(8, 3)]
    engine = engine_of(loaded, recompute_ratio=0.3)
    engine.chunks.warm([chunks[0], chunks[2]], progress=False)
    prompt = prompt_of(chunks, "Why?")
    with engine.with_config(recompute_ratio=1.0) as everything:
        expected = engine.adapter.prefill(ids_of(engine, prompt)).logits
        assert torch.allclose(everything.fuse(prompt).logits, expected, atol=2e-3)
    report = engine.generate(prompt, max_new_tokens=1).report
    assert report.recomputed_tokens[0] >= 8


def test_more_chunks_than_llama_cpp_has_sequences_are_blended(loaded, monkeypatch):
    monkeypatch.setattr("cacheblend_rag.llama_cpp.blend._LONG", 100)
    chunks = [f"Note {number}: {tiny.text(7, number)}" for number in range(70)]
    with engine_of(loaded, selection="boundary", recompute_ratio=0.1) as engine:
        engine.chunks.warm(chunks, progress=False)
        report = engine.generate(prompt_of(chunks), max_new_tokens=1).report
    assert (report.hits, report.plain) == (70, False)


def test_methods_of_a_comparison_are_told(loaded):
    engine = engine_of(loaded)
    engine.chunks.warm(CHUNKS)
    *_, results = (step for step in Methods(engine, prompt_of()).compare(max_new_tokens=6) if step)
    found = {one.name: one for one in results}
    assert found["prefix caching"].nearness.kl < 1e-3
    assert found["blended"].nearness.kl < found["blended"].nearness.order_kl


def test_model_with_a_window_is_answered_plainly_and_its_beginnings_are_reused(tmp_path):
    file = gguf_files.write(tmp_path / "window.gguf", tiny.model("gemma3_text"))
    engine, prompt = engine_of(load_gguf(file), prompt_cache=10**8), prompt_of()
    first, again = engine.generate(prompt, max_new_tokens=4), engine.generate(prompt, max_new_tokens=4)
    assert first.report.plain
    assert "cannot move its KV" in first.report.plain_reason
    assert again.token_ids == first.token_ids == greedy(engine, ids_of(engine, prompt), 4)
    assert engine.chunks.warm(CHUNKS).computed == 0


def test_rule_that_drops_rows_between_layers_is_refused(loaded):
    with pytest.raises(ConfigError, match=r"'gradual'.*use 'query'"):
        engine_of(loaded, selection="gradual")


def test_backend_is_llama_cpp_for_files_and_pytorch_where_it_is_named(file, tmp_path):
    for arguments, kind in (({}, "LlamaModel"), ({"backend": "torch"}, "Qwen3ForCausalLM")):
        with BlendEngine.from_pretrained(file, **arguments) as engine:
            assert type(engine.model).__name__ == kind
    refused = {"llama": ({}, "backend"), "torch": ({"lora": file}, r"lora.*leave backend out")}
    refused |= {
        "llama.cpp": ({"dtype": "float32"}, "dtype"),
        "auto": ({"n_gpu_layers": 1}, "n_gpu_layers=.*_LLAMA_CPP"),
    }
    for backend, (arguments, said) in refused.items():
        with pytest.raises(ConfigError, match=said):
            BlendEngine.from_pretrained(file, backend=backend, **arguments)
    with pytest.raises(ConfigError, match="name a GGUF file"):
        BlendEngine.from_pretrained("some/model", backend="llama.cpp")
    with pytest.raises(ModelLoadError, match="is no LoRA adapter for"):
        BlendEngine.from_pretrained(file, lora=file)
    with pytest.raises(ModelLoadError, match="is a LoRA adapter"):
        load_gguf(gguf_files.write_lora(tmp_path / "a.gguf", "qwen3", "x", torch.eye(4), torch.eye(4), alpha=8.0))


def test_file_that_is_none_or_damaged_is_refused_without_a_crash(file, tmp_path):
    (blob := tmp_path / f"sha256-{64 * '0'}").write_bytes(whole := file.read_bytes())
    (tmp_path / "other.gguf").write_bytes(b"no model at all" * 100)
    (tmp_path / "cut.gguf").write_bytes(whole[:-5000])
    (tmp_path / "alike.gguf").write_bytes(whole.replace(b"unused28", b"unused29"))
    (tmp_path / "fewer.gguf").write_bytes(whole.replace(b"block_count\4\0\0\0\4", b"block_count\4\0\0\0\1"))
    (tmp_path / "merges.gguf").write_bytes(whole.replace(b"\xc4\xa0 b", b"\xc4\xa0zb"))
    files = {"alike": "two of its tokens are the same", "merges": "is damaged", "none" * 99: "does not exist"}
    files |= {"other": "not a GGUF file", "cut": "cut.gguf", "none": "does not exist", "fewer": "it has 1 layers"}
    for one, said in [*((tmp_path / f"{name}.gguf", said) for name, said in files.items()), (blob, "by other content")]:
        with pytest.raises(ModelLoadError, match=said):
            load_gguf(one)


def test_memory_that_does_not_suffice_is_named_before_it_is_taken(file, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("cacheblend_rag.llama_cpp.model.total_memory", lambda: 1_300_000_000 + file.stat().st_size)
        with pytest.raises(ModelLoadError, match=r"some 1,3\d\d,\d{3},\d{3} bytes of memory, and there are 1,30\d,"):
            load_gguf(file)
    monkeypatch.setattr("cacheblend_rag.llama_cpp.runtime._CELLS_ALONE", 512)
    engine = engine_of(load_gguf(file))
    ids = [5 + number % 40 for number in range(700)]
    with monkeypatch.context() as patch:
        patch.setattr("cacheblend_rag.llama_cpp.runtime.free_memory", lambda: 10**5)
        with pytest.raises(GenerationError, match=r"context of 1,024 tokens takes .* bytes of memory, and 100,000 are"):
            engine.adapter.prefill(ids)
    assert engine.adapter.prefill(ids).cache.length == 700


def test_rows_of_a_long_prompt_are_computed_in_tiles(loaded, monkeypatch):
    monkeypatch.setattr("cacheblend_rag.llama_cpp.blend._LONG", 100)
    monkeypatch.setattr("cacheblend_rag.llama_cpp.blend._GROUP", 100)
    calls, decode = [], Runtime._decode
    monkeypatch.setattr(Runtime, "_decode", lambda self, rows, *to: (calls.append(len(rows)), decode(self, rows, *to)))
    engine = engine_of(loaded, recompute_ratio=0.3)
    engine.chunks.warm(chunks := [tiny.text(150, number) for number in range(3)])
    calls.clear()
    computed = engine.generate(prompt_of(chunks), max_new_tokens=1).report.computed_tokens[0]
    # Separators are computed where stored KV is put in place; then come whole blocks, and the question at the end.
    rows = [count for count in calls if count >= 40][1:]  # the question is computed for its attention before
    assert rows[-1] >= 64
    assert sum(rows) <= computed
    assert len(rows) > 2
    assert max(rows[:-1]) - min(rows[:-1]) <= 1
    assert all(count >= 40 for count in calls[-len(rows) :])


def test_model_is_given_back_where_its_context_cannot_be_made(file, monkeypatch):
    freed, _ = list[int](), gc.collect()
    monkeypatch.setattr(library(), "llama_init_from_model", lambda *_: None)
    monkeypatch.setattr(library(), "llama_model_free", freed.append)
    with pytest.raises(ModelLoadError, match="could not make a context"):
        load_gguf(file)
    gc.collect()
    assert len(freed) == 1


def test_answer_whose_context_cannot_grow_fails_alone(loaded, monkeypatch):
    monkeypatch.setattr("cacheblend_rag.llama_cpp.runtime._CELLS_ALONE", 512)
    adapter, scheduler = engine_of(loaded).adapter, Scheduler()
    decode, name = LlamaDecode(adapter), cache_argument(loaded[0])
    caches = [adapter.prefill([5 + number % 40 for number in range(count)]).cache for count in (512, 300)]
    inputs = [{"input_ids": torch.tensor([[9]]), name: cache} for cache in caches]
    expected = adapter.extend(copy.copy(caches[1]), [9])
    monkeypatch.setattr("cacheblend_rag.llama_cpp.runtime.free_memory", lambda: 10**5)
    failed, taken = (_Step(one, decode, ModelTime(lambda: 0)) for one in inputs)
    with scheduler.entered():
        scheduler._run([failed, taken], decode)
    assert torch.equal(taken.results[0][0], expected)
    assert "ask with fewer documents" in str(failed.error)
    with pytest.raises(GenerationError, match="ask with fewer documents"):
        decode(inputs[:1])


def test_longest_answer_fails_alone_where_the_shared_context_cannot_grow(file, monkeypatch):
    monkeypatch.setattr("cacheblend_rag.llama_cpp.runtime.CELLS", 512)
    adapter = engine_of(load_gguf(file)).adapter
    long, short = (SequenceCache(adapter.runtime, adapter.runtime.take(), 0) for _ in range(2))
    adapter.extend(short, list(range(5, 17)), 1)
    expected = adapter.extend(copy.copy(short), [9])
    adapter.extend(long, [5 + number % 40 for number in range(499)], 1)
    monkeypatch.setattr("cacheblend_rag.llama_cpp.runtime.free_memory", lambda: 0)
    inputs = [{"input_ids": torch.tensor([[9]]), cache_argument(adapter.model): cache} for cache in (long, short)]
    failed, taken = LlamaDecode(adapter)(inputs)
    assert "ask with fewer documents" in str(failed)
    assert torch.allclose(taken[0], expected, atol=1e-3)


def test_lora_adapter_is_added_to_the_weights_and_its_kv_is_its_own(file, loaded, torch_model, tmp_path):
    adapted, ids = copy.deepcopy(torch_model), list(range(5, 45))
    weight = adapted.model.layers[0].mlp.down_proj.weight
    a, b = torch.eye(4, weight.shape[1]), torch.eye(weight.shape[0], 4)
    lora = gguf_files.write_lora(tmp_path / "lora.gguf", "qwen3", "blk.0.ffn_down.weight", a, b, alpha=8.0)
    weight.data += 2 * b @ a
    expected, plain = (ModelAdapter(model).prefill(ids).logits for model in (adapted, torch_model))
    engine_of(loaded, tmp_path / "kv").chunks.warm(CHUNKS)
    shared = (engine := engine_of(load_gguf(file, lora), tmp_path / "kv")).adapter.runtime
    for logits in (engine.adapter.prefill(ids).logits, shared.compute(ids, 0, shared.take(), 1)[-1]):
        assert float((logits - expected).norm()) < 0.1 * float((plain - expected).norm())
    assert [engine.generate(prompt_of(), max_new_tokens=1).report.hits for _ in range(2)] == [0, 3]


def test_chunks_are_warmed_one_by_one_so_that_requests_get_through(loaded, monkeypatch):
    counts, compute = list[int](), LlamaAdapter.segments_kv
    monkeypatch.setattr(LlamaAdapter, "segments_kv", lambda *given: counts.append(len(given[2])) or compute(*given))
    engine_of(loaded).chunks.warm(CHUNKS, progress=False)
    assert set(counts) == {1}


def test_missing_library_is_named_with_its_remedy(file, monkeypatch, caplog):
    monkeypatch.setattr("cacheblend_rag.llama_cpp.library._candidates", lambda: iter(()))
    with caplog.at_level(logging.WARNING), BlendEngine.from_pretrained(file) as engine:
        assert type(engine.model).__name__ == "Qwen3ForCausalLM"
    assert "cacheblend-rag[llama-cpp]" in caplog.text


def test_full_prefill_is_the_same_to_the_bit_whatever_else_is_in_memory(loaded):
    adapter = engine_of(loaded).adapter
    ids = [5 + number * 7 % 300 for number in range(600)]
    first = adapter.prefill(ids)
    with adapter.runtime.sequence() as one:
        adapter.runtime.compute(ids[:150], 0, one)
        others = [adapter.prefill(ids[:100]) for _ in range(2)]
        again = adapter.prefill(ids)
        assert torch.equal(again.logits, first.logits)
        steps = [adapter.extend(made.cache, [9])[-1] for made in (first, again)]
        assert torch.equal(*steps)
    assert len(others) == 2
