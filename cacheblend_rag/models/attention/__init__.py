"""Attention of some rows over all positions."""
