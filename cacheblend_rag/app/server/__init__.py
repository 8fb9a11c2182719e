"""HTTP server: an OpenAI-compatible API, a RAG API over a folder of documents, and the page over both.

Nothing is imported here, so that the command line stays light. The server has four floors. A file imports from its own
floor and from floors further down; `tests/test_import_rule.py` holds it.

=============  =======================================================================================
floor          what it knows
=============  =======================================================================================
api            HTTP: routes, bodies, streams, and what every request passes; ``app`` puts it together
services       what the server does: who is admitted, folders and their indexes, answers, counts
security       tenants with their quotas, and what strangers made within limits
settings       what an operator says; beside it the file of keys, and errors as answers
=============  =======================================================================================

Files of the first and the last floor that programs import:

=============  =======================================================================================
``app``        the FastAPI application, its connections, and how uvicorn runs it
``settings``   where the server listens, who may use it, and its limits
``keys_file``  hashed keys in a file, which may change while the server runs
``problems``   errors as answers
=============  =======================================================================================
"""
