"""A document of over 100,000 tokens, read through overlapping windows.

Each chunk is computed once and stands in two windows; every question reads the whole document again
and computes almost nothing of it.
"""

import argparse
import time

from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate

from cacheblend_rag import BlendConfig
from cacheblend_rag.langchain import CacheBlendLLM
from cacheblend_rag.reference import MODEL_PATH
from cacheblend_rag.reference.archive import build_town

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--tokens", type=int, default=110_000, help="length of the document")
parser.add_argument("--window", type=int, default=16, help="chunks in a window; half of them in the next one, too")
options = parser.parse_args()

config = BlendConfig(write_back="inline")
llm = CacheBlendLLM.from_model_id(MODEL_PATH, config=config, store="blend_data/kv", max_new_tokens=24)
chunks: list[Document] = []
tokens = seed = 0
while tokens < options.tokens:  # towns of the archive's kind, one after another
    for passage in build_town(seed, "test").passages:
        chunks.append(Document(page_content=passage.chunk))
        tokens += llm.get_num_tokens(passage.chunk)
    seed += 1

started = time.perf_counter()
warmed = llm.warm(chunks)
print(f"{len(chunks)} chunks, {tokens} tokens; {warmed.computed} computed in {time.perf_counter() - started:.1f} s")

half = options.window // 2
windows = [chunks[at : at + options.window] for at in range(0, max(1, len(chunks) - half), half)]
prompt = PromptTemplate.from_template("{context}\n\nQuestion: {question}\nAnswer:")
chain = create_stuff_documents_chain(llm, prompt)
for question in ("Which animal does the gardener keep?", "Who works as a locksmith?"):
    started = time.perf_counter()
    # Windows that share chunks are answered one after the other, each chunk read once.
    answers = chain.batch([{"context": window, "question": question} for window in windows])
    took = time.perf_counter() - started
    print(f"{question} {len(windows)} windows in {took:.1f} s; the first says: {answers[0].strip()}")
