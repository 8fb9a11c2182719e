"""Models that are not blended: each is answered as transformers answers, and beginnings are reused exactly."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation import LogitsProcessor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cacheblend_rag import BlendEngine, Prompt
from cacheblend_rag.app.cli import main
from cacheblend_rag.calibration.quality import Methods
from cacheblend_rag.engine.prompt_cache import KeptPrompt, PromptCache, PromptKind
from cacheblend_rag.errors import ConfigError, PromptError, UnsupportedModelError
from cacheblend_rag.models import families
from cacheblend_rag.models.loading import treatment_of
from cacheblend_rag.models.plain import PlainAdapter
from cacheblend_rag.store import MemoryStore
from tests import gguf_files, probes, tiny
from tests.pairwise import others_slow
from tests.parity.families import OF_THE_DAY, PAGE, treatment_rows
from tests.thinking import Writer, thinking_tokenizer

BEGINS = tiny.text(40, 7)
CHUNKS = [tiny.text(23, 1), tiny.text(31, 2)]
PROMPT = Prompt(BEGINS, CHUNKS, "What fell in the end?")
OTHER = Prompt(BEGINS, [tiny.text(19, 5)], "Who watched from the tree?")
IN_SLICES = sorted(name for name, (goes_on, _) in tiny.PLAIN.items() if goes_on == "slices")


def engine_of(*given: Any, **options: Any) -> BlendEngine:
    """An engine of a model that is answered plainly. It remembers what others in these tests shall not."""
    return probes.engine_of(*given, **{"prompt_cache": "auto", **options})


def own_answer(model: Any, ids: Sequence[int], tokens: int = 8) -> list[int]:
    """Transformers' own greedy answer."""
    inputs = torch.tensor([list(ids)])
    out = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, do_sample=False)
    answer: list[int] = out[0, len(ids) :].tolist()
    return answer


@pytest.mark.parametrize("family", others_slow(sorted(tiny.PLAIN), ("lfm2", "rwkv", "gpt2", "jamba")))
def test_plain_models_answer_as_transformers_does(family: str) -> None:
    goes_on, model = tiny.PLAIN[family][0], tiny.plain_model(family)
    with engine_of(copy.deepcopy(model), verify="always") as engine:
        assert (engine.adapter.goes_on, bool(engine.adapter.plain_reason)) == (goes_on, True)
        first, again, other = (engine.generate(prompt, max_new_tokens=8) for prompt in (PROMPT, PROMPT, OTHER))
        for answer in (first, again, other):
            assert answer.token_ids == own_answer(model, answer.report.input_ids)
            assert answer.report.plain
            assert answer.report.plain_reason == engine.adapter.plain_reason
            assert answer.verification.status == "verified"
            assert answer.verification.seconds == 0
        kept = first.report.prefix_tokens * (goes_on == "slices")
        assert [one.report.resumed_tokens for one in (first, again, other)] == [0, kept, kept]
        assert again.report.prefix_hit == other.report.prefix_hit == bool(kept)
        assert set(again.report.computed_tokens) == {again.report.prompt_tokens - kept}


@pytest.mark.parametrize("family", others_slow(IN_SLICES, ("lfm2", "mamba2")))
def test_behind_a_checkpoint_logits_are_those_without_it(family: str) -> None:
    with engine_of(tiny.plain_model(family)) as engine:
        first, again = engine.fuse(PROMPT), engine.fuse(PROMPT)
        assert (first.report.resumed_tokens, again.report.prefix_hit) == (0, True)
        plain = tiny.full_prefill(engine.model, first.input_ids).logits[0, -1]
        for one in (first, again):
            assert float((one.logits - plain).norm() / plain.norm()) < 1e-3


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_prompt_is_read_at_once_where_frequencies_change_with_its_length(rope: str) -> None:
    window = tiny.LONG * (1 if rope == "dynamic" else 4)
    model = tiny.plain_model("lfm2", max_position_embeddings=window, rope_parameters=tiny.rope_parameters(rope))
    with engine_of(copy.deepcopy(model)) as engine:
        fused = engine.fuse(Prompt(BEGINS, [tiny.text(100, 2)], tiny.text(200, 3)))
    plain = tiny.full_prefill(model, fused.input_ids).logits[0, -1]
    assert float((fused.logits - plain).norm() / plain.norm()) < 1e-3


