"""A model's name and what was given become a plan and vLLM's exact arguments, the same way for every caller."""
