"""Every model family and RoPE type against the model's own forward pass."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.models import families
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.families import CONTAINERS, FAMILIES, why_plain
from cacheblend_rag.models.modules import cache_argument
from cacheblend_rag.models.rope import rotate
from tests import tiny
from tests.pairwise import others_slow
from tests.parity.families import PAGE, described_of
from tests.tolerance import assert_close, assert_layers_close, assert_logits_close, terms_of

THREE_CHUNKS = Prompt("Read this:", [tiny.text(37, 1), tiny.text(20, 2), tiny.text(51, 3)], "What fell?")
ONE_CHUNK = Prompt("Read this:", [tiny.text(51, 3)], "What fell?")
# A window for the families whose config sets one for every layer, or leaves the choice of layers to an option.
WINDOWS: dict[str, dict[str, Any]] = {
    "ministral3": {"sliding_window": 16},
    "mistral": {"sliding_window": 16},
    "mistral3": {"sliding_window": 16},
    "mixtral": {"sliding_window": 16},
    "phi3": {"sliding_window": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    "qwen2_5_vl": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    "qwen2_vl": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 16},
    "smollm3": {"use_sliding_window": True, "sliding_window": 16},
    "starcoder2": {"sliding_window": 16},
}
BY_LAYER_TYPE = (
    *("cohere2", "cohere2_vision", "cwm", "dots1", "exaone4", "exaone4_5", "exaone_moe", "gemma2", "gemma3"),
    *("gemma3_text", "gpt_oss", "ministral", "olmo3", "vaultgemma"),
)
# Soft caps and attention sinks, which sdpa does not have.
EAGER_ONLY = ("gemma2", "gpt_oss", "vaultgemma")
OF_LATENTS = [name for name, family in FAMILIES.items() if family.latent]


def kernels(families: Sequence[str]) -> list[Any]:
    """Each family with each attention kernel it runs on; by default one, for those that differ."""
    return [
        pytest.param(family, name, marks=() if number == 0 and family in tiny.DIFFERENT else pytest.mark.slow)
        for family in families
        for number, name in enumerate(("sdpa", "eager")[family in EAGER_ONLY :])
    ]


def engine_of(model: Any, **options: Any) -> BlendEngine:
    options = {"min_tokens": 0, "write_back": "inline"} | options
    return BlendEngine(model, tiny.tokenizer(), config=BlendConfig(**options))


def assert_equals_plain(fused: Any, model: Any) -> None:
    """Logits and cache are those of the model's own prefill."""
    plain = tiny.full_prefill(model, fused.input_ids)
    assert_logits_close(fused.logits, plain.logits[0, -1], model, len(fused.input_ids))
    assert_layers_close(fused.cache.layers, tiny.cache_of(plain).layers, model)


def plain_tokens(model: Any, ids: list[int], count: int) -> list[int]:
    """The model's own generation."""
    inputs = torch.tensor([ids])
    out = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return list(out[0, len(ids) :].tolist())


@contextmanager
def gives_back(model: Any) -> Iterator[None]:
    """The model's attention is as it was after this, and no hook is left."""
    attention = model.config._attn_implementation
    yield
    assert model.config._attn_implementation == attention
    assert not model.get_decoder().rotary_emb._forward_hooks


def check_exact(model: Any, prompt: Prompt = THREE_CHUNKS, tokens: int = 4) -> None:
    """Full KV recompute is plain prefill, and so is what follows."""
    with gives_back(model), engine_of(model, recompute_ratio=1.0) as engine:
        engine.warm(prompt.chunks)
        fused = engine.fuse(prompt)
        assert (fused.report.hits, fused.report.plain) == (len(prompt.chunks), False)
        assert_equals_plain(fused, model)
        assert engine.generate(prompt, max_new_tokens=tokens).token_ids == plain_tokens(model, fused.input_ids, tokens)


def check_exact_behind_prefix(model: Any, prompt: Prompt = ONE_CHUNK) -> None:
    """A chunk directly behind what it was computed behind needs no recompute."""
    with gives_back(model), engine_of(model, recompute_ratio=0.0, condition="prefix") as engine:
        engine.warm(prompt.chunks, prefix=prompt.prefix)
        for prefix_hit in (False, True):
            fused = engine.fuse(prompt)
            assert (fused.report.hits, fused.report.prefix_hit) == (1, prefix_hit)
            assert_equals_plain(fused, model)
        assert fused.report.computed_tokens[-1] < len(fused.input_ids) / 2


