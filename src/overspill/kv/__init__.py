"""The KV connector: what vLLM loads, and the RAM tier behind it."""
