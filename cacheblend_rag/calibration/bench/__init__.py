"""Measuring: baselines, speed and quality."""
