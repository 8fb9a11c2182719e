"""First token, whole answers, storing and memory inside llama.cpp, with and without reuse.

``python -m docs.benchmarks.scripts.llama_cpp --model qwen2.5-coder-1.5b --out docs/benchmarks/llama-cpp-1.5b.json``

Both ways compute the same GGUF file in the same library, in turn. *llama.cpp alone* prefills the whole prompt in
batches of 512 tokens and takes the answer token by token, greedily, in a context of its own that nothing watches. *This
package* answers by `BlendEngine.generate`, chunks stored on disk before, no kept prompts. The prompt is a chat about
the bundled articles, in chunks of 512 tokens. The answers may not end before their length.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from cacheblend_rag import BlendConfig, BlendEngine, Prompt
from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.llama_cpp.library import Observer
from cacheblend_rag.llama_cpp.runtime import Runtime
from cacheblend_rag.models.starters import STARTERS
from cacheblend_rag.prompt.chat import question_turns, render_turns
from docs.benchmarks.scripts.common import machine, table, write_json

CHUNK_TOKENS = 512
QUESTION = "When did the island appear, and what happened on it first?"


class _Alone(Runtime):
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
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
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
        alone = _Alone(engine.model.file, torch.get_num_threads())
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
    answer = engine.generate(
        prompt, max_new_tokens=tokens, stop_repetition=False, additional_kwargs={"min_new_tokens": tokens}
    )
    return answer.report.ttft, time.perf_counter() - started


def _about_articles(tokenizer: Any, count: int) -> Prompt:
    """A chat about articles cut into so many chunks."""
    texts = [file.read_text(encoding="utf-8") for file in sorted(ARTICLES_PATH.glob("*.md"))]
    ids = tokenizer.encode("\n\n".join(texts), add_special_tokens=False)
    chunks = [tokenizer.decode(ids[at * CHUNK_TOKENS : (at + 1) * CHUNK_TOKENS]).strip() for at in range(count)]
    before, after = render_turns(tokenizer, question_turns(tokenizer, "<chunks>", QUESTION)).split("<chunks>")
    return Prompt(before, chunks, after, ["\n\n"] * (count - 1))


def _peak() -> int:
    """Most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
