"""Verified answers: how many are corrected, whether each is full prefill's, and when it is there.

``python -m docs.benchmarks.scripts.verified --data squad.jsonl --half test --out docs/benchmarks/verified.json``

Each question is asked through LangChain's ``stream`` of a chat model, its passages stored before: blended, blended and
verified, and by full prefill in the same engine; then transformers' own ``generate`` answers the same ids. All ways
answer one question before the next one is asked. ``--ways verified full`` leaves out those that only times need: the
draft of a verified answer is what was blended. A verified answer is the text at the end, corrected where it was. It
counts as full prefill's if it has the same words. An answer is right if it has one of the answers in the file. A run
that was broken off goes on where ``--out`` ends.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag.calibration.statistics import interval
from cacheblend_rag.config import DTYPES, BlendConfig
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.langchain import ChatCacheBlend
from cacheblend_rag.prompt.tokenizer import common_length
from docs.benchmarks.evaluation.datasets import EvalCase
from docs.benchmarks.scripts.common import (
    TokenClock,
    machine,
    reported,
    save_figure,
    script_parser,
    table,
    unboxed,
    write_json,
)
from docs.benchmarks.scripts.yardstick import in_prompt, is_right, of_half, open_cases

WAYS = ("blended", "verified", "full", "transformers")
_MOST = 48  # tokens of an answer
_ASKED = "Use the following pieces of context to answer the question at the end, in a few words.\n\n"


class Asking:
    """The ways of answering a question by one engine.

    Parameters
    ----------
    engine : BlendEngine
    ways : sequence of str
        Those of `WAYS` that are asked, ``"full"`` among them.
    """

    def __init__(self, engine: BlendEngine, ways: Sequence[str] = WAYS) -> None:
        self._engine, self._ways = engine, ways
        full = engine.with_config(selection="all")
        self._models = {
            "blended": ChatCacheBlend(engine=engine, max_new_tokens=_MOST, temperature=0),
            "verified": ChatCacheBlend(engine=engine, max_new_tokens=_MOST, temperature=0, verify="always"),
            "full": ChatCacheBlend(engine=full, max_new_tokens=_MOST, temperature=0),
        }

    def row(self, case: EvalCase) -> dict[str, Any]:
        """Answers and times of each way for one question."""
        chunks = [passage.chunk for passage in case.passages]
        self._models["blended"].warm(chunks, progress=False)
        text = _ASKED + "\n\n".join(chunks) + f"\n\nQuestion: {case.question}\nHelpful Answer:"
        ways: dict[str, Callable[[], dict[str, Any]]] = {
            name: lambda model=model: _streamed(model, text)  # type: ignore[misc]
            for name, model in self._models.items()
            if name in self._ways
        }
        found = {name: ask() for name, ask in ways.items()}
        report = self._models["full"].last_report
        assert report is not None
        if "transformers" in self._ways:
            found["transformers"] = self._generated(report.input_ids)
        for one in found.values():
            one["right"] = is_right(one["text"], case.answers)
            if "draft" in one:
                one["draft_right"] = is_right(one["draft"], case.answers)
        if (other := found["verified"]) and other["text"] != found["full"]["text"]:
            other["lead_units"] = self._lead(report.input_ids, found["full"]["text"], other["text"])
        return {"id": case.id, "prompt_tokens": report.prompt_tokens, "ways": found}

    def _lead(self, ids: Sequence[int], full: str, other: str) -> float:
        """By how much full prefill prefers its own token where another answer leaves it, in units of rounding.

        A unit is the epsilon of the element type times the highest score.
        """
        adapter, tokenizer = self._engine.adapter, self._engine.tokenizer
        one, two = (
            [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in (full, other)
        )
        kept = common_length(one, two)
        with self._engine.products():
            scores = adapter.prefill([*ids, *one[:kept]]).logits.float()
        unit = torch.finfo(adapter.dtype).eps * float(scores.max().abs())
        return round(float(scores[one[kept]] - scores[two[kept]]) / unit, 3)

    def _generated(self, ids: Sequence[int]) -> dict[str, Any]:
        clock, started = TokenClock(), time.perf_counter()
        given = torch.tensor([list(ids)], device=self._engine.adapter.device)
        with torch.no_grad():
            made = self._engine.model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=_MOST,
                do_sample=False,
                logits_processor=[clock],
            )
        seconds = time.perf_counter() - started
        text = self._engine.tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True)
        return {"text": text, "first": clock.times[0] - started, "last": seconds, "seconds": seconds}


def _streamed(model: ChatCacheBlend, text: str) -> dict[str, Any]:
    started, first, last, said, told = time.perf_counter(), 0.0, 0.0, "", dict[str, Any]()
    for chunk in model.stream(text):
        if chunk.content:
            last = time.perf_counter() - started
            first = first or last
        said += str(chunk.content)
        told = chunk.response_metadata.get("verification", told)
    seconds, draft = time.perf_counter() - started, said
    if told["status"] == "corrected":
        said = said[: told["position"]] + told["after"]
    times = {"first": first or seconds, "last": last or seconds, "seconds": seconds}
    own = {name: told[name] for name in ("status", "kept_tokens", "ties", "seconds")}
    return {"text": said, **times, "draft": draft, "verification": own}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts and times of all questions."""

    def of(way: str, field: str) -> list[Any]:
        return [row["ways"][way][field] for row in rows]

    full, right = of("full", "text"), of("full", "right")
    asked = [way for way in WAYS if way in rows[0]["ways"]]
    ways = {}
    for way in asked:
        same = [text == other for text, other in zip(of(way, "text"), full, strict=True)]
        kept = [now for now, was in zip(of(way, "right"), right, strict=True) if was]
        ways[way] = {
            "same": sum(same),
            "same_share": asdict(interval([float(one) for one in same])),
            "right": sum(of(way, "right")),
            "right_lost": len(kept) - sum(kept),
            "first_s": statistics.median(of(way, "first")),
            "last_s": statistics.median(of(way, "last")),
            "seconds": statistics.median(of(way, "seconds")),
        }
    drafts, draft_right = of("verified", "draft"), of("verified", "draft_right")
    times = {}
    if "blended" in asked:
        pairs = zip(of("verified", "first"), of("blended", "first"), strict=True)
        times["first_ratio"] = statistics.median(one / other for one, other in pairs)
    status = [one["status"] for one in of("verified", "verification")]
    leads = [row["ways"]["verified"].get("lead_units") for row in rows]
    return {
        "questions": len(rows),
        "leads_where_verified_left": sorted(one for one in leads if one is not None),
        "prompt_tokens": statistics.median(row["prompt_tokens"] for row in rows),
        "status": {one: status.count(one) for one in sorted(set(status))},
        "ties": sum(one["ties"] for one in of("verified", "verification")),
        "drafts_same": sum(draft == text for draft, text in zip(drafts, full, strict=True)),
        "drafts_right_lost": sum(was and not now for was, now in zip(right, draft_right, strict=True)),
        **times,
        "check_s": statistics.median(one["seconds"] for one in of("verified", "verification")),
        "ways": ways,
    }


