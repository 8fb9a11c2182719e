"""The only room that knows transformers' decoder layers."""
