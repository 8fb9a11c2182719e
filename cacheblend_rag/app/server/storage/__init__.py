"""What is kept of a tenant's documents.

=============  ======================================================
``catalogue``  collections, documents, passages and their vectors
``uploads``    files on their way to become documents
``deletions``  what is deleted, and which KV goes with it
``tables``     tables of all three, and what a database does for them
``sqlite``     one tenant's catalogue in a file
``postgres``   the same in a database that several servers share
``peers``      what these servers tell each other
=============  ======================================================
"""
