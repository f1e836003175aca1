"""`hsx serve`: a `vllm serve` that extracts, from a model's name and the layers that are wanted."""
