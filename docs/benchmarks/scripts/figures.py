"""The figures of the paper, made again on one's own model and questions: data as JSON, drawn as SVG.

``python -m docs.benchmarks.scripts.figures --data questions.jsonl --model PATH_OR_ID --out runs/figures``

``--data toy:test`` draws questions from the toy's generator, anew for each number of chunks.

Numbers are those of the CacheBlend paper (arXiv 2405.16444).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from cacheblend_rag.calibration.datasets import Cases
from cacheblend_rag.calibration.passages import Ranker
from cacheblend_rag.calibration.trials import PreparedPrompt
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.fusor.selection import SelectNone
from cacheblend_rag.loading import BlendSettings
from cacheblend_rag.prompt import PromptTokenizer
from docs.benchmarks.evaluation.command import add_eval_arguments, open_evaluation
from docs.benchmarks.evaluation.methods import BLENDED, own_ratios, rule_of
from docs.benchmarks.evaluation.plots import (
    draw_against,
    draw_least_work,
    draw_over_chunks,
    draw_over_ratio,
    drawn,
)
from docs.benchmarks.evaluation.runner import EvalOptions, Evaluation
from docs.benchmarks.evaluation.summary import MethodRow, main_measure, write_summary
from docs.benchmarks.scripts.analysis import attention_deviation, kv_deviation, rank_correlation
from docs.benchmarks.scripts.chains import with_chains
from docs.benchmarks.scripts.common import reported, script_parser
from docs.benchmarks.scripts.measuring import machine
from docs.benchmarks.scripts.plots import import_pyplot
from tests.toy.cases import ToyCases

__all__ = ["FIGURES", "FigureMaker", "main"]

FIGURES: Mapping[int, str] = {
    2: "quality by full prefill and by full KV reuse, over the number of chunks",
    6: "attention deviation over the recompute ratio",
    7: "how KV deviation is spread over tokens, layer by layer",
    8: "rank correlation of KV deviation between neighbouring layers",
    12: "quality against time to first token, with prefix caching and full KV reuse",
    13: "quality against time to first token, with MapReduce and MapRerank",
    15: "time to first token over number (a) and length (b) of chunks, at no more than 0.015 loss",
    16: "quality over the recompute ratio",
}
_SHARES = 51  # points of a distribution


@dataclass(frozen=True, kw_only=True)
class FigureMaker:
    """Makes figures of one model and one set of questions.

    Parameters
    ----------
    engine : BlendEngine
    cases : Cases
    options : EvalOptions
        Its methods without those that a figure adds; its ratios; the first of its numbers of chunks
        where a figure has only one.
    folder : path
        Gets ``fig6.json``, ``fig6.svg`` and so on, and the results a figure is made of.
    sweep_chunks, sweep_tokens : tuple of int
        Numbers and lengths of chunks that are compared.
    prompts : int
        Prompts for figures 6 to 8.
    ranker, retrieval, calibrated
        As for `Evaluation`.
    measure : str, optional
        What is drawn, see `main_measure`.
    progress : bool, optional
        Show progress bars; by default if standard error is a terminal.
    """

    engine: BlendEngine
    cases: Cases
    options: EvalOptions
    folder: Path
    sweep_chunks: tuple[int, ...] = (3, 6, 9, 12)
    sweep_tokens: tuple[int, ...] = (100, 200, 300)
    prompts: int = 20
    ranker: Ranker | None = None
    retrieval: str = "file"
    calibrated: BlendSettings | None = None
    measure: str | None = None
    progress: bool | None = None

    def make(self, number: int) -> list[Path]:
        """Make one figure; the files it is in.

        Raises
        ------
        ConfigError
            If there is no such figure here.
        MissingExtraError
            If matplotlib is not installed.
        """
        if number not in FIGURES:
            raise ConfigError("only", number, "use some of " + ", ".join(map(str, FIGURES)))
        import_pyplot()  # better missed now than after hours
        self.folder.mkdir(parents=True, exist_ok=True)
        kinds: dict[int, Callable[[], list[Path]]] = {
            2: self._over_chunks,
            6: self._attention,
            7: self._spread,
            8: self._correlation,
            12: self._over_time,
            13: self._beside_chains,
            15: self._least_work,
            16: self._over_ratio,
        }
        return kinds[number]()

    @property
    def _blended(self) -> tuple[str, ...]:
        names = [m for m in self.options.methods if m.split(":")[0] in (*BLENDED, "calibrated")]
        return tuple(names) or ("hkvd",)

    # Figures of whole runs ----------------------------------------------------------------------

    def _run(
        self, name: str, folder: str = "", *, chains: bool = False, **changes: Any
    ) -> tuple[str, list[MethodRow], list[Path]]:
        """A run with a figure's settings: its measure, its rows and the JSON they are in.

        Figures that name the same folder are made of the same run.
        """
        evaluation = self._evaluation(**changes)
        out = self.folder / (folder or name)
        run = evaluation.run(out, progress=self.progress)
        if chains:
            run = with_chains(self.engine, evaluation, run, out / "chains")
        rows, measure = write_summary(run, out, measure=self.measure), main_measure(run, self.measure)
        path = self.folder / f"{name}.json"
        content = {
            "figure": name,
            "settings": run.settings,
            "machine": machine(),
            "measure": measure,
            "rows": [asdict(r) for r in rows],
        }
        _write(path, content)
        return measure, rows, [path]

    def _evaluation(self, **changes: Any) -> Evaluation:
        options = replace(self.options, **changes)
        return Evaluation(self.engine, self.cases, options, self.ranker, self.calibrated, retrieval=self.retrieval)

    @property
    def _one(self) -> tuple[int, ...]:
        return self.options.chunks[:1]

    def _over_chunks(self) -> list[Path]:
        measure, rows, files = self._run("fig2", methods=("full", "reuse"), chunks=self.sweep_chunks)
        return [*files, draw_over_chunks(rows, measure, "chunks", self.folder / "fig2.svg")]

    def _usual(self, name: str) -> tuple[str, list[MethodRow], list[Path]]:
        """The runs of figures 12 and 16, once for both."""
        methods = ("prefix", "reuse", *self._blended)
        return self._run(name, "fig12-16", methods=methods, chunks=self._one)

    def _over_time(self) -> list[Path]:
        measure, rows, files = self._usual("fig12")
        return [*files, draw_against(rows, measure, "ttft", self.folder / "fig12.svg")]

    def _over_ratio(self) -> list[Path]:
        measure, rows, files = self._usual("fig16")
        return [*files, draw_over_ratio(rows, measure, self.folder / "fig16.svg")]

    def _beside_chains(self) -> list[Path]:
        measure, rows, files = self._run("fig13", chains=True, methods=self._blended, chunks=self._one)
        return [*files, draw_against(rows, measure, "ttft", self.folder / "fig13.svg")]

    def _least_work(self) -> list[Path]:
        methods = ("full", *self._blended)
        measure, rows, first = self._run("fig15a", methods=methods, chunks=self.sweep_chunks)
        drawn = draw_least_work(rows, measure, "chunks", self.folder / "fig15a.svg")
        tokens: dict[str, Any] = {"chunks": self._one, "chunk_tokens": self.sweep_tokens}
        measure, rows, second = self._run("fig15b", methods=methods, **tokens)
        return [*first, drawn, *second, draw_least_work(rows, measure, "chunk_tokens", self.folder / "fig15b.svg")]

    # Figures of single prompts ------------------------------------------------------------------

    def _each(self, look: Callable[[PreparedPrompt], torch.Tensor]) -> torch.Tensor:
        """Mean over prompts of what is seen in each."""
        segments = PromptTokenizer(self.engine.tokenizer, self.engine.config.separator)
        (count,) = self._one
        evaluation = self._evaluation(chunks=self._one)
        cases = evaluation.pools[count]
        picked = cases[:: max(1, len(cases) // self.prompts)][: self.prompts]
        found = []
        for case in tqdm(picked, desc="prompts", disable=None if self.progress is None else not self.progress):
            _, prompt = evaluation.prompt_of(case, count, 0)
            found.append(look(PreparedPrompt(self.engine.adapter, segments, prompt)).double())
        return torch.stack(found).mean(dim=0)

    def _curves(
        self, number: int, curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], titles: tuple[str, str]
    ) -> list[Path]:
        path = self.folder / f"fig{number}.json"
        settings = {"model": self.engine.fingerprint, "prompts": self.prompts, **asdict(self.options)}
        axes = {"x": titles[0], "y": titles[1]}
        shown = {name: {"x": list(places), "y": list(heights)} for name, (places, heights) in curves.items()}
        _write(path, {"figure": f"fig{number}", "settings": settings, **axes, "curves": shown})
        return [path, _draw_curves(curves, titles, self.folder / f"fig{number}.svg")]

    def _attention(self) -> list[Path]:
        ratios = sorted({0.0, *self.options.ratios, 1.0})
        blended = [own_ratios(method)[0] for method in self._blended if method != "calibrated"]
        methods = list(dict.fromkeys(("hkvd", "random", *blended)))

        def look(prepared: PreparedPrompt) -> torch.Tensor:
            rules = [[rule_of(method, ratio) for ratio in ratios] for method in methods]
            return torch.tensor([[float(attention_deviation(prepared, rule).mean()) for rule in of] for of in rules])

        found = self._each(look)
        curves = {method: (ratios, row.tolist()) for method, row in zip(methods, found, strict=True)}
        return self._curves(6, curves, ("recompute ratio", "attention deviation"))

    def _spread(self) -> list[Path]:
        shares = torch.linspace(0, 1, _SHARES, dtype=torch.float64)

        def look(prepared: PreparedPrompt) -> torch.Tensor:
            return torch.quantile(kv_deviation(prepared, SelectNone()).double(), shares, dim=1).T

        found = self._each(look)
        layers = range(1, len(found), max(1, len(found) // 5))  # on layer 0 nothing deviates
        curves = {f"layer {layer}": (found[layer].tolist(), shares.tolist()) for layer in layers}
        return self._curves(7, curves, ("KV deviation", "share of tokens"))

    def _correlation(self) -> list[Path]:
        found = self._each(lambda prepared: rank_correlation(kv_deviation(prepared)[1:]))
        pairs = list(range(1, len(found) + 1))
        curves = {"neighbouring layers": (pairs, found.tolist())}
        return self._curves(8, curves, ("layer, with the one after it", "rank correlation"))


def _draw_curves(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], titles: tuple[str, str], path: Path
) -> Path:
    """Named lines, each of places and heights."""

    def draw(axis: Any) -> None:
        for name, (places, heights) in curves.items():
            axis.plot(list(places), list(heights), marker="o" if len(places) < 30 else None, label=name)
        axis.set(xlabel=titles[0], ylabel=titles[1])

    return drawn(path, draw)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _toy_cases(parsed: argparse.Namespace) -> Cases | None:
    """Gives questions of ``toy:SPLIT``; None for those of a file."""
    kind, _, split = parsed.data.partition(":")
    if kind != "toy":
        return None
    return ToyCases(split, parsed.per_kind, parsed.seed, parsed.order == "random", parsed.limit).cases


def _whole(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def main(arguments: Sequence[str] | None = None) -> int:
    """Make figures and print the files they are in."""
    parser = script_parser("figures", __doc__)
    add_eval_arguments(parser)
    parser.add_argument("--per-kind", type=int, default=50, metavar="N", help="questions of each kind, of toy:SPLIT")
    parser.add_argument("--only", type=_whole, metavar="N,N,…", help="2, 6, 7, 8, 12, 13, 15, 16; all by default")
    parser.add_argument("--sweep-chunks", type=_whole, default=(3, 6, 9, 12), metavar="N,N,…")
    parser.add_argument("--sweep-tokens", type=_whole, default=(100, 200, 300), metavar="N,N,…")
    parser.add_argument("--prompts", type=int, default=20, help="prompts for figures 6 to 8")
    parsed = parser.parse_args(arguments)

    def make() -> None:
        with open_evaluation(parsed, _toy_cases(parsed)) as made:
            maker = FigureMaker(
                engine=made.engine,
                cases=made.cases,
                options=made.options,
                folder=Path(parsed.out),
                sweep_chunks=parsed.sweep_chunks,
                sweep_tokens=parsed.sweep_tokens,
                prompts=parsed.prompts,
                ranker=made.ranker,
                retrieval=parsed.retrieve,
                calibrated=made.calibrated,
                measure=parsed.measure,
            )
            for number in parsed.only or FIGURES:
                for path in maker.make(number):
                    print(path)

    return reported(parser, make)


if __name__ == "__main__":
    sys.exit(main())
