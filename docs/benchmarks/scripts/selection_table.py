"""Compare selection rules at equal work: ``python -m docs.benchmarks.scripts.selection_table``.

Every rule fuses the same held-out prompts of the reference model. Each result is held against full
prefill of the same prompt, by teacher forcing on the gold answer: one pass gives both whether greedy
decoding would write it and how far the distributions are apart.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.calibration.evaluation.journal import Journal
from cacheblend_rag.calibration.evaluation.statistics import Interval, interval, paired
from cacheblend_rag.calibration.prepared import PreparedPrompt
from cacheblend_rag.fusor import Fusion
from cacheblend_rag.fusor.selection import SelectNone
from cacheblend_rag.fusor.teacher_forcing import answer_log_probs, kl_divergence
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.models.identity import fingerprint
from cacheblend_rag.prompt import Prompt, PromptTokenizer
from docs.benchmarks.scripts.rule_grid import LATE, PAPER, WORKS, Candidate, candidates
from tests.toy import MODEL_PATH
from tests.toy.measure import Case, held_out_cases
from tests.toy.prompts import DEFAULT_SEPARATOR, STUFF
from tests.toy.questions import QUESTION_KINDS

__all__ = ["Measured", "Result", "Row", "Scored", "compare", "markdown", "prepared_case", "score", "summary"]

CEILING = "full prefill"
_MOST_LINES = 25
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scored:
    """One answer against the gold answer and against full prefill.

    Parameters
    ----------
    exact : bool
        Whether greedy decoding writes the gold answer.
    divergence : float
        KL divergence of the next-token distribution from full prefill's, mean over the gold
        answer's tokens, in nats.
    """

    exact: bool
    divergence: float


@dataclass(frozen=True)
class Result:
    """A rule's results on one prompt."""

    name: str
    aim: float | None
    family: str
    kind: str
    exact: bool
    full_exact: bool
    divergence: float
    work: float
    scaled_work: float


class _Answers:
    """Scores fused prompts against one gold answer."""

    def __init__(self, prepared: PreparedPrompt, answer_ids: Sequence[int]) -> None:
        self._prepared, self._ids = prepared, list(answer_ids)
        self._full = self._distributions(prepared.full)
        self.full_exact = self._is_exact(self._full)

    def score(self, fusion: Fusion) -> Scored:
        found = self._distributions(fusion)
        return Scored(self._is_exact(found), float(kl_divergence(self._full, found).mean()))

    def _is_exact(self, distributions: torch.Tensor) -> bool:
        return distributions.argmax(dim=-1).tolist() == self._ids

    def _distributions(self, fusion: Fusion) -> torch.Tensor:
        """Log-probabilities where the gold answer's tokens stand, ``[tokens, vocab]``."""
        adapter = self._prepared.adapter
        return answer_log_probs(adapter, adapter.new_cache(fusion.layers), fusion.logits, self._ids)


def score(prepared: PreparedPrompt, fusion: Fusion, answer_ids: Sequence[int]) -> Scored:
    """Hold one fused prompt against full prefill on a gold answer; its ids end with the end token."""
    return _Answers(prepared, answer_ids).score(fusion)


def prepared_case(adapter: ModelAdapter, tokenizer: Any, case: Case) -> tuple[PreparedPrompt, list[int]]:
    """A question's prompt with its chunks stored, and the ids of its gold answer.

    Parameters
    ----------
    adapter : ModelAdapter
    tokenizer
        As transformers loads it.
    case : Case
    """
    prompt = Prompt(STUFF.prefix, list(case.chunks), STUFF.suffix.format(q=case.question))
    prepared = PreparedPrompt(adapter, PromptTokenizer(tokenizer, DEFAULT_SEPARATOR), prompt)
    return prepared, [*tokenizer.encode(" " + case.sentence, add_special_tokens=False), tokenizer.eos_token_id]


