"""The figures of the paper, made again on one's own model and questions: data as JSON, drawn as SVG.

``python -m docs.benchmarks.scripts.figures --data questions.jsonl --model PATH_OR_ID --out runs/figures``

Numbers are those of the CacheBlend paper (arXiv 2405.16444).
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.outputs import LLMResult
from tqdm import tqdm

from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import CacheBlendError, ConfigError, MissingExtraError
from cacheblend_rag.fusor.blend import attention_rows
from cacheblend_rag.fusor.selection import SelectionRule, SelectNone
from cacheblend_rag.fusor.work import prefill_work
from cacheblend_rag.langchain import CacheBlendLLM
from cacheblend_rag.loading import BlendSettings
from cacheblend_rag.models.kv import LayerKV
from cacheblend_rag.prompt import PromptTokenizer
from docs.benchmarks.evaluation.command import (
    MethodRow,
    add_eval_arguments,
    draw_against,
    draw_least_work,
    draw_over_chunks,
    draw_over_ratio,
    drawn,
    main_measure,
    open_evaluation,
    write_summary,
)
from docs.benchmarks.evaluation.datasets import Cases
from docs.benchmarks.evaluation.journal import Journal
from docs.benchmarks.evaluation.passages import Ranker
from docs.benchmarks.evaluation.prepared import PreparedPrompt
from docs.benchmarks.evaluation.runner import (
    BLENDED,
    DEPTH,
    EvalOptions,
    EvalRun,
    Evaluation,
    Subject,
    own_ratios,
    rule_of,
    scored,
)
from docs.benchmarks.scripts.common import import_pyplot, machine, reported, script_parser


def kv_deviation(prepared: PreparedPrompt, rule: SelectionRule | None = None) -> torch.Tensor:
    """How far a rule's values are from full prefill's, token by token (Table 1 of the paper).

    Parameters
    ----------
    prepared : PreparedPrompt
    rule : SelectionRule, optional
        Full KV reuse by default.

    Returns
    -------
    Tensor, [layers, context], float32
        L2 norm of the difference of values, over all heads; ``context`` are the positions from the first chunk to the
        last.
    """
    span = slice(prepared.context.start, prepared.context.stop)
    fused, full = prepared.fuse(rule or SelectNone()).fusion.layers, prepared.full.layers
    rows = []
    for ours, theirs in zip(fused, full, strict=True):
        difference = (ours.values - theirs.values)[0, :, span].float()  # [kv_heads, context, head_dim]
        rows.append(difference.square().sum(dim=(0, 2)).sqrt())
    return torch.stack(rows)


def question_attention(prepared: PreparedPrompt, layers: Sequence[LayerKV]) -> list[torch.Tensor]:
    """Attention of the question's rows over fused KV, a layer, ``[heads, question, tokens]``."""
    adapter, ids = prepared.adapter, torch.tensor(prepared.tokens.input_ids, device=prepared.adapter.device)
    copies = [LayerKV(kv.keys.clone(), kv.values.clone()) for kv in layers]
    rows = torch.arange(prepared.question.start, prepared.question.stop, device=adapter.device)
    numbers = range(adapter.num_layers)
    with adapter.blending() as row_layers:
        rotaries = adapter.rotary(len(ids))
        found = attention_rows(
            row_layers, adapter.embed(ids[rows]), rows, len(rows), copies.__getitem__, rotaries, numbers
        )
    return [found[number] for number in numbers]


def attention_deviation(prepared: PreparedPrompt, rule: SelectionRule | None = None) -> torch.Tensor:
    """How far the question's attention over the context is from full prefill's (section 4.2 of the paper).

    Returns
    -------
    Tensor, [layers], float32
        L2 norm of the difference of the forward attention matrices, mean over heads.
    """
    span = slice(prepared.context.start, prepared.context.stop)
    ours = question_attention(prepared, prepared.fuse(rule or SelectNone()).fusion.layers)
    theirs = question_attention(prepared, prepared.full.layers)
    differences = [(a[:, :, span] - b[:, :, span]).float() for a, b in zip(ours, theirs, strict=True)]
    return torch.stack([difference.square().sum(dim=(1, 2)).sqrt().mean() for difference in differences])


