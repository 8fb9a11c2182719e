"""RetrievalQA over a folder of documents, answered from stored KV: only the model of the chain is another."""

from langchain_classic.chains import RetrievalQA

from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.langchain import ChatCacheBlend
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.index import build_index

embedder = SentenceTransformerEmbeddings("minilm")
index = build_index(ARTICLES_PATH, embedder=embedder, index_dir="blend_data/index").index
retriever = index.store.as_retriever(search_kwargs={"k": 3})

# Chunks are stored after their first use. llm.warm(index.chunks()) stores them ahead of time.
llm = ChatCacheBlend.from_model_id("smollm2", store="blend_data/kv", max_new_tokens=32)
chain = RetrievalQA.from_chain_type(llm, retriever=retriever)
print(chain.invoke({"query": "When was Surtsey first seen?"})["result"])
