"""The programs: command line, server, replicas, and questions to a folder of documents."""
