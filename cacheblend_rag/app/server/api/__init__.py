"""The floor that knows HTTP.

=================  ==========================================================================
``gatekeeper``     what every request passes: its id, keys, sizes, hosts, origins and headers
``requests``       the session of a request
``bodies``         bodies looked at before they are validated: how many values they hold
``streams``        server-sent events, and clients that go away
``rag``            bodies and routes of the page and of documents
``openai``         routes of OpenAI's clients
``openai_bodies``  their bodies
``completions``    completions and conversations of OpenAI's API
``responses``      responses of OpenAI's API, which are conversations as typed events
=================  ==========================================================================
"""
