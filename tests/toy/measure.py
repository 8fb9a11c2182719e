"""Measure answers on the held-out split: ``python -m tests.toy.measure``.

What answers is a parameter, so that every way of computing a prompt is measured on the same samples.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.prompt import Prompt
from tests.toy import DOCUMENTS_PATH, EMBEDDER_PATH, MODEL_PATH, QUESTIONS_PATH
from tests.toy.archive import WIDE_SIZE, build_town
from tests.toy.bundle import read_questions
from tests.toy.names import Split
from tests.toy.prompts import DEFAULT_SEPARATOR, STUFF, PromptFormat
from tests.toy.questions import QUESTION_KINDS, WIDE_KINDS, ask_all, sample_prompt

if TYPE_CHECKING:
    from cacheblend_rag.engine.engine import BlendEngine

Answer = Callable[[str, Sequence[str], str], str]
"""``answer(prefix, chunks, suffix)`` returns the generated text."""

MAX_NEW_TOKENS = 64


@dataclass(frozen=True)
class Case:
    """A prompt with its gold answer.

    ``complete`` tells whether the chunks hold all that is needed, ``town`` which archive they are from.
    """

    kind: str
    chunks: tuple[str, ...]
    question: str
    sentence: str
    value: str
    complete: bool = True
    town: int = field(default=0, repr=False)


@dataclass(frozen=True)
class KindResult:
    """Results of one question kind.

    ``exact`` is the share of answers equal to the gold sentence, ``low`` and ``high`` its 95% Wilson interval;
    ``value`` the share that contains the gold value; ``complete`` the share whose prompt held every needed passage.
    """

    kind: str
    count: int
    exact: float
    low: float
    high: float
    value: float
    complete: float


def normalise(text: str) -> str:
    """Lower-case, without punctuation, single spaces."""
    return " ".join(text.lower().translate(str.maketrans("", "", string.punctuation)).split())


def wilson(right: int, count: int) -> tuple[float, float]:
    """Return the 95% Wilson interval of a share."""
    if count == 0:
        return 0.0, 1.0
    z, share = 1.96, right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def held_out_cases(
    per_kind: int,
    *,
    passages: int = 6,
    split: Split = "test",
    seed: int = 0,
    shuffled: bool = False,
    wide: bool = False,
) -> list[Case]:
    """Sample cases from fresh towns of a split: the passages needed and distractors from the same town.

    Parameters
    ----------
    per_kind : int
        Questions a kind.
    passages : int
        Passages a prompt.
    shuffled : bool
        Whether a passage may stand before the one that says who is meant.
    wide : bool
        Whether the towns are those of the wider archive, with questions of more kinds.
    """
    rng = random.Random(f"held-out/{split}/{seed}")
    kinds, size = (WIDE_KINDS, WIDE_SIZE) if wide else (QUESTION_KINDS, None)
    cases: list[Case] = []
    left = dict.fromkeys(kinds, per_kind)
    town_seed = 1_000 * (seed + 1)
    while any(left.values()):
        town = build_town(town_seed, split, size)
        town_seed += 1
        asked = ask_all(town)
        for kind in kinds:
            of_kind = [question for question in asked if question.kind == kind]
            for question in rng.sample(of_kind, min(left[kind], 8, len(of_kind))):
                sample = sample_prompt(rng, town, question, passages, shuffled=shuffled)
                texts = (question.question, question.sentence, question.answers[0])
                cases.append(Case(kind, sample.chunks, *texts, town=town.seed))
                left[kind] -= 1
    return cases


def retrieved_cases(
    documents: Path = DOCUMENTS_PATH,
    questions: Path = QUESTIONS_PATH,
    embedder: Path = EMBEDDER_PATH,
    passages: int = 6,
) -> list[Case]:
    """Make cases from a bundled archive: the passages nearest to each question, nearest first."""
    from sentence_transformers import SentenceTransformer

    asked = read_questions(questions)
    files = sorted(documents.glob("*.md"))
    texts = [path.read_text(encoding="utf-8").strip() for path in files]
    model = SentenceTransformer(str(embedder), device="cpu")
    vectors = model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
    wanted = model.encode([item.question for item in asked], normalize_embeddings=True, show_progress_bar=False)
    order = (-(wanted @ vectors.T)).argsort(axis=1, kind="stable")[:, :passages]
    cases = []
    for item, row in zip(asked, order, strict=True):
        found = {files[index].name for index in row}
        chunks = tuple(texts[index] for index in row)
        complete = found.issuperset(item.files)
        cases.append(Case(item.kind, chunks, item.question, item.sentence, item.answers[0], complete))
    return cases


def plain_answer(model: Any, tokenizer: Any, separator: str = DEFAULT_SEPARATOR) -> Answer:
    """Return an answer function that runs a full prefill and decodes greedily.

    Parameters
    ----------
    model : transformers.LlamaForCausalLM
    tokenizer : transformers.PreTrainedTokenizerBase
    separator : str
        What stands between segments; each segment is tokenised on its own.
    """
    import torch

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def answer(prefix: str, chunks: Sequence[str], suffix: str) -> str:
        ids = [tokenizer.bos_token_id, *encode(prefix)]
        for chunk in chunks:
            ids += encode(separator) + encode(chunk)
        if chunks:
            ids += encode(separator)
        ids += encode(suffix)
        with torch.inference_mode():
            inputs = torch.tensor([ids], device=model.device)
            out = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=False,
                pad_token_id=tokenizer.eos_token_id,
            )
        return str(tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))

    return answer


def blended_answer(engine: BlendEngine) -> Answer:
    """Return an answer function that blends from warm chunks and decodes greedily.

    The prefix and every chunk are stored before the prompt is answered.
    """

    def answer(prefix: str, chunks: Sequence[str], suffix: str) -> str:
        engine.warm(chunks, progress=False)
        return engine.generate(Prompt(prefix, chunks, suffix), max_new_tokens=MAX_NEW_TOKENS).text

    return answer


def measure(answer: Answer, cases: Iterable[Case], form: PromptFormat = STUFF) -> list[KindResult]:
    """Answer every case and count, by kind.

    Raises
    ------
    ConfigError
        If there are no cases.
    """
    seen: dict[str, list[tuple[bool, bool, bool]]] = {}
    for case in cases:
        text = answer(form.prefix, case.chunks, form.suffix.format(q=case.question))
        said = normalise(text)
        right = said == normalise(case.sentence)
        holds = f" {normalise(case.value)} " in f" {said} "
        seen.setdefault(case.kind, []).append((right, holds, case.complete))
    if not seen:
        raise ConfigError("cases", 0, "give at least one case")
    results = []
    for kind, rows in seen.items():
        count = len(rows)
        exact, value, complete = (sum(column) for column in zip(*rows, strict=True))
        low, high = wilson(exact, count)
        results.append(KindResult(kind, count, exact / count, low, high, value / count, complete / count))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; the last line printed is JSON."""
    from cacheblend_rag.models.loading import load_model

    parser = argparse.ArgumentParser(prog="python -m tests.toy.measure", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_PATH)
    parser.add_argument("--per-kind", type=int, default=200, help="questions a kind")
    parser.add_argument("--passages", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", choices=("dev", "test"), default="test")
    parser.add_argument("--shuffled", action="store_true", help="fully random order of passages")
    parser.add_argument("--wide", action="store_true", help="the wider archive")
    parser.add_argument("--retrieve", action="store_true", help="the bundled archive, passages by the embedder")
    parser.add_argument("--selection", help="blend by this rule instead of a full prefill: hkvd, none, …")
    parser.add_argument("--ratio", type=float, default=0.15, help="recompute ratio of the rule")
    parser.add_argument("--check-layer", type=int, default=1, help="layer of the rule's check")
    args = parser.parse_args(argv)
    loaded = load_model(args.model, device="cpu")
    if args.retrieve:
        cases = retrieved_cases(passages=args.passages)
    else:
        cases = held_out_cases(
            args.per_kind,
            passages=args.passages,
            split=args.split,
            seed=args.seed,
            shuffled=args.shuffled,
            wide=args.wide,
        )
    rule: dict[str, Any] = {"recompute_ratio": args.ratio, "selection_options": {"check_layers": (args.check_layer,)}}
    results = measure(_answer(loaded.model, loaded.tokenizer, args.selection, rule), cases)
    for result in results:
        print(
            f"{result.kind:<11} {result.count:>4} exact {result.exact:.3f} [{result.low:.3f}, {result.high:.3f}] "
            f"value {result.value:.3f} complete {result.complete:.3f}"
        )
    print(json.dumps([asdict(result) for result in results]))
    return 0


def _answer(model: Any, tokenizer: Any, selection: str | None, rule: Mapping[str, Any]) -> Answer:
    if selection is None:
        return plain_answer(model, tokenizer)
    from cacheblend_rag.config import BlendConfig
    from cacheblend_rag.engine.engine import BlendEngine

    config = BlendConfig(selection=selection, **rule, condition="sink", min_tokens=0, size_limit="1GB")
    return blended_answer(BlendEngine(model, tokenizer, config=config))


if __name__ == "__main__":
    raise SystemExit(main())
