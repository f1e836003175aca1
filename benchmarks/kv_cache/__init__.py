"""KV cache that remains with each layout of hidden states, as planned by vLLM."""
