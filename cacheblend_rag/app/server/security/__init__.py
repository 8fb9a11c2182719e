"""Tenants with their keys and quotas, and limits for strangers' files, schemas and templates.

===============  ==========================================================
``tenants``      tenants, their keys and quotas
``sandbox``      limits that a process sets itself
``file_reader``  files parsed in such a process
``grammars``     schemas of answers, compiled in such a process
``templates``    allowed arguments of the chat template, and its time limit
===============  ==========================================================
"""
