"""The engine: the five verbs split, look up, load, fuse, decode, and the scheduler of requests."""
