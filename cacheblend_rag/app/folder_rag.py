"""A folder of documents, a model and a chain: what the command line and the server answer with."""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.prompts import ChatPromptTemplate

from cacheblend_rag.app.data_lock import DataLock
from cacheblend_rag.app.options import FolderRAGOptions
from cacheblend_rag.engine.engine import BlendEngine
from cacheblend_rag.engine.streaming import Progress, on_read
from cacheblend_rag.engine.write_back import CLOSE_SECONDS, closing_seconds
from cacheblend_rag.errors import ConfigError, MissingExtraError
from cacheblend_rag.langchain import CacheBlendLLM, ChatCacheBlend
from cacheblend_rag.langchain.messages import THOUGHT
from cacheblend_rag.prompt import Prompt
from cacheblend_rag.prompt.chat import question_turns
from cacheblend_rag.prompt.control import OWN
from cacheblend_rag.report import BlendReport, WarmReport
from cacheblend_rag.retrieval.documents import FileBytes, SourceFile, parse
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings, SharedEmbeddings
from cacheblend_rag.retrieval.index import FolderIndex, IndexReport
from cacheblend_rag.store.base import KVStore
from cacheblend_rag.store.factory import open_store


@dataclass(frozen=True)
class Answer:
    """An answer with what it was made from.

    Parameters
    ----------
    text : str
        The answer.
    sources : list of Document
        The retrieved chunks.
    prompt : Prompt
        The segments the model was given.
    report : BlendReport
        How it was made.
    thought : str
        The model's thought before it.
    """

    text: str
    sources: list[Document]
    prompt: Prompt
    report: BlendReport
    thought: str = ""

    @property
    def tiers(self) -> dict[str, str]:
        """The tier that each chunk's KV was read from, by the chunk's text; empty if the KV was not stored."""
        return dict(zip(self.prompt.chunks, self.report.chunk_tiers, strict=False))


