"""Documents in a folder, split into chunks, embedded, and found again by L2 distance and words.

Nothing of these is imported here: take names from the submodules, so that faiss and sentence-transformers
load only where they are used.

===============  =======================================================================================
``documents``    read the files of a folder: text, code, tables, HTML, office formats, books, PDF
``office``       workbooks, slides, OpenDocument texts and books as rows and HTML; text that Word's converter leaves out
``splitting``    split documents into chunks
``embedder``     a sentence-transformers model as LangChain embeddings, and the parts in which it embeds passages
``vectorstore``  a LangChain vector store in memory, searched by faiss
``words``        the store of a folder, searched by words, too
``saved_index``  a vector store on disk
``index``        an index of a folder, kept up to date file by file
===============  =======================================================================================
"""

from cacheblend_rag.errors import require

require("retrieval", "langchain_core", "sentence_transformers", "faiss")
