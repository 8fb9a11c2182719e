"""A conversation about the same documents: after the first turn, each of them is read from the store."""

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.memory import ChatMemoryBuffer

from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.llama_index import CacheBlendLLM
from cacheblend_rag.llama_index.embedding import SentenceTransformerEmbedding

documents = [Document(text=path.read_text(), id_=path.name) for path in sorted(ARTICLES_PATH.glob("s*.md"))]
index = VectorStoreIndex.from_documents(documents, embed_model=SentenceTransformerEmbedding("minilm"))
llm = CacheBlendLLM.from_model_id("smollm2", store="blend_data/kv", max_new_tokens=24)
chat = index.as_chat_engine(
    chat_mode="context", llm=llm, similarity_top_k=2, memory=ChatMemoryBuffer.from_defaults(token_limit=4000)
)
for question in ("When was Surtsey first seen?", "When did the eruption of Surtsey end?"):
    print(f"{question} {chat.chat(question)}")
    llm.engine.flush()  # only so that the second turn finds all that the first one stores
