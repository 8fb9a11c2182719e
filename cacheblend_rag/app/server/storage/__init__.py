"""Documents of tenants, as they are kept.

=================  ==============================================================================
``catalogue``      collections with documents, passages and vectors; uploads; and what is deleted
``conversations``  what was asked and answered, in the same database
``shares``         read-only copies of conversations, too
``prompts``        prompts that were saved, too
``departed``       conversations of a tenant without a key
``tables``         its tables, and what a database does for it
``sqlite``         one tenant's catalogue in a file
``postgres``       the same in a database, and what the servers that share it tell each other
=================  ==============================================================================
"""
