"""A conversation over documents: what earlier turns retrieved and answered is reused in later ones."""

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage

from cacheblend_rag.langchain import ChatCacheBlend
from cacheblend_rag.reference import DOCUMENTS_PATH, EMBEDDER_PATH, MODEL_PATH
from cacheblend_rag.retrieval.embedder import SentenceTransformerEmbeddings
from cacheblend_rag.retrieval.index import build_index

# The bundled model has no chat template of its own; larger models bring one.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ {'system': 'System', 'user': '\nHuman'}.get(m.role, '\nAI') }}: "
    "{{ m.content }}{% endfor %}{{ '\nAI:' }}"
)
QUESTIONS = [
    "Which company does Lars Mardahl work for?",
    "Which animal does the gardener keep?",
    "What did the locksmith win at Velvetmas?",
]

embedder = SentenceTransformerEmbeddings(str(EMBEDDER_PATH))
store = build_index(DOCUMENTS_PATH, embedder=embedder, index_dir="blend_data/index").index.store
chat = ChatCacheBlend.from_model_id(MODEL_PATH, store="blend_data/kv", max_new_tokens=64)
chat.engine.tokenizer.chat_template = TEMPLATE
retriever = store.as_retriever(search_kwargs={"k": 4})

turns: list[BaseMessage] = [SystemMessage("Answer from the passages.")]
for question in QUESTIONS:
    passages = "\n\n".join(document.page_content for document in retriever.invoke(question))
    turns.append(HumanMessage(f"{passages}\n\n{question}"))
    answer = chat.invoke(turns)
    turns.append(answer)
    chat.engine.flush()  # what was missing is stored now, and not only when nothing else is asked
    said, usage = answer.response_metadata, answer.usage_metadata or {}
    print(f"{question} {answer.text.strip()}")
    print(f"  {said['hits']} hits, {said['misses']} misses; {usage.get('input_token_details')}")
