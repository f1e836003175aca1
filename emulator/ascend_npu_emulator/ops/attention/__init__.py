"""References for attention and the paged KV cache."""
