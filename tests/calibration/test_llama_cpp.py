"""llama.cpp beside our methods: the file is the model's, the logits are transformers', measured on request."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import pytest
import torch

from cacheblend_rag.errors import CacheBlendError, ConfigError
from docs.benchmarks.scripts.gguf_file import ARCHITECTURES, write_gguf
from docs.benchmarks.scripts.llama_cpp import NAMES, LlamaCpp, LlamaSettings, file_dtype, main, measure
from docs.benchmarks.scripts.ttft import TTFTOptions
from tests import tiny

IDS = torch.randint(400, (90,), generator=torch.Generator().manual_seed(0)).tolist()
EXACT = LlamaSettings(flash_attention=False, kv="F32")
SMALL = ["--chunks", "2", "--chunk-tokens", "40", "--rounds", "1", "--threads", "1", "--device", "cpu"]


def test_missing_package_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert main(["--shape", "smollm2-135m", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "package='llama_cpp'" in error
    assert "pip install llama-cpp-python" in error


def test_device_other_than_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", ModuleType("llama_cpp"))
    with pytest.raises(ConfigError, match=r'device=.*use "cpu"'):
        measure(TTFTOptions(device="meta"))


@pytest.mark.parametrize(
    ("family", "rope", "changes", "found"),
    [
        ("gemma2", "default", {}, "gemma2"),
        ("llama", "yarn", {}, "yarn"),
        ("mistral", "default", {"sliding_window": 24}, "24"),
        ("qwen3", "default", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}, "24"),
    ],
)
def test_models_that_would_not_be_the_same_are_refused(
    family: str, rope: str, changes: dict[str, Any], found: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"shape='?{found}'?"):
        write_gguf(tiny.model(family, rope, **changes), tmp_path / "model.gguf")


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "F32"), ("bfloat16", "BF16"), ("float16", "F16")])
@pytest.mark.parametrize("tied", [True, False])
def test_the_file_holds_the_weights_in_the_models_element_type(
    dtype: str, kind: str, tied: bool, tmp_path: Path
) -> None:
    model = tiny.model("qwen2", tie_word_embeddings=tied).to(getattr(torch, dtype))
    write_gguf(model, tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert ("output.weight" in tensors) is not tied
    assert len(tensors) == len(list(model.parameters()))
    assert {t.tensor_type.name for t in tensors.values() if len(t.shape) == 2} == {kind}
    assert {t.tensor_type.name for t in tensors.values() if len(t.shape) == 1} == {"F32"}
    down = gguf.dequantize(tensors["blk.1.ffn_down.weight"].data, tensors["blk.1.ffn_down.weight"].tensor_type)
    torch.testing.assert_close(torch.from_numpy(down.copy()), model.model.layers[1].mlp.down_proj.weight.float())


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {"tie_word_embeddings": tied}) for family in ARCHITECTURES for tied in (False, True)),
        ("llama", {"attention_bias": True}),
    ],
)
def test_logits_are_those_of_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    model = tiny.model(family, **changes)
    wanted = tiny.full_prefill(model, IDS).logits[0, -1]
    write_gguf(model, tmp_path / "model.gguf")
    with LlamaCpp(tmp_path / "model.gguf", threads=1) as llama:
        context = llama.context(len(IDS), EXACT)
        whole = context.prefill(IDS)
        kept = context.prefill(IDS, kept=40)
        again = context.prefill(IDS)
    for logits in (whole, kept, again):
        assert logits.argmax() == wanted.argmax()
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize(
    ("dtype", "file", "most"),
    [("float32", "float32", 0.01), ("bfloat16", "bfloat16", 0.1), ("bfloat16", "float16", 0.1)],
)
def test_as_it_is_measured_it_differs_by_rounding(
    dtype: str, file: str, most: float, flash: bool, tmp_path: Path
) -> None:
    pytest.importorskip("llama_cpp")
    model = tiny.model("qwen3").to(getattr(torch, dtype))
    wanted = tiny.full_prefill(model, IDS).logits[0, -1].float()
    write_gguf(model, tmp_path / "model.gguf", getattr(torch, file))
    with LlamaCpp(tmp_path / "model.gguf", threads=1) as llama:
        logits = llama.context(len(IDS), LlamaSettings(flash_attention=flash)).prefill(IDS)
    assert logits.argmax() == wanted.argmax()
    assert (logits - wanted).abs().max() < most * wanted.abs().max()


def test_bfloat16_is_given_to_it_as_what_it_is_quick_with(monkeypatch: pytest.MonkeyPatch) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    for said, wanted in ((b"CPU : AVX2 = 1 | ", torch.float16), (b"CPU : AVX512_BF16 = 1 | ", torch.bfloat16)):
        monkeypatch.setattr(llama_cpp, "llama_print_system_info", lambda said=said: said)
        assert file_dtype(torch.bfloat16) == wanted
        assert file_dtype(torch.float32) == torch.float32


def test_kept_prefix_is_not_read_again(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    write_gguf(tiny.model(), tmp_path / "model.gguf")
    with LlamaCpp(tmp_path / "model.gguf", threads=1) as llama:
        context = llama.context(len(IDS), EXACT)
        wanted = context.prefill(IDS)
        others = [(token + 1) % 400 for token in IDS[:40]]
        assert torch.equal(context.prefill(others + IDS[40:], kept=40), context.prefill(IDS, kept=40))
        assert not torch.allclose(context.prefill(others + IDS[40:]), wanted, atol=0.1)


def test_llama_cpp_failures_are_errors_of_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("llama_cpp")
    (tmp_path / "no.gguf").write_bytes(b"GGUF")
    with caplog.at_level(logging.ERROR), pytest.raises(CacheBlendError, match="could not load"):
        LlamaCpp(tmp_path / "no.gguf", threads=1)
    assert caplog.records, "llama.cpp's own reason is logged"
    write_gguf(tiny.model(), tmp_path / "model.gguf")
    with (
        LlamaCpp(tmp_path / "model.gguf", threads=1) as llama,
        pytest.raises(CacheBlendError, match=r"300 tokens.* 256"),
    ):
        llama.context(256, EXACT).prefill([5] * 300)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_benchmark_measures_it_beside_the_others(
    dtype: str, tiny_shape: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("llama_cpp")
    chosen = ["--methods", "prefix", "default", "--kv", "memory", "--dtype", dtype]
    drawn = tmp_path / "ttft.svg"
    assert main(["--shape", "tiny", *SMALL, *chosen, "--plot", str(drawn)]) == 0
    out, err = capsys.readouterr()
    assert err == "", "llama.cpp keeps its notes to itself"
    result = json.loads(out.splitlines()[-1])
    names = list(NAMES)
    assert list(result["ttft_seconds"]) == ["full recompute", "prefix caching", *names, "default, memory"]
    assert result["work"]["llama.cpp"] == result["work"]["full recompute"] == 1.0
    assert result["work"]["llama.cpp, prefix kept"] == result["work"]["prefix caching"] < 1.0
    assert result["loaded_bytes"]["llama.cpp"] == 0
    found = result["llama_cpp"]
    assert (found["flash_attention"], found["ubatch"]) in [(True, 512), (True, 256), (False, 512), (False, 256)]
    assert found["kv"] == "F16"
    assert list(found["same_first_token"]) == names
    most = 0.01 if dtype == "float32" else 0.1
    assert all(difference < most for difference in found["logit_difference"].values())
    assert set(names) <= set(re.findall(r"<!-- (.*?) -->", drawn.read_text(encoding="utf-8")))
