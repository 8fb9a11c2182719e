"""Whether answers are still right: questions with passages, every method, paired with full prefill."""
