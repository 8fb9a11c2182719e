"""A conversation over documents: what earlier turns retrieved and answered is reused in later ones."""

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage

from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.langchain import ChatCacheBlend
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.index import build_index

QUESTIONS = ["When was Surtsey first seen?", "When did the eruption of Surtsey end?"]

embedder = SentenceTransformerEmbeddings("minilm")
store = build_index(ARTICLES_PATH, embedder=embedder, index_dir="blend_data/index").index.store
chat = ChatCacheBlend.from_model_id("smollm2", store="blend_data/kv", max_new_tokens=32)
retriever = store.as_retriever(search_kwargs={"k": 2})

turns: list[BaseMessage] = [SystemMessage("Answer from the passages, in one short sentence.")]
for question in QUESTIONS:
    passages = "\n\n".join(document.page_content for document in retriever.invoke(question))
    turns.append(HumanMessage(f"{passages}\n\n{question}"))
    answer = chat.invoke(turns)
    turns.append(answer)
    chat.engine.flush()  # what was missing is stored now, and not only when nothing else is asked
    said, usage = answer.response_metadata, answer.usage_metadata or {}
    print(f"{question} {answer.text.strip()}")
    print(f"  {said['hits']} hits, {said['misses']} misses; {usage.get('input_token_details')}")
