"""Launches: from a model's name and settings to a plan and vLLM's exact arguments, the same way for every caller."""
