"""`hsx serve`: run `vllm serve` with extraction, given a model and layers.

The command becomes the server, so signals and exit codes are vLLM's.
"""
