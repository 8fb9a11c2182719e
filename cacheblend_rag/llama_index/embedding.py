"""A sentence-transformers model as a LlamaIndex embedding."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from pydantic import PrivateAttr

from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


class SentenceTransformerEmbedding(BaseEmbedding):
    """Embed nodes and questions with a sentence-transformers model.

    Parameters
    ----------
    model : str, path or SentenceTransformer
        A model hub id, a folder with a saved model, or a loaded model. ``model_name`` may name it, too.
    batch_size : int
        Texts embedded at once.
    device : str, optional
        Where the model runs; see `cacheblend_rag.retrieval.embedder.SentenceTransformerEmbeddings`.
    **fields
        Fields of LlamaIndex's `BaseEmbedding`.

    Raises
    ------
    EmbedderError
        If the model cannot be loaded.
    ConfigError
        If ``batch_size`` is no whole number from 1 on, or ``device`` is given with a loaded model.
    """

    _inner: SentenceTransformerEmbeddings = PrivateAttr()

    def __init__(
        self,
        model: str | os.PathLike[str] | SentenceTransformer | None = None,
        *,
        batch_size: int = 32,
        device: str | None = None,
        **fields: Any,
    ) -> None:
        model = fields.get("model_name") if model is None else model
        batch_size = fields.get("embed_batch_size", batch_size)
        inner = SentenceTransformerEmbeddings(model, batch_size=batch_size, device=device)
        name = os.fspath(model) if isinstance(model, (str, os.PathLike)) else type(model).__name__
        super().__init__(**{"model_name": name, "embed_batch_size": batch_size, **fields})
        self._inner = inner

    @classmethod
    def class_name(cls) -> str:
        """Name of the class, as LlamaIndex shows it."""
        return "SentenceTransformerEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._inner.embed_query(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._inner.embed_documents(texts)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)


HuggingFaceEmbedding = SentenceTransformerEmbedding
"""The same class under the name that it has in LlamaIndex's own package."""
