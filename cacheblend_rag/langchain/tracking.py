"""Learning chunk texts from every retriever of the process.

LangChain offers each run to the handlers of configure hooks. Ours sees the documents a retriever
returns, in any chain, sync or async, and notes their texts. It changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.tracers.context import register_configure_hook

from cacheblend_rag.noticing import ChunkRegistry

__all__ = ["known_chunks", "switch_on", "tracking", "tracking_off"]

known_chunks = ChunkRegistry()
"""Chunk texts seen in this process."""


class _Tracker(BaseCallbackHandler):
    """Notes the texts of retrieved documents."""

    run_inline = True  # a dictionary update; a thread would cost more than the work

    def on_retriever_end(self, documents: Sequence[Document], **kwargs: Any) -> None:
        known_chunks.add(document.page_content for document in documents)


_tracker = _Tracker()
_handler: ContextVar[BaseCallbackHandler | None] = ContextVar("cacheblend_rag_tracker", default=_tracker)
_lock = threading.Lock()
_registered = False


def switch_on() -> None:
    """Offer the tracker to every run from now on; further calls do nothing."""
    global _registered
    with _lock:
        if not _registered:
            register_configure_hook(_handler, inheritable=True)
            _registered = True


@contextmanager
def tracking_off() -> Iterator[None]:
    """Within this, retrievers are not tracked."""
    token = _handler.set(None)
    try:
        yield
    finally:
        _handler.reset(token)


@contextmanager
def tracking() -> Iterator[ChunkRegistry]:
    """Within this, retrievers are tracked, also inside `tracking_off`."""
    switch_on()
    token = _handler.set(_tracker)
    try:
        yield known_chunks
    finally:
        _handler.reset(token)
