"""KV is computed while documents are ingested, and erased with a document that goes."""

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter

from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.llama_index import CacheBlendLLM, CacheBlendPrecompute, erasing
from cacheblend_rag.llama_index.embedding import SentenceTransformerEmbedding

llm = CacheBlendLLM.from_model_id("smollm2", store="blend_data/kv", max_new_tokens=24)
embedding = SentenceTransformerEmbedding("minilm")
pipeline = IngestionPipeline(
    transformations=[SentenceSplitter(chunk_size=512), embedding, CacheBlendPrecompute(llm=llm)]
)
names = ("surtsey.md", "telescope.md", "snow-leopard.md")
documents = [Document(text=(ARTICLES_PATH / name).read_text(), id_=name) for name in names]
nodes = pipeline.run(documents=documents)
print(f"{len(nodes)} nodes, {llm.engine.store.volume():,} bytes of KV")

index = VectorStoreIndex(nodes, embed_model=embedding)
print(index.as_query_engine(llm=llm, similarity_top_k=2).query("When was Surtsey first seen?"))
with erasing(index, llm):
    index.delete_ref_doc(documents[0].id_)
print(f"{llm.engine.store.volume():,} bytes without {documents[0].id_}")