def test_memory_that_runs_out_costs_a_checkpoint_and_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(cache: Any) -> Any:
        raise torch.OutOfMemoryError("it is full")

    with engine_of(tiny.plain_model("lfm2")) as engine:
        monkeypatch.setattr("cacheblend_rag.engine.prompt_cache.copy.deepcopy", fails)
        assert engine.fuse(PROMPT).report.plain
        assert len(engine.prompts) == 0
    assert "memory ran out: it is full" in caplog.text


def test_long_prompts_are_read_in_slices_beside_others() -> None:
    model = tiny.plain_model("lfm2", max_position_embeddings=4096)
    prompts = [Prompt(BEGINS, [tiny.text(1100, seed)], f"What fell {seed} times?") for seed in range(3)]
    with engine_of(copy.deepcopy(model), max_concurrent=3) as engine, ThreadPoolExecutor(3) as pool:
        assert engine.turns.several
        answers = list(pool.map(lambda prompt: engine.generate(prompt, max_new_tokens=6), prompts))
        assert all(len(answer.report.input_ids) > 1024 for answer in answers)
        for answer in answers:
            assert answer.token_ids == own_answer(model, answer.report.input_ids, 6)


@pytest.mark.parametrize("family", ["jamba", "mamba2"])
def test_several_answers_at_once_are_those_of_one_after_another(family: str) -> None:
    model = tiny.plain_model(family)
    prompts = [PROMPT, OTHER, PROMPT, Prompt(suffix=tiny.text(12, 9))]
    with engine_of(copy.deepcopy(model), max_concurrent=4) as engine:
        assert engine.turns.several == (tiny.PLAIN[family][0] != "whole")
        answers = engine.generate_batch(prompts, max_new_tokens=6)
        assert [answer.token_ids for answer in answers] == [
            own_answer(model, answer.report.input_ids, 6) for answer in answers
        ]


