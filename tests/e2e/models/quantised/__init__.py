"""Rotated and quantised weights of the tiny models, as vllm-ascend reads them, and their rows."""
