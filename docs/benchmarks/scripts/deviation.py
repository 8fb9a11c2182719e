"""Where stored KV differs from full prefill's: by layer and by place in the chunk, for each condition.

``python -m docs.benchmarks.scripts.deviation --data squad.jsonl --count 8 --plot deviation.svg``

A condition says what chunks are computed behind, as in the yardstick. Values and keys of each chunk token are compared
with those of a full prefill of the same prompt, keys at the same positions. The deviation of a row is the norm of the
difference, relative to the norm of the full prefill's row. Rows are averaged. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.fusor.selection import SelectNone
from cacheblend_rag.fusor.teacher_forcing import prefill_layerwise
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.prompt import Span
from docs.benchmarks.scripts.common import reported, script_parser
from docs.benchmarks.scripts.measuring import table
from docs.benchmarks.scripts.plots import pyplot_for, save_figure
from docs.benchmarks.scripts.yardstick import Yardstick, in_prompt, of_half, open_cases

__all__ = ["draw", "main", "measure"]

CONDITIONS = ("sink", "plain", "context")
# Places of tokens in their chunk, from 0: the first of each range and the one behind its last.
PLACES = ((0, 1), (1, 4), (4, 16), (16, 64), (64, 10**6))
_STARTS = 0.05  # share of a chunk's tokens that are its first ones
_SAID = {"sink": "the start alone", "plain": "plain prose", "context": "neighbours (the default)"}
_COLOURS = {"sink": "tab:red", "plain": "tab:orange", "context": "tab:blue"}


def measure(yardstick: Yardstick, prompts: Sequence[Any], conditions: Sequence[str] = CONDITIONS) -> dict[str, Any]:
    """Mean deviations over the chunk tokens of some prompts.

    Parameters
    ----------
    yardstick : Yardstick
    prompts : sequence of Prompt
    conditions : sequence of str

    Returns
    -------
    dict
        By condition: ``values`` and ``keys``, each with ``starts`` and ``rest``, a mean for each layer; ``places``, the
        mean of the values behind layer 0 for each of `PLACES`; ``first_norm``, how large the values of a chunk's first
        token are, relative to the mean over the chunk. Under ``full prefill``, the last alone.
    """
    sums: dict[tuple[str, ...], Any] = {}

    def add(*name: str, value: torch.Tensor) -> None:
        total, count = sums.get(name, (0.0, 0))
        sums[name] = (total + value.double().sum(dim=-1), count + value.shape[-1])

    for prompt in prompts:
        full = prefill_layerwise(yardstick.adapter, yardstick.tokenizer.tokenize(prompt).input_ids).layers
        for condition in conditions:
            prepared = yardstick.prepared(condition, prompt)
            stored = prepared.fuse(SelectNone()).fusion.layers
            for span in prepared.tokens.chunks:
                place = torch.arange(len(span))
                starts = place < max(1, round(_STARTS * len(span)))
                for part in ("values", "keys"):
                    apart = _apart(_rows(stored, part, span), _rows(full, part, span))  # [layers, tokens]
                    add(condition, part, "starts", value=apart[:, starts])
                    add(condition, part, "rest", value=apart[:, ~starts])
                    for number, (first, behind) in enumerate(PLACES if part == "values" else ()):
                        inside = (place >= first) & (place < behind)
                        add(condition, "places", str(number), value=apart[1:, inside].mean(dim=0))
                for name, layers in ((condition, stored), ("full prefill", full)):
                    add(name, "first_norm", value=_first_norm(_rows(layers, "values", span)))
    means = {name: (total / count).tolist() for name, (total, count) in sums.items()}
    found: dict[str, Any] = {"full prefill": {"first_norm": _short(means["full prefill", "first_norm"])}}
    for name in conditions:
        parts = {part: {of: _short(means[name, part, of]) for of in ("starts", "rest")} for part in ("values", "keys")}
        places = [_short(means[name, "places", str(number)]) for number in range(len(PLACES))]
        found[name] = {**parts, "places": places, "first_norm": _short(means[name, "first_norm"])}
    return found


def _rows(layers: Sequence[LayerKV], part: str, span: Span) -> torch.Tensor:
    """Keys or values of some positions, ``[layers, tokens, heads * width]``."""
    found = torch.stack([getattr(layer, part)[0, :, span.start : span.stop] for layer in layers])
    return found.transpose(1, 2).flatten(2)


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)


def _first_norm(values: torch.Tensor) -> torch.Tensor:
    """Size of the first row's values behind layer 0, relative to the mean over the rows, ``[1]``."""
    norm = values.norm(dim=-1)[1:]
    return (norm[:, 0] / norm.mean(dim=1)).mean()[None]


