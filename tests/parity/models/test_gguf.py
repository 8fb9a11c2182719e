"""A GGUF file gives the logits of the model it was written from, or is refused with the reason."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from cacheblend_rag import BlendEngine, Prompt
from cacheblend_rag.errors import ModelLoadError, UnsupportedModelError
from cacheblend_rag.models import gguf as conversion
from cacheblend_rag.models.loading import load_geometry, load_model
from tests import gguf_files, tiny
from tests.pairwise import others_slow

GEMMA3 = ["sliding_attention"] * 5 + ["full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {
        "num_hidden_layers": 6,
        "layer_types": GEMMA3,
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": None,
    },
    "llama": {},
    "phi3": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "stablelm": {"qk_layernorm": False},
    "starcoder2": {"sliding_window": 24},
}
IDS = torch.arange(3, 93)[None]  # longer than the windows


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cacheblend_rag" / "models"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_families_under_test_are_those_supported() -> None:
    assert sorted(FAMILIES) == sorted(conversion.ARCHITECTURES.values())


@pytest.mark.parametrize("family", others_slow(list(FAMILIES), ("gemma3_text", "llama", "phi3", "qwen3_moe")))
def test_logits_are_those_of_the_model_it_was_written_from(family: str, tmp_path: Path) -> None:
    model = tiny.model(family, **FAMILIES[family])
    model.config.rope_parameters.get("full_attention", model.config.rope_parameters)["rope_theta"] = 30_000.0
    model = _rebuilt(model)
    loaded = load_model(gguf_files.write(tmp_path / "model.gguf", model), device="cpu", dtype="float32")
    assert loaded.model.config.model_type == family
    torch.testing.assert_close(logits(loaded.model), logits(model), atol=1e-5, rtol=1e-4)


def _rebuilt(model: Any) -> Any:
    """The same weights under the config as it is now."""
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    return other


def test_rope_scaling_is_taken_from_the_file(tmp_path: Path) -> None:
    model = tiny.model("llama", "yarn")
    settings = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    said = {f"rope__scaling__{name}": value for name, value in settings.items()}
    loaded = load_model(gguf_files.write(tmp_path / "model.gguf", model, **said), device="cpu")
    torch.testing.assert_close(logits(loaded.model), logits(model), atol=1e-5, rtol=1e-4)
    assert not torch.allclose(logits(loaded.model), logits(tiny.model("llama")), atol=0.1)


def test_frequencies_of_llama_3_are_taken_from_the_file(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model = tiny.model("llama", head_dim=32, rope_parameters=rope)
    plain = 500_000.0 ** -(torch.arange(16) / 16)
    divisors = plain / model.model.rotary_emb.inv_freq
    assert divisors.max() > 7
    path = gguf_files.write(tmp_path / "model.gguf", model, tensors={"rope_freqs.weight": divisors.tolist()})
    loaded = load_model(path, device="cpu")
    torch.testing.assert_close(loaded.model.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    torch.testing.assert_close(logits(loaded.model), logits(model), atol=1e-5, rtol=1e-4)


def test_other_scaled_frequencies_are_refused(tmp_path: Path) -> None:
    model = tiny.model("llama")
    path = gguf_files.write(tmp_path / "model.gguf", model, tensors={"rope_freqs.weight": [1.0, 3.0, 2.0, 5.0]})
    with pytest.raises(ModelLoadError, match="RoPE frequencies"):
        load_model(path)


@pytest.mark.parametrize(
    ("kind", "computed"), [("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.bfloat16)]
)
def test_the_element_type_is_the_files(kind: str, computed: torch.dtype, tmp_path: Path) -> None:
    model = tiny.model("llama", hidden_size=32, intermediate_size=64)
    path = gguf_files.write(tmp_path / "model.gguf", model, kind)
    wide = load_model(path, device="cpu", dtype="float32").model
    assert wide.dtype == torch.float32
    assert conversion.AutoConfig.from_pretrained(conversion.settings_folder(path)).dtype == computed
    assert not hasattr(wide.config, "quantization_config")
    if kind == "Q8_0":
        tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_up.weight")
        exact = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type))
        torch.testing.assert_close(wide.model.layers[0].mlp.up_proj.weight.data, exact, atol=1e-7, rtol=2**-11)


def test_tokenizer_template_and_ends_come_along(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "model.gguf", tiny.model("llama"), tokenizer__ggml__padding_token_id=0)
    loaded = load_model(path, device="cpu")
    tokenizer = loaded.tokenizer
    assert tokenizer(" quick brown fox").input_ids == tiny.tokenizer(bos=False)(" quick brown fox").input_ids
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("fox  12")
    assert [piece for piece, _ in pieces] == ["fox", "ĠĠ", "1", "2"]
    turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "fox"}], return_dict=False)[-1] == turn
    ids = loaded.model.generation_config
    assert (ids.bos_token_id, ids.eos_token_id, ids.pad_token_id) == (1, [2, turn], 0)


def test_engine_answers_from_a_gguf_file_and_knows_its_kv_again(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "model.gguf", tiny.model("llama"))
    chunks = [tiny.text(150, 1), tiny.text(150, 2)]
    present = []
    for _ in range(2):
        with BlendEngine.from_pretrained(path, store=tmp_path / "kv", device="cpu") as engine:
            present.append(engine.warm(chunks).present)
            assert engine.generate(Prompt("the", chunks, "the fox"), max_new_tokens=2).report.hits == 2
    assert present == [0, 2]


def test_settings_are_read_once_wherever_the_file_lies_but_for_a_damaged_folder(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, plain = [], conversion._write_settings
    monkeypatch.setattr(conversion, "_write_settings", lambda file, folder: (read.append(file), plain(file, folder)))
    path = gguf_files.write(tmp_path / "model.gguf", tiny.model("llama"))
    first = load_model(path, device="cpu").fingerprint()
    elsewhere = tmp_path / "other" / "model.gguf"
    elsewhere.parent.mkdir()
    shutil.copyfile(path, elsewhere)
    assert load_model(elsewhere, device="cpu").fingerprint() == load_model(path, device="cpu").fingerprint() == first
    assert load_geometry(path)[0].kv_heads == 2
    assert read == [path]
    assert len(list((cache / "gguf").glob("*"))) == 1 + 1  # and its lock
    os.truncate(next((cache / "gguf").rglob("tokenizer.json")), 100)
    load_model(path, device="cpu")
    assert read == [path, path]


def test_unknown_architecture_is_refused_by_name(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"architecture 'mamba'.*supported are gemma2, .*llama") as refused:
        load_model(path)
    assert "qwen3moe" in str(refused.value)
    assert not [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_missing_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gguf_files._weights
    monkeypatch.setattr(
        gguf_files, "_weights", lambda *given: (pair for pair in plain(*given) if "layers.2.mlp.up" not in pair[0])
    )
    path = gguf_files.write(tmp_path / "model.gguf", tiny.model("llama"))
    with pytest.raises(ModelLoadError, match=r"missing, such as model\.layers\.2\.mlp\.up_proj\.weight"):
        load_model(path)


def test_split_or_truncated_file_is_refused_with_the_remedy(tmp_path: Path, cache: Path) -> None:
    path = gguf_files.write(tmp_path / "model.gguf", tiny.model("llama"), split__count=3)
    with pytest.raises(ModelLoadError, match=r"one of 3 parts .*llama-gguf-split --merge"):
        load_model(path)
    path = gguf_files.write(tmp_path / "model.gguf", tiny.model("llama"))
    for share in (0.99, 0.02):
        os.truncate(path, int(share * path.stat().st_size))
        with pytest.raises(ModelLoadError, match="damaged or incomplete"):
            load_model(path)
    assert not [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