def rank_correlation(scores: torch.Tensor) -> torch.Tensor:
    """Spearman's rank correlation of neighbouring layers, over tokens (Fig. 8 of the paper).

    Parameters
    ----------
    scores : Tensor, [layers, tokens]

    Returns
    -------
    Tensor, [layers - 1], float64
        NaN next to a layer on which all tokens are equal.

    Raises
    ------
    ConfigError
        If there are fewer than two layers or two tokens.
    """
    if scores.ndim != 2 or min(scores.shape) < 2:
        raise ConfigError("scores", tuple(scores.shape), "use at least two layers and two tokens")
    ranks = torch.stack([_ranks(row) for row in scores])
    ranks = ranks - ranks.mean(dim=1, keepdim=True)
    sizes = ranks.norm(dim=1)
    correlation: torch.Tensor = (ranks[1:] * ranks[:-1]).sum(dim=1) / (sizes[1:] * sizes[:-1])
    return correlation


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """Ranks from 0; equal values share the mean of theirs."""
    _, inverse, counts = torch.unique(values, sorted=True, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double() - 1
    ranks: torch.Tensor = (last - (counts.double() - 1) / 2)[inverse]
    return ranks


CHAINS = ("map_reduce", "map_rerank")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChainAnswer:
    """The result of a chain for a question.

    Parameters
    ----------
    text : str
        Empty if the chain could not use what the model wrote.
    ttft : float
        Seconds until the answer began to be known: to the first token of the last call, or to the end of
        all calls where the answer is chosen among them.
    calls : tuple of (int, int)
        Prompt and generated tokens of each call of the model.
    failed : bool
        Whether LangChain refused what the model wrote: MapRerank asks for a score that can be read,
        MapReduce for parts that are not too long.
    """

    text: str
    ttft: float
    calls: tuple[tuple[int, int], ...]
    failed: bool = False


class DocumentChains:
    """LangChain's ``map_reduce`` and ``map_rerank`` question answering over an engine's model.

    Parameters
    ----------
    engine : BlendEngine
    max_new_tokens : int
        Of each call.
    **fields
        Further fields of the `CacheBlendLLM`.

    Raises
    ------
    MissingExtraError
        If langchain-classic is not installed.
    """

    def __init__(self, engine: BlendEngine, max_new_tokens: int, **fields: Any) -> None:
        try:
            from langchain_classic.chains.question_answering import load_qa_chain
        except ImportError as error:
            raise MissingExtraError("langchain-classic", "langchain") from error
        self._load = load_qa_chain
        plain = engine.with_config(min_tokens=sys.maxsize, prompt_cache=0)
        self._llm = CacheBlendLLM.from_engine(plain, max_new_tokens=max_new_tokens, track=False, **fields)
        self._chains: dict[str, Any] = {}

    def answer(self, kind: str, question: str, chunks: Sequence[str]) -> ChainAnswer:
        """Answer from chunks by ``"map_reduce"`` or ``"map_rerank"``."""
        seen = _Calls()
        given = {"input_documents": [Document(page_content=chunk) for chunk in chunks], "question": question}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are deprecated, and still what people compare with
            if kind not in self._chains:
                self._chains[kind] = self._load(self._llm, chain_type=kind)
            started = time.perf_counter()
            try:
                text, failed = str(self._chains[kind].invoke(given, {"callbacks": [seen]})["output_text"]), False
            except CacheBlendError:
                raise
            except ValueError as error:
                _log.info("%s gave no answer: %s", kind, error)
                text, failed = "", True
        ended = time.perf_counter()
        calls = tuple((info["prompt_tokens"], info["generated_tokens"]) for info in seen.infos)
        first = ended if failed or kind == "map_rerank" else seen.began + seen.infos[-1]["ttft"]
        return ChainAnswer(text.strip(), first - started, calls, failed)


class _Calls(BaseCallbackHandler):
    """The model's report of each call, and when the last one began."""

    def __init__(self) -> None:
        self.infos: list[dict[str, Any]] = []
        self.began = 0.0

    def on_llm_start(self, serialized: dict[str, Any], prompts: list[str], **kwargs: Any) -> None:
        self.began = time.perf_counter()

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        for batch in response.generations:
            self.infos += [dict(one.generation_info or {}) for one in batch]


def with_chains(engine: BlendEngine, evaluation: Evaluation, run: EvalRun, folder: Path) -> EvalRun:
    """A run in which the chains have answered the same questions from the same chunks.

    They have no prompt that could be compared token by token. Rows and work count all their calls.

    Parameters
    ----------
    engine : BlendEngine
    evaluation : Evaluation
        What the run was made by.
    run : EvalRun
    folder : path
        Keeps their results question by question, as a run does.
    """
    subject = Subject(engine, run.settings["max_new_tokens"])
    known: dict[int, DocumentChains] = {}
    with Journal(folder, run.settings) as journal, engine.products():
        for line in run.lines[len(journal.lines) :]:
            count, length = line["chunks"], line["chunk_tokens"]
            case = next(one for one in evaluation.pools[count] if one.id == line["case"])
            most = subject.answer_tokens(case)
            if most not in known:
                known[most] = DocumentChains(engine, most)
            chosen, prompt = evaluation.prompt_of(case, count, length)
            tokens, question = len(engine.tokenize(prompt).input_ids), case.question or "Summarize the news."
            results = []
            for kind in CHAINS if line["results"] else ():
                found = known[most].answer(kind, question, prompt.chunks)
                results.append({**_spent(engine, kind, found, tokens), **scored(chosen, found.text)})
            journal.append({"case": case.id, "results": results})
        both = zip(run.lines, journal.lines, strict=True)
        return replace(run, lines=[{**line, "results": [*line["results"], *more["results"]]} for line, more in both])


def _spent(engine: BlendEngine, kind: str, found: ChainAnswer, tokens: int) -> dict[str, Any]:
    """Time of a chain, beside full prefill of a prompt of so many tokens."""
    calls = list(found.calls)
    if kind == "map_reduce" and calls:
        calls[-1] = (calls[-1][0], 0)  # what the last call writes is the answer itself
    sizes = [read + written for read, written in calls]
    shape = engine.adapter.shape
    deep = max(DEPTH, engine.adapter.num_layers)
    work = {
        name: sum(prefill_work(shape, size, layers) for size in sizes) / prefill_work(shape, tokens, layers)
        for name, layers in (("work", None), ("work_24", deep))
    }
    about = {"label": kind, "method": kind, "ratio": None, "ttft": found.ttft, "rows": sum(sizes) / tokens}
    return {**about, **work, "failed": found.failed}


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


def _whole(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def main(arguments: Sequence[str] | None = None) -> int:
    """Make figures and print the files they are in."""
    parser = script_parser("figures", __doc__)
    add_eval_arguments(parser)
    parser.add_argument("--only", type=_whole, metavar="N,N,…", help="2, 6, 7, 8, 12, 13, 15, 16; all by default")
    parser.add_argument("--sweep-chunks", type=_whole, default=(3, 6, 9, 12), metavar="N,N,…")
    parser.add_argument("--sweep-tokens", type=_whole, default=(100, 200, 300), metavar="N,N,…")
    parser.add_argument("--prompts", type=int, default=20, help="prompts for figures 6 to 8")
    parsed = parser.parse_args(arguments)

    def make() -> None:
        with open_evaluation(parsed) as made:
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
