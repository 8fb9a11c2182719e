"""What each codec costs in answers, and what it saves in bytes.

``python -m docs.benchmarks.scripts.codec_table --per-kind 100``

Every prompt of held-out questions is answered from records of every codec. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.fusor.teacher_forcing import answer_log_probs, kl_divergence
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.store.codecs import CODECS
from tests.toy import MODEL_PATH
from tests.toy.measure import Case, blended_answer, held_out_cases, measure
from tests.toy.prompts import STUFF

__all__ = ["CodecResult", "main", "measure_codec"]


@dataclass(frozen=True)
class CodecResult:
    """What one codec gave.

    Parameters
    ----------
    codec, selection : str
    token_bytes : float
        Bytes a token takes, all layers.
    value : dict of str to float
        Share of answers that hold the gold value, by kind of question.
    overall : float
        The same over all questions.
    same : float
        Share of answers that are word for word those over raw records.
    divergence : float
        KL divergence of the next-token distribution from that over raw records, mean over the gold answers' tokens, in
        nats.
    """

    codec: str
    selection: str
    token_bytes: float
    value: dict[str, float]
    overall: float
    same: float
    divergence: float


@dataclass(frozen=True)
class _Answers:
    texts: list[str]
    log_probs: list[torch.Tensor]
    """For each case, of all tokens where each token of the gold answer stands."""


def measure_codec(
    engine: BlendEngine, cases: Sequence[Case], raw: _Answers | None = None
) -> tuple[CodecResult, _Answers]:
    """Answer all cases from the engine's store.

    Parameters
    ----------
    engine : BlendEngine
        Over an empty store; its config names the codec.
    cases : sequence of Case
    raw : answers, optional
        What raw records gave; by default these are they.
    """
    found, answer = _Answers([], []), blended_answer(engine)
    gold = iter(engine.tokenizer(f" {case.sentence}", add_special_tokens=False).input_ids for case in cases)

    def noting(prefix: str, chunks: Sequence[str], suffix: str) -> str:
        found.texts.append(answer(prefix, chunks, suffix))
        fused = engine.fuse(Prompt(prefix, chunks, suffix))
        found.log_probs.append(answer_log_probs(engine.adapter, fused.cache, fused.logits, next(gold)))
        return found.texts[-1]

    kinds = measure(noting, cases, STUFF)
    raw = raw or found
    pairs = zip(raw.log_probs, found.log_probs, strict=True)
    divergence = [float(kl_divergence(exact, coded).mean()) for exact, coded in pairs]
    chunk = next(info for _, info in engine.store.infos("") if not info.rotated)  # a prefix is kept as it is
    result = CodecResult(
        codec=engine.config.codec,
        selection=str(engine.config.selection),
        token_bytes=CODECS[engine.config.codec].token_bytes(chunk),
        value={kind.kind: kind.value for kind in kinds},
        overall=sum(kind.value * kind.count for kind in kinds) / len(cases),
        same=sum(a == b for a, b in zip(raw.texts, found.texts, strict=True)) / len(cases),
        divergence=sum(divergence) / len(cases),
    )
    return result, found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every codec and print a table."""
    parser = argparse.ArgumentParser(description="What each codec costs in answers, and what it saves in bytes.")
    parser.add_argument("--model", default=str(MODEL_PATH), metavar="PATH_OR_ID")
    parser.add_argument("--dtype", default="bfloat16", help='"float32", "bfloat16" or "float16"')
    parser.add_argument("--per-kind", type=int, default=100, help="questions a kind")
    parser.add_argument("--selection", nargs="+", default=["hkvd", "none"])
    parsed = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(parsed.model, dtype=parsed.dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(parsed.model)
    cases = held_out_cases(parsed.per_kind)
    results: list[CodecResult] = []
    for selection in parsed.selection:
        raw: _Answers | None = None
        for codec in CODECS:
            config = BlendConfig(codec=codec, selection=selection, min_tokens=0, write_back="inline")
            with (
                tempfile.TemporaryDirectory() as folder,
                BlendEngine(model, tokenizer, config=config, store=Path(folder) / "kv") as engine,
            ):
                result, answers = measure_codec(engine, cases, raw)
            raw = raw or answers
            results.append(result)
            print(
                f"{selection:<6} {codec:<5} {result.token_bytes:>9.0f} bytes a token  value {result.overall:.3f}  "
                f"same answer {result.same:.3f}  KL {result.divergence:.2e}"
            )
    print(json.dumps([asdict(result) for result in results]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
