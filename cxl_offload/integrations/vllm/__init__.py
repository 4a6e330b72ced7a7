"""vLLM by flags alone: weights (and KV cache) in tiers, by a plugin that vLLM finds itself."""
