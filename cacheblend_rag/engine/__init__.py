"""The engine: the five verbs split, choose a route, fuse, decode, verify, and the scheduler of requests."""
