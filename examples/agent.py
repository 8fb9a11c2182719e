"""An agent over documents.

With the bundled model, which cannot call tools, documents are put before the model by a middleware.
Name a model whose chat template takes tools, and it gets a retrieval tool instead:
``python examples/agent.py Qwen/Qwen3-1.7B``.
"""

import sys

from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

from cacheblend_rag.langchain import CacheBlendMiddleware, ChatCacheBlend
from cacheblend_rag.reference import DOCUMENTS_PATH, EMBEDDER_PATH, MODEL_PATH
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.index import build_index

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ {'system': 'System', 'user': '\nHuman'}.get(m.role, '\nAI') }}: "
    "{{ m.content }}{% endfor %}{{ '\nAI:' }}"
)

embedder = SentenceTransformerEmbeddings(str(EMBEDDER_PATH))
store = build_index(DOCUMENTS_PATH, embedder=embedder, index_dir="blend_data/index").index.store
retriever = store.as_retriever(search_kwargs={"k": 6})


@tool(response_format="content_and_artifact")
def look_up(query: str) -> tuple[str, list[Document]]:
    """Find passages of the archive."""
    found = retriever.invoke(query)
    return "\n\n".join(document.page_content for document in found), found


chat = ChatCacheBlend.from_model_id(sys.argv[1] if len(sys.argv) > 1 else MODEL_PATH, store="blend_data/kv")
if len(sys.argv) > 1:
    agent = create_agent(chat, [look_up])
else:
    chat.engine.tokenizer.chat_template = TEMPLATE
    agent = create_agent(chat, [], middleware=[CacheBlendMiddleware(retriever)])

for question in ("Which company does Lars Mardahl work for?", "Where does Lars Mardahl live?"):
    answer = agent.invoke({"messages": [HumanMessage(question)]})["messages"][-1]
    chat.engine.flush()
    print(f"{question} {answer.text.strip()}")
    print(f"  {answer.response_metadata['hits']} hits, {answer.response_metadata['misses']} misses")
