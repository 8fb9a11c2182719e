"""The floor that knows HTTP.

=================  ==========================================================================
``gatekeeper``     what every request passes: its id, keys, sizes, hosts, origins and headers
``requests``       the session of a request
``bodies``         bodies looked at before they are validated: how many values they hold
``streams``        server-sent events, and clients that go away
``rag``            routes of the page and of collections
``rag_bodies``     their bodies
``kept``           conversations that the server keeps, and answers that go on while nobody reads them
``shares``         read-only copies of conversations, for all who have a key
``saved``          prompts that were saved, and rated answers as a file
``tenants``        what each tenant has and uses, for a key that is for metrics
``verifications``  requests about answers that are held against full prefill
``openai``         routes of OpenAI's clients
``openai_bodies``  their bodies
``conversations``  the LangChain chat model behind conversations
``completions``    completions and conversations of OpenAI's API
``responses``      responses of OpenAI's API, which are conversations as typed events
=================  ==========================================================================
"""
