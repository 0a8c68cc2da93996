"""Weights in RAM where vLLM's own offloaders do not reach."""
