"""What is kept of a tenant's documents.

====================  ============================================================================
``catalogue``         collections, documents, passages and uploads of a tenant, in one SQLite file
``shared_catalogue``  the same in a database that several servers share
``database``          that database
====================  ============================================================================
"""
