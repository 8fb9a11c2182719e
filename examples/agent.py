"""An agent over documents.

The chat template of the starter model takes no tools, so a middleware puts documents before the model.
Name a model whose chat template takes tools, and it gets a retrieval tool instead:
``python examples/agent.py Qwen/Qwen3-1.7B``.
"""

import sys

from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.langchain import CacheBlendMiddleware, ChatCacheBlend
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.index import build_index

embedder = SentenceTransformerEmbeddings("minilm")
store = build_index(ARTICLES_PATH, embedder=embedder, index_dir="blend_data/index").index.store
retriever = store.as_retriever(search_kwargs={"k": 3})


@tool(response_format="content_and_artifact")
def look_up(query: str) -> tuple[str, list[Document]]:
    """Find passages of the articles."""
    found = retriever.invoke(query)
    return "\n\n".join(document.page_content for document in found), found


model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
chat = ChatCacheBlend.from_model_id(model, store="blend_data/kv", max_new_tokens=32 if model == "smollm2" else 256)
if model == "smollm2":
    instructions = "Use the following pieces of context to answer the question. Answer in a few words."
    agent = create_agent(chat, [], middleware=[CacheBlendMiddleware(retriever, instructions=instructions)])
else:
    agent = create_agent(chat, [look_up])

for question in ("When was Surtsey first seen?", "When did the eruption of Surtsey end?"):
    answer = agent.invoke({"messages": [HumanMessage(question)]})["messages"][-1]
    chat.engine.flush()
    print(f"{question} {answer.text.strip()}")
    print(f"  {answer.response_metadata['hits']} hits, {answer.response_metadata['misses']} misses")
