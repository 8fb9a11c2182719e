"""The work of the server, whoever asks for it.

===================  ============================================================================
``service``          objects that all requests share, and the server as one tenant sees it
``admission_queue``  the bounded, fair queue in front of the models
``served_model``     a model: its name and its engines
``questions``        a question as a prompt, its report, and every method side by side
``verifications``    answers of a tenant that are held against full prefill, and their latest counts
``under_way``        answers that go on while nobody reads them
``conversations``    conversations that are kept for a tenant
``shares``           read-only copies of them
``use``              what each tenant has and uses
``library``          what one tenant does with its collections, and its uploads
``collection``       a collection that can be searched, and its vectors in memory
``several``          collections and documents that are searched together
``erasing``          KV of what a tenant deletes
``following``        how a server follows the others that share a database
``ingestion``        uploads read, split, embedded and warmed in the background, tenants in turns
``logs``             a request's line in the access log, and its span
``metrics``          counts for Prometheus
===================  ============================================================================
"""
