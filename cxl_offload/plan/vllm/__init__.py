"""Plans for vLLM: weights and KV blocks off the GPU."""
