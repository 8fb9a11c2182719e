"""LoRA adapters: part of a model's identity, blended exactly, and never served another adapter's KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.engine.scheduler import scheduler_of
from cacheblend_rag.errors import ModelLoadError, StoreError, UnsupportedModelError
from cacheblend_rag.models import identity
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.identity import fingerprint
from cacheblend_rag.models.loading import load_geometry, load_model
from cacheblend_rag.prompt import Prompt
from tests import tiny

# peft asks transformers by a name it has given up, and warns of whatever it is made to do here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]

CHUNKS = [tiny.text(25, seed) for seed in range(1, 4)]
PROMPT = Prompt("answer briefly", CHUNKS, "who fell into the river")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


def lora(targets: list[str] = TARGETS, rank: int = 4, **more: Any) -> LoraConfig:
    # init_lora_weights=False leaves B at random, where training would bring it.
    return LoraConfig(
        r=rank, lora_alpha=16, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", **more
    )


def adapted(model: Any, seed: int = 0, targets: list[str] = TARGETS, **more: Any) -> Any:
    torch.manual_seed(seed)
    return get_peft_model(model, lora(targets, **more)).eval()


def two_adapters() -> Any:
    """A tiny model with the adapters "one", which is active, and "two"."""
    torch.manual_seed(1)
    made = get_peft_model(tiny.model(), lora(), adapter_name="one")
    torch.manual_seed(2)
    made.add_adapter("two", lora())
    return made.eval()


def engine_of(model: Any, store: Any = None, **config: Any) -> BlendEngine:
    options = {"min_tokens": 0, "write_back": "inline", "recompute_ratio": 1.0} | config
    return BlendEngine(model, tiny.tokenizer(), config=BlendConfig(**options), store=store)


def assert_same(engine: BlendEngine, model: Any) -> None:
    """A fused prompt is what the model computes of it."""
    fused = engine.fuse(PROMPT)
    full = tiny.full_prefill(model, fused.input_ids)
    torch.testing.assert_close(fused.logits, full.logits[0, -1], rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(fused.cache.layers, tiny.cache_of(full).layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-4)


def hits(engine: BlendEngine) -> int:
    return engine.fuse(PROMPT).report.hits


# Exactness --------------------------------------------------------------------------------


def test_adapted_model_is_blended_exactly() -> None:
    biased = tiny.model(attention_bias=True, mlp_bias=True)
    for model in (
        adapted(tiny.model()),
        adapted(tiny.model("phi3"), targets=FUSED),
        adapted(tiny.model(), use_dora=True),
        adapted(biased, lora_bias=True, use_rslora=True, rank=8),
    ):
        with engine_of(model) as engine:
            engine.warm(CHUNKS)
            assert_same(engine, model)
            assert hits(engine) == 3


def test_packed_weights_know_what_was_merged() -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    model = adapted(tiny.model(**wide).to(torch.bfloat16), targets=["q_proj", "v_proj", "down_proj"])
    try:
        engine = engine_of(model, prepack_weights=True)
    except ValueError as error:
        pytest.skip(str(error))
    with engine:
        engine.fuse(PROMPT)
        model.merge_adapter()
        fused = engine.fuse(PROMPT)
        full = tiny.full_prefill(model, fused.input_ids)
        near = (fused.logits - full.logits[0, -1]).float().norm() / full.logits[0, -1].float().norm()
        assert near < 0.05


def test_answers_are_those_of_the_adapted_model() -> None:
    model = two_adapters()
    with engine_of(model) as engine:
        for name in ("one", "two"):
            model.set_adapter(name)
            answer = engine.generate(PROMPT, max_new_tokens=6)
            ids = torch.tensor([answer.report.input_ids])
            plain = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
            assert answer.token_ids == plain[0, ids.shape[1] :].tolist()


# Identity ---------------------------------------------------------------------------------


def test_one_adapters_kv_is_never_anothers(tmp_path: Path) -> None:
    model = two_adapters()
    with engine_of(model, tmp_path / "kv") as engine:
        engine.warm(CHUNKS)
        one = engine.fingerprint
        assert hits(engine) == 3
        model.set_adapter("two")
        assert engine.fingerprint != one
        assert hits(engine) == 0  # and its own are stored now
        assert hits(engine) == 3
        assert_same(engine, model)
        model.set_adapter("one")
        assert engine.fingerprint == one
        assert hits(engine) == 3
        assert_same(engine, model)
        with model.disable_adapter():
            assert engine.fingerprint == fingerprint(tiny.model())
            assert hits(engine) == 0
            assert_same(engine, model)
        assert hits(engine) == 3


def test_merged_adapter_has_an_identity_of_its_own(tmp_path: Path) -> None:
    model, base = two_adapters(), tiny.model()
    with engine_of(model, tmp_path / "kv") as engine:
        engine.warm(CHUNKS)
        active = engine.fingerprint
        model.merge_adapter()
        merged = engine.fingerprint
        assert merged not in (active, fingerprint(base))
        assert hits(engine) == 0
        assert_same(engine, model)
        model.unmerge_adapter()
        assert engine.fingerprint != merged
        assert_same(engine, model)
        model.merge_adapter()
        model.base_model.disable_adapter_layers()  # the next pass unmerges
        assert_same(engine, model)
        assert engine.fingerprint != merged


def test_adapters_that_come_later_are_noticed() -> None:
    model = tiny.model()
    with engine_of(model) as engine:
        engine.warm(CHUNKS)
        base = engine.fingerprint
        wrapped = adapted(model, 1)
        assert engine.fingerprint != base
        assert hits(engine) == 0
        assert_same(engine, wrapped)
        torch.manual_seed(2)
        wrapped.add_adapter("two", lora())
        wrapped.add_weighted_adapter(["default", "two"], [0.7, 0.3], "both", combination_type="linear")
        wrapped.set_adapter("both")
        assert hits(engine) == 0
        assert_same(engine, wrapped)
        wrapped.base_model.set_adapter(["default", "two"])
        assert hits(engine) == 0
        assert_same(engine, wrapped)
        wrapped.unload()
        assert engine.fingerprint == base
        assert hits(engine) == 3


def _train(model: Any, name: str = "one") -> None:
    weight = model.base_model.model.model.layers[1].self_attn.v_proj.lora_B[name].weight
    with torch.no_grad():
        weight[0, 0] += 1e-3


def _write_through_data(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_B.one" in name:
            parameter.data.mul_(1.5)


def _scale(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("one", 0.5)


def _replace(model: Any) -> None:
    model.set_adapter("two")
    model.delete_adapter("one")
    torch.manual_seed(7)
    model.add_adapter("one", lora())
    model.set_adapter("one")


def test_prompt_kept_with_one_adapter_is_not_gone_on_from_with_another() -> None:
    model, text = two_adapters(), "\n\n".join(CHUNKS)
    with engine_of(model) as engine:
        for change in (lambda model: model.set_adapter("two"), lambda model: _train(model, "two")):
            engine.generate(text, max_new_tokens=1)
            assert engine.fuse(text).report.resumed_tokens > 0
            change(model)
            fused = engine.fuse(text)
            assert fused.report.resumed_tokens == 0
            full = tiny.full_prefill(model, fused.input_ids)
            torch.testing.assert_close(fused.logits, full.logits[0, -1], rtol=1e-4, atol=1e-4)


def test_changed_adapter_is_another() -> None:
    model = two_adapters()
    with engine_of(model) as engine:
        engine.warm(CHUNKS)
        for change in (_train, _write_through_data, _scale, _replace):
            change(model)
            assert hits(engine) == 0, change.__name__
            assert_same(engine, model)


def test_misses_of_one_adapter_are_not_stored_for_the_next() -> None:
    model = two_adapters()
    with engine_of(model, write_back="background", prompt_cache=0) as engine:
        with scheduler_of(engine.model).entered():  # storing waits until nothing else runs
            engine.generate(PROMPT, max_new_tokens=1)
            model.set_adapter("two")
        engine.flush()
        for name in ("two", "one"):
            model.set_adapter(name)
            assert hits(engine) == 0
            engine.flush()
            assert hits(engine) == 3
            assert_same(engine, model)


@pytest.mark.parametrize("verify", ["off", "always"])
@pytest.mark.parametrize("switched_at", [(3, 6), (3,), (12,), (11, 14)])  # back again, or not; in the check, if any
def test_answer_within_which_adapters_are_switched_leaves_nothing(switched_at: tuple[int, ...], verify: str) -> None:
    model, calls = two_adapters(), list[int]()

    def switches(input_ids: Any, scores: Any) -> Any:
        calls.append(1)
        if len(calls) in switched_at:
            model.set_adapter(("two", "one")[switched_at.index(len(calls))])
        return scores

    with engine_of(model, selection="none", verify=verify) as engine:
        engine.warm(CHUNKS[:2])
        stored = list(engine.store.infos(""))
        engine.generate(PROMPT, max_new_tokens=9 if verify == "always" else 15, logits_processor=[switches])
        assert len(calls) >= switched_at[-1]
        assert (engine.prompts.nbytes, list(engine.store.infos(""))) == (0, stored)


def test_adapters_of_other_kinds_are_refused() -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UnsupportedModelError, match=r"only LoRA is supported.*merge_and_unload"):
        engine_of(get_peft_model(tiny.model(), config))
    wrapped = get_peft_model(tiny.model(), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(UnsupportedModelError, match="of type IA3"):
        ModelAdapter(wrapped.get_base_model()).identity()


# Loading ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An adapter's folder, and beside it its base model."""
    monkeypatch.setattr(identity, "cache_file", lambda: tmp_path / "fingerprints.json")
    tiny.model().save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    adapted(load_model(tmp_path / "base", device="cpu").model, 1).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_folder_of_an_adapter_loads_with_its_base(folder: Path, tmp_path: Path) -> None:
    with BlendEngine.from_pretrained(
        folder, config=BlendConfig(min_tokens=0, recompute_ratio=1.0), store=tmp_path / "kv", device="cpu"
    ) as engine:
        engine.warm(CHUNKS)
        assert_same(engine, engine.model)
        assert engine.fingerprint != fingerprint(tiny.model())
    plain = tiny.model()
    wrapped = PeftModel.from_pretrained(plain, str(folder)).eval()
    with engine_of(wrapped, tmp_path / "kv") as engine:
        assert hits(engine) == 3  # loaded by peft, it is the same
        assert_same(engine, wrapped)
    by_transformers = type(plain).from_pretrained(folder).eval()
    with engine_of(by_transformers, tmp_path / "kv") as engine:
        assert hits(engine) == 3
        by_transformers.disable_adapters()
        assert engine.fingerprint == fingerprint(tiny.model())
        assert_same(engine, by_transformers)
        by_transformers.enable_adapters()
        assert hits(engine) == 3
        by_transformers.delete_adapter("default")
        assert engine.fingerprint == fingerprint(tiny.model())
    assert load_geometry(folder)[0] == load_geometry(folder.parent / "base")[0]


def test_unloadable_adapter_says_why(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ModelLoadError, match="no base_model_name_or_path"):
        load_model(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_model(folder)


def test_contexts_computed_while_adapters_are_switched_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, decoder_kv, calls = two_adapters(), ModelAdapter.decoder_kv, list[int]()

    def switched(self: ModelAdapter, *given: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            model.set_adapter("two")
        return decoder_kv(self, *given)

    with engine_of(model, selection="none") as engine, engine_of(two_adapters(), selection="none") as other:
        monkeypatch.setattr(ModelAdapter, "decoder_kv", switched)
        with pytest.raises(StoreError, match="switched"):
            engine.warm(CHUNKS)
        model.set_adapter("one")
        assert engine.warm(CHUNKS).computed == other.warm(CHUNKS).computed == 3
        torch.testing.assert_close(engine.fuse(PROMPT).logits, other.fuse(PROMPT).logits)
