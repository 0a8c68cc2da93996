"""The plan: what goes where, and how fast that is. Arithmetic only: no torch, no GPU, no network."""
