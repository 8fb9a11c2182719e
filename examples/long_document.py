"""A document longer than the model's window, read through overlapping windows.

Each chunk is computed once and stands in two windows; every question reads the whole document again
and computes almost nothing of it. The document is the articles, one after another: some 14,000 tokens.
That takes minutes on two cores; ``--characters 4000`` reads the beginning alone.
"""

import argparse
import time

from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_text_splitters import RecursiveCharacterTextSplitter

from cacheblend_rag import BlendConfig
from cacheblend_rag.app.collection import ARTICLES_PATH
from cacheblend_rag.langchain import ChatCacheBlend

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--characters", type=int, help="how much of the document is read (default: all)")
parser.add_argument("--window", type=int, default=8, help="chunks in a window; half of them in the next one, too")
options = parser.parse_args()

config = BlendConfig(write_back="inline")
llm = ChatCacheBlend.from_model_id("smollm2", config=config, store="blend_data/kv", max_new_tokens=16)
document = "\n\n".join(path.read_text() for path in sorted(ARTICLES_PATH.glob("*.md")))[: options.characters]
splitter = RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=0)
chunks = [Document(page_content=text) for text in splitter.split_text(document)]
tokens = sum(llm.get_num_tokens(chunk.page_content) for chunk in chunks)

started = time.perf_counter()
warmed = llm.warm(chunks)
print(f"{len(chunks)} chunks, {tokens} tokens; {warmed.computed} computed in {time.perf_counter() - started:.1f} s")

half = options.window // 2
windows = [chunks[at : at + options.window] for at in range(0, max(1, len(chunks) - half), half)]
instructions = "Use the following pieces of context to answer the question. Answer in a few words.\n\n{context}"
prompt = ChatPromptTemplate.from_messages([("system", instructions), ("user", "{question}")])
chain = create_stuff_documents_chain(llm, prompt)
for question in ("What is the main food of puffins?", "Where do puffins breed?"):
    started = time.perf_counter()
    # Windows are answered one after the other, from the KV that is stored.
    answers = chain.batch([{"context": window, "question": question} for window in windows])
    took = time.perf_counter() - started
    print(f"{question} {len(windows)} windows in {took:.1f} s; the first says: {answers[0].strip()}")
