"""How a vector store tells what a search of it returned: by LangChain's own callback handlers.

LangChain has no callback for a search of a store. The handlers that a run has, or that a configure hook gives to every
run, hear of it if they are listeners.
"""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.callbacks import BaseCallbackHandler, CallbackManager
from langchain_core.documents import Document
from langchain_core.runnables.config import var_child_runnable_config


class SearchListener(BaseCallbackHandler):
    """A callback handler that hears what direct searches of our vector stores return."""

    def on_search(self, documents: Sequence[Document]) -> None:
        """A search has returned documents."""
        raise NotImplementedError


def tell_listeners(documents: Sequence[Document]) -> None:
    """Tell the listeners among the handlers that are in force here, unless they ignore retrievers."""
    config = var_child_runnable_config.get() or {}
    for handler in CallbackManager.configure(config.get("callbacks")).handlers:
        if isinstance(handler, SearchListener) and not handler.ignore_retriever:
            handler.on_search(documents)
