"""KV of running requests in RAM: contexts longer than the GPU's KV cache."""
