"""CANN's Python binding, as far as vllm-ascend imports it."""
