"""First token, whole answers, storing and memory inside llama.cpp, with and without reuse.

``python -m docs.benchmarks.scripts.llama_cpp --model qwen2.5-coder-1.5b --out docs/benchmarks/llama-cpp-1.5b.json``

Both ways compute the same GGUF file in the same library, in turn. *llama.cpp alone* prefills the whole prompt in
batches of 512 tokens and takes the answer token by token, greedily, in a context of its own that nothing watches. *This
package* answers by `BlendEngine.generate`, chunks stored on disk before, no kept prompts. The prompt is a chat about
the bundled articles, in chunks of 512 tokens. The answers may not end before their length.

``python -m docs.benchmarks.scripts.llama_cpp --model smollm2 --idle``

What checking answers while nothing is asked costs the next question: the seconds to its first token when it is asked
directly after an answer, and when it is asked five seconds later, while a check is under way.

``python -m docs.benchmarks.scripts.llama_cpp --rows squad.jsonl --half choose --count 12 --out rows.json``

How far answers are from full prefill's own 24 tokens, in nats a token, by rule and share of rows, on given questions;
by the last rule also with records as they are read once they were written in 8 bits; and how many verified answers
are the tokens that llama.cpp alone gives. ``--rules`` names the rules. ``--backend torch --rules default`` measures
what PyTorch does by default on the same questions.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.calibration.quality import Methods, ReferenceAnswer, another_order
from cacheblend_rag.engine.decode import DecodeOptions
from cacheblend_rag.llama_cpp.library import Observer
from cacheblend_rag.llama_cpp.runtime import Runtime
from cacheblend_rag.models.starters import STARTERS
from cacheblend_rag.prompt.chat import question_turns, render_turns
from cacheblend_rag.store.memory import MemoryStore
from cacheblend_rag.store.record import RecordFormat, as_written
from cacheblend_rag.store.stored_kv import KVRecord
from docs.benchmarks.evaluation.datasets import load_cases
from docs.benchmarks.scripts.common import machine, table, write_json

CHUNK_TOKENS = 512
PASSAGES = 4
QUESTION = "When did the island appear, and what happened on it first?"


class Alone(Runtime):
    """llama.cpp without anything that watches its graph."""

    def _open(self, cells: int) -> None:
        self._observer = Observer()
        super()._open(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a starter, or a GGUF file")
    parser.add_argument("--chunks", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=Path, metavar="FILE", help="questions; divergences by rule are measured")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=[name for name in RULES if name != "default"])
    parser.add_argument("--backend", choices=("llama.cpp", "torch"), default="llama.cpp", help="for --rows")
    parser.add_argument("--half", choices=("choose", "test"), default="choose")
    parser.add_argument("--count", type=int, default=12, help="questions")
    parser.add_argument("--idle", action="store_true", help="what checks in idle time cost is measured")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.rows is not None:
        found = divergences(options)
        print(rows_table(found))
        same, said = [one["same"] for one in found["verified"]], [one["fidelity"] for one in found["verified"]]
        print(f"verified: {sum(same)} of {len(same)} are llama.cpp's own, {said.count('corrected')} corrected")
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.idle:
            result = checking(options.model, options.chunks, options.rounds, Path(folder))
            print(table(["verify", "pause, s", "next first token, s", "two answers and checks, s"], result["table"]))
        else:
            result = measure(options.model, options.chunks, options.tokens, options.rounds, Path(folder))
            print(rows(result))
    if options.out is not None:
        write_json(options.out, result)


def measure(model: str, count: int, tokens: int, rounds: int, folder: Path) -> dict[str, Any]:
    """All figures of one model."""
    started = time.perf_counter()
    config = BlendConfig(prompt_cache=0, write_back="inline")
    with BlendEngine.from_pretrained(model, backend="llama.cpp", config=config, store=folder) as engine:
        ready = time.perf_counter() - started
        prompt = _about_articles(engine.tokenizer, count)
        started = time.perf_counter()
        engine.chunks.warm(prompt.chunks, progress=False)
        stored = time.perf_counter() - started
        engine.generate(prompt, max_new_tokens=1)  # stores the prefix
        peak = _peak()
        ids = list(engine.tokenize(prompt).input_ids)
        alone = Alone(engine.model.file, torch.get_num_threads())
        times: dict[str, list[tuple[float, float]]] = {"llama.cpp alone": [], "this package": []}
        for _ in range(rounds):
            times["llama.cpp alone"].append(_alone(alone, ids, tokens))
            times["this package"].append(_with_reuse(engine, prompt, tokens))
        report = engine.generate(prompt, max_new_tokens=1).report
        bytes_of_file = engine.model.file.stat().st_size
        store_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    ways = {
        name: {
            "first_token": statistics.median(first for first, _ in found),
            "answer": statistics.median(whole for _, whole in found),
            "token": statistics.median((whole - first) / (tokens - 1) for first, whole in found),
            "rounds": found,
        }
        for name, found in times.items()
    }
    return {
        "model": STARTERS[model].title if model in STARTERS else Path(model).name,
        "file_bytes": bytes_of_file,
        "prompt_tokens": len(ids),
        "answer_tokens": tokens,
        "computed_share": report.computed_tokens[0] / len(ids),
        "ready_seconds": ready,
        "stored_seconds": stored,
        "stored_bytes": store_bytes,
        "peak_bytes": peak,
        "ways": ways,
        "machine": machine("cpu"),
        "threads": torch.get_num_threads(),
    }


def checking(model: str, count: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Seconds to the next question's first token by ``verify``, after pauses; and of both answers and their checks."""
    config = BlendConfig(prompt_cache=0, write_back="inline")
    ways = [(verify, pause) for pause in (0.0, 5.0) for verify in ("off", "idle")]
    found: dict[tuple[str, float], list[tuple[float, float]]] = {way: [] for way in ways}
    with BlendEngine.from_pretrained(model, backend="llama.cpp", config=config, store=folder) as engine:
        prompt = _about_articles(engine.tokenizer, count)
        other = replace(prompt, chunks=prompt.chunks[::-1])
        engine.chunks.warm(prompt.chunks, progress=False)
        engine.generate(prompt, max_new_tokens=1)
        for _ in range(rounds):
            for (verify, pause), times in found.items():
                started = time.perf_counter()
                engine.generate(prompt, max_new_tokens=16, verify=verify)
                time.sleep(pause)
                asked = time.perf_counter()
                stream = engine.stream(other, max_new_tokens=16, verify=verify)
                next(stream)
                first = time.perf_counter() - asked
                for _ in stream:
                    pass
                engine.flush()
                times.append((first, time.perf_counter() - started - pause))
    medians = [
        [verify, f"{pause:.0f}", *(f"{statistics.median(one):.2f}" for one in zip(*times, strict=True))]
        for (verify, pause), times in found.items()
    ]
    rows = [{"verify": verify, "pause": pause, "rounds": times} for (verify, pause), times in found.items()]
    return {"model": model, "ways": rows, "table": medians, "machine": machine("cpu")}