def test_every_family_has_a_tiny_model_and_a_row_in_the_documentation() -> None:
    assert set(WINDOWS) | set(BY_LAYER_TYPE) <= set(tiny.ARCHITECTURES)
    assert sorted(tiny.CONTAINERS) == sorted(CONTAINERS)
    (table,) = (part for part in PAGE.read_text(encoding="utf-8").split("\n\n") if part.startswith("| model type |"))
    rows = table.splitlines()[2:]
    described = [described_of(architecture) for architecture in tiny.ARCHITECTURES]
    remedy = "write it anew: python -m tests.parity.families"
    assert {family for _, family, _, _ in described} == set(FAMILIES)
    assert len(rows) == len(described) >= 30, remedy
    for row, (architecture, family, features, kernels) in zip(rows, described, strict=True):
        assert row.startswith(f"| `{architecture}` | `{family}` | {features} | {kernels} | "), remedy
        assert ("soft caps or sinks" in features) == (architecture in EAGER_ONLY), architecture


def rope_cases(family: str) -> list[Any]:
    """The RoPE types of a family: all for one family, one for each other, since they share their code."""
    types = tiny.rope_types(family)
    later = () if family == "llama" else pytest.mark.slow
    return [pytest.param(family, rope, marks=later if rope != types[0] else ()) for rope in types]


@pytest.mark.parametrize(("family", "rope"), [case for family in tiny.ARCHITECTURES for case in rope_cases(family)])
def test_exact_with_every_rope_type(family: str, rope: str) -> None:
    check_exact(tiny.model(family, rope))


@pytest.mark.parametrize("family", others_slow(tiny.ARCHITECTURES, tiny.DIFFERENT))
def test_chunk_behind_what_it_was_computed_behind_is_exact(family: str) -> None:
    check_exact_behind_prefix(tiny.model(family))


@pytest.mark.parametrize(("family", "attention"), kernels([*sorted(WINDOWS), *BY_LAYER_TYPE]))
def test_windows_shorter_than_the_prompt(family: str, attention: str) -> None:
    model = tiny.model(family, **WINDOWS.get(family, {}))
    model.set_attn_implementation(attention)
    windows = ModelAdapter(model).windows
    assert any(window is not None and window < 30 for window in windows)
    check_exact(model)
    check_exact_behind_prefix(model)


_WITH_WINDOWS = [*sorted(WINDOWS), *BY_LAYER_TYPE]


@pytest.mark.parametrize("family", others_slow(_WITH_WINDOWS, ("ministral3", "gemma3")))
def test_decoding_past_the_window(family: str) -> None:
    with engine_of(tiny.model(family)) as engine:
        tokens = len(engine.fuse(ONE_CHUNK).input_ids)
    changes = WINDOWS.get(family, {}) | {"sliding_window": tokens + 5}
    check_exact(tiny.model(family, **changes), ONE_CHUNK, tokens=12)


@pytest.mark.parametrize("family", others_slow(tiny.ARCHITECTURES, ("llama", "phi3", "deepseek_v3", "gemma3")))
def test_projections_are_those_of_the_layers(family: str) -> None:
    model = tiny.model(family, "yarn" if "yarn" in tiny.rope_types(family) else "default")
    adapter = ModelAdapter(model)
    inputs: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0][0])) for layer in adapter.layers
    ]
    ids = list(range(3, 40))
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([ids]), **{cache_argument(model): cache})
        for hook in hooks:
            hook.remove()
        torch.testing.assert_close(adapter.embed(ids), inputs[0])
        rotaries = adapter.rotary(len(ids))
        (stored,) = adapter.segments_kv((), [ids])
        terms = 3 * model.config.get_text_config().hidden_size  # a norm, the product, a norm of keys
        for number, layer in enumerate(adapter.layers_of(cache.layers)):
            keys, values = layer.keys[0], layer.values[0]
            with adapter.blending() as layers:
                assert_close(layers.project_values(number, inputs[number]), values, terms)
                found, same = layers.project(number, inputs[number], rotaries)
            assert_close(found, keys, terms)
            assert_close(same, values, terms)
            rotated = rotate(stored.keys[number], rotaries.of_keys(number))
            assert_close(rotated, keys, terms_of(model, len(ids), number + 1))


_WITHOUT_WINDOWS = sorted(set(tiny.ARCHITECTURES) - set(WINDOWS) - set(BY_LAYER_TYPE))


@pytest.mark.parametrize("family", others_slow(_WITHOUT_WINDOWS, ("llama",)))
def test_exact_with_attention_in_plain_steps(family: str) -> None:
    model = tiny.model(family)
    model.set_attn_implementation("eager")
    check_exact(model)
    with gives_back(model), engine_of(model, recompute_ratio=0.3) as engine:
        engine.warm(THREE_CHUNKS.chunks)
        engine.fuse(THREE_CHUNKS)


