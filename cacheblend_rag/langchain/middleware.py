"""CacheBlendMiddleware: retrieval and chunk matching for LangChain agents."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage, ToolMessage

from cacheblend_rag.engine.llm_base import known_chunks
from cacheblend_rag.errors import MissingExtraError
from cacheblend_rag.langchain.messages import artifact_texts
from cacheblend_rag.prompt.registry import ChunkRegistry

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
except ImportError as error:
    raise MissingExtraError("langchain", "agents") from error

_INSTRUCTIONS = "Use the following passages to answer. If they do not hold the answer, say so."


class CacheBlendMiddleware(AgentMiddleware[Any, Any, Any]):
    """Adds retrieved documents to an agent's prompt, and registers documents that its tools return.

    Parameters
    ----------
    retriever : BaseRetriever, optional
        Asked with the newest message of the user before each call of the model. Its documents
        go behind the system prompt. Without a retriever, only the documents that tools
        attached to their answers are made known.
    instructions : str
        Text before the documents.
    tool_answers : bool
        Reuse whole answers of tools as well, whatever they hold. An agent reads them again at every step.
    known : ChunkRegistry, optional
        Where documents are made known; by default `known_chunks`. Give the model's own, if it has one.
    """

    def __init__(
        self,
        retriever: Any = None,
        *,
        instructions: str = _INSTRUCTIONS,
        tool_answers: bool = False,
        known: ChunkRegistry | None = None,
    ) -> None:
        super().__init__()
        self._retriever = retriever
        self._instructions = instructions
        self._tool_answers = tool_answers
        self._known = known_chunks if known is None else known

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Add documents to the request; see the class."""
        self._note(request.messages)
        question = _question(request.messages)
        if self._retriever is None or not question:
            return handler(request)
        return handler(self._add_documents(request, self._retriever.invoke(question)))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """`wrap_model_call` without blocking the event loop."""
        self._note(request.messages)
        question = _question(request.messages)
        if self._retriever is None or not question:
            return await handler(request)
        return await handler(self._add_documents(request, await self._retriever.ainvoke(question)))

    def _note(self, messages: Sequence[AnyMessage]) -> None:
        self._known.add(artifact_texts(messages))
        if self._tool_answers:
            answers = [one for one in messages if isinstance(one, ToolMessage) and not artifact_texts([one])]
            self._known.add(str(answer.text) for answer in answers)

    def _add_documents(self, request: ModelRequest[Any], documents: Sequence[Document]) -> ModelRequest[Any]:
        """The request with documents behind its system prompt."""
        texts = [document.page_content for document in documents]
        self._known.add(texts)
        parts = [request.system_prompt or "", self._instructions, *texts]
        return request.override(system_message=SystemMessage("\n\n".join(part for part in parts if part)))


def _question(messages: Sequence[AnyMessage]) -> str:
    """The newest message of the user."""
    return next((str(one.text) for one in reversed(messages) if isinstance(one, HumanMessage)), "")
