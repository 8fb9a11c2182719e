"""Every method on questions with known answers, paired with full prefill: ``python -m docs.benchmarks.evaluation``."""
