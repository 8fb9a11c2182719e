"""The prompt formats the model is trained on: the stuff prompts of common frameworks and variations of them.

A prompt is a prefix, chunks and a suffix with separators between them; each is tokenised on its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_rag.prompt import chat as formats

DEFAULT_SEPARATOR = " # # "
SEPARATORS = (DEFAULT_SEPARATOR, DEFAULT_SEPARATOR, DEFAULT_SEPARATOR, "\n\n", "\n")


@dataclass(frozen=True)
class PromptFormat:
    """Prefix, suffix (with ``{q}`` for the question) and what stands directly before each chunk."""

    prefix: str
    suffix: str
    before_chunk: str = ""


_STUFF = formats.STUFF.prefix
_CONTEXT = "Use the following pieces of context to answer the user's question."
_SYSTEM = (
    "System: You are an assistant for question-answering tasks. Use the following pieces of retrieved context to "
    "answer the question. If you don't know the answer, say that you don't know. Keep the answer concise.\n\n"
)
_LLAMA_INDEX = "Context information is below.\n---------------------\n"
_LLAMA_INDEX_END = (
    "\n---------------------\nGiven the context information and not prior knowledge, answer the query.\n"
    "Query: {q}\nAnswer: "
)

STUFF = PromptFormat(formats.STUFF.prefix, formats.STUFF.suffix)
"""The prompt of LangChain's ``RetrievalQA.from_chain_type``."""
PLAIN = PromptFormat("", "Question: {q}\nAnswer:")
LLAMA_INDEX = PromptFormat(_LLAMA_INDEX, _LLAMA_INDEX_END)
"""The default text question template of LlamaIndex."""

FORMATS: tuple[PromptFormat, ...] = (
    STUFF,
    STUFF,
    STUFF,
    PLAIN,
    LLAMA_INDEX,
    LLAMA_INDEX,
    PromptFormat(_STUFF, "\n\nQuestion: {q}\nHelpful Answer:", "Context:\n"),
    PromptFormat(_CONTEXT + "\n\n", "\n\nQuestion: {q}\nHelpful Answer:"),
    PromptFormat(_SYSTEM, "\nHuman: {q}"),
    PromptFormat(_SYSTEM, "\nHuman: {q}\nAI:"),
    PromptFormat("System: Answer the question from the context.\n\n", "\nHuman: {q}"),
    PromptFormat("System: " + _CONTEXT + "\n----------------\n", "\nHuman: {q}\nAI:"),
    PromptFormat("Context information is below.\n", "\nGiven the context, answer the query.\nQuery: {q}\nAnswer:"),
    PromptFormat("", "\n\nQuestion: {q}\nAnswer:"),
    PromptFormat("Answer the question from the passages.\n\n", "\n\nQ: {q}\nA:"),
    PromptFormat("Here are some passages from an archive.\n\n", "\n\n{q}\n"),
    PromptFormat("Context:\n", "\n\nQuestion: {q}\n\nAnswer:"),
    PromptFormat("You are a helpful assistant.\n\nDocuments:\n", "\n\nUser: {q}\nAssistant:"),
)
