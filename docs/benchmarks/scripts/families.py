"""The table of model families in the documentation, by the tiny models of the tests.

``python -m docs.benchmarks.scripts.families`` holds the blended pass of each at recompute ratio 1.0 against the plain
model, as the tests do, and writes the table. It writes nothing if one of them is not exact.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.gpu.plain import plain_layers
from docs.benchmarks.scripts.common import script_parser
from tests import tiny

__all__ = ["PAGE", "described_of", "main"]

PAGE = Path(__file__).parents[2] / "reference" / "model-families.md"
_HEAD = "| model type | family | beyond Llama | our kernels on a GPU | float32 | bfloat16 | float16 |"
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table into the page."""
    script_parser("families", __doc__).parse_args(arguments)
    rows = [_row(architecture) for architecture in tqdm(tiny.ARCHITECTURES)]
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(_HEAD)
    end = text.index("\n\n", start)
    PAGE.write_text(
        "\n".join([text[:start] + _HEAD, "|---|---|---|---|---|---|---|", *rows]) + text[end:], encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
