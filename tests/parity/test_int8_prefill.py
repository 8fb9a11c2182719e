"""Prompts in 8 bits: the products that the codes give, whatever stands beside a row, and tokens computed as ever."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models.contexts import LearnedContext
from cacheblend_rag.models.cpu import float16_copies as halves
from cacheblend_rag.models.cpu import int8_prefill as int8
from cacheblend_rag.models.cpu import weight_prepacking as prepacking
from cacheblend_rag.models.cpu.int8_prefill import Int8Weight, codes_of, int8_layers, row_codes
from cacheblend_rag.models.identity import fingerprint_in_int8, known_names, remember_fingerprint
from cacheblend_rag.store.learned import keep_context
from tests import tiny
from tests.parity.test_weight_prepacking import CHANGES, error
from tests.probes import CHUNKS, PROMPT, engine_of, untouched

pytestmark = pytest.mark.skipif(
    not (int8.gives_int8() and halves.are_there()), reason="PyTorch has no products of 8 bits here"
)
# What rounding weights and rows to 255 steps makes of a product of random numbers.
ROUNDING = 0.03


@pytest.fixture(autouse=True)
def even_small_weights_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "_LEAST", 0)
    monkeypatch.setattr(int8, "_LEAST_SIDE", 8)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product in 8 bits."""
    rows: list[int] = []
    inner = Int8Weight.__call__

    def counted(weight: Int8Weight, given: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows.append(given.shape[:-1].numel())
        return inner(weight, given, bias)

    monkeypatch.setattr(Int8Weight, "__call__", counted)
    return rows


def model_of(family: str = "llama", **changes: Any) -> Any:
    return tiny.model(family, initializer_range=0.1, **changes)


def twin(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same product, code by code, in float64."""
    (codes, steps), (given, row_steps) = codes_of(weight), row_codes(rows.reshape(-1, rows.shape[-1]))
    product = (given.double() - 128) @ codes.double().T * steps * row_steps
    return (product if bias is None else product + bias).view(*rows.shape[:-1], -1)


# Products -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 33, 256, 700])
@pytest.mark.parametrize(("out", "width"), [(8, 8), (50, 34), (192, 576), (400, 1000)])
def test_products_are_those_of_the_codes(rows: int, out: int, width: int) -> None:
    weight, given, bias = torch.randn(out, width), torch.randn(2, rows, width), torch.randn(out)
    given[:, 1::3, 5] *= 40  # as in models whose columns differ in size
    found = Int8Weight(weight)(given, bias)
    assert found.dtype is torch.float32
    assert error(found, twin(given, weight, bias)) < 1e-6
    assert error(Int8Weight(weight)(given[:, ::3], None), given[:, ::3] @ weight.T) < ROUNDING


def test_rows_in_bfloat16_are_rounded_once_more() -> None:
    weight, given = torch.randn(40, 64).bfloat16(), torch.randn(9, 64).bfloat16()
    found = Int8Weight(weight)(given, None)
    assert found.dtype is torch.bfloat16
    assert error(found, twin(given, weight).float()) < torch.finfo(torch.bfloat16).eps


def test_products_of_the_largest_numbers_do_not_overflow() -> None:
    for signs in (torch.ones(64), -torch.ones(64), torch.ones(64) - 2 * (torch.arange(64) % 2)):
        weight, rows = torch.ones(16, 64) * signs, torch.ones(5, 64) * signs
        assert error(Int8Weight(weight)(rows, None), twin(rows, weight)) < 1e-6
        assert error(Int8Weight(weight)(rows, None), rows @ weight.T) < ROUNDING


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_neighbouring_codes_of_a_weight_never_come_to_more_than_128(scale: float) -> None:
    weight = torch.cat((torch.randn(300, 64), torch.rand(20, 1).expand(20, 64), torch.eye(64), torch.zeros(1, 64)))
    before = (weight := weight * scale).clone()
    codes, steps = codes_of(weight)
    assert torch.equal(weight, before), "the weight is not written to"
    assert int(codes.int().abs().max()) <= 127
    assert int(codes.int().abs().view(len(codes), -1, 2).sum(dim=2).max()) <= 128
    assert bool(((codes * steps[:, None] - weight).abs() <= 0.501 * steps[:, None]).all())


def test_row_is_the_same_whatever_stands_beside_it() -> None:
    weight, rows = Int8Weight(torch.randn(96, 64)), torch.randn(600, 64)
    together = weight(rows, None)
    for begin, end in ((0, 1), (255, 257), (599, 600), (100, 500)):
        assert torch.equal(weight(rows[begin:end], None), together[begin:end])
    rows[3] = 1e6
    assert torch.equal(weight(rows, None)[4:], together[4:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_no_numbers_do_not_become_some(bad: float) -> None:
    weight, rows = Int8Weight(torch.randn(96, 64)), torch.randn(4, 64)
    expected = weight(rows, None)
    rows[1, 7] = bad
    found = weight(rows, None)
    assert not bool(found[1].isfinite().any())
    assert torch.equal(found[[0, 2, 3]], expected[[0, 2, 3]])
    assert not bool(weight(torch.zeros(2, 64), None).any())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "olmo2", "deepseek_v3"])
def test_projections_before_attention_are_multiplied_as_ever(family: str) -> None:
    model = tiny.model(family)
    found = set(int8_layers(model.model.layers, "self_attn"))
    names = {name.rsplit(".", 1)[1] for name, part in model.named_modules() if part in found}
    mlp = {"gate_up_proj", "down_proj"} if family == "phi3" else {"gate_proj", "up_proj", "down_proj"}
    assert names == {"o_proj"} | mlp


# Prompts and tokens -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3"])
def test_recomputing_everything_is_full_prefill_in_8_bits(family: str) -> None:
    model = model_of(family)
    with engine_of(model, int8_prefill=True, selection="all") as engine:
        engine.warm(CHUNKS)
        fused = engine.fuse(PROMPT)
        with engine.products(), torch.no_grad():
            expected = model(torch.tensor([list(fused.input_ids)]), use_cache=True)
    assert error(fused.logits, expected.logits[0, -1]) < 1e-4
    plain = tiny.full_prefill(model, fused.input_ids).logits[0, -1]
    assert 1e-4 < error(fused.logits, plain) < 0.2, "it is near full prefill, and not the same"
    assert untouched(model)


def test_models_in_bfloat16_multiply_prompts_so_too(monkeypatch: pytest.MonkeyPatch, products: list[int]) -> None:
    monkeypatch.setattr(prepacking, "_LEAST", 0)
    monkeypatch.setattr(prepacking, "in_hardware", lambda dtype: True)
    # Copies for tokens need a processor of their own; those in 8 bits do not.
    monkeypatch.setattr(prepacking._PrepackedWeights, "make", lambda copies, forwards, first: None)
    model = model_of().bfloat16()
    with engine_of(model, int8_prefill=True, prepack_weights=True, selection="all") as engine:
        engine.warm(CHUNKS)
        products.clear()
        fused = engine.fuse(PROMPT)
        assert products
        with engine.products(), torch.no_grad():
            expected = model(torch.tensor([list(fused.input_ids)])).logits[0, -1]
    assert error(fused.logits, expected) < 0.02
    assert untouched(model)


def test_prompts_are_multiplied_in_8_bits_and_tokens_are_not(products: list[int]) -> None:
    with engine_of(model_of(), int8_prefill=True, prompt_lookup=4) as engine:
        engine.warm(CHUNKS)
        assert products
        products.clear()
        engine.fuse(PROMPT)
        prompt = len(products)
        assert prompt
        engine.generate(PROMPT, max_new_tokens=12)
        assert len(products) == 2 * prompt, "twelve tokens came without any"


def test_verified_answers_are_those_of_full_prefill_in_8_bits(products: list[int]) -> None:
    model = model_of()
    with engine_of(model, int8_prefill=True, min_tokens=10_000) as engine:
        expected = engine.generate(PROMPT, max_new_tokens=12).token_ids
    with engine_of(model, int8_prefill=True, verify="always", selection="none") as engine:
        engine.warm(CHUNKS)
        products.clear()
        engine.fuse(PROMPT)
        blended = len(products)
        answer = engine.generate(PROMPT, max_new_tokens=12)
    assert answer.report.verification.done
    assert answer.token_ids == expected
    assert len(products) == 3 * blended, "the check prefills once, and no token of it is multiplied so"


def test_stored_kv_of_one_setting_is_never_read_by_the_other(tmp_path: Path) -> None:
    model = model_of()
    with engine_of(model, store=tmp_path, int8_prefill=True) as engine:
        engine.warm(CHUNKS)
        assert engine.generate(PROMPT, max_new_tokens=2).report.hits == 3
        with engine.with_config(int8_prefill=False) as other:
            assert isinstance(other, BlendEngine)
            assert other.fingerprint != engine.fingerprint == fingerprint_in_int8(other.fingerprint)
            assert other.generate(PROMPT, max_new_tokens=2).report.hits == 0
    with engine_of(model, store=tmp_path) as engine:
        assert engine.generate(PROMPT, max_new_tokens=2).report.hits == 3, "those that the other view stored"


def test_engine_beside_it_computes_as_before(products: list[int]) -> None:
    model = model_of()
    with engine_of(model, min_tokens=10_000) as engine:
        expected = engine.fuse(PROMPT).logits
        view = engine.with_config(int8_prefill=True)
        assert not products
        assert error(view.fuse(PROMPT).logits, expected) > 1e-4
        products.clear()
        assert torch.equal(engine.fuse(PROMPT).logits, expected)
        assert not products


def test_engine_made_during_a_pass_leaves_it_in_8_bits() -> None:
    model, made = model_of(), list[BlendEngine]()
    with engine_of(model, int8_prefill=True, min_tokens=10_000) as engine:
        expected = engine.fuse(PROMPT).logits

        def meanwhile(module: Any, args: Any) -> None:
            thread = threading.Thread(target=lambda: made.append(engine_of(model, check_model=False)))
            thread.start()
            thread.join()

        with model.model.layers[1].register_forward_pre_hook(meanwhile):
            assert torch.equal(engine.fuse(PROMPT).logits, expected)
        assert made
        made[0].close()
        assert torch.equal(engine.fuse(PROMPT).logits, expected)
    assert untouched(model)


def test_answers_of_earlier_turns_do_not_count_as_prefilled_in_8_bits() -> None:
    model = model_of()
    with engine_of(model, int8_prefill=True, min_tokens=10_000, prompt_cache=2**26) as engine:
        said = engine.generate(PROMPT, max_new_tokens=24).text
        again = Prompt(PROMPT.prefix, CHUNKS, PROMPT.suffix + said + " And then?")
        found = engine.fuse(again)
        assert found.report.resumed_tokens >= len(engine.tokenize(PROMPT).input_ids) - 1
        expected = engine.with_config(prompt_cache=0).fuse(again)
    assert error(found.logits, expected.logits) < 1e-5


def test_context_that_was_learned_for_one_setting_is_not_used_by_the_other(tmp_path: Path) -> None:
    model = model_of()
    with engine_of(model, store=tmp_path, condition="auto") as engine:
        (kv,) = engine.adapter.segments_kv((), [tuple(range(5, 15))], heads=[0])
        keep_context(engine.store, engine.fingerprint, LearnedContext(kv))
    with engine_of(model, store=tmp_path, condition="auto") as engine:
        assert engine.condition == "learned"
        view = engine.with_config(int8_prefill=True)
        assert (view.condition, view.learned) == ("context", None)
        assert view.with_config(int8_prefill=False).condition == "learned"
        assert engine.with_config(prepack_weights=False).condition == "learned"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_that_are_off_change_no_product() -> None:
    peft = pytest.importorskip("peft")
    model = model_of()
    with engine_of(model, int8_prefill=True, min_tokens=10_000) as engine:
        expected, own = engine.fuse(PROMPT).logits, engine.fingerprint
        chosen = int8_layers(model.model.layers, "self_attn")
    config = peft.LoraConfig(r=8, target_modules=["o_proj", "v_proj", "up_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    assert int8_layers(model.model.layers, "self_attn") == chosen
    with engine_of(adapted, int8_prefill=True, min_tokens=10_000) as engine:
        assert engine.fingerprint != own
        assert error(engine.fuse(PROMPT).logits, expected) > 0.01
        with adapted.disable_adapter():
            assert torch.equal(engine.fuse(PROMPT).logits, expected)
            assert engine.fingerprint == own


def test_one_thread_computes_a_prompt_while_another_computes_tokens(products: list[int]) -> None:
    model = model_of()
    rows, layer = torch.randn(2, 32), model.model.layers[0].mlp.up_proj
    with engine_of(model, int8_prefill=True) as engine, engine.products(True), torch.no_grad():
        expected, found = layer(rows), list[torch.Tensor]()

        def elsewhere() -> None:
            with engine.products(), torch.no_grad():
                found.append(layer(rows))
                with engine.products(True):
                    found.append(layer(rows))
                found.append(layer(rows))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert products == [2, 2]
        assert torch.equal(layer(rows), expected)
    assert torch.equal(found[1], expected)
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], expected)
    assert untouched(model)


# Weights that change ------------------------------------------------------------------------


# The others are of bfloat16.
@pytest.mark.parametrize(
    "change", [CHANGES[name] for name in CHANGES if name not in ("assigned", "cast", "new module")]
)
def test_changed_weight_is_never_computed_with_as_it_was(change: Callable[[Any], None], products: list[int]) -> None:
    model = model_of()
    ids = torch.tensor([[5, 6, 7]])

    def logits(engine: BlendEngine) -> torch.Tensor:
        with engine.products(), torch.no_grad():
            logits: torch.Tensor = engine.model(ids).logits
        return logits

    with engine_of(model, int8_prefill=True) as engine:
        before = logits(engine)
        assert products
        change(model)
        with torch.no_grad():
            plain = model(ids).logits
        with engine_of(copy.deepcopy(model), int8_prefill=True) as other:
            rounded = logits(other)
        assert error(before, rounded) > 0.05, "the change shows"
        for _ in range(3):  # plain products serve until the weights rest
            assert min(error(logits(engine), expected) for expected in (plain, rounded)) < 1e-5


def test_copies_are_made_again_once_they_were_dropped(products: list[int]) -> None:
    model = model_of()
    with engine_of(model, int8_prefill=True, min_tokens=10_000) as engine:
        expected = engine.fuse(PROMPT).logits
        prepacking.drop_copies(model)
        products.clear()
        assert torch.equal(engine.fuse(PROMPT).logits, expected)
        assert products


@pytest.mark.parametrize("kind", [MemoryError, RuntimeError])
def test_without_memory_for_copies_products_are_plain(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(weight: torch.Tensor) -> None:
        raise kind("no memory")

    model = model_of()
    with engine_of(model, int8_prefill=True, min_tokens=10_000) as engine:
        monkeypatch.setattr(int8, "codes_of", fails)
        for _ in range(2):
            found = engine.fuse(PROMPT)
            assert error(found.logits, tiny.full_prefill(model, found.input_ids).logits[0, -1]) < 1e-5
    assert [one.getMessage() for one in caplog.records if "plain" in one.message] == [
        "weights are not prepacked any more, products are plain: no memory"
    ]


def test_copies_go_with_the_last_engine() -> None:
    model = model_of()
    engine = engine_of(model, int8_prefill=True)
    engine.fuse(PROMPT)
    found = prepacking._by_model[model]()
    assert found is not None
    kept = weakref.ref(found)
    del found
    engine.close()
    del engine
    gc.collect()
    assert kept() is None


# What is refused ----------------------------------------------------------------------------


def test_model_that_cannot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"int8_prefill=True .* leave it off, or prepack_weights at 'auto'"):
        engine_of(model_of(), int8_prefill=True, prepack_weights=False)
    with pytest.raises(ConfigError, match=r"int8_prefill=True .* no large linear layers"):
        engine_of(model_of().half(), int8_prefill=True)
    with pytest.raises(ConfigError, match=r"prepack_weights=True is not usable: use 'auto' with int8_prefill"):
        engine_of(model_of(), int8_prefill=True, prepack_weights=True)
    monkeypatch.setattr(prepacking, "is_compiled", lambda model: True)
    with pytest.raises(ConfigError, match=r"int8_prefill=True .* the model is compiled"):
        engine_of(model_of(), int8_prefill=True, check_model=False)


def test_pytorch_without_these_products_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacking, "gives_int8", lambda: False)
    with pytest.raises(ConfigError, match=r"int8_prefill=True is not usable: leave it off here: this PyTorch has no"):
        engine_of(model_of(), int8_prefill=True)


def test_weights_too_small_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "_LEAST_SIDE", 512)
    with pytest.raises(ConfigError, match="int8_prefill"):
        engine_of(model_of(), int8_prefill=True)
    with engine_of(model_of()) as engine, pytest.raises(ConfigError, match="int8_prefill"):
        engine.with_config(int8_prefill=True)


def test_bfloat16_without_its_arithmetic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepacking, "in_hardware", lambda dtype: False)
    with pytest.raises(ConfigError, match=r"int8_prefill=True .* or load the model in float32"):
        engine_of(model_of().bfloat16(), int8_prefill=True)


def test_option_is_off_by_default_and_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BlendConfig().int8_prefill is False
    monkeypatch.setenv("CACHEBLEND_RAG_INT8_PREFILL", "on")
    assert BlendConfig().int8_prefill is True


def test_records_of_both_settings_have_the_models_name() -> None:
    remember_fingerprint("files", own := "ab" * 32, "a model")
    assert known_names()[own] == "a model"
    assert known_names()[fingerprint_in_int8(own)] == "a model in 8 bits"
