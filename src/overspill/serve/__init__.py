"""`overspill serve`: vLLM's server with the plan's flags, started, checked and stopped."""
