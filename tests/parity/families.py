"""The tables of model families in the documentation, by the tiny models of the tests.

``python -m tests.parity.families`` holds the blended pass of each at recompute ratio 1.0 against the plain
model, as the tests do, and writes the table. It writes nothing if one of them is not exact. With ``--treatments`` it
writes only the table of what the families of the day get, by loading a tiny model of each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cacheblend_rag.engine.backends import adapter_of
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.gpu.plain import plain_layers
from cacheblend_rag.models.loading import Treatment, treatment_of
from tests import tiny

__all__ = ["OF_THE_DAY", "PAGE", "described_of", "main", "treatment_rows"]

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "model-families.md"
_HEAD = "| model type | family | beyond Llama | our kernels on a GPU | float32 | bfloat16 | float16 |"
_TREATMENTS = "| models | model type | what they get | why |"
# Names under which people know them, by the model type of their text.
OF_THE_DAY = {
    "Qwen3": "qwen3",
    "Qwen3 30B-A3B and other mixtures": "qwen3_moe",
    "Qwen2.5, DeepSeek-R1 distils": "qwen2",
    "Qwen3-VL": "qwen3_vl",
    "Qwen3.5, 3.6, 3.8": "qwen3_5_text",
    "Qwen3-Next, Qwen3-Coder-Next": "qwen3_next",
    "Llama 3, 3.1, 3.2, 3.3": "llama",
    "Llama 4": "llama4_text",
    "Gemma 3": "gemma3",
    "Gemma 3n": "gemma3n_text",
    "Gemma 4": "gemma4_text",
    "gpt-oss": "gpt_oss",
    "DeepSeek V3, R1; Kimi K2": "deepseek_v3",
    "Mistral Small 3, Ministral 3": "mistral3",
    "Phi-4, Phi-4-mini": "phi3",
    "SmolLM3": "smollm3",
    "GLM-4.5 to 4.7": "glm4_moe",
    "MiniMax M2": "minimax_m2",
    "OLMo 3": "olmo3",
    "Granite 4 H": "granitemoehybrid",
    "LFM2": "lfm2",
    "Falcon-H1": "falcon_h1",
    "Nemotron-H, Nemotron 3": "nemotron_h",
    "Mamba 2": "mamba2",
    "Mamba, Falcon Mamba": "mamba",
    "Jamba": "jamba",
    "RecurrentGemma": "recurrent_gemma",
    "RWKV": "rwkv",
    "GPT-2": "gpt2",
    "T5, Flan-T5": "t5",
}
_NARROW = (torch.bfloat16, torch.float16)


def described_of(architecture: str) -> tuple[str, str, str, str]:
    """An architecture, its text's family, what its tiny model has beyond Llama, and what runs by kernels on a GPU."""
    adapter = ModelAdapter(tiny.model(architecture))
    return architecture, adapter.family.model_type, ", ".join(_features(adapter)) or "—", _by_kernels(adapter)


def _by_kernels(adapter: ModelAdapter) -> str:
    """Families that the kernels of this package would run on a GPU, as `ModelAdapter.blending` chooses."""
    if not (adapter.attends_by_kernel and adapter.form.as_attended):
        return "—"
    form = (adapter.windows, adapter.kv_heads, adapter.head_dim, adapter.rotary(1), adapter.device)
    return "attention" if plain_layers(adapter.layers, *form) is None else "whole layers"


def _features(adapter: ModelAdapter) -> list[str]:
    config, family, rotaries = adapter.config, adapter.family, adapter.rotary(1)
    attention = getattr(adapter.layers[0], family.attention)
    widths = {2 * rotaries.layer(layer).frequencies()[0].shape[-1] for layer in range(adapter.num_layers)}
    within = config is not adapter.model.config
    experts = any(weight.ndim == 3 for layer in adapter.layers for weight in layer.parameters())
    found = {
        "experts": experts,
        "windows": family.window.__name__ != "_no_window",
        "layers without positions": not all(rotaries.rotates),
        "interleaved rotation": family.layout.interleaved,
        "partial rotation": not family.latent and min(widths) < adapter.head_dim,
        "several rotary bases": len(rotaries.tables) > 1,
        "positions by time, height and width": "mrope_section" in config.rope_parameters,
        "no norm before attention": family.norm is None,
        "one projection for queries, keys and values": family.fused is not None,
        "latents in place of keys and values": family.latent,
        "biases": getattr(getattr(attention, family.keys, None), "bias", None) is not None,
        "key norms": getattr(attention, family.keys_norm or "", None) is not None and not family.norms_span_heads,
        "key norm over all heads": family.norms_span_heads,
        "soft caps or sinks in attention": not adapter.attends_by_kernel,
        "scaled embeddings": not torch.equal(adapter.embed([5])[0], adapter.model.get_input_embeddings().weight[5]),
        "scaled logits": not within and (_scale(config, "logits_scaling") or _scale(config, "logit_scale")),
        "capped logits": not within and _scale(config, "final_logit_softcapping"),
    }
    return [name for name, holds in found.items() if holds]


def _scale(config: Any, name: str) -> bool:
    return getattr(config, name, None) not in (None, 1.0)


def _row(architecture: str) -> str:
    from tests.parity.test_families import check_exact, narrow_errors

    check_exact(tiny.model(architecture))
    errors = (narrow_errors(architecture, dtype) for dtype in _NARROW)
    name, family, features, kernels = described_of(architecture)
    cells = [
        f"`{name}`",
        f"`{family}`",
        features,
        kernels,
        "exact",
        *(f"{ours / theirs:.1f}" for ours, theirs in errors),
    ]
    return f"| {' | '.join(cells)} |"


def treatment_rows() -> list[str]:
    """What the families of the day get: their tiny models are loaded, and held against what their config promises."""
    rows = []
    for name, kind in OF_THE_DAY.items():
        plain = kind in tiny.PLAIN
        if kind not in tiny.PLAIN and kind not in tiny.ARCHITECTURES:
            found = treatment_of(CONFIG_MAPPING[kind]())
        else:
            model = tiny.plain_model(kind) if plain else tiny.model(kind)
            found, adapter = treatment_of(model.config), adapter_of(model)
            reused = "plain, beginnings reused" if adapter.goes_on == "slices" else "plain"
            if found != Treatment(reused if adapter.plain_reason else "blended", adapter.plain_reason):
                raise ValueError(f"{kind}: {found} by its config, but {adapter.goes_on}: {adapter.plain_reason}")
        why = found.reason.partition("; ")[0] or "—"
        rows.append(f"| {name} | `{kind}` | {found.how} | {why} |")
    return rows


def _put(text: str, head: str, rows: Sequence[str]) -> str:
    """A page with other rows below the head of a table."""
    start = text.index(head)
    end = text.index("\n\n", start)
    return "\n".join([text[:start] + head, "|---" * head.count(" | ") + "|---|", *rows]) + text[end:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table into the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity.families", description=__doc__)
    parser.add_argument("--treatments", action="store_true", help="only the table of what the families of the day get")
    parsed = parser.parse_args(arguments)
    text = _put(PAGE.read_text(encoding="utf-8"), _TREATMENTS, treatment_rows())
    if not parsed.treatments:
        text = _put(text, _HEAD, [_row(architecture) for architecture in tqdm(tiny.ARCHITECTURES)])
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