def shown(found: dict[str, Any]) -> str:
    """The table of a summary."""
    heads = ("way", "same words as full prefill", "right", "right answers lost", "first word (s)", "whole answer (s)")
    rows = []
    for way, one in found["ways"].items():
        same = f"{one['same']} of {found['questions']}"
        rows.append(
            (way, same, str(one["right"]), str(one["right_lost"]), f"{one['first_s']:.2f}", f"{one['seconds']:.2f}")
        )
    return table(heads, rows)


_SHOWN = {
    "blended": "blended",
    "verified": "blended and verified",
    "full": "full prefill, same engine",
    "transformers": "transformers",
}


def draw(pyplot: Any, result: Mapping[str, Any], path: Path) -> None:
    """The time line of each way: until the first word, while words come, until the answer is certain."""
    ways = {name: result["summary"]["ways"][name] for name in _SHOWN if name in result["summary"]["ways"]}
    figure, axis = pyplot.subplots(figsize=(7.5, 0.6 * len(ways) + 1.4), layout="constrained")
    for at, (name, one) in enumerate(ways.items()):
        certain = one["seconds"] if name == "verified" else one["last_s"]
        parts = ((0, one["first_s"], "0.88"), (one["first_s"], one["last_s"], "tab:blue"))
        for begin, end, colour in (*parts, (one["last_s"], certain, "tab:green")):
            axis.barh(at, end - begin, left=begin, color=colour, height=0.55)
        axis.annotate(f" {certain:.1f} s", (certain, at), va="center", fontsize="small")
    axis.set_yticks(range(len(ways)), [_SHOWN[name] for name in ways])
    axis.invert_yaxis()
    axis.set_xlim(right=1.1 * max(one["seconds"] for one in ways.values()))
    axis.set_xlabel("seconds: waiting (grey), words come (blue), being checked (green)")
    unboxed(axis)
    figure.suptitle("When words come, and when the answer is certain", fontsize="medium")
    save_figure(pyplot, figure, path)


def run(parsed: argparse.Namespace) -> None:
    """Ask all questions, and write what was found."""
    torch.set_num_threads(parsed.threads)
    cases = of_half(open_cases(parsed.data), parsed.half)[: parsed.limit]
    # Nothing that checks teach: a draft is what an answer without a check is.
    config = BlendConfig(prompt_cache=0, min_tokens=0, write_back="inline")
    with BlendEngine.from_pretrained(parsed.model, dtype=parsed.dtype, config=config) as engine:
        asking, rows = Asking(engine, parsed.ways), _asked(parsed)
        known = {row["id"] for row in rows}
        for case in (case for case in cases if case.id not in known):
            rows.append(asking.row(in_prompt(case, parsed.chunks)))
            print(".", end="", file=sys.stderr, flush=True)
            _write(parsed, rows)
    found = summary(rows)
    print("\n" + shown(found))
    print(json.dumps({name: value for name, value in found.items() if name != "ways"}))


def _options(parsed: argparse.Namespace) -> dict[str, Any]:
    options = {name: getattr(parsed, name) for name in ("dtype", "half", "chunks", "ways", "threads", "limit")}
    return options | {"model": Path(parsed.model).name, "data": Path(parsed.data).name}


def _asked(parsed: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of an earlier run that was broken off, or had a lower limit."""
    if not parsed.out or not Path(parsed.out).exists():
        return []
    earlier = json.loads(Path(parsed.out).read_text(encoding="utf-8"))
    options = _options(parsed)
    other = sorted(name for name in options if name != "limit" and earlier["options"].get(name) != options[name])
    if other:
        raise SystemExit(f"--out {parsed.out} has another run, of other {', '.join(other)}: name another file")
    rows: list[dict[str, Any]] = earlier["rows"]
    return rows[: parsed.limit]


def _write(parsed: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """Write what is known so far, so that a long run that is broken off is not lost."""
    if parsed.out:
        write_json(
            parsed.out, {"options": _options(parsed), "machine": machine(), "summary": summary(rows), "rows": rows}
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = script_parser("verified", __doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    parser.add_argument("--data", required=True)
    parser.add_argument("--half", default="dev", choices=("dev", "test", "all"))
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out")
    parsed = parser.parse_args(arguments)
    return reported(parser, lambda: run(parsed))


if __name__ == "__main__":
    sys.exit(main())
