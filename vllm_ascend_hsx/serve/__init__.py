"""`hsx serve`: run `vllm serve` with extraction, given a model and its layers."""
