"""A LlamaIndex query engine over faiss, answered from stored KV: nothing of the engine is changed."""

import faiss
from llama_index.core import Document, StorageContext, VectorStoreIndex
from llama_index.vector_stores.faiss import FaissVectorStore

from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.llama_index import CacheBlendLLM
from cacheblend_rag.llama_index.embedding import SentenceTransformerEmbedding

documents = [Document(text=path.read_text(), id_=path.name) for path in sorted(ARTICLES_PATH.glob("*.md"))]
embedding = SentenceTransformerEmbedding("minilm")
store = FaissVectorStore(faiss.IndexFlatL2(len(embedding.get_text_embedding("any text"))))
index = VectorStoreIndex.from_documents(
    documents,
    embed_model=embedding,
    storage_context=StorageContext.from_defaults(vector_store=store),
)
llm = CacheBlendLLM.from_model_id("smollm2", store="blend_data/kv", max_new_tokens=24)
# Nodes are stored after their first use; warm_index(index, llm) stores all of them ahead.
engine = index.as_query_engine(llm=llm, similarity_top_k=2)
print(engine.query("When was Surtsey first seen?"))