def compare(
    model: Any,
    tokenizer: Any,
    cases: Sequence[Case],
    rules: Sequence[Candidate],
    journal: Journal,
    on_case: Callable[[int], None],
) -> list[Result]:
    """Fuse every prompt by every rule.

    Parameters
    ----------
    model, tokenizer
        As transformers loads them.
    cases : sequence of Case
    rules : sequence of Candidate
    journal : Journal
        Open, made for these prompts and rules. Prompts it holds are not fused again.
    on_case : callable
        Called with the number of finished prompts.
    """
    adapter = ModelAdapter(model)
    for case in cases[len(journal.lines) :]:
        with torch.no_grad():
            journal.append(_fused_by_all(adapter, tokenizer, case, rules))
        on_case(len(journal.lines))
    return [result for line in journal.lines for result in _results(line, rules)]


def _fused_by_all(adapter: ModelAdapter, tokenizer: Any, case: Case, rules: Iterable[Candidate]) -> dict[str, Any]:
    """A line of the journal: one prompt by every rule, in their order."""
    prepared, answer_ids = prepared_case(adapter, tokenizer, case)
    answers = _Answers(prepared, answer_ids)
    found = []
    for rule in rules:
        fused = prepared.fuse(rule.rule)
        found.append({**asdict(answers.score(fused.fusion)), "work": fused.work, "scaled_work": fused.scaled_work})
    return {"kind": case.kind, "full_exact": answers.full_exact, "rules": found}


def _results(line: Mapping[str, Any], rules: Sequence[Candidate]) -> list[Result]:
    about = {"kind": line["kind"], "full_exact": line["full_exact"]}
    return [
        Result(name=rule.name, aim=rule.aim, family=rule.family, **about, **found)
        for rule, found in zip(rules, line["rules"], strict=True)
    ]


@dataclass(frozen=True)
class Measured:
    """A rule over some prompts.

    Parameters
    ----------
    prompts : int
    exact : Interval
        Share of gold answers.
    difference : Interval
        The same less full prefill's on the same prompts.
    against_paper : Interval or None
        The same less that of the paper's flat rule at the same work; None where it cannot be had.
    divergence : Interval
        KL divergence from full prefill, in nats.
    """

    prompts: int
    exact: Interval
    difference: Interval
    against_paper: Interval | None
    divergence: Interval


@dataclass(frozen=True)
class Row:
    """A rule's line of the table.

    Parameters
    ----------
    kinds : dict of str to Measured
        By question kind.
    overall : Measured
        Over all prompts.
    """

    name: str
    aim: float | None
    family: str
    work: float
    scaled_work: float
    kinds: dict[str, Measured]
    overall: Measured


def summary(results: Sequence[Result]) -> list[Row]:
    """Line up results by rule, the ceiling last; each rule's are those of the same prompts in the same order."""
    groups: dict[tuple[str, float | None], list[Result]] = {}
    for result in results:
        groups.setdefault((result.name, result.aim), []).append(result)
    first = next(iter(groups.values()))
    groups[CEILING, None] = [
        replace(r, name=CEILING, exact=r.full_exact, divergence=0.0, work=1.0, scaled_work=1.0) for r in first
    ]
    papers = {aim: group for (name, aim), group in groups.items() if aim and name.startswith(f"{PAPER},")}
    kinds = [kind for kind in QUESTION_KINDS if any(r.kind == kind for r in first)]
    rows = []
    for (name, aim), group in groups.items():
        paper = papers.get(aim) if aim else None
        rows.append(
            Row(
                name=name,
                aim=aim,
                family=group[0].family,
                work=sum(r.work for r in group) / len(group),
                scaled_work=sum(r.scaled_work for r in group) / len(group),
                kinds={kind: _measured(_of(group, kind), paper and _of(paper, kind)) for kind in kinds},
                overall=_measured(group, paper),
            )
        )
    return rows