class Forced(LogitsProcessor):  # type: ignore[misc]
    """Lets an answer be some ids."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = deque(ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -100.0)
        forced[:, self._ids.popleft()] = 100.0
        return forced


@pytest.mark.parametrize("family", ["mamba2"])
def test_finished_turns_are_gone_on_from(family: str) -> None:
    model, tokenizer = tiny.plain_model(family), tiny.tokenizer(bos=False)
    said = tokenizer("\nseven grey owls\n")["input_ids"]
    following = Prompt(BEGINS, CHUNKS, PROMPT.suffix + "\nseven grey owls\nAnd before that?")
    with engine_of(copy.deepcopy(model), tokenizer) as engine:
        first = engine.generate(PROMPT, max_new_tokens=len(said), logits_processor=[Forced(said)])
        second = engine.generate(following, max_new_tokens=6)
        read = (*first.report.input_ids, *said[:-1])
        assert second.report.input_ids[: len(read)] == read
        assert second.report.resumed_tokens == len(read)
        assert (second.report.hits, second.report.misses) == (2, 0)
        assert second.token_ids == own_answer(model, second.report.input_ids, 6)
    with engine_of(model, tokenizer, prompt_cache=0) as engine:
        engine.generate(PROMPT, max_new_tokens=len(said), logits_processor=[Forced(said)])
        again = engine.generate(following, max_new_tokens=6).report
        assert (again.resumed_tokens, again.hits) == (0, 0)


def test_conversation_whose_answers_change_goes_on_from_what_both_began_with() -> None:
    """A template that leaves out thoughts writes other tokens than the answer had."""
    model = tiny.plain_model("qwen3_5_text")
    turns = [BEGINS + tiny.text(30, 1)]
    turns += [turns[0] + " so it is. " + tiny.text(20, 2), turns[0] + " so it is. " + tiny.text(20, 2) + " or not"]
    with engine_of(copy.deepcopy(model)) as engine:
        answers = [engine.generate(Prompt(suffix=turn), max_new_tokens=6) for turn in turns]
        for answer in answers:
            assert answer.token_ids == own_answer(model, answer.report.input_ids, 6)
        resumed = [answer.report.resumed_tokens for answer in answers]
        first = len(answers[0].report.input_ids)
        assert resumed[:2] == [0, 0]
        assert first - 3 < resumed[2] <= first
        engine.forget([BEGINS])
        assert engine.generate(Prompt(suffix=turns[2]), max_new_tokens=6).report.resumed_tokens == 0
    with engine_of(model, prompt_cache=0) as engine:
        assert [engine.generate(turn, max_new_tokens=1).report.resumed_tokens for turn in turns] == [0, 0, 0]


def test_checkpoints_are_of_one_tenant_and_one_model() -> None:
    model = tiny.plain_model("lfm2")
    with engine_of(model, salt="a") as one:
        one.generate(PROMPT, max_new_tokens=2)
        assert one.generate(PROMPT, max_new_tokens=2).report.prefix_hit
        other = one.with_config(salt="b")
        assert not other.generate(PROMPT, max_new_tokens=2).report.prefix_hit
        assert other.generate(PROMPT, max_new_tokens=2).report.prefix_hit
        assert one.prompts is other.prompts
        other.forget([BEGINS])
        assert one.generate(PROMPT, max_new_tokens=2).report.prefix_hit
        assert not other.generate(PROMPT, max_new_tokens=2).report.prefix_hit


def test_forgetting_a_chunk_drops_the_turns_that_hold_it() -> None:
    with engine_of(tiny.plain_model("lfm2")) as engine:
        engine.generate(PROMPT, max_new_tokens=2)
        engine.generate(OTHER, max_new_tokens=2)
        assert len(engine.prompts) == 3
        engine.forget([CHUNKS[1]])
        assert len(engine.prompts) == 2
        one, other = (engine.generate(prompt, max_new_tokens=2).report for prompt in (PROMPT, OTHER))
        assert one.resumed_tokens == other.prefix_tokens
    assert len(engine.prompts) == 0


def test_answer_under_way_puts_back_no_checkpoint_of_what_was_forgotten() -> None:
    def forget(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        engine.forget([CHUNKS[1]])
        return scores

    with engine_of(tiny.plain_model("lfm2")) as engine:
        engine.generate(PROMPT, max_new_tokens=2, logits_processor=[forget])
        assert len(engine.prompts) == 1, "that behind the prefix"
        engine.generate(PROMPT, max_new_tokens=2)
        assert len(engine.prompts) == 2


@pytest.mark.parametrize("ends", ["thought", "stop"])
def test_checkpoint_behind_an_answer_is_behind_no_thought_and_nothing_that_was_cut_off(ends: str) -> None:
    """The states of a model without attention do not say what they have read."""
    model = tiny.plain_model("mamba2", vocab_size=420)
    tokenizer = thinking_tokenizer("qwen3")
    said = {"thought": "<think>\nan owl\n</think>\n\nA leaf.", "stop": "A leaf. It fell."}[ends]
    with engine_of(model, tokenizer) as engine:
        options: dict[str, Any] = {"reasoning": True} if ends == "thought" else {"stop": ["It"]}
        first = engine.generate(
            Prompt(suffix=BEGINS), max_new_tokens=40, logits_processor=[Writer(tokenizer, said)], **options
        )
        assert bool(first.report.thought_tokens) is (ends == "thought")
        assert first.text.strip() == "A leaf."
        following = engine.fuse(f"{BEGINS}{first.text} And what then?")
        plain = tiny.full_prefill(engine.model, following.input_ids).logits[0, -1]
        assert float((following.logits - plain).norm() / plain.norm()) < 1e-3


def test_checkpoints_take_no_more_than_their_bytes_and_the_longest_is_found() -> None:
    adapter = PlainAdapter(tiny.plain_model("lfm2"), "it is tried")
    kind, ids = PromptKind("", "model", ""), range(5, 65)
    made = [KeptPrompt(kind, (*ids[:length],), length, length, frozenset(), None, True) for length in (20, 40, 60)]
    made = [replace(one, cache=adapter.prefill(one.token_ids).cache) for one in made]
    prompts = PromptCache()
    for one in made:
        prompts.keep(one, 10**9)
    assert prompts.find(kind, [*ids[:50], 7]) == (made[1], 40)
    assert prompts.find(kind, ids[:40]) == (made[0], 20), "the last token is always computed"
    assert prompts.find(PromptKind("", "other", ""), [*ids, 9]) is None
    prompts.keep(made[2], prompts.nbytes - 1)
    assert len(prompts) == 2
    assert prompts.find(kind, [*ids[:50], 7]) == (made[0], 20), "what was used least lately is gone"
    prompts.tenants = lambda: 2
    prompts.keep(made[1], 2 * prompts.nbytes)
    assert len(prompts) == 2, "of two tenants each has half, whatever the other asks"
    prompts.repeated(kind, (1, 2, 3))
    for number in range(40):
        prompts.repeated(replace(kind, salt="other"), (number,))
    assert prompts.repeated(kind, (1, 2, 4)) == 2


def test_nothing_of_a_plain_model_is_stored_and_warming_does_nothing() -> None:
    store = MemoryStore(10**8)
    with engine_of(tiny.plain_model("falcon_h1"), store=store) as engine:
        report = engine.warm(CHUNKS)
        assert (report.computed, report.skipped, report.plain_reason) == (0, 0, engine.adapter.plain_reason)
        assert engine.chunks.estimate_bytes(CHUNKS) == 0
        engine.generate(PROMPT, max_new_tokens=2)
        engine.flush()
        assert list(store.infos("")) == []
        assert engine.forget(CHUNKS) == 0


def test_one_line_at_load_says_why_and_what_is_reused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), engine_of(tiny.plain_model("jamba")):
        (line,) = [one.getMessage() for one in caplog.records if one.name.startswith("cacheblend_rag")]
    assert line.startswith("model jamba is answered plainly, each prompt computed in full: 2 of its 4 layers carry")


def test_methods_that_need_a_blended_pass_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(tiny.plain_model("lfm2")) as engine:
        with pytest.raises(UnsupportedModelError, match=r"'lfm2' model is answered plainly.* 3 of its 4 layers carry"):
            list(Methods(engine, PROMPT).compare(4))
        with pytest.raises(ConfigError, match=r"prepack_weights=True.*model is not blended"):
            engine.with_config(prepack_weights=True)
    with engine_of(tiny.plain_model("rwkv")) as engine, pytest.raises(PromptError, match="fuses no prompts"):
        engine.fuse(PROMPT)
    monkeypatch.setattr(families, "_registered", {})
    families.register_family("lfm2", like="llama")
    with pytest.raises(UnsupportedModelError, match="'lfm2' is not supported"):
        engine_of(tiny.plain_model("lfm2"))


def test_blended_pass_that_differs_is_not_used(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    model = tiny.model("llama")
    monkeypatch.setattr("cacheblend_rag.models.adapter._scale_logits", lambda logits, config: -logits)
    with engine_of(model) as engine:
        assert "differs in the logits" in engine.adapter.plain_reason
        answer = engine.generate(PROMPT, max_new_tokens=6)
    assert answer.token_ids == own_answer(model, answer.report.input_ids, 6)


def test_models_on_whose_passes_transformers_fails_are_refused() -> None:
    model = tiny.plain_model("lfm2")
    model.lm_head = torch.nn.Linear(3, 3)
    with pytest.raises(UnsupportedModelError, match=r"'lfm2' model cannot be run by this transformers.*RuntimeError"):
        engine_of(model)


@pytest.mark.parametrize("family", others_slow(sorted(tiny.PLAIN), ("lfm2", "rwkv", "gpt2", "jamba")))
def test_config_alone_says_what_loading_finds(family: str) -> None:
    model = tiny.plain_model(family)
    found, adapter = treatment_of(model.config), PlainAdapter(model, "it is tried")
    assert found.how == ("plain, beginnings reused" if adapter.goes_on == "slices" else "plain")
    assert found.reason


def test_command_says_what_models_get_before_fetching_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = {"phi": "plain, beginnings reused: no entry", "t5": "refused: it is an encoder–decoder", "qwen3": "blended"}
    for kind in saved:
        CONFIG_MAPPING[kind]().save_pretrained(tmp_path / kind)
    folders = [str(tmp_path / kind) for kind in saved]
    assert main(["models", "check", *folders, "smollm2"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert "15% of their tokens are recomputed, by the rule 'query'; its context window holds 32,768 tokens" in told[3]
    del told[3]
    assert told[3] == "smollm2: blended"
    for line, folder, kind in zip(told, folders, saved, strict=False):
        assert line.startswith(f"{folder}: {saved[kind]}")
    file = gguf_files.write(tmp_path / "model.gguf", tiny.model("qwen3"))
    assert main(["models", "check", str(file)]) == 0
    assert capsys.readouterr().out.startswith(f"{file}: blended\n    stored KV of chunks is reused")
    (tmp_path / "none.gguf").write_bytes(b"GGUF and no more")
    assert main(["models", "check", str(tmp_path / "none.gguf"), "llama3.2:3b"]) == 2
    assert "a tag of Ollama's library" in capsys.readouterr().err
    assert main(["models", "list"]) == 0
    assert "SmolLM2-135M-Instruct, language model, blended," in capsys.readouterr().out


@pytest.mark.slow
def test_table_of_the_families_of_the_day_is_current() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for row in treatment_rows():
        assert row in text
    assert len(OF_THE_DAY) >= 20
