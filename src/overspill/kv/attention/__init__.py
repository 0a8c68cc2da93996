"""Attention on the CPU to KV blocks in RAM: partial outputs with log-sum-exps, to be merged with the GPU's part."""
