"""Overspill: KV-cache offload to RAM for stock vLLM."""

__version__ = "0.1.0"
