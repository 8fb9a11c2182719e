"""The engine: who runs when, and the five verbs split, look up, load, fuse, decode."""