def rows(result: dict[str, Any]) -> str:
    """The table of one model."""
    alone, ours = result["ways"]["llama.cpp alone"], result["ways"]["this package"]
    names = {"first_token": "first token", "answer": f"{result['answer_tokens']} tokens", "token": "a token"}
    found = [
        [said, f"{alone[name]:.3g} s", f"{ours[name]:.3g} s", f"{alone[name] / ours[name]:.2f}"]
        for name, said in names.items()
    ]
    about = (
        f"{result['model']}, {result['prompt_tokens']} tokens: ready in {result['ready_seconds']:.1f} s, chunks "
        f"stored in {result['stored_seconds']:.0f} s, peak memory {result['peak_bytes'] / 1e9:.2f} GB, file "
        f"{result['file_bytes'] / 1e9:.2f} GB, rows computed {result['computed_share']:.0%}"
    )
    return f"{about}\n\n" + table(["", "llama.cpp alone", "this package", "ratio"], found)


RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "nothing": {"selection": "none"},
    "heads, 15%": {"selection": "boundary", "recompute_ratio": 0.15},
    **{f"question, {share:.0%}": {"selection": "query", "recompute_ratio": share} for share in (0.02, 0.05, 0.1, 0.15)},
}


class WrittenToo(MemoryStore):
    """Keeps records in 16 bits, and in another store as they are once they were written in 8."""

    written = MemoryStore()

    def put(self, key: str, record: KVRecord) -> None:
        super().put(key, record)
        self.written.put(key, as_written(record, RecordFormat("int8")))


