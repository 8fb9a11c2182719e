"""The floor that knows HTTP.

=================  ==========================================================================
``gatekeeper``     what every request passes: its id, keys, sizes, hosts, origins and headers
``requests``       the session of a request
``bodies``         bodies looked at before they are validated: how many values they hold
``streams``        server-sent events, and clients that go away
``rag``            routes of the page and of documents
``rag_bodies``     their bodies
``openai``         routes of OpenAI's clients
``openai_bodies``  their bodies
``conversations``  the LangChain chat model behind conversations
``completions``    completions and conversations of OpenAI's API
``responses``      responses of OpenAI's API, which are conversations as typed events
=================  ==========================================================================
"""
