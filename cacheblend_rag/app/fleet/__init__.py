"""Several replicas of the engine that answer as one application."""
