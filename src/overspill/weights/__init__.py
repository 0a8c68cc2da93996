"""Weights in RAM: what vLLM's own offloaders leave undone."""
