"""A LlamaIndex query engine over faiss, answered from stored KV: nothing of the engine is changed."""

from llama_index.core import Document, StorageContext, VectorStoreIndex

from cacheblend_rag.llama_index import CacheBlendLLM, warm_index
from cacheblend_rag.llama_index.embedding import SentenceTransformerEmbedding
from cacheblend_rag.llama_index.vector_store import FaissVectorStore
from cacheblend_rag.reference import DOCUMENTS_PATH, EMBEDDER_PATH, MODEL_PATH

documents = [Document(text=path.read_text(), id_=path.name) for path in sorted(DOCUMENTS_PATH.glob("*.md"))]
index = VectorStoreIndex.from_documents(
    documents,
    embed_model=SentenceTransformerEmbedding(EMBEDDER_PATH),
    storage_context=StorageContext.from_defaults(vector_store=FaissVectorStore()),
)
llm = CacheBlendLLM.from_model_id(MODEL_PATH, store="blend_data/kv", max_new_tokens=64)
warm_index(index, llm)  # optional: nodes that are missing are stored after their first use
engine = index.as_query_engine(llm=llm, similarity_top_k=6)
print(engine.query("Which company does Lars Mardahl work for?"))
