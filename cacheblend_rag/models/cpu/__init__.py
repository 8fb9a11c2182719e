"""Faster products and row operations on a CPU."""
