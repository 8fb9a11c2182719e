"""Tests on the starter models over the bundled articles."""