def divergences(options: argparse.Namespace) -> dict[str, Any]:
    """Nats a token from full prefill's own answer by rule, and whether verified answers are llama.cpp's own."""
    cases = load_cases(str(options.rows))[options.half == "test" :: 2]
    found, verified = list[dict[str, float]](), list[dict[str, Any]]()
    store, config = WrittenToo(), BlendConfig(prompt_cache=0)
    with BlendEngine.from_pretrained(options.model, backend=options.backend, config=config, store=store) as engine:
        engines = {name: engine.with_config(**RULES[name]) for name in options.rules}
        alone = None
        if options.backend == "llama.cpp":
            last = list(engines)[-1]
            engines[f"{last}, 8 bits"] = BlendEngine(
                engine.model, engine.tokenizer, config=engines[last].config, store=store.written
            )
            alone = Alone(engine.model.file, torch.get_num_threads())
        for case in cases[:: max(1, len(cases) // options.count)][: options.count]:
            before, after = render_turns(engine.tokenizer, question_turns("<chunks>", case.question)).split("<chunks>")
            prompt = Prompt(before, [one.chunk for one in case.passages[:PASSAGES]], after, ["\n\n"] * (PASSAGES - 1))
            full = Methods(engine, prompt)
            answer = ReferenceAnswer(full, full.full_recompute(), DecodeOptions(max_new_tokens=24))
            engine.chunks.warm(prompt.chunks, progress=False)
            other = Methods(engine, another_order(prompt)).full_recompute()
            row = {"another order": answer.divergence(other.cache, other.logits)}
            for name, one in engines.items():
                made = Methods(one, prompt).blended()
                row[name] = answer.divergence(made.cache, made.logits)
            found.append(row)
            verified += [_verified(engine, prompt, alone)] if alone else []
            print(len(found), {name: round(value, 3) for name, value in row.items()}, verified[-1:], flush=True)
            result = {key: str(getattr(options, key)) for key in ("model", "backend", "half")}
            result |= {"questions": options.rows.name, "rows": found, "verified": verified, "machine": machine("cpu")}
            if options.out is not None:
                write_json(options.out, result)
    return result


def _verified(engine: BlendEngine, prompt: Prompt, alone: Runtime) -> dict[str, Any]:
    """Whether a verified answer has the tokens of a plain loop over llama.cpp."""
    answer = engine.generate(prompt, max_new_tokens=24, verify="always", stop_repetition=False)
    ids, own = list(engine.tokenize(prompt).input_ids), list[int]()
    with alone.sequence() as sequence:
        logits = alone.compute(ids, 0, sequence, 1)
        while len(own) < len(answer.token_ids):
            own.append(int(logits[-1].argmax()))
            logits = alone.compute(own[-1:], len(ids) + len(own) - 1, sequence, 1)
    return {"fidelity": answer.report.fidelity, "same": own == list(answer.token_ids)}


def rows_table(result: dict[str, Any]) -> str:
    """Mean, median and worst of each rule, and how many times nearer than another order of the passages."""
    found = result["rows"]
    order = statistics.fmean(row["another order"] for row in found)
    lines = []
    for name in found[0]:
        values = [row[name] for row in found]
        mean = statistics.fmean(values)
        lines.append(
            [name, f"{mean:.3f}", f"{statistics.median(values):.3f}", f"{max(values):.3f}", f"{order / mean:.1f}"]
        )
    return table(["", "mean", "median", "worst", "nearer than another order"], lines)


def _alone(runtime: Runtime, ids: list[int], tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and to the last."""
    started = time.perf_counter()
    with runtime.sequence() as sequence:
        token = int(runtime.compute(ids, 0, sequence, 1)[-1].argmax())
        first = time.perf_counter() - started
        for at in range(tokens - 1):
            token = int(runtime.compute([token], len(ids) + at, sequence, 1)[-1].argmax())
        return first, time.perf_counter() - started


def _with_reuse(engine: BlendEngine, prompt: Prompt, tokens: int) -> tuple[float, float]:
    started = time.perf_counter()
    # A token that no model chooses ends the answer: a least length costs time that users do not spend.
    unused = engine.model.runtime.vocabulary - 1
    endless = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=unused, pad_token_id=0)
    answer = engine.generate(prompt, stop_repetition=False, generation_config=endless)
    assert len(answer.token_ids) == tokens
    return answer.report.ttft, time.perf_counter() - started


def _about_articles(tokenizer: Any, count: int) -> Prompt:
    """A chat about articles cut into so many chunks."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(ARTICLES_PATH.glob("*.md"))]
    ids = tokenizer.encode("\n\n".join(texts), add_special_tokens=False)
    chunks = [tokenizer.decode(ids[at * CHUNK_TOKENS : (at + 1) * CHUNK_TOKENS]).strip() for at in range(count)]
    before, after = render_turns(tokenizer, question_turns("<chunks>", QUESTION)).split("<chunks>")
    return Prompt(before, chunks, after, ["\n\n"] * (count - 1))


def _peak() -> int:
    """Most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
