"""The part of CANN's Python binding that vllm-ascend imports."""
