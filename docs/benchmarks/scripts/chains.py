"""MapReduce and MapRerank, as LangChain's own chains do them, over the same model with plain prefill."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.outputs import LLMResult

from cacheblend_rag.calibration.journal import Journal
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.errors import CacheBlendError, MissingExtraError
from cacheblend_rag.fusor.work import prefill_work
from cacheblend_rag.langchain import CacheBlendLLM
from docs.benchmarks.evaluation.runner import EvalRun, Evaluation
from docs.benchmarks.evaluation.subject import DEPTH, Subject, scored

__all__ = ["CHAINS", "ChainAnswer", "DocumentChains", "with_chains"]

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
