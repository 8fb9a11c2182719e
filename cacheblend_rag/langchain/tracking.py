"""Tracking: the texts that any retriever of the process returns become known chunks.

LangChain gives each run to the handlers of configure hooks. Our handler sees the documents that a retriever, a
runnable or a tool returns, and those that a runnable is given, in any chain, sync or async. It notes their texts in a
registry, by default the one that models share, and for the run they belong to. It changes nothing.

There is one handler for the process, because LangChain takes no hook back. `tracking` has one of its own.

A method called on a vector store is not a run, and no handler is called. Its documents are seen if a runnable returns
them or is given them, such as a LangGraph node, a lambda or a chain. Otherwise `track` makes them known.

The documents of a prompt's run are looked for first, also in rewritten forms. The model finds them by the prompt's
text, because a plain model is called with many prompts and one run, and a streaming chat model without a run.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables.config import var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook
from pydantic import BaseModel

from cacheblend_rag.engine.llm_base import known_chunks
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.matching import RetrievedDocument
from cacheblend_rag.prompt.registry import ChunkRegistry
from cacheblend_rag.report import Newest

# Runs that never end (streams left early) are forgotten after so many others.
_RUNS, _PROMPTS = 16_384, 256
_CHARACTERS = 16_000_000


class RunDocuments:
    """The documents that each run retrieved. Its size is bounded: the oldest runs are forgotten first.

    Parameters
    ----------
    limit : int
        Most characters of documents kept in all.
    """

    def __init__(self, limit: int = _CHARACTERS) -> None:
        self._limit, self._size = limit, 0
        self._roots: OrderedDict[UUID, UUID] = OrderedDict()
        self._texts: OrderedDict[UUID, dict[str, bool]] = OrderedDict()  # whether a later step left it out
        self._prompts: OrderedDict[bytes, tuple[UUID, dict[str, bool]]] = OrderedDict()
        self._found: dict[UUID, set[str]] = {}  # in prompts of outermost runs in which a model of ours was asked
        self.answers: OrderedDict[str, str] = OrderedDict()  # ids of the latest answers by those of their runs
        self._below: OrderedDict[UUID, set[str]] = OrderedDict()  # what runs were given, or found in runs within
        self._lock = threading.Lock()

    def begin(self, run: UUID, parent: UUID | None, given: Collection[str] = ()) -> None:
        """Note the start of a run, and the documents in its input."""
        with self._lock:
            self._roots[run] = self._root(run, parent)
            if len(self._roots) > _RUNS:
                self._roots.popitem(last=False)
        self.give(run, given)

    def give(self, run: UUID, given: Collection[str]) -> None:
        """Note documents that a run was given. New documents belong to its outermost run."""
        if not given:
            return
        with self._lock:
            root = self._roots.get(run, run)
            known = self._texts.get(root, {})
            self._note_below(run, given)
            self._note(root, {text: False for text in given if text not in known})

    def end(self, run: UUID) -> tuple[int, int]:
        """Note the end of a run. At the end of the outermost run, its documents are forgotten.

        Returns
        -------
        (int, int)
            Documents that it handed on and that no prompt of a model of ours held, and all that it handed on. Both
            are 0 if no such model was called.
        """
        with self._lock:
            self._roots.pop(run, None)
            self._below.pop(run, None)
            handed_on = [text for text, left_out in self._texts.get(run, {}).items() if not left_out]
            found = self._found.get(run)
            self._forget(run)
        if found is None:
            return 0, 0
        looked_for = [text for text in handed_on if RetrievedDocument((text,)).looked_for]
        return sum(text not in found for text in looked_for), len(looked_for)

    def add(
        self, run: UUID | None, parent: UUID | None, texts: Iterable[str]
    ) -> tuple[Collection[str], Collection[str]]:
        """Documents were retrieved in a run; others that it was given, or that runs within found, it has left out.

        Documents found by a call that is no run belong to its parent.

        Returns
        -------
        (collection of str, collection of str)
            Those that it has left out, and those that are new. The one may be rewritten forms of the other.
        """
        if parent is None:
            return (), ()  # it was retrieved on its own: no model is called in this run
        handed_on = dict.fromkeys(texts, False)
        with self._lock:
            given = self._below.pop(run, set()) if run else set()
            left_out = given - handed_on.keys()
            root = self._roots.get(parent, parent)
            if handed_on:
                self._note_below(parent, handed_on)
            known = self._texts.get(root, {})
            changed = handed_on | dict.fromkeys(left_out & known.keys(), True)
            self._note(root, {text: left for text, left in changed.items() if known.get(text) != left})
        return left_out, handed_on.keys() - given

    def _note(self, root: UUID, changed: Mapping[str, bool]) -> None:
        """Of these documents of an outermost run it is new that they are there, or whether they were left out."""
        if not changed:
            return
        known = self._texts.get(root, {})
        self._texts[root] = {**known, **changed}  # replaced, never changed: prompts keep what they were made of
        self._size += sum(len(text) for text in changed if text not in known)
        while self._size > self._limit:
            self._forget(next(iter(self._texts)))

    def call(self, parent: UUID | None, prompts: Iterable[bytes]) -> None:
        """Note that a run is about to call a model with these prompts, each named by its `prompt_key`."""
        with self._lock:
            root = self._root(parent, parent) if parent else None
            texts = self._texts.get(root) if root else None
            for prompt in prompts:
                self._prompts.pop(prompt, None)
                if root and texts:
                    self._prompts[prompt] = root, texts
            while len(self._prompts) > _PROMPTS:
                self._prompts.popitem(last=False)

    def documents_of(self, prompt: bytes) -> tuple[RetrievedDocument, ...]:
        """Documents of the run in which a prompt was made."""
        with self._lock:
            _, texts = self._prompts.get(prompt, (None, {}))
        return tuple(RetrievedDocument((text,), left_out=left_out) for text, left_out in texts.items())

    def note_found(self, prompt: bytes, texts: Iterable[str]) -> None:
        """Note which documents of its run a prompt contains."""
        with self._lock:
            root, _ = self._prompts.get(prompt, (None, None))
            if root is not None and root in self._texts:
                self._found.setdefault(root, set()).update(texts)

    def _root(self, run: UUID, parent: UUID | None) -> UUID:
        return run if parent is None else self._roots.get(parent, parent)

    def _note_below(self, run: UUID, texts: Iterable[str]) -> None:
        self._below.setdefault(run, set()).update(texts)
        if len(self._below) > _RUNS:
            self._below.popitem(last=False)

    def _forget(self, root: UUID) -> None:
        self._size -= sum(map(len, self._texts.pop(root, ())))
        self._found.pop(root, None)


class _DoneAwaitable:
    """An awaitable of work that is already done."""

    def __await__(self) -> Iterator[None]:
        return iter(())


async def _await(work: Callable[..., object]) -> None:
    """The coroutine function that `_AtOnce` is a partial of, so that it counts as a coroutine function."""


class _AtOnce(partial[Any]):
    """A handler's method that works alike in sync and async runs, without a thread.

    LangChain's async runs send a plain method through a thread, which costs more than the work. They await a coroutine
    function, and a partial of one is one. But sync runs start an event loop for a coroutine, so a call of this does its
    work at once, and gives what can be awaited and is no coroutine.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> _DoneAwaitable:
        (work,) = self.args
        work(*args, **kwargs)
        return _DoneAwaitable()


