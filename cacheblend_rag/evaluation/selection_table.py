"""Compare selection rules at equal work: ``python -m cacheblend_rag.evaluation.selection_table``.

Every rule fuses the same held-out prompts of the reference model. Each result is held against full
prefill of the same prompt, by teacher forcing on the gold answer: one pass gives both whether greedy
decoding would write it and how far the distributions are apart.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.evaluation.prepared import PreparedPrompt
from cacheblend_rag.evaluation.quality.statistics import Interval, interval
from cacheblend_rag.evaluation.rule_grid import WORKS, Candidate, candidates
from cacheblend_rag.fusor import Fusion
from cacheblend_rag.fusor.forcing import answer_log_probs, kl_divergence
from cacheblend_rag.fusor.selection import SelectNone
from cacheblend_rag.models.adapter import ModelAdapter
from cacheblend_rag.prompt import Prompt, SegmentTokenizer
from cacheblend_rag.reference import MODEL_PATH
from cacheblend_rag.reference.measure import Case, held_out_cases
from cacheblend_rag.reference.prompts import DEFAULT_SEPARATOR, STUFF
from cacheblend_rag.reference.questions import QUESTION_KINDS

__all__ = ["Interval", "Result", "Row", "Scored", "compare", "interval", "markdown", "score", "summary"]

CEILING = "full prefill"
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
    kind: str
    passages: int
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


def compare(
    model: Any, tokenizer: Any, cases: Sequence[Case], rules: Sequence[Candidate], on_case: Callable[[int], None]
) -> list[Result]:
    """Fuse every prompt by every rule.

    Parameters
    ----------
    model, tokenizer
        As transformers loads them.
    cases : sequence of Case
    rules : sequence of Candidate
    on_case : callable
        Called with the number of finished prompts.
    """
    adapter, segments = ModelAdapter(model), SegmentTokenizer(tokenizer, DEFAULT_SEPARATOR)
    results = []
    for done, case in enumerate(cases):
        with torch.no_grad():
            prepared = PreparedPrompt(adapter, segments, _prompt(case))
            answer = [*tokenizer.encode(" " + case.sentence, add_special_tokens=False), tokenizer.eos_token_id]
            answers = _Answers(prepared, answer)
            for rule in rules:
                fused = prepared.fuse(rule.rule)
                scored = answers.score(fused.fusion)
                results.append(
                    Result(
                        name=rule.name,
                        aim=rule.aim,
                        kind=case.kind,
                        passages=len(case.chunks),
                        exact=scored.exact,
                        full_exact=answers.full_exact,
                        divergence=scored.divergence,
                        work=fused.work,
                        scaled_work=fused.scaled_work,
                    )
                )
        on_case(done + 1)
    return results


def _prompt(case: Case) -> Prompt:
    return Prompt(STUFF.prefix, list(case.chunks), STUFF.suffix.format(q=case.question))


@dataclass(frozen=True)
class Row:
    """A rule's line of the table.

    Parameters
    ----------
    exact : dict of str to float
        Share of gold answers by question kind.
    difference : Interval
        Share of gold answers less full prefill's on the same prompts.
    divergence : Interval
        KL divergence from full prefill, in nats.
    """

    name: str
    aim: float | None
    prompts: int
    work: float
    scaled_work: float
    exact: dict[str, float]
    difference: Interval
    divergence: Interval


def summary(results: Sequence[Result]) -> list[Row]:
    """Line up results by rule, the ceiling last."""
    groups: dict[tuple[str, float | None], list[Result]] = {}
    for result in results:
        groups.setdefault((result.name, result.aim), []).append(result)
    first = next(iter(groups.values()))
    groups[CEILING, None] = [
        replace(r, name=CEILING, exact=r.full_exact, divergence=0.0, work=1.0, scaled_work=1.0) for r in first
    ]
    rows = []
    for (name, aim), group in groups.items():
        kinds = [kind for kind in QUESTION_KINDS if any(r.kind == kind for r in group)]
        rows.append(
            Row(
                name=name,
                aim=aim,
                prompts=len(group),
                work=sum(r.work for r in group) / len(group),
                scaled_work=sum(r.scaled_work for r in group) / len(group),
                exact={kind: _share([r.exact for r in group if r.kind == kind]) for kind in kinds},
                difference=interval([r.exact - r.full_exact for r in group]),
                divergence=interval([r.divergence for r in group]),
            )
        )
    return rows


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags)


def markdown(rows: Sequence[Row]) -> str:
    """The table, one part for each work aimed at."""
    kinds = list(rows[0].exact)
    head = ["rule", "work, 24 layers", "work here", *kinds, "against full prefill", "KL divergence"]
    parts = []
    for aim in dict.fromkeys(row.aim for row in rows):
        lines = ["**Fixed points**\n" if aim is None else f"**Work on reused tokens of about {aim:.0%}**\n"]
        lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        for row in sorted((row for row in rows if row.aim == aim), key=lambda row: row.divergence.mean):
            change, apart = row.difference, row.divergence
            cells = [row.name, f"{row.scaled_work:.1%}", f"{row.work:.1%}"]
            cells += [f"{row.exact[kind]:.0%}" for kind in kinds]
            cells.append(f"{100 * change.mean:+.0f} [{100 * change.low:+.0f}, {100 * change.high:+.0f}]")
            cells.append(f"{apart.mean:.3f} [{apart.low:.3f}, {apart.high:.3f}]")
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry: prints the table and writes it, with all results as JSON."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(prog="python -m cacheblend_rag.evaluation.selection_table")
    parser.add_argument("--model", type=Path, default=MODEL_PATH)
    parser.add_argument("--per-kind", type=int, default=50, help="questions a kind, for each number of passages")
    parser.add_argument("--passages", type=int, nargs="+", default=[6, 8])
    parser.add_argument(
        "--works", type=float, nargs="+", default=list(WORKS), help="work on reused tokens, in 24 layers"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("selection"), help="written to OUT.md and OUT.json")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    cases = [
        case
        for passages in args.passages
        for case in held_out_cases(args.per_kind, passages=passages, split="test", seed=args.seed)
    ]
    first = PreparedPrompt(ModelAdapter(model), SegmentTokenizer(tokenizer, DEFAULT_SEPARATOR), _prompt(cases[0]))
    question = first.fuse(SelectNone()).scaled_work
    rules = candidates(model.config.num_hidden_layers, args.works, question, first.reused_share)
    started = time.perf_counter()

    def tell(done: int) -> None:
        if done % 10 == 0 or done == len(cases):
            _log.info("%d of %d prompts, %.0f s", done, len(cases), time.perf_counter() - started)

    rows = summary(compare(model, tokenizer, cases, rules, tell))
    table = markdown(rows)
    args.out.with_suffix(".md").write_text(table, encoding="utf-8")
    data = json.dumps([asdict(row) for row in rows], indent=1)
    args.out.with_suffix(".json").write_text(data + "\n", encoding="utf-8")
    print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
