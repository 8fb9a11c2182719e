"""Before and after a move from LangChain's Hugging Face wrapper: one RetrievalQA-like chain, two models.

``python -m docs.benchmarks.scripts.migration --shape qwen2.5-0.5b --chunks 4 --chunk-tokens 512``

Both models answer through the same chain over the same transformers model: the pipeline as
``HuggingFacePipeline`` calls it (that class itself if langchain-huggingface is installed), and
`CacheBlendLLM.from_pipeline` over the same pipeline. Measured is the time from the chain's call to the
first token, and to the end of the answer. The store is on disk and warm.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models.llms import LLM
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda
from transformers import pipeline
from transformers.generation import LogitsProcessorList

from cacheblend_rag.calibration.timing import chunk_texts, medians
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.langchain import CacheBlendLLM
from docs.benchmarks.scripts.common import TokenClock
from docs.benchmarks.scripts.measuring import bench_model, machine, table
from docs.benchmarks.scripts.shapes import SHAPES, BenchOptions

__all__ = ["MigrationOptions", "main", "measure"]

_PROMPT = PromptTemplate.from_template(
    "Use the following pieces of context to answer the question at the end.\n\n{context}\n\n"
    "Question: {question}\nHelpful Answer:"
)
_QUESTION = "What does the second passage say about the mill, and who rebuilt it after the fire?"


@dataclass(frozen=True)
class MigrationOptions(BenchOptions):
    """Options of the measurement; the chunks are retrieved documents.

    Parameters
    ----------
    new_tokens : int
        Tokens of the answer.
    """

    rounds: int = 3
    new_tokens: int = 16


class _PipelineLLM(LLM):
    """A pipeline as ``HuggingFacePipeline`` calls it, for where langchain-huggingface is not installed."""

    pipeline: Any

    @property
    def _llm_type(self) -> str:
        return "pipeline"

    def _call(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> str:
        return str(self.pipeline(prompt, return_full_text=False)[0]["generated_text"])


def measure(options: MigrationOptions) -> dict[str, Any]:
    """Measure both models; a dictionary fit for JSON."""
    model, tokenizer = bench_model(options)
    model.resize_token_embeddings(len(tokenizer))  # random weights would write tokens that are no text
    length, clock = options.new_tokens, TokenClock()
    settings: dict[str, Any] = {
        "max_new_tokens": length,
        "min_new_tokens": length,
        "do_sample": False,
        "pad_token_id": 0,
    }
    settings["logits_processor"] = LogitsProcessorList([clock])
    made = pipeline("text-generation", model, tokenizer=tokenizer, **settings)
    documents = [Document(page_content=text) for text in chunk_texts(tokenizer, options.chunks, options.chunk_tokens)]
    with tempfile.TemporaryDirectory() as folder:
        config = BlendConfig(prompt_cache=0, min_tokens=0, write_back="inline")
        ours = CacheBlendLLM.from_pipeline(made, config=config, store=folder, logits_processor=[clock])
        warming = ours.warm(documents, progress=False)
        before = _huggingface(made)
        chains = {type(before).__name__.strip("_"): _chain(before, documents), "CacheBlendLLM": _chain(ours, documents)}
        times = _times(chains, options.rounds, clock)
        ours.engine.close()
    return {
        "options": asdict(options),
        "machine": machine(options.device),
        "warming_seconds": warming.seconds,
        "seconds": times,
        "medians": {name: medians(by) for name, by in times.items()},
    }


def _huggingface(made: Any) -> Any:
    try:
        wrapper = import_module("langchain_huggingface").HuggingFacePipeline
    except ImportError:
        wrapper = _PipelineLLM
    return wrapper(pipeline=made)


def _chain(model: Any, documents: Sequence[Document]) -> Runnable[Any, Any]:
    def stuffed(question: str) -> dict[str, str]:
        return {"context": "\n\n".join(one.page_content for one in documents), "question": question}

    chain: Runnable[Any, Any] = RunnableLambda(stuffed) | _PROMPT | model
    return chain


def _times(chains: dict[str, Runnable[Any, Any]], rounds: int, clock: TokenClock) -> dict[str, dict[str, list[float]]]:
    """Seconds to the first token and to the end, round after round, the models in turn."""
    times: dict[str, dict[str, list[float]]] = {name: {"first": [], "all": []} for name in chains}
    for number in range(rounds + 1):
        for name, chain in chains.items():
            clock.times.clear()
            started = time.perf_counter()
            chain.invoke(_QUESTION)
            if number:
                times[name]["first"].append(clock.times[0] - started)
                times[name]["all"].append(time.perf_counter() - started)
    return times


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table; the last line is JSON."""
    parser = argparse.ArgumentParser(prog="python -m docs.benchmarks.scripts.migration", description=__doc__)
    defaults = asdict(MigrationOptions())
    for name, value in defaults.items():
        choices = sorted(SHAPES) if name == "shape" else None
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, choices=choices)
    result = measure(MigrationOptions(**vars(parser.parse_args(arguments))))
    rows = [(name, f"{found['first']:.3f} s", f"{found['all']:.3f} s") for name, found in result["medians"].items()]
    print(table(("model", "first token", "whole answer"), rows))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