def _short(value: Any) -> Any:
    return [_short(one) for one in value] if isinstance(value, list) else float(f"{value:.4g}")


def _place(number: int) -> str:
    first, behind = PLACES[number]
    return f"{first}" if behind == first + 1 else f"{first} on" if behind > 10**5 else f"{first} to {behind - 1}"


def _shown(found: Mapping[str, Any]) -> str:
    rows = [["computed behind", *(f"token {_place(number)}" for number in range(len(PLACES))), "first token's norm"]]
    for name, one in found.items():
        places = [f"{value:.3f}" for value in one["places"]] if "places" in one else ["–"] * len(PLACES)
        rows.append([_SAID.get(name, name), *places, f"{one['first_norm']:.2f}"])
    return table(rows[0], rows[1:])


def draw(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """Deviation of values over layers, first tokens of chunks apart from the others, and over places in a chunk."""
    figure, (over_layers, over_places) = pyplot.subplots(1, 2, figsize=(9, 4.8), layout="constrained")
    for name, one in result["deviation"].items():
        if "values" not in one:
            continue
        label, look = _SAID.get(name, name), {"color": _COLOURS.get(name), "linewidth": 1.5}
        over_layers.plot(one["values"]["starts"], label=f"{label}: first 5%", **look)
        over_layers.plot(one["values"]["rest"], label=f"{label}: the rest", linestyle="--", **look)
        over_places.plot(range(len(PLACES)), one["places"], label=label, marker="o", **look)
    over_layers.set_xlabel("layer")
    over_layers.set_ylabel("deviation of the values, relative")
    over_places.set_xlabel("place of a token in its chunk")
    over_places.set_xticks(range(len(PLACES)), [_place(number) for number in range(len(PLACES))])
    for axes in (over_layers, over_places):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)
    save_figure(pyplot, figure, path)


def run(options: argparse.Namespace) -> None:
    """Measure, print a table and the JSON, and draw."""
    pyplot = pyplot_for(options.plot) if options.plot else None
    torch.set_num_threads(options.threads)
    cases = open_cases(options.data)
    with BlendEngine.from_pretrained(options.model, dtype=options.dtype) as engine:
        yardstick = Yardstick(engine, cases, [], options.chunks)
        chosen = of_half(cases, "dev")
        random.Random("0").shuffle(chosen)
        prompts = [yardstick.prompt(in_prompt(case, options.chunks)) for case in chosen[: options.count]]
        found = measure(yardstick, prompts, options.conditions)
    result = {"options": {"about": options.about, "prompts": len(prompts)}, "deviation": found}
    print(_shown(found))
    print(json.dumps(result))
    if pyplot is not None:
        draw(pyplot, result, Path(options.plot))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    parser = script_parser("deviation", __doc__)
    parser.add_argument("--data", required=True, metavar="FILE", help="questions with passages")
    parser.add_argument("--count", type=int, default=8, help="prompts")
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--conditions", nargs="+", default=list(CONDITIONS))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--about", default="")
    parser.add_argument("--plot", metavar="FILE", help="the picture to write")
    options = parser.parse_args(arguments)
    return reported(parser, lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
