"""HTTP server: an OpenAI-compatible API, a RAG API with collections, and the page over both.

Nothing is imported here, so that the command line stays light.

====================  ================================================================================
``settings``          where the server listens, who may use it, and its limits
``app``               the FastAPI application, its connections, and how uvicorn runs it
``gatekeeper``        keys, sizes, hosts, origins and headers, before anything else runs
``rag_api``           routes of the page and of collections
``rag_models``        their bodies
``openai_api``        routes of OpenAI's clients
``openai_models``     their bodies
``service``           objects that all requests share, and the server as one tenant sees it
``served_model``      a model: its name and its engines
``admission_queue``   the bounded, fair queue in front of the models
``questions``         a question as a prompt, its report, and every method side by side
``completions``       completions and conversations of OpenAI's API
``responses``         responses of OpenAI's API, which are conversations as typed events
``served_chat``       the LangChain chat model behind conversations
``templates``         allowed arguments of the chat template, and its time limit
``grammars``          schemas of answers, compiled in a process of its own
``streams``           server-sent events, and clients that go away
``library``           collections of a tenant, and deleting
``catalogue``         collections, documents, passages and uploads of a tenant, in one SQLite file
``shared_catalogue``  the same in a database that several servers share
``database``          that database
``follower``          threads that follow the other servers
``ingestion``         uploads read, split, embedded and warmed in the background, tenants in turns
``file_reader``       files parsed in a process of its own
``sandbox``           limits that such a process sets itself
``keys_file``         hashed keys in a file, which may change while the server runs
``tenants``           tenants, their keys and quotas
``problems``          errors as responses
``logs``              a request's id, its line in the access log, and its span
``metrics``           counts for Prometheus
``suggestions``       questions that the page offers for the bundled articles
====================  ================================================================================
"""
