"""Triton on the emulated NPU: the language, a launcher, and references for some kernels."""
