"""vLLM servers that Overspill did not start."""
