"""Quantised weights as transformers loads them: exact at ratio 1.0, an identity of their own, or refused by method."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from cacheblend_rag import BlendConfig, BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models import loading
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.batched_decode import BatchedDecode
from cacheblend_rag.models.cpu.layers import row_by_row
from cacheblend_rag.models.cpu.products import KERNELS, _weight_to_copy
from cacheblend_rag.models.gpu.layer import is_plain
from cacheblend_rag.models.identity import fingerprint
from cacheblend_rag.models.loading import load_model
from cacheblend_rag.models.quantised import mixes_rows
from tests import tiny
from tests.pairwise import others_slow
from tests.parity.test_families import THREE_CHUNKS, assert_equals_plain

# Libraries of quantisation warn when they are imported, and where they are slow.
pytestmark = pytest.mark.filterwarnings("ignore")

# bitsandbytes takes blocks of 64 inputs and of 32 outputs on a CPU.
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 4, "num_attention_heads": 8}
IDS = torch.tensor([list(range(5, 45))])


def bits_and_bytes(**options: Any) -> Any:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**options)


def torchao(kind: str, **options: Any) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    return TorchAoConfig(getattr(quantization, kind)(**options))


METHODS: dict[str, Callable[[], Any]] = {
    "bitsandbytes 4 bits": lambda: bits_and_bytes(load_in_4bit=True),
    "bitsandbytes nf4, scales quantised": lambda: bits_and_bytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "bitsandbytes 8 bits": lambda: bits_and_bytes(load_in_8bit=True),
    "torchao int8": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao int4": lambda: torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "torchao float8": lambda: torchao("Float8WeightOnlyConfig"),
    "torchao int8, activations too": lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("plain"), "llama", torch.float32)


def written(folder: Path, family: str, dtype: torch.dtype, **settings: Any) -> Path:
    tiny.model(family, **WIDE | settings).to(dtype).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def engine_of(model: Any, **options: Any) -> BlendEngine:
    config = BlendConfig(min_tokens=0, write_back="inline", recompute_ratio=1.0)
    return BlendEngine.from_pretrained(model, config=config, device="cpu", **options)


def check_exact(engine: BlendEngine) -> None:
    """Full KV recompute is the quantised model's own prefill, though all chunks are found in the store."""
    engine.warm(THREE_CHUNKS.chunks, progress=False)
    fused = engine.fuse(THREE_CHUNKS)
    assert (fused.report.hits, fused.report.plain) == (3, False)
    assert_equals_plain(fused, engine.model)


@pytest.mark.parametrize(
    "method", others_slow(list(METHODS), ("bitsandbytes 4 bits", "bitsandbytes 8 bits", "torchao int8"))
)
def test_exact_and_known_again(method: str, saved: Path, tmp_path: Path) -> None:
    """Loaded as it is quantised, and from a folder that it was saved to."""
    options = {"quantization_config": METHODS[method]()}
    loaded = load_model(saved, device="cpu", **options)
    assert loaded.model.dtype == torch.float32
    known = loaded.fingerprint()
    assert known != load_model(saved, device="cpu").fingerprint()
    loaded.model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with engine_of(saved, **options) as engine, engine_of(tmp_path) as other:
        check_exact(engine)
        check_exact(other)
        assert fingerprint(engine.model) == fingerprint(other.model) == known  # passes have changed nothing
        assert engine.generate(THREE_CHUNKS, max_new_tokens=4).report.hits == 3


def test_looking_at_the_identity_leaves_the_model_as_it_is(saved: Path) -> None:
    """The ``state_dict`` of bitsandbytes changes a model that has answered on a CPU."""
    model = load_model(saved, device="cpu", quantization_config=METHODS["bitsandbytes 4 bits"]()).model
    with torch.no_grad():
        first = model(IDS).logits
        before = fingerprint(model)
        assert torch.equal(model(IDS).logits, first)
    assert fingerprint(model) == before


def test_eight_bits_with_outliers_keep_rows_together(saved: Path) -> None:
    """A row's result depends on the others of its call: no prompt depends on what else is computed."""
    model = load_model(saved, device="cpu", quantization_config=bits_and_bytes(load_in_8bit=True)).model
    adapter = ModelAdapter(model)
    assert adapter.mixes_rows
    assert not BatchedDecode(adapter).takes_several
    ids = [list(range(5, 45)), list(range(50, 80))]
    for both, alone in zip(
        adapter.segments_kv((), ids), (adapter.segments_kv((), [one])[0] for one in ids), strict=True
    ):
        assert all(map(torch.equal, both.keys, alone.keys))
    prefilled = adapter.prefill([5] * 2000, between=lambda *_: pytest.fail("sliced"))
    assert len(prefilled.logits) == adapter.config.vocab_size
    without = bits_and_bytes(load_in_8bit=True, llm_int8_threshold=0.0)
    with engine_of(saved, quantization_config=without) as engine:
        assert not mixes_rows(engine.model)
        check_exact(engine)


