"""Services of the server, without HTTP.

===================  ================================================================================
``service``          objects that all requests share, and the server as one tenant sees it
``admission_queue``  the bounded, fair queue in front of the models
``served_model``     a model: its name and its engines
``folders``          folders of documents that are served: their files, and the index of each kept alike
``questions``        a question as a prompt, its report, and every method side by side
``verifications``    answers of a tenant that are held against full prefill, and their latest counts
``logs``             a request's line in the access log, and its span
``metrics``          counts for Prometheus
===================  ================================================================================
"""
