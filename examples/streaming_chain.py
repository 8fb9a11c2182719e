"""create_retrieval_chain, streamed: pieces of the answer arrive as they are made."""

from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.prompts import PromptTemplate

from cacheblend_rag.langchain import CacheBlendLLM, warm_vectorstore
from cacheblend_rag.reference import DOCUMENTS_PATH, EMBEDDER_PATH, MODEL_PATH
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.index import build_index

QUESTIONS = ["Which company does Lars Mardahl work for?", "Which animal does the gardener keep?"]

embedder = SentenceTransformerEmbeddings(str(EMBEDDER_PATH))
store = build_index(DOCUMENTS_PATH, embedder=embedder, index_dir="blend_data/index").index.store
llm = CacheBlendLLM.from_model_id(MODEL_PATH, store="blend_data/kv", max_new_tokens=64)
warm_vectorstore(store, llm)  # says how many bytes it takes, and erases KV when documents are deleted

prompt = PromptTemplate.from_template("{context}\n\nQuestion: {input}\nAnswer:")
chain = create_retrieval_chain(store.as_retriever(search_kwargs={"k": 6}), create_stuff_documents_chain(llm, prompt))
for question in QUESTIONS:
    print(question, end=" ", flush=True)
    for piece in chain.stream({"input": question}):
        print(piece.get("answer", ""), end="", flush=True)
    print()
