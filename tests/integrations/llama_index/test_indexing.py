"""The KV of an index: warmed, computed while documents are ingested, erased with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.schema import TextNode

from cacheblend_rag.engine.llm_base import known_chunks
from cacheblend_rag.llama_index import (
    CacheBlendLLM,
    CacheBlendPrecompute,
    erasing,
    forget_nodes,
    index_nodes,
    warm_index,
)
from cacheblend_rag.llama_index.tracking import node_texts
from tests import tiny
from tests.integrations.llama_index.common import QUESTION, embedding, listening, make_index, make_llm, make_nodes
from tests.probes import key_of

# No chunk is computed behind another, so what is erased is exactly what left.
APART = {"condition": "sink"}


def documents(count: int = 3, seed: int = 40) -> list[Document]:
    return [
        Document(text=tiny.text(120, seed + n), id_=f"doc-{seed + n}", metadata={"title": f"T{n}"})
        for n in range(count)
    ]


def index_of(made: list[Document]) -> VectorStoreIndex:
    splitter = SentenceSplitter(chunk_size=64, chunk_overlap=0)
    index = make_index([])
    index._transformations = [splitter]
    for document in made:
        index.insert(document)
    return index


def stored(llm: CacheBlendLLM, nodes: Any) -> list[bool]:
    """Of which nodes the KV is there."""
    return [llm.engine.store.contains(key_of(llm.engine, node_texts(node)[0])) for node in nodes]


def refresh(index: VectorStoreIndex, made: list[Document]) -> None:
    index.refresh_ref_docs([Document(text="A new river.", id_=made[0].id_)])


def update(index: VectorStoreIndex, made: list[Document]) -> None:
    index.update_ref_doc(Document(text="A new river.", id_=made[0].id_))


def delete(index: VectorStoreIndex, made: list[Document]) -> None:
    index.delete_ref_doc(made[0].id_, delete_from_docstore=True)


def delete_nodes(index: VectorStoreIndex, made: list[Document]) -> None:
    index.delete_nodes([node.node_id for node in index_nodes(index) if node.ref_doc_id == made[0].id_])


@pytest.mark.parametrize("change", [delete, delete_nodes, update, refresh])
def test_node_that_leaves_the_index_is_erased(change: Callable[..., None]) -> None:
    llm, made = make_llm(config=APART), documents(seed=50)
    index = index_of(made)
    warm_index(index, llm, progress=False, say=lambda message: None)
    gone = [node for node in index_nodes(index) if node.ref_doc_id == made[0].id_]
    stays = [node for node in index_nodes(index) if node.ref_doc_id != made[0].id_]
    known_chunks.add(node_texts(gone[0]))
    with erasing(index, llm):
        change(index, made)
    assert not any(stored(llm, gone))
    assert all(stored(llm, stays))
    assert node_texts(gone[0])[0] not in known_chunks
    left = {node.ref_doc_id for node in index_nodes(index)}
    assert (made[0].id_ in left) == (change in (update, refresh))


async def test_text_of_another_node_is_kept_even_after_a_failure() -> None:
    llm, nodes = make_llm(config=APART), make_nodes(seed=32)
    twin = TextNode(text=nodes[0].text, metadata=nodes[0].metadata, id_="twin")
    index = make_index([*nodes, twin])
    warm_index(index, llm, progress=False, say=lambda message: None)
    gone = [nodes[0].node_id, nodes[1].node_id]

    async def fail() -> None:
        with erasing(index, llm):
            await index.adelete_nodes(gone)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert stored(llm, nodes) == [True, False, True, True]


def test_forms_that_stood_in_prompts_are_erased_too() -> None:
    nodes = make_nodes(seed=33, words=60)
    for node in nodes:
        node.metadata["window"] = "Window: " + node.text[::-1]
        node.excluded_llm_metadata_keys = ["window"]
    llm, index = make_llm(context_window=1000), make_index(nodes)
    rewrite = MetadataReplacementPostProcessor(target_metadata_key="window")
    engines = [
        index.as_query_engine(llm=llm, similarity_top_k=4, **options)
        for options in ({"node_postprocessors": [rewrite]}, {"response_mode": "simple_summarize"}, {})
    ]
    with listening() as answers:
        for engine in engines:
            engine.query(QUESTION)
    assert sum(misses for _, misses in answers.counts) >= 8
    assert forget_nodes(nodes, llm) >= 8
    kept = [llm.engine.tokenizer.decode(info.token_ids) for _, info in llm.engine.store.infos("")]
    assert kept  # the beginnings of the templates
    assert not any(
        "Passage 33" in text or "Window" in text or node.text[40:90] in text for text in kept for node in nodes
    )


async def test_nodes_are_computed_while_documents_are_ingested() -> None:
    llm = make_llm()
    pipeline = IngestionPipeline(
        transformations=[
            SentenceSplitter(chunk_size=64, chunk_overlap=0),
            embedding(),
            CacheBlendPrecompute(llm=llm, progress=False),
        ]
    )

    nodes = pipeline.run(documents=documents(seed=60))
    assert len(nodes) > 3
    assert all(stored(llm, nodes))
    llm.forget(nodes)
    assert all(
        stored(llm, await pipeline.arun(documents=documents(seed=60)))
    )  # the pipeline's cache knows nothing of the KV store
    index = VectorStoreIndex(nodes, embed_model=embedding())
    with listening() as answers:
        index.as_query_engine(llm=llm, similarity_top_k=3).query(QUESTION)
    assert answers.counts == [(3, 0)]
