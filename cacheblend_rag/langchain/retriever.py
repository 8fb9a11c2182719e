"""CacheBlendRetriever: a retriever whose documents are found in prompts without tracking."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.prompt.matching import known_chunks


class CacheBlendRetriever(BaseRetriever):
    """Asks another retriever and makes its documents known to our models.

    Models of this package track every retriever by themselves. Use this class if tracking is off, or if you want to
    see it in the chain. It returns the documents unchanged.

    Parameters
    ----------
    retriever : BaseRetriever
        Finds the documents. Anything that can be invoked with a question will do.
    k : int, optional
        Most documents that are returned. It can also be given with a call.

    Raises
    ------
    ConfigError
        If a call gives ``k`` below 1. The constructor raises pydantic's ``ValidationError``.
    """

    retriever: Any
    k: int | None = None

    def model_post_init(self, context: Any, /) -> None:
        """Check ``k``."""
        super().model_post_init(context)
        _check(self.k)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        found = self.retriever.invoke(query, {"callbacks": run_manager.get_child()}, **kwargs)
        return self._handed_on(found, k)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        found = await self.retriever.ainvoke(query, {"callbacks": run_manager.get_child()}, **kwargs)
        return self._handed_on(found, k)

    def _handed_on(self, found: list[Document], k: int | None) -> list[Document]:
        _check(k)
        documents = found[: k or self.k]
        known_chunks.add(document.page_content for document in documents)
        return documents


def _check(k: int | None) -> None:
    if k is not None and k < 1:
        raise ConfigError("k", k, "use a whole number, 1 or more")
