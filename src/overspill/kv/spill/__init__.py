"""Spill: KV of running requests in RAM, for contexts longer than the GPU's KV cache."""
