"""HTTP server: an OpenAI-compatible API, a RAG API with collections, and the page over both.

Nothing is imported here, so that the command line stays light.

====================  ================================================================================
``settings``          where the server listens, who may use it, and its limits
``app``               the FastAPI application, its connections, and how uvicorn runs it
``rag_api``           requests of the page and of collections
``rag_models``        their bodies
``openai_api``        requests of OpenAI's clients
``openai_models``     their bodies
``service``           what all requests share, and the server as one tenant sees it
``served_model``      a model: its name, its engines, and how it is asked
``keys_file``         hashed keys in a file, which may change while the server runs
``tenants``           who sent a request, what belongs to each, and how much each may have in a minute
``library``           collections as requests see them, and what deleting takes
``catalogue``         collections, documents, passages and uploads of a tenant, in one SQLite file
``shared_catalogue``  the same in a database that several servers share
``database``          that database
``following``         what a server does among others
``ingestion``         uploads read, split, embedded and warmed in the background, tenants in turns
``reading``           files parsed in a process of its own
``confinement``       limits that this process sets itself
``asking``            a question as a prompt, its report, and every method side by side
``templates``         what a request may hand to the chat template, and how long that may run
``grammars``          schemas of answers, compiled in a process of its own
``answering``         completions and conversations: what is asked, and how answers are told
``responding``        OpenAI's responses, which are conversations told as typed events
``chatting``          conversations through the LangChain chat model
``admission_queue``   the bounded, fair queue in front of the model
``streams``           server-sent events, and clients that go away
``gatekeeping``       keys, sizes, hosts, origins and headers, before anything else runs
``problems``          errors as answers
``logs``              a request's id, its line in the access log, and its span
``metrics``           what is counted
``suggestions``       questions the page offers for the bundled articles
====================  ================================================================================
"""
