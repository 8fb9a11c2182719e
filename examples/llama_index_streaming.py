"""An answer as it is written, and what tracing is told of it."""

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler

from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.llama_index import CacheBlendEvent, CacheBlendLLM
from cacheblend_rag.llama_index.embedding import SentenceTransformerEmbedding


class Print(BaseEventHandler):
    """Prints how each answer was made; most tracing tools listen in the same way."""

    def handle(self, event, **kwargs):
        if isinstance(event, CacheBlendEvent):
            print(f"\n{event.hits} hits, {event.misses} misses, first token after {1000 * event.ttft:.0f} ms")


get_dispatcher().add_event_handler(Print())
documents = [Document(text=path.read_text(), id_=path.name) for path in sorted(ARTICLES_PATH.glob("s*.md"))]
index = VectorStoreIndex.from_documents(documents, embed_model=SentenceTransformerEmbedding("minilm"))
llm = CacheBlendLLM.from_model_id("smollm2", store="blend_data/kv", max_new_tokens=24)
engine = index.as_query_engine(llm=llm, similarity_top_k=2, streaming=True)
for question in ("When was Surtsey first seen?", "When did the eruption of Surtsey end?"):
    for piece in engine.query(question).response_gen:
        print(piece, end="", flush=True)
    llm.engine.flush()  # the nodes of the first question are stored now, not only when nothing else is asked
