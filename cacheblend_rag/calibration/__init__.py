"""Finding, without labels, the cheapest way to blend a model's prompts within a tolerance."""
