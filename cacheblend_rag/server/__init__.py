"""HTTP server: an OpenAI-compatible API, a RAG API with collections, and the page over both.

Nothing is imported here, so that the command line stays light.

====================  ===============================================================
``settings``          where the server listens, who may use it, and its limits
``app``               the FastAPI application and how it is run
``service``           what all requests share: model, store, tenants, queue, ingestion
``tenants``           keys, and what belongs to each: salt, known texts, collections
``library``           documents with their index, kept in one file set that is never apart
``ingestion``         uploads read, split, embedded and warmed in the background
``reading``           one file parsed in a process of its own, within limits
``asking``            a question and its passages as a prompt; what a report shows
``chatting``          conversations through the LangChain chat model
``line``              the bounded, fair queue in front of the model
``streams``           server-sent events, and clients that go away
``guard``             sizes, hosts, origins and headers, before anything else runs
``problems``          errors as answers
``metrics``, ``logs`` what is counted and what is written down
====================  ===============================================================
"""