# Checkpoints that others make ---------------------------------------------------------------------


def rewritten(folder: Path, quantised: Callable[[str, torch.Tensor], dict[str, torch.Tensor]], **said: Any) -> Path:
    """A folder with other weights, and a config that says how they are quantised."""
    weights = load_file(folder / "model.safetensors")
    made = {name: one for own, weight in weights.items() for name, one in quantised(own, weight).items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return folder


def in_float8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Blocks of 32 by 32 with a scale each, as DeepSeek and Qwen ship them."""
    if not name.endswith("proj.weight"):
        return {name: weight.half()}  # a type that the config does not name
    blocks = weight.float().unflatten(0, (-1, 32)).unflatten(2, (-1, 32))  # [rows, 32, columns, 32]
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scale}


def in_mxfp4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Blocks of 32 with an exponent each, two codes a byte, as gpt-oss ships its experts."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: weight}
    blocks = weight.float().transpose(1, 2).unflatten(2, (-1, 32))  # [experts, out, blocks, 32]
    exponent = blocks.abs().amax(dim=-1).log2().floor() - 2
    steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    steps = torch.cat((steps, -steps))
    codes = (blocks / exponent.exp2()[..., None]).unsqueeze(-1).sub(steps).abs().argmin(-1).to(torch.uint8)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return {f"{name}_blocks": packed.contiguous(), f"{name}_scales": (exponent + 127).to(torch.uint8)}


@pytest.fixture
def with_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "in_hardware", lambda dtype: True)


def of_float8(folder: Path, family: str = "qwen3") -> Path:
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
    return rewritten(written(folder, family, torch.bfloat16), in_float8, **said)


def of_mxfp4(folder: Path) -> Path:
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    whole = written(folder, "gpt_oss", torch.bfloat16, intermediate_size=64)
    return rewritten(whole, in_mxfp4, quant_method="mxfp4", modules_to_not_convert=kept)


@pytest.mark.parametrize("make", [of_float8, of_mxfp4])
def test_model_that_transformers_dequantises_is_an_ordinary_model(
    make: Callable[[Path], Path], tmp_path: Path, with_hardware: None
) -> None:
    folder = make(tmp_path)
    with engine_of(folder, dtype="float32") as engine:
        assert {weight.dtype for weight in engine.model.parameters()} == {torch.float32}
        check_exact(engine)
        assert all(row_by_row([layer.input_layernorm]) for layer in engine.adapter.layers)
        assert {type(module) for module in engine.model.modules() if "proj" in type(module).__name__} <= {nn.Linear}
    assert {weight.dtype for weight in load_model(folder, device="cpu").model.parameters()} == {torch.bfloat16}
    wide, narrow = (load_model(folder, device="cpu", dtype=kind).fingerprint() for kind in ("float32", "bfloat16"))
    assert wide != narrow


def test_unloadable_quantisation_is_refused_by_its_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.quantizers.quantizer_gptq.is_optimum_available", lambda: False)
    monkeypatch.setattr("transformers.quantizers.quantizer_awq.is_gptqmodel_available", lambda: False)
    folder = written(tmp_path, "llama", torch.float32)
    for method, message in (
        ("gptq", r"'gptq' is not usable: .*optimum.*load weights that are not quantised"),
        ("awq", r"'awq' is not usable: .*gptqmodel.*TorchAoConfig"),
        ("folded", r"'folded' is not usable: this transformers does not know"),
    ):
        rewritten(folder, lambda name, weight: {name: weight}, quant_method=method, bits=4)
        with pytest.raises(ConfigError, match=message):
            load_model(folder, device="cpu")


@torch.no_grad()
def test_faster_products_leave_quantised_layers_alone(saved: Path) -> None:
    for method, dtype in (("bitsandbytes 4 bits", "float32"), ("torchao int8", "bfloat16")):
        model = load_model(saved, device="cpu", dtype=dtype, quantization_config=METHODS[method]()).model
        layer = model.model.layers[0]
        for linear in (module for module in layer.modules() if isinstance(module, nn.Linear)):
            assert all(_weight_to_copy(linear, kernel.dtype) is None for kernel in KERNELS)
        assert not is_plain(layer)
        assert row_by_row([layer.mlp, layer.input_layernorm]) == [layer.input_layernorm]
    assert is_plain(tiny.model("llama").model.layers[0])
