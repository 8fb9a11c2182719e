"""What the server does, whoever asks for it.

===================  ============================================================================
``service``          objects that all requests share, and the server as one tenant sees it
``admission_queue``  the bounded, fair queue in front of the models
``served_model``     a model: its name and its engines
``questions``        a question as a prompt, its report, and every method side by side
``library``          collections of a tenant, and deleting
``ingestion``        uploads read, split, embedded and warmed in the background, tenants in turns
``follower``         threads that follow the other servers
``logs``             a request's line in the access log, and its span
``metrics``          counts for Prometheus
===================  ============================================================================
"""