def _of(group: Iterable[Result], kind: str) -> list[Result]:
    return [result for result in group if result.kind == kind]


def _measured(group: Sequence[Result], paper: Sequence[Result] | None) -> Measured:
    exact = [float(r.exact) for r in group]
    return Measured(
        prompts=len(group),
        exact=interval(exact),
        difference=paired(exact, [float(r.full_exact) for r in group]),
        against_paper=paired(exact, [float(r.exact) for r in paper]) if paper else None,
        divergence=interval([r.divergence for r in group]),
    )


def markdown(rows: Sequence[Row], kind: str | None = None, whole: bool = False) -> str:
    """The table, one part for each work aimed at, the smallest divergence first.

    Parameters
    ----------
    rows : sequence of Row
    kind : str, optional
        Of questions of one kind only.
    whole : bool
        All rules; otherwise a long part is cut down to the best of each family and the paper's rule.
    """
    parts = []
    for aim in dict.fromkeys(row.aim for row in rows):
        part = sorted((row for row in rows if row.aim == aim), key=lambda row: _shown(row, kind).divergence.mean)
        lines = ["**Fixed points**\n" if aim is None else f"**Work on reused tokens of about {aim:.0%}**\n"]
        if len(part) > _MOST_LINES and not whole:
            lines = [f"{lines[0][:-1]} (best of each kind of rule, of {len(part)})\n"]
            part = _best(part)
        kinds = [kind] if kind else list(rows[0].kinds)
        head = ["rule", "work, 24 layers", "work here", *kinds]
        head += ["against full prefill", "against the paper's rule", "KL divergence"]
        lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        lines += ["| " + " | ".join(_cells(row, kinds, _shown(row, kind))) + " |" for row in part]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _shown(row: Row, kind: str | None) -> Measured:
    return row.kinds[kind] if kind else row.overall


def _best(part: Sequence[Row]) -> list[Row]:
    """The first row of each family, and the paper's rule."""
    firsts = {row.family: row.name for row in reversed(part)}
    return [row for row in part if row.name == firsts[row.family] or row.name.startswith(f"{PAPER},")]


def _cells(row: Row, kinds: Sequence[str], shown: Measured) -> list[str]:
    apart = shown.divergence
    return [
        row.name,
        f"{row.scaled_work:.1%}",
        f"{row.work:.1%}",
        *(_points(row.kinds[kind].exact) for kind in kinds),
        _points(shown.difference, "+"),
        "" if shown.against_paper is None else _points(shown.against_paper, "+"),
        f"{apart.mean:.3f} [{apart.low:.3f}, {apart.high:.3f}]",
    ]


