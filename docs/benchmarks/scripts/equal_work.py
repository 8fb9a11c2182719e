"""``cacheblend-rag eval`` at equal work: each rule at the ratio with which it does so much of it.

``python -m docs.benchmarks.scripts.equal_work --data questions.jsonl --methods full,hkvd --works 0.12 --out runs``

Ratios of different rules do not compare. Here one is found for each method that has none of its own, by fusing a dozen
of the prompts. Then the run is that of ``eval``, with the same arguments. ``--against "hkvd @0.12"`` is the method at
that work.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
from collections.abc import Sequence

from cacheblend_rag.app.cli.evaluate import add_eval_arguments, add_run_arguments, numbers, open_evaluation, run_eval
from cacheblend_rag.calibration.evaluation.methods import BLENDED, own_ratios, rule_of
from cacheblend_rag.calibration.evaluation.runner import Evaluation
from cacheblend_rag.calibration.prepared import PreparedPrompt
from cacheblend_rag.config import check_share
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.selection import SelectionRule
from cacheblend_rag.prompt import PromptTokenizer
from docs.benchmarks.scripts.common import reported, script_parser

__all__ = ["EqualWork", "main"]

_PROMPTS = 12
_log = logging.getLogger(__name__)
# Ratios that are tried: the work of two neighbours differs by a thousandth of full prefill's at most.
_STEPS = 1000


class EqualWork:
    """Finds ratios by fusing a few prompts; their answers are not looked at.

    Parameters
    ----------
    prepared : sequence of PreparedPrompt
        Prompts like those that will be asked.
    """

    def __init__(self, prepared: Sequence[PreparedPrompt]) -> None:
        self._prepared = prepared
        self._known: dict[str, float] = {}

    def ratio(self, method: str, work: float) -> float | None:
        """A method's highest ratio whose mean work stays within ``work``, a share of full prefill's in 24 layers.

        None if it does more at any ratio: the layers before its check alone may be too many.
        """
        fitting = self._fitting(method)
        low, high = -1, len(fitting)
        while high - low > 1:
            middle = (low + high) // 2
            if self._work(fitting[middle][1]) <= work:
                low = middle
            else:
                high = middle
        return None if low < 0 else fitting[low][0]

    def _fitting(self, method: str) -> list[tuple[float, SelectionRule]]:
        """Ratios that the method's other options allow, rising, each with its rule."""
        layers = self._prepared[0].adapter.num_layers
        found: list[tuple[float, SelectionRule]] = []
        refused: ConfigError | None = None
        for step in range(1, _STEPS + 1):
            try:
                found.append((step / _STEPS, rule_of(method, step / _STEPS).fit(layers)))
            except ConfigError as error:
                refused = refused or error
        if not found and refused is not None:
            raise refused
        return found

    def _work(self, rule: SelectionRule) -> float:
        name = repr(rule)
        if name not in self._known:
            self._known[name] = statistics.fmean(one.fuse(rule).scaled_work for one in self._prepared)
        return self._known[name]


def main(arguments: Sequence[str] | None = None) -> int:
    """Find the ratios, and run."""
    parser = script_parser("equal_work", __doc__)
    add_eval_arguments(parser)
    add_run_arguments(parser)
    about = "work as a share of full prefill's, in 24 layers"
    parser.add_argument("--works", type=numbers, required=True, metavar="W,W,…", help=about)
    parsed = parser.parse_args(arguments)

    def run() -> None:
        labels = _find_ratios(parsed)
        parsed.against = tuple(labels.get(label, label) for label in parsed.against)
        run_eval(parsed)

    return reported(parser, run)


def _find_ratios(parsed: argparse.Namespace) -> dict[str, str]:
    """Give each method without a ratio one for every work; labels of the run by ``"METHOD @WORK"``."""
    if len(parsed.chunks) * len(parsed.chunk_tokens) > 1:
        raise ConfigError("chunks", parsed.chunks, "use one number and one length: ratios depend on both")
    for work in parsed.works:
        check_share("works", work)
    with open_evaluation(parsed) as made:
        evaluation = Evaluation(made.engine, made.source, made.options, made.ranker, made.calibrated)
        segments = PromptTokenizer(made.engine.tokenizer, made.engine.config.separator)
        (count,), (length,) = parsed.chunks, parsed.chunk_tokens
        pool = evaluation.pools[count]
        prompts = [evaluation.asked(case, count, length)[1] for case in pool[:: -(-len(pool) // _PROMPTS)]]
        equal = EqualWork([PreparedPrompt(made.engine.adapter, segments, prompt) for prompt in prompts])
        methods, labels = list[str](), dict[str, str]()
        for method in parsed.methods:
            if method.split(":")[0] not in BLENDED or own_ratios(method)[1]:
                methods.append(method)
                continue
            for work in parsed.works:
                ratio = equal.ratio(method, work)
                if ratio is None:
                    _log.warning("%s does more than %.3g of full prefill's work at any ratio; left out", method, work)
                    continue
                methods.append(f"{method}:ratio={ratio:g}")
                labels[f"{method} @{work:.4g}"] = f"{method} {ratio:.4g}"
                print(f"{method} @{work:.4g}: ratio {ratio:g}", file=sys.stderr)
    parsed.methods = tuple(methods)
    return labels


if __name__ == "__main__":
    sys.exit(main())
