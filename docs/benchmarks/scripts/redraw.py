"""A benchmark's plot from the JSON it printed, with nothing measured again.

``python -m docs.benchmarks.scripts.redraw docs/benchmarks/ttft-qwen2.5-0.5b-float32.json --plot ttft.svg``
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import ConfigError
from docs.benchmarks.scripts import (
    concurrent,
    decode,
    deviation,
    hit_rates,
    loading,
    scaling,
    shared,
    simulator,
    store,
    three_models,
    throughput,
    verified,
    warm,
    yardstick,
)
from docs.benchmarks.scripts.common import reported, script_parser
from docs.benchmarks.scripts.plots import draw_ttft, pyplot_for

__all__ = ["KINDS", "Kind", "draw_file", "main"]


@dataclass(frozen=True)
class Kind:
    """A kind of result.

    Parameters
    ----------
    keys : tuple of str
        What a result of this kind has, and one of no other kind.
    draw : callable
        Takes pyplot, the result and the file to write.
    """

    keys: tuple[str, ...]
    draw: Callable[[Any, Mapping[str, Any], Path], None]


# By the command or script that measured it.
KINDS = {
    "ttft": Kind(("ttft_seconds", "bound_seconds", "times_faster", "prompt_tokens"), draw_ttft),
    "store": Kind(("bytes_a_second", "records"), store.draw),
    "warm": Kind(("seconds_a_token", "to_batch", "spread", "tokens"), warm.draw),
    "decode": Kind(("seconds_a_token", "to_transformers", "spread", "prompt_tokens"), decode.draw),
    "loading": Kind(("alone", "rows"), loading.draw),
    "shared": Kind(("link_load", "rows"), shared.draw),
    "scaling": Kind(("growth", "rows"), scaling.draw),
    "throughput": Kind(("served", "rows", "batches"), throughput.draw),
    "concurrent": Kind(("under_way", "prompt_tokens"), concurrent.draw),
    "simulator": Kind(("rule", "runs", "large"), simulator.draw),
    "hit_rates": Kind(("content", "chained"), hit_rates.draw),
    "deviation": Kind(("deviation",), deviation.draw),
    "three_models": Kind(("models",), three_models.draw),
    "verified": Kind(("options", "summary", "rows"), verified.draw),
    "yardstick": Kind(("sets", "together", "drawn"), yardstick.draw),
}


def draw_file(source: str | Path, plot: str | Path) -> str:
    """Draw a result again, with nothing measured.

    Parameters
    ----------
    source : path
        What a benchmark printed, or its last line alone, which is JSON.
    plot : path
        The file to write; its ending says of what kind.

    Returns
    -------
    str
        What measured it, a key of `KINDS`.

    Raises
    ------
    ConfigError
        If the file does not hold a result that can be drawn, or no such plot can be written.
    MissingExtraError
        If matplotlib is not installed.
    """
    pyplot = pyplot_for(plot)
    result = _result(Path(source))
    for name, kind in KINDS.items():
        if result.keys() >= {"options", *kind.keys}:
            kind.draw(pyplot, result, Path(plot))
            return name
    raise _unknown(source)


def _result(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8").strip()
        lines = text.splitlines() or [""]
        found = json.loads(text if text.startswith("{") else lines[-1])
    except (OSError, ValueError) as error:
        raise _unknown(path) from error
    if not isinstance(found, dict):
        raise _unknown(path)
    return found


def _unknown(path: str | Path) -> ConfigError:
    return ConfigError("file", str(path), f"use a file with the JSON that one of these printed: {', '.join(KINDS)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw one result."""
    parser = script_parser("redraw", __doc__)
    parser.add_argument("file", metavar="RESULT", help="what a benchmark printed, or its last line")
    parser.add_argument("--plot", metavar="FILE", required=True, help="the picture to write")
    parsed = parser.parse_args(arguments)
    return reported(parser, lambda: print(f"{draw_file(parsed.file, parsed.plot)}: {parsed.plot}"))


if __name__ == "__main__":
    sys.exit(main())