class _Tracker(BaseCallbackHandler):
    """Notes the texts of retrieved documents, and the runs they belong to.

    Parameters
    ----------
    known : ChunkRegistry
        Where texts are noted.
    runs : RunDocuments
        Which documents each run has; all trackers of the process have the same one.
    """

    # Not run_inline: with an inline handler, asynchronous plain models announce their start to no other
    # handler (langchain-core 1.8), so that tracers and astream_events would lose them.

    def __init__(self, known: ChunkRegistry, runs: RunDocuments) -> None:
        self.known, self.runs = known, runs
        self.off: bool | None = False
        for name in dir(BaseCallbackHandler):
            if name.startswith("on_"):
                setattr(self, name, _AtOnce(_await, getattr(self, name)))

    @property
    def ignore_chain(self) -> bool:
        return self.off is not False

    ignore_agent = ignore_retriever = ignore_llm = ignore_chat_model = ignore_chain

    def on_chain_start(
        self, serialized: Any, inputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        if parent_run_id is None:
            Newest.here()  # runs below may answer in other threads
        given = documents_in(inputs)
        self.known.add(given)
        self.runs.begin(run_id, parent_run_id, given)

    def on_chain_end(
        self, outputs: Any, *, run_id: UUID, parent_run_id: UUID | None = None, inputs: Any = None, **kwargs: Any
    ) -> None:
        given = documents_in(inputs)  # of a step in a stream, which begins before it is given anything
        self.known.add(given)
        self.runs.give(run_id, given)
        self._found(documents_in(outputs), run_id, parent_run_id)

    def on_chain_error(self, *args: Any, run_id: UUID, **kwargs: Any) -> None:
        self._end(run_id)

    def on_tool_start(self, *args: Any, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any) -> None:
        self.runs.begin(run_id, parent_run_id)

    def on_tool_end(self, output: Any, *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any) -> None:
        self._found(documents_in(output), run_id, parent_run_id)

    on_retriever_start = on_tool_start
    on_tool_error = on_retriever_error = on_chain_error

    def on_retriever_end(
        self, documents: Sequence[Document], *, run_id: UUID, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        self._found([document.page_content for document in documents], run_id, parent_run_id)

    def on_llm_start(
        self, serialized: Any, prompts: list[str], *, parent_run_id: UUID | None = None, **kwargs: Any
    ) -> None:
        self.runs.call(parent_run_id, map(prompt_key, prompts))

    def on_chat_model_start(
        self,
        serialized: Any,
        messages: list[list[BaseMessage]],
        *,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        self.runs.call(parent_run_id, map(prompt_key, messages))

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        for made in response.generations[0][:1]:
            info = made.message.response_metadata if isinstance(made, ChatGeneration) else made.generation_info
            if info and "answer_id" in info:
                self.runs.answers[str(run_id)] = info["answer_id"]
                if len(self.runs.answers) > _PROMPTS:
                    self.runs.answers.popitem(last=False)

    def _found(self, texts: Sequence[str], run_id: UUID, parent_run_id: UUID | None) -> None:
        """A run has ended with these documents."""
        if texts:
            self.known.add(texts)
            self.known.forms.note_rewritten(*self.runs.add(run_id, parent_run_id, texts))
        self._end(run_id)

    def _end(self, run_id: UUID) -> None:
        self.known.warn_of_missing(*self.runs.end(run_id))


def documents_in(value: Any, depth: int = 4) -> list[str]:
    """Texts of the documents in what a search, a runnable or a tool was given or returned.

    Parameters
    ----------
    value : any
        Documents are also found in lists, tuples, mappings, fields of dataclasses and pydantic models, artifacts of
        tools, and what LangGraph's commands and sends carry.
    depth : int
        How deep.
    """
    if isinstance(value, Document):
        return [value.page_content]
    if isinstance(value, str) or depth == 0:
        return []
    if isinstance(value, BaseMessage):
        return documents_in(getattr(value, "artifact", None), depth - 1)
    if isinstance(value, Mapping):
        return documents_in(list(value.values()), depth)
    if isinstance(value, (list, tuple)):
        return [text for one in value for text in documents_in(one, depth - 1)]
    if isinstance(value, BaseModel):
        return documents_in(list(vars(value).values()), depth)
    if is_dataclass(value):
        return documents_in([getattr(value, field.name, None) for field in fields(value)], depth)
    # Nothing is a Send of LangGraph before its module is loaded, which takes long.
    langgraph = sys.modules.get("langgraph.types")
    return documents_in(value.arg, depth - 1) if langgraph and isinstance(value, langgraph.Send) else []


_tracker = _Tracker(known_chunks, RunDocuments())
_tracker.off = None  # until the first model is made
_handler: ContextVar[BaseCallbackHandler | None] = ContextVar("cacheblend_rag_tracker", default=_tracker)
register_configure_hook(_handler, inheritable=True)


def switch_on() -> None:
    """Track every run from now on, even after `switch_off`."""
    _tracker.off = False


def switch_off() -> None:
    """Stop tracking in the whole process until `switch_on`, also for models that are made later."""
    _tracker.off = True


def begin_tracking() -> None:
    """Switch tracking on unless the user has switched it off. Constructing a model calls this."""
    _tracker.off = bool(_tracker.off)


@contextmanager
def tracking_off() -> Iterator[None]:
    """Context manager in which retrievers are not tracked."""
    token = _handler.set(None)
    try:
        yield
    finally:
        _handler.reset(token)


@contextmanager
def tracking(known: ChunkRegistry | None = None) -> Iterator[ChunkRegistry]:
    """Context manager in which retrievers are tracked, also inside `tracking_off` or after `switch_off`.

    Parameters
    ----------
    known : ChunkRegistry, optional
        Where their documents are noted, and nowhere else; by default in `known_chunks`.

    Returns
    -------
    context manager
        Gives the registry.
    """
    tracker = _tracker
    if known is not None or _tracker.off is not False:
        tracker = _Tracker(known_chunks if known is None else known, _tracker.runs)
    token = _handler.set(tracker)
    try:
        yield tracker.known
    finally:
        _handler.reset(token)


def prompt_key(prompt: str | Sequence[BaseMessage]) -> bytes:
    """Key of a prompt between its announcement and the call of the model: a digest of its whole text."""
    texts = prompt if isinstance(prompt, str) else [str(message.content) for message in prompt]
    return hashlib.sha256(json.dumps(texts).encode()).digest()


def documents_of_run(prompt: str | Sequence[BaseMessage]) -> tuple[RetrievedDocument, ...]:
    """Documents that were retrieved in the run that made a prompt, if the run is known."""
    return _tracker.runs.documents_of(prompt_key(prompt))


def answer_of_run(run: str) -> str:
    """The id of a run's answer, or the text itself if the id is not known."""
    return _tracker.runs.answers.get(run, run)


def note_found(prompt: str | Sequence[BaseMessage], seen: Prompt) -> None:
    """Note the documents in a prompt, so that its run does not count them as missing."""
    _tracker.runs.note_found(prompt_key(prompt), [one.text for one in seen.documents if one.chunk is not None])


def note_search(texts: Sequence[str], known: ChunkRegistry) -> None:
    """Note documents of a search that is not a run of its own. They belong to the run that called it."""
    known.add(texts)
    config = var_child_runnable_config.get()
    run = getattr((config or {}).get("callbacks"), "parent_run_id", None)
    if run is not None:
        _tracker.runs.add(None, run, texts)
