"""An answer as it is written, and what tracing is told of it."""

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler

from cacheblend_rag.llama_index import CacheBlendEvent, CacheBlendLLM, warm_index
from cacheblend_rag.llama_index.embedding import SentenceTransformerEmbedding
from cacheblend_rag.reference import DOCUMENTS_PATH, EMBEDDER_PATH, MODEL_PATH


class Print(BaseEventHandler):
    """Prints how each answer was made; most tracing tools listen in the same way."""

    def handle(self, event, **kwargs):
        if isinstance(event, CacheBlendEvent):
            print(f"\n{event.hits} hits, {event.misses} misses, first token after {1000 * event.ttft:.0f} ms")


get_dispatcher().add_event_handler(Print())
documents = [Document(text=path.read_text(), id_=path.name) for path in sorted(DOCUMENTS_PATH.glob("*.md"))]
index = VectorStoreIndex.from_documents(documents, embed_model=SentenceTransformerEmbedding(EMBEDDER_PATH))
llm = CacheBlendLLM.from_model_id(MODEL_PATH, store="blend_data/kv", max_new_tokens=64)
warm_index(index, llm)
engine = index.as_query_engine(llm=llm, similarity_top_k=6, streaming=True)
for piece in engine.query("Which animal does the gardener keep?").response_gen:
    print(piece, end="", flush=True)
