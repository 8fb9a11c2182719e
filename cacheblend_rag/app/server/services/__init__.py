"""What the server does, whoever asks for it.

===================  =====================================================================
``service``          objects that all requests share, and the server as one tenant sees it
``admission_queue``  the bounded, fair queue in front of the models
``served_model``     a model: its name and its engines
``questions``        a question as a prompt, its report, and every method side by side
``library``          what one tenant does with its collections
``collection``       a collection that can be searched, and its vectors in memory
``incoming``         files of uploads, and what a tenant has room for
``erasing``          KV of what a tenant deletes
``following``        how a server follows the others that share a database
``ingestion``        uploads read, split and embedded in the background, tenants in turns
``jobs``             uploads as jobs, and how far they are
``warming``          KV of documents stored before anybody asks for it
``logs``             a request's line in the access log, and its span
``metrics``          counts for Prometheus
===================  =====================================================================
"""
