"""HTTP server: an OpenAI-compatible API, a RAG API with collections, and the page over both.

Nothing is imported here, so that the command line stays light.

==========================  ===============================================================
``settings``                where the server listens, who may use it, and its limits
``app``, ``running``        the FastAPI application, and how it is run
``rag_api``, ``openai_api`` requests; their bodies in ``rag_models`` and ``openai_models``
``service``, ``sessions``   what all requests share, and the server as one tenant sees it
``keys_file``               hashed keys in a file, which may change while the server runs
``tenants``                 who sent a request, and what belongs to each: salt, known texts, a folder
``library``                 collections as requests see them, and what deleting takes
``catalogue``               collections, documents, passages and uploads of a tenant, in one SQLite file
``shared_catalogue``        the same in a database that several servers share
``database``, ``following`` that database, and what a server does among others
``ingestion``               uploads read, split, embedded and warmed in the background, tenants in turns
``reading``                 files parsed in a process of its own
``confinement``             limits that this process sets itself
``asking``, ``comparing``   a question as a prompt, its report, and every method side by side
``templates``               what a request may hand to the chat template, and how long that may run
``answering``               completions and conversations: what is asked, and how answers are told
``responding``              OpenAI's responses, which are conversations told as typed events
``chatting``                conversations through the LangChain chat model
``admission_queue``         the bounded, fair queue in front of the model
``quota``                   how many requests and tokens a tenant may have in a minute
``streams``                 server-sent events, and clients that go away
``gatekeeping``             keys, sizes, hosts, origins and headers, before anything else runs
``connections``             slow, idle and too many connections
``problems``                errors as answers
``request_ids``             an id for each request, in its answer and in the log
``accounting``              what one request took: a line of the access log, attributes of its span
``metrics``, ``logs``       what is counted and what is written down
``suggestions``             questions the page offers for the bundled articles
``docs_page``               the OpenAPI document as a page
==========================  ===============================================================
"""
