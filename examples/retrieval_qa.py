"""RetrievalQA over a folder of documents, answered from stored KV: nothing of the chain is changed."""

from langchain_classic.chains import RetrievalQA

from cacheblend_rag.langchain import CacheBlendLLM
from cacheblend_rag.reference import DOCUMENTS_PATH, EMBEDDER_PATH, MODEL_PATH
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.index import build_index

embedder = SentenceTransformerEmbeddings(str(EMBEDDER_PATH))
index = build_index(DOCUMENTS_PATH, embedder=embedder, index_dir="blend_data/index").index
llm = CacheBlendLLM.from_model_id(MODEL_PATH, store="blend_data/kv", max_new_tokens=64)
llm.warm(index.chunks())  # optional: chunks that are missing are stored after their first use
chain = RetrievalQA.from_chain_type(llm, retriever=index.store.as_retriever(search_kwargs={"k": 6}))
print(chain.invoke({"query": "Which company does Lars Mardahl work for?"})["result"])