def narrow_errors(family: str, dtype: torch.dtype) -> tuple[float, float]:
    """How far logits are from those in float32 with the same weights: blended at ratio 1.0, and of the plain model."""
    model = tiny.model(family, initializer_range=0.1).to(dtype)
    reference = tiny.model(family, initializer_range=0.1)
    reference.load_state_dict(model.state_dict())  # the same rounded weights, computed with in float32
    ours, theirs = 0.0, 0.0
    with engine_of(model, recompute_ratio=1.0) as engine:
        for seed in range(4):
            prompt = Prompt("Read:", [tiny.text(20, seed), tiny.text(30, seed + 9)], "What fell?")
            engine.warm(prompt.chunks)
            fused = engine.fuse(prompt)
            exact = tiny.full_prefill(reference, fused.input_ids).logits[0, -1]
            plain = tiny.full_prefill(model, fused.input_ids).logits[0, -1]
            error = float((fused.logits.float() - exact).abs().max())
            ours += float((fused.logits.float() - exact).square().mean())
            theirs += float((plain.float() - exact).square().mean())
            best = exact.topk(2).values
            if best[0] - best[1] > 2 * error:
                assert fused.logits.argmax() == exact.argmax()
    return ours**0.5, theirs**0.5


@pytest.mark.parametrize("family", others_slow(tiny.ARCHITECTURES, ("llama", "gpt_oss")))
def test_bfloat16_is_as_good_as_the_plain_model(family: str) -> None:
    ours, theirs = narrow_errors(family, torch.bfloat16)
    assert ours <= 2 * theirs


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_float16(family: str) -> None:
    model = tiny.model(family, initializer_range=0.1).to(torch.float16)
    with engine_of(model, recompute_ratio=1.0) as engine:
        engine.warm(THREE_CHUNKS.chunks)
        fused = engine.fuse(THREE_CHUNKS)
    plain = tiny.full_prefill(model, fused.input_ids)
    assert fused.logits.dtype == torch.float16
    torch.testing.assert_close(fused.logits, plain.logits[0, -1], atol=2e-2, rtol=2e-2)


UNSUPPORTED = {
    **{"longcat_flash": "latent", "bloom": "ALiBi", "gpt2": "learned", "t5": "encoder–decoder"},
    **{"gemma4": "an input of its own for each layer", "gemma3n": "layers that read the KV of others"},
    **{"llama4_text": "chunked_attention", "gptj": "no rope_parameters", "phi": "no entry", "paligemma": "looks ahead"},
}


def test_unsupported_models_say_why() -> None:
    for model_type, reason in UNSUPPORTED.items():
        model = SimpleNamespace(config=CONFIG_MAPPING[model_type]())
        with pytest.raises(UnsupportedModelError, match=reason) as caught:
            ModelAdapter(model)
        assert "supported families" not in caught.value.reason
        message = str(caught.value)
        assert repr(model_type) in message
        encodes = "encoder" in reason
        remedy = "use a causal language model" if encodes else "supported families: apertus, arcee, bitnet"
        assert remedy in message, model_type


SOME_RECURRENT = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}


def test_config_of_recurrent_models_says_why_they_are_answered_plainly() -> None:
    for model_type, settings, layers in (
        ("bamba", {"num_hidden_layers": 4, "attn_layer_indices": [2]}, "3 of its 4 layers"),
        ("granitemoehybrid", SOME_RECURRENT, "3 of its 4 layers"),
        ("jamba", {}, "28 of its 32 layers"),
        ("lfm2", {"num_hidden_layers": 4, "full_attn_idxs": [2]}, "3 of its 4 layers"),
        ("qwen3_next", {}, "36 of its 48 layers"),
        ("rwkv", {}, "its layers"),
    ):
        reason = why_plain(CONFIG_MAPPING[model_type](**settings))
        message = rf".*{layers} carry a recurrent state, which cannot be divided by chunk; use .* such as Qwen3"
        assert reason is not None
        assert re.match(message, reason), model_type


def test_unlisted_family_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_registered", {})
    model = tiny.model("llama")
    model.config.model_type = "llamalike"
    with pytest.raises(UnsupportedModelError, match=r'register_family\("llamalike", like="llama"\)'):
        ModelAdapter(model)
    families.register_family("llamalike", like="llama")
    assert ModelAdapter(model).segments_kv((), [list(range(5, 30))])[0].keys[0].shape == (2, 25, 8)
    with pytest.raises(ConfigError, match="like='lama'"):
        families.register_family("llamalike", like="lama")
    for other, missing in {"phi3": "qkv_proj", "smollm3": "layer_types"}.items():
        families.register_family("llamalike", like=other)
        with pytest.raises(UnsupportedModelError, match=f"has no '{missing}'"):
            ModelAdapter(model)
    families.register_family("bloom", like="llama")
    with pytest.raises(UnsupportedModelError, match="ALiBi"):
        ModelAdapter(SimpleNamespace(config=CONFIG_MAPPING["bloom"]()))


def test_models_on_several_devices_are_refused() -> None:
    model = tiny.model("llama")
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedModelError, match="spread over"):
        ModelAdapter(model)
