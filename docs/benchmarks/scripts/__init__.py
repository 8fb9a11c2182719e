"""Scripts that make tables and plots of docs/benchmarks.

They are run from the root of the repository: ``python -m docs.benchmarks.scripts.NAME``.
"""
