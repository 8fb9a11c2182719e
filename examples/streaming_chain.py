"""create_retrieval_chain, streamed: pieces of the answer arrive as they are made."""

from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.prompts import ChatPromptTemplate

from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.langchain import ChatCacheBlend
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.index import build_index

QUESTIONS = ["When was Surtsey first seen?", "When did the eruption of Surtsey end?"]

embedder = SentenceTransformerEmbeddings("minilm")
store = build_index(ARTICLES_PATH, embedder=embedder, index_dir="blend_data/index").index.store
retriever = store.as_retriever(search_kwargs={"k": 3})
llm = ChatCacheBlend.from_model_id("smollm2", store="blend_data/kv", max_new_tokens=32)
llm.warm(retriever.invoke(QUESTIONS[0]))  # ahead of time; warm_vectorstore(store, llm) does so with all chunks

instructions = "Use the following pieces of context to answer the question. Answer in a few words.\n\n{context}"
prompt = ChatPromptTemplate.from_messages([("system", instructions), ("user", "{input}")])
chain = create_retrieval_chain(retriever, create_stuff_documents_chain(llm, prompt))
for question in QUESTIONS:
    print(question, end=" ", flush=True)
    for piece in chain.stream({"input": question}):
        print(piece.get("answer", ""), end="", flush=True)
    print()