def _points(share: Interval, sign: str = "") -> str:
    """A share and its interval, in hundredths."""
    return f"{100 * share.mean:{sign}.0f} [{100 * share.low:{sign}.0f}, {100 * share.high:{sign}.0f}]"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry: prints the table and writes it, with all results as JSON."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    counts = {kind: args.per_kind if count is None else count for kind, count in args.kinds}
    cases = [case for passages in args.passages for case in _cases(counts, passages, args.seed)]
    shares = _shares(ModelAdapter(model), tokenizer, cases)
    rules = candidates(model.config.num_hidden_layers, args.works, *shares, late=args.late)
    settings = {
        "model": fingerprint(model),
        "kinds": counts,
        "passages": args.passages,
        "seed": args.seed,
        "prompts": hashlib.sha256(repr(cases).encode()).hexdigest()[:16],
        "rules": [f"{rule.name} at {rule.aim}" for rule in rules],
    }
    with Journal(args.out, settings) as journal:
        tell = _progress(len(cases), len(journal.lines))
        rows = summary(compare(model, tokenizer, cases, rules, journal, tell))
        _write(args.out, rows, settings)
    print(markdown(rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m docs.benchmarks.scripts.selection_table",
        description="Compare selection rules at equal work. A command that was killed goes on where it was.",
    )
    parser.add_argument("--model", type=Path, default=MODEL_PATH)
    parser.add_argument("--dtype", default="float32", help='"float32", "bfloat16" or "float16"')
    parser.add_argument(
        "--kinds",
        type=_kind_and_count,
        nargs="+",
        metavar="KIND[=COUNT]",
        default=[(kind, None) for kind in QUESTION_KINDS],
        help=f"kinds of questions, of {', '.join(QUESTION_KINDS)}, and how many of each",
    )
    parser.add_argument("--per-kind", type=_count, default=50, help="questions a kind where --kinds does not say")
    parser.add_argument("--passages", type=int, nargs="+", default=[6], help="passages a prompt; several: all of them")
    parser.add_argument(
        "--works", type=float, nargs="+", default=list(WORKS), help="work on reused tokens, in 24 layers"
    )
    parser.add_argument("--late", type=int, default=LATE, metavar="LAYER", help="layer of the later checks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("selection"), help="folder for the table and, prompt by prompt, the results"
    )
    return parser


def _kind_and_count(given: str) -> tuple[str, int | None]:
    kind, _, count = given.partition("=")
    if kind not in QUESTION_KINDS:
        raise argparse.ArgumentTypeError(f"use one of {', '.join(QUESTION_KINDS)}, with =COUNT or without")
    return kind, _count(count) if count else None


def _count(given: str) -> int:
    if not given.isdecimal() or not int(given):
        raise argparse.ArgumentTypeError("use a whole number, 1 or more")
    return int(given)


def _cases(counts: Mapping[str, int], passages: int, seed: int) -> list[Case]:
    """The first so many questions of each kind."""
    left, cases = dict(counts), []
    for case in held_out_cases(max(counts.values()), passages=passages, split="test", seed=seed):
        if left.get(case.kind, 0) > 0:
            left[case.kind] -= 1
            cases.append(case)
    return cases


def _shares(adapter: ModelAdapter, tokenizer: Any, cases: Sequence[Case]) -> tuple[float, float]:
    """Work of the rows that are always computed, and reused tokens as a share of all; means over some prompts."""
    some = cases[:: max(1, len(cases) // 20)]
    with torch.no_grad():
        prepared = [prepared_case(adapter, tokenizer, case)[0] for case in some]
        works = [one.fuse(SelectNone()).scaled_work for one in prepared]
    return sum(works) / len(some), sum(map(reused_share, prepared)) / len(some)


def reused_share(prepared: PreparedPrompt) -> float:
    """Tokens a rule decides on, as a share of all."""
    return sum(map(len, prepared.plan.reused)) / len(prepared.tokens.input_ids)


def _progress(total: int, before: int) -> Callable[[int], None]:
    started = time.perf_counter()

    def tell(done: int) -> None:
        each = (time.perf_counter() - started) / (done - before)
        _log.info("%d of %d prompts, %.1f s each, %.0f min left", done, total, each, each * (total - done) / 60)

    return tell


def _write(folder: Path, rows: Sequence[Row], settings: Mapping[str, Any]) -> None:
    """The short table, the whole one, one for each question kind, and the numbers."""
    tables = {"table": markdown(rows), "whole": markdown(rows, whole=True)}
    tables |= {kind: markdown(rows, kind) for kind in rows[0].kinds}
    for name, table in tables.items():
        (folder / f"{name}.md").write_text(table, encoding="utf-8")
    lines = ",\n".join(json.dumps(_rounded(asdict(row))) for row in rows)
    data = f'{{"settings": {json.dumps(settings)},\n"rows": [\n{lines}\n]}}\n'
    (folder / "table.json").write_text(data, encoding="utf-8")


def _rounded(data: Any) -> Any:
    return json.loads(json.dumps(data), parse_float=lambda number: round(float(number), 4))


if __name__ == "__main__":
    raise SystemExit(main())
