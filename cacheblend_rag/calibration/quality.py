"""``cacheblend-rag eval``: how near answers stay to full prefill's, and how many stay right, on own prompts."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from cacheblend_rag.calibration.comparison import METHODS, MethodResult, compare
from cacheblend_rag.calibration.statistics import Interval, best_f1, exact_match, first_line, interval, paired
from cacheblend_rag.config import check_whole
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.prompt import Prompt

_NEW_TOKENS = 32


@dataclass(frozen=True)
class MethodQuality:
    """One method over all prompts.

    Parameters
    ----------
    name : str
        One of `comparison.METHODS`.
    prompts : int
    kl : Interval
        Mean KL divergence from full recompute, in nats a token of full recompute's own answer.
    same : float
        Share of the answers that have full recompute's words.
    ttft : float
        Time to first token in seconds, a median over prompts.
    computed : float
        Mean share of the prompt's rows that are computed a layer.
    f1, exact : float or None
        Mean F1, and share of exact matches, with the gold answers; None without any.
    lost : Interval or None
        F1 minus that of full recompute on the same prompts.
    """

    name: str
    prompts: int
    kl: Interval
    same: float
    ttft: float
    computed: float
    f1: float | None = None
    exact: float | None = None
    lost: Interval | None = None


def measure_quality(
    engine: BlendEngine,
    prompts: Sequence[Prompt],
    golds: Sequence[Sequence[str]] = (),
    *,
    max_new_tokens: int = _NEW_TOKENS,
    corpus: Sequence[str] = (),
    progress: bool | None = None,
) -> list[MethodQuality]:
    """Answer prompts by every method, and hold each answer against full recompute's.

    Parameters
    ----------
    engine : BlendEngine
        With the options and the store that are judged. The chunks of the prompts are stored there.
    prompts : sequence of Prompt
        Each with its question behind the chunks. Those that do not fit the model are left out.
    golds : sequence of sequence of str
        The right answers of each prompt; empty if none are known.
    max_new_tokens : int
        Most tokens of an answer.
    corpus : sequence of str
        All chunks, those of a document one after another. They are warmed first, as for serving.
    progress : bool, optional
        Show a progress bar; by default if standard error is a terminal.

    Returns
    -------
    list of MethodQuality
        Full recompute first.

    Raises
    ------
    ConfigError
        If no prompt fits the model, or there are not as many gold answers as prompts.
    """
    check_whole("max_new_tokens", max_new_tokens, 1)
    if golds and len(golds) != len(prompts):
        raise ConfigError("golds", len(golds), f"give the answers of each of the {len(prompts)} prompts")
    limit = engine.context_window
    sizes = [len(engine.tokenize(prompt).input_ids) + max_new_tokens for prompt in prompts]
    wanted = [number for number, size in enumerate(sizes) if limit is None or size <= limit]
    if not wanted:
        raise ConfigError("prompts", len(prompts), "use some that fit the model, with fewer or shorter chunks")
    hidden = None if progress is None else not progress
    if corpus:
        engine.warm(corpus, progress=progress)
    scored = []
    with engine.products():  # full prefill too is computed as requests are
        for number in tqdm(wanted, desc="evaluating", disable=hidden):
            # The time of each method is that of the pass that answers.
            steps = compare(engine, prompts[number], max_new_tokens, 0.0, reorder=False)
            right = golds[number] if golds else ()
            scored.append([_score(one, right) for results in steps for one in results])
    return list(_summed_up(scored))


def quality_table(rows: Sequence[MethodQuality], left_out: int = 0) -> str:
    """The methods as lines of text, with what the columns mean.

    Parameters
    ----------
    rows : sequence of MethodQuality
        From `measure_quality`.
    left_out : int
        Prompts that were not measured, because they do not fit the model.
    """
    full, known = rows[0], rows[0].f1 is not None
    right = f"{'F1':>7}  {'F1 against full':<25}{'exact':>6}" if known else ""
    lines = [f"  {'method':<16}{right}{'TTFT':>10}{'faster':>9}{'rows':>7}{'same':>7}  nats a token"]
    for row in rows:
        speed = f"{row.ttft * 1e3:>7,.0f} ms{full.ttft / row.ttft:>8.2f}×{row.computed:>7.0%}"
        if row.f1 is not None and row.exact is not None and row.lost is not None:
            lost = "–" if row is full else _show(row.lost, "+.3f")
            right = f"{row.f1:>7.3f}  {lost:<25}{row.exact:>6.0%}"
        same, kl = ("–", "–") if row is full else (f"{row.same:.0%}", _show(row.kl, ".4f"))
        lines.append(f"  {row.name:<16}{right}{speed}{same:>7}  {kl}")
    lines += [
        "",
        f"{full.prompts} prompts. same: answers in full recompute's words. nats a token: mean KL divergence from full",
        "recompute over its own answer, 0 if each token is as likely. Square brackets: 95% intervals over prompts.",
    ]
    if left_out:
        lines.append(f"{left_out} prompts were left out because they do not fit the model.")
    return "\n".join(lines)


def _score(result: MethodResult, golds: Sequence[str]) -> dict[str, Any]:
    """A result by name, with F1 and exact match if the right answer is known."""
    near = {"kl": result.nearness.kl, "same": result.nearness.same_answer}
    found = {"name": result.name, "ttft": result.ttft, "computed": result.computed, **near}
    if golds:
        short = not any("\n" in gold.strip() for gold in golds)
        answer = first_line(result.text) if short else result.text
        found |= {"f1": best_f1(answer, golds), "exact": exact_match(answer, golds)}
    return found


def _summed_up(found: Sequence[Sequence[dict[str, Any]]]) -> Iterator[MethodQuality]:
    by_method = {name: [one for results in found for one in results if one["name"] == name] for name in METHODS}
    full = by_method[METHODS[0]]
    for name, results in by_method.items():
        right: dict[str, Any] = {}
        if "f1" in results[0]:
            scores = [one["f1"] for one in results]
            right = {
                "f1": statistics.mean(scores),
                "exact": statistics.mean(one["exact"] for one in results),
                "lost": paired(scores, [one["f1"] for one in full]),
            }
        yield MethodQuality(
            name,
            len(results),
            interval([one["kl"] for one in results]),
            statistics.mean(one["same"] for one in results),
            statistics.median(one["ttft"] for one in results),
            statistics.mean(one["computed"] for one in results),
            **right,
        )


def _show(found: Interval, form: str) -> str:
    return f"{found.mean:{form}} [{found.low:{form}}, {found.high:{form}}]"