class FolderRAG:
    """Documents in a folder, answered through LangChain's ``RetrievalQA`` ("stuff").

    It holds its data folder from the beginning to `close`: no other process writes there meanwhile.

    Parameters
    ----------
    options : FolderRAGOptions
    wrapped : callable, optional
        Puts a store of its own around the KV store.
    read : callable
        Turns the bytes of a file into text, as `parse` does.
    may_be_empty : bool
        Whether the folder may hold no text.

    Raises
    ------
    CacheBlendError
        If the model, the embedder or the documents cannot be read, or another process uses the data folder.
    """

    def __init__(
        self,
        options: FolderRAGOptions,
        *,
        wrapped: Callable[[KVStore], KVStore] | None = None,
        read: Callable[[FileBytes], SourceFile] = parse,
        may_be_empty: bool = False,
    ) -> None:
        self.options, self._read, self._may_be_empty = options, read, may_be_empty
        options.check_paths(may_be_empty=may_be_empty)
        # Before anything is loaded, so that it is known at once.
        self._lock = DataLock(options.data_path)
        try:
            self._load(wrapped)
        except BaseException:
            self._lock.release()
            raise

    def _load(self, wrapped: Callable[[KVStore], KVStore] | None) -> None:
        options, config = self.options, self.options.blending
        self._others: list[CacheBlendLLM] = []
        self._store = wrapped and wrapped(open_store(options.store_locations, config, beside_gpu=options.on_gpu))
        where: dict[str, Any] = {"store": self._store or options.store_locations, "device": options.device}
        self.engine = BlendEngine.from_pretrained(options.model, config=config, dtype=options.dtype, **where)
        chats = bool(getattr(self.engine.tokenizer, "chat_template", None))
        model = ChatCacheBlend if chats else CacheBlendLLM
        given = {"reasoning": options.reasoning, "reasoning_tokens": options.reasoning_tokens}
        own = {} if chats else {"prompt_prefix": OWN}  # control tokens of documents are text
        self.llm = model.from_engine(self.engine, max_new_tokens=options.max_new_tokens, **given, **own)
        embedder = SentenceTransformerEmbeddings(os.fspath(options.embedder))
        self.embeddings = SharedEmbeddings(embedder, self.engine.turns.in_turn)
        self.index = self.index_of(options.docs, self.forget)

    def index_of(self, docs: str | os.PathLike[str], on_delete: Callable[[Sequence[str]], object]) -> FolderIndex:
        """The index of a folder of documents, kept in the data folder; files that cannot be read are left out."""
        name = hashlib.sha256(os.fsencode(Path(docs).resolve())).hexdigest()[:16]
        return FolderIndex(
            docs,
            embedder=self.embeddings,
            index_dir=self.options.data_path / "indexes" / name,
            on_error="skip",
            on_delete=on_delete,
            read=self._read,
            may_be_empty=self._may_be_empty,
        )

    def also(self, model: str | os.PathLike[str]) -> BlendEngine:
        """Load another model over the same store.

        All models take turns. KV of deleted chunks is erased for each of them.

        Parameters
        ----------
        model : str or path
            As for `FolderRAGOptions`, whose other options hold for this model, too.

        Raises
        ------
        CacheBlendError
            If it cannot be loaded, or an option does not fit it.
        """
        options, first = self.options, self.engine
        try:
            made = BlendEngine.from_pretrained(
                model,
                config=options.blending,
                store=first.store,
                device=options.device,
                dtype=options.dtype,
                beside=first,
            )
        except ConfigError as error:
            raise ConfigError(error.field, error.value, f"with {os.fspath(model)!r}, {error.remedy}") from error
        self._others.append(CacheBlendLLM.from_engine(made))
        return made

    def forget(self, texts: Sequence[str]) -> None:
        """Erase the KV of texts, that of a server's tenants too."""
        for llm in (self.llm, *self._others):
            llm.forget(texts)
            llm.engine.chunks.forget_for_all(texts)

    def update(self, *, progress: bool | None = False) -> IndexReport:
        """Bring the index up to date with the folder; KV of chunks that are gone is erased."""
        return self.index.update(progress=progress)

    def warm(self, *, progress: bool | None = None) -> WarmReport:
        """Compute and store the KV of all chunks that are not stored yet."""
        return self.llm.warm(self.index.chunks(), progress=progress)

    def ask(self, question: str, told: Callable[[Progress], object] = lambda read: None) -> Answer:
        """Answer a question through the chain; ``told`` is called with how far the prompt is read."""
        if not question.strip():
            raise ConfigError("question", question, "ask something")
        seen, before = _SeenPrompt(), on_read.set(told)
        try:
            result = self._chain().invoke({"query": question}, {"callbacks": [seen]})
        finally:
            on_read.reset(before)
        report = self.llm.last_report or BlendReport(())
        text, found = result["result"].strip(), result["source_documents"]
        if isinstance(self.llm, ChatCacheBlend):
            prompt = self.llm.segments(seen.messages)
        else:
            prompt = self.llm.match_chunks(seen.text)
        return Answer(text, found, prompt, report, seen.thought)

    def _chain(self) -> Any:
        try:
            from langchain_classic.chains import RetrievalQA
        except ImportError as error:
            raise MissingExtraError("langchain-classic", "langchain") from error
        retriever = self.index.store.as_retriever(search_kwargs={"k": self.options.top_k})
        own = {}
        if isinstance(self.llm, ChatCacheBlend):
            turns = question_turns("{context}", "{question}")
            prompt = ChatPromptTemplate.from_messages([(turn["role"], turn["content"]) for turn in turns])
            own = {"chain_type_kwargs": {"prompt": prompt}}
        with warnings.catch_warnings():
            # RetrievalQA is deprecated in favour of create_retrieval_chain; both are supported.
            warnings.simplefilter("ignore")
            return RetrievalQA.from_chain_type(
                self.llm, chain_type="stuff", retriever=retriever, return_source_documents=True, **own
            )

    def close(self, *, seconds: float = CLOSE_SECONDS) -> None:
        """Store what waits and release the models.

        Parameters
        ----------
        seconds : float
            As for `BlendEngine.close`; for all models together.
        """
        ends = time.monotonic() + seconds
        for engine in [*(one.engine for one in self._others), self.engine]:
            engine.close(seconds=max(0.0, ends - time.monotonic()))
        if self._store is not None:
            self._store.close()
        self._lock.release()

    def __enter__(self) -> FolderRAG:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(seconds=closing_seconds(kind))


class _SeenPrompt(BaseCallbackHandler):
    """Keeps the finished prompt and the model's thought."""

    def __init__(self) -> None:
        self.text = ""
        self.messages: list[BaseMessage] = []
        self.thought = ""

    def on_llm_start(self, serialized: dict[str, Any], prompts: list[str], **kwargs: Any) -> None:
        self.text = prompts[0]

    def on_chat_model_start(self, serialized: dict[str, Any], messages: list[list[BaseMessage]], **kwargs: Any) -> None:
        self.messages = messages[0]

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        made = response.generations[0][0]
        fields = made.message.additional_kwargs if isinstance(made, ChatGeneration) else made.generation_info or {}
        self.thought = str(fields.get(THOUGHT, ""))
