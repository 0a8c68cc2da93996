"""What a model is made of, and what vLLM makes of it; found out without a GPU, the weights, torch or vLLM."""
