"""What layouts of hidden states leave of the KV cache, by vLLM's own planner."""
